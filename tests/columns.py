#!/usr/bin/env python3
"""Finds lines of more than 100 columns in the files that git knows.

Rows of tables may be longer, and so may a line that cannot be broken: one word, such as an address,
or one piece of code in a text. Generated and foreign files are left out.
"""

import re
import subprocess
import sys
from pathlib import Path

MAX_COLUMNS = 100
ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = (".lock", ".svg", ".json", "LICENSE-APACHE", "fuzz/corpus/", ".txt")


def is_text(name):
    return not any(name.endswith(part) or name.startswith(part) for part in LEFT_OUT)


def may_be_long(name, line):
    # A row of a table; in code, the same after the comment's mark.
    text = line.lstrip().removeprefix("//!").removeprefix("///").removeprefix("//").lstrip("# ")
    is_code = name.endswith(".md") and re.fullmatch(r"`[^`]+`\W*", text)
    return text.startswith("|") or len(text.split()) == 1 or is_code


def main():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    wide = 0
    for name in filter(is_text, listed.stdout.splitlines()):
        try:
            lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_COLUMNS and not may_be_long(name, line):
                wide += 1
                print(f"{name}:{number}: {len(line)} columns, at most {MAX_COLUMNS}")
    return 1 if wide else 0


if __name__ == "__main__":
    sys.exit(main())
