"""The console script, and kernels that run under a budget."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import StandIn
from swaptide import SwaptideError, _kernelspec

SOURCE = Path(_kernelspec.__file__).parents[1]


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "swaptide", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )


def test_all_else_is_the_binarys(stand_in: StandIn) -> None:
    done = command("run", "--", "sh", "-c", "echo out; exit 5")
    assert (done.returncode, done.stdout) == (5, "out\n")
    assert stand_in.asked() == [["run", "--", "sh", "-c", "echo out; exit 5"]]
    assert command("frobnicate").stderr.startswith("swaptide frobnicate: ")


def test_without_a_binary(monkeypatch: pytest.MonkeyPatch, no_bundle: None) -> None:
    monkeypatch.setenv("SWAPTIDE", "/nonexistent")
    done = command("ctl", "list")
    assert done.returncode == 2
    assert done.stderr == (
        "swaptide: $SWAPTIDE: /nonexistent is no program; name the swaptide binary\n"
    )


def test_a_kernel_is_wrapped(stand_in: StandIn) -> None:
    spec = {"argv": ["python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"]}
    made = _kernelspec.wrapped({**spec, "language": "python"}, "2G", ["zram:1G"], "Name")
    assert made == {
        "argv": [
            *[str(stand_in.path), "run", "--quiet", "--ram", "2G", "--swap", "zram:1G", "--"],
            *[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        ],
        "display_name": "Name",
        "language": "python",
    }
    other = _kernelspec.wrapped({"argv": ["/usr/bin/R", "-e", "x"]}, "2G", [], "R")
    assert other["argv"][6:] == ["/usr/bin/R", "-e", "x"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "COMMAND"),
        (["install"], "--ram"),
        (["install", "--ram", "1G", "--user", "--prefix", "x"], "--prefix"),
    ],
)
def test_bad_usage_is_one_line(words: list[str], named: str) -> None:
    done = command("kernelspec", *words)
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert len(lines) == 1
    assert named in lines[0]


def test_without_jupyter(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jupyter_client.kernelspec", None)
    assert _kernelspec.main(["install", "--ram", "1G"]) == 2
    assert "pip install jupyter-client ipykernel" in capsys.readouterr().err
    assert stand_in.asked() == []


def test_a_kernel_of_another_is_not_replaced(tmp_path: Path) -> None:
    def kernel(place: Path, text: str) -> Path:
        place.mkdir(parents=True)
        (place / "kernel.json").write_text(text)
        return place

    own = kernel(tmp_path / "own", json.dumps({"argv": ["/usr/bin/swaptide", "run", "--", "R"]}))
    others = [
        kernel(tmp_path / str(number), text)
        for number, text in enumerate(['{"argv": ["R"]}', '{"argv": ["R", "run"]}', "{}", "[]", ""])
    ]
    _kernelspec._check_name("R", {}, None)
    _kernelspec._check_name("R", {"r": str(own)}, None)
    for place in others:
        with pytest.raises(SwaptideError, match="add --force"):
            _kernelspec._check_name("R", {"r": str(place)}, None)
    # Where Jupyter does not look.
    prefix = tmp_path / "prefix"
    kernel(prefix / "share" / "jupyter" / "kernels" / "r", '{"argv": ["R"]}')
    with pytest.raises(SwaptideError, match="add --force"):
        _kernelspec._check_name("R", {}, str(prefix))
    _kernelspec._check_name("S", {}, str(prefix))


def test_install(stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ipykernel")
    words = ["install", "--ram", "1G", "--prefix", str(tmp_path)]
    place = tmp_path / "share" / "jupyter" / "kernels" / "swaptide-python3"
    stand_in.tell(refuses={"run": "--ram: 1B is too small"})
    assert _kernelspec.main(words) == 2
    assert capsys.readouterr().err == "swaptide kernelspec: --ram: 1B is too small\n"
    assert not place.exists()
    stand_in.tell(refuses={})
    assert _kernelspec.main([*words, "--kernel", "none"]) == 2
    assert _kernelspec.main([*words, "--name", "no/name"]) == 2
    assert _kernelspec.main(words) == 0
    spec = json.loads((place / "kernel.json").read_text())
    assert spec["argv"][:6] == [str(stand_in.path), "run", "--quiet", "--ram", "1G", "--"]
    assert spec["display_name"].endswith("(swaptide 1G)")
    assert (place / "logo-svg.svg").exists()
    # It is replaced; one that is not swaptide's with --force alone.
    assert _kernelspec.main([*words, "--display-name", "Another"]) == 0
    text = (place / "kernel.json").read_text()
    assert json.loads(text)["display_name"] == "Another"
    other = place.with_name("other")
    place.rename(other)
    (other / "kernel.json").write_text('{"argv": ["R"]}')
    assert _kernelspec.main([*words, "--name", "Python3"]) == 2
    assert _kernelspec.main([*words, "--name", "other"]) == 2
    assert (other / "kernel.json").read_text() == '{"argv": ["R"]}'
    assert _kernelspec.main([*words, "--name", "other", "--force"]) == 0
    assert "swaptide" in (other / "kernel.json").read_text()
