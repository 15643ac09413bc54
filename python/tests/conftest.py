"""A program in the place of `swaptide`: it notes what it is asked, and answers as that does."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from swaptide import _binary, _limit

STAND_IN = """#!{python} -SE
import json, subprocess, sys
from pathlib import Path

place = Path({place!r})
words = sys.argv[1:]
with (place / "words").open("a") as file:
    file.write(json.dumps(words) + "\\n")
state = json.loads((place / "state").read_text())


def save():
    (place / "state").write_text(json.dumps(state))


def refuse(line):
    print("swaptide " + words[0] + ": " + line, file=sys.stderr)
    sys.exit(2)


def value(option):
    return words[words.index(option) + 1]


if state["refuses"].get(words[0]):
    refuse(state["refuses"][words[0]])
if words[0] == "attach":
    state["run"] = 4711
    state["budget"] = int(value("--ram").rstrip("MG"))
    state["refuses"] = state.get("run-refuses", state["refuses"])
    save()
elif words[0] == "run":
    command = words[words.index("--") + 1 :]
    status = subprocess.call(command)
    report = {{"exit_status": status, "budget_bytes": 5, "stats": {{"zswpout": 3, "pswpout": 4}}}}
    if "--report" in words and "left" in state:
        Path(value("--report")).write_text(state["left"])
    elif "--report" in words:
        Path(value("--report")).write_text(json.dumps(report))
    sys.exit(status)
elif state["run"] is None:
    refuse("--pid 1: neither a run of this user nor a process in one; see swaptide ctl list")
elif words[:2] == ["ctl", "stats"]:
    process = {{"pid": int(value("--pid")), "group": "/", "limit_bytes": 9,
               "state": state.get("as", "engaged"),
               "resident_bytes": 5 << 20, "pool_bytes": 1, "swapped_pool_bytes": 1 << 20,
               "swapped_file_bytes": 2 << 20}}
    asker = dict(process, pid=__import__("os").getpid())
    print(json.dumps({{"pid": state["run"], "program": "python3", "wall_s": 1.5,
                      "budget_bytes": state["budget"], "resident_bytes": 5 << 20,
                      "peak_resident_bytes": 6 << 20, "peak_footprint_bytes": 8 << 20,
                      "processes": [process, asker], "later": 1,
                      "stats": {{"pswpout": 4, "stall_us": 1500000}}}}))
elif words[:2] == ["ctl", "budget"]:
    state["budget"] = int(words[-1].rstrip("MG%"))
    save()
elif words[:2] == ["ctl", "preload"]:
    pass
elif words[:2] == ["ctl", "detach"]:
    if state["refuses"].get("detach"):
        state["run"] = state["refuses"].get("run-after")
        save()
        refuse(state["refuses"]["detach"])
    state["run"] = None
    save()
else:
    refuse("what is " + " ".join(words))
"""


class StandIn:
    """What the program is told to answer, and what it was asked."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.path = place / "swaptide"
        self.path.write_text(STAND_IN.format(python=sys.executable, place=str(place)))
        self.path.chmod(0o755)
        self.tell(run=None, budget=0, refuses={})

    def tell(self, **values: Any) -> None:
        path = self.place / "state"
        state = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**state, **values}))

    @property
    def budget(self) -> int | None:
        """The budget in force."""
        state = json.loads((self.place / "state").read_text())
        return int(state["budget"]) if state["run"] is not None else None

    def asked(self) -> list[list[str]]:
        """What it was asked since it was last asked for this, but for statistics."""
        path = self.place / "words"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        words = [json.loads(line) for line in lines]
        return [one for one in words if one[:2] != ["ctl", "stats"]]


@pytest.fixture
def no_bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package has no program of its own."""
    monkeypatch.setattr(_binary, "_BUNDLED", tmp_path / "none")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_bundle: None) -> StandIn:
    """The program, and a process that knows of no budget."""
    program = StandIn(tmp_path)
    monkeypatch.setenv("SWAPTIDE", str(program.path))
    monkeypatch.setattr(_limit, "_state", _limit._State())
    monkeypatch.setenv(_limit._ENV_RUN, "")
    return program


@pytest.fixture
def own() -> str:
    """The number of this process."""
    return str(os.getpid())
