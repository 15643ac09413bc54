"""Which program is used, and what it says when it fails."""

import os
from pathlib import Path

import pytest

from conftest import StandIn
from swaptide import BinaryNotFoundError, _binary, binary


def made(path: Path, contents: bytes = b"\x7fELF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents)
    path.chmod(0o755)
    return path


def test_the_packages_own_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_binary, "_BUNDLED", made(tmp_path / "bin" / "swaptide"))
    monkeypatch.setenv("SWAPTIDE", str(made(tmp_path / "other")))
    assert binary() == tmp_path / "bin" / "swaptide"
    (tmp_path / "bin" / "swaptide").unlink()
    assert binary() == tmp_path / "other"


def test_path_is_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_bundle: None) -> None:
    monkeypatch.delenv("SWAPTIDE", raising=False)
    # The console script of this package would start itself for ever.
    made(tmp_path / "venv" / "swaptide", b"#!/usr/bin/python3\n")
    found = made(tmp_path / "usr" / "swaptide")
    places = [tmp_path / name for name in ("nowhere", "venv", "usr")]
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, places)))
    assert binary() == found
    found.unlink()
    with pytest.raises(BinaryNotFoundError, match="SWAPTIDE"):
        binary()


def test_a_wrong_name_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_bundle: None
) -> None:
    monkeypatch.setenv("SWAPTIDE", str(tmp_path / "absent"))
    with pytest.raises(BinaryNotFoundError, match="absent is no program"):
        binary()


def test_sizes() -> None:
    assert _binary.size("2G") == "2G"
    assert _binary.size(1 << 30) == "1073741824"
    for wrong in (1.5, True, None):
        with pytest.raises(TypeError, match="a size is"):
            _binary.size(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("swaptide attach: no process 7; see ps\n", "no process 7; see ps"),
        ("swaptide: python3: more\nswaptide ctl: last\n\n", "last"),
        ("Segmentation fault: core dumped", "Segmentation fault: core dumped"),
        ("", ""),
    ],
)
def test_the_last_line_without_the_name(said: str, line: str) -> None:
    assert _binary.last_line(said) == line


def test_an_answer_and_the_one_that_gave_it(stand_in: StandIn) -> None:
    stand_in.tell(run=4711, budget=5)
    pid, text = _binary.asked("ctl", "stats", "--pid", "1")
    assert f'"pid": {pid}' in text
