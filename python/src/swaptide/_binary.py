"""The program `swaptide`: where it is, and how it is asked."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from swaptide._errors import BinaryNotFoundError, RefusedError

_ELF = b"\x7fELF"
_BUNDLED = Path(__file__).resolve().parent / "bin" / "swaptide"


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _on_path() -> Iterator[Path]:
    """The programs of this name on PATH, but no script: that may be the one of this package."""
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = Path(directory or ".") / "swaptide"
        if not _is_program(path):
            continue
        try:
            with path.open("rb") as file:
                if file.read(len(_ELF)) == _ELF:
                    yield path.absolute()
        except OSError:
            continue


def binary() -> Path:
    """The program `swaptide`: the one in this package, else what `$SWAPTIDE` names, else the first
    on `PATH`. Raises `BinaryNotFoundError` where there is none."""
    if _is_program(_BUNDLED):
        return _BUNDLED
    named = os.environ.get("SWAPTIDE")
    if named:
        path = Path(named).absolute()
        if _is_program(path):
            return path
        raise BinaryNotFoundError(f"$SWAPTIDE: {named} is no program; name the swaptide binary")
    for path in _on_path():
        return path
    raise BinaryNotFoundError(
        "no swaptide binary in this package, in $SWAPTIDE or on PATH; install a wheel for this "
        "platform, or build it (cargo build --release) and set SWAPTIDE to target/release/swaptide"
    )


def last_line(text: str) -> str:
    """What swaptide said last, without its name."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    name, _, rest = lines[-1].partition(": ")
    return rest if rest and name.split(" ")[0] == "swaptide" else lines[-1]


def asked(*words: str) -> tuple[int, str]:
    """What `swaptide` prints for these words, and the number of its process. Raises `RefusedError`
    with its line if it fails.

    Python starts it by `vfork`, which copies no memory.
    """
    with subprocess.Popen(
        [str(binary()), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as process:
        output, errors = process.communicate()
    if process.returncode != 0:
        line = last_line(errors)
        raise RefusedError(line or f"swaptide {words[0]} ended with status {process.returncode}")
    return process.pid, output


def ask(*words: str) -> str:
    """What `swaptide` prints for these words; as `asked`."""
    return asked(*words)[1]


def size(ram: str | int) -> str:
    """A size as `swaptide` takes it; a number is one of bytes."""
    if isinstance(ram, bool) or not isinstance(ram, str | int):
        raise TypeError(f"a size is a text such as '2G', or a number of bytes, not {ram!r}")
    return str(ram)
