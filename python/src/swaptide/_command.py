"""The console script `swaptide`: the binary, and `kernelspec`, which is Python's."""

import os
import sys

from swaptide import _kernelspec
from swaptide._binary import binary
from swaptide._errors import SwaptideError


def main() -> int:
    """The exit status; where the binary does it, it does not return."""
    words = sys.argv[1:]
    if words[:1] == ["kernelspec"]:
        return _kernelspec.main(words[1:])
    try:
        path = binary()
        os.execv(path, [str(path), *words])
    except (SwaptideError, OSError) as error:
        print(f"swaptide: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
