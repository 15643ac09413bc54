"""`%swaptide`, and the line that it shows."""

import time
from collections.abc import Callable
from typing import Any

import pytest

import swaptide
from conftest import StandIn
from swaptide import _magic

pytest.importorskip("IPython")

from IPython.core.error import UsageError  # noqa: E402


class Handle:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, data: dict[str, str], raw: bool) -> None:
        assert raw
        assert "<pre>swaptide: " in data["text/html"]
        self.lines.append(data["text/plain"])


class Shell:
    """What of IPython's shell is used."""

    def __init__(self) -> None:
        self.magics_manager = self
        self.magics: dict[str, dict[str, Callable[[str], None]]] = {"line": {}}
        self.events = self
        self.called: dict[str, list[Callable[..., None]]] = {}

    def register_magic_function(
        self, function: Callable[[str], None], kind: str, name: str
    ) -> None:
        self.magics[kind][name] = function

    def register(self, event: str, function: Callable[..., None]) -> None:
        self.called.setdefault(event, []).append(function)

    def unregister(self, event: str, function: Callable[..., None]) -> None:
        self.called[event].remove(function)

    def magic(self, text: str) -> None:
        self.magics["line"]["swaptide"](text)


class Notebook(Shell):
    kernel = object()


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    shown = Handle()

    def display(data: dict[str, str], **_how: Any) -> Handle:
        shown.lines.append(data["text/plain"])
        return shown

    monkeypatch.setattr("IPython.display.display", display)
    return shown


def test_a_terminal(stand_in: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    shell = Shell()
    swaptide.load_ipython_extension(shell)
    shell.magic("")
    shell.magic("5M")
    assert stand_in.budget == 5
    shell.magic("off")
    assert stand_in.budget is None
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0].split(",")[0] for line in lines] == [
        "swaptide: no budget",
        "swaptide: 5.0M of 5 in use",
        "swaptide: no budget",
    ]


@pytest.mark.parametrize("error", [OSError("no fork"), ValueError("no JSON")])
def test_a_line_that_cannot_be_had_is_shown(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails() -> swaptide.Stats:
        raise error

    monkeypatch.setattr(_magic, "stats", fails)
    assert _magic._line() == f"swaptide: {error}"


def test_errors_are_one_line(stand_in: StandIn) -> None:
    shell = Shell()
    swaptide.load_ipython_extension(shell)
    stand_in.tell(refuses={"attach": "process 1 is traced"})
    with pytest.raises(UsageError, match="^swaptide: process 1 is traced$"):
        shell.magic("5M")
    with pytest.raises(UsageError, match="a size, off, or nothing"):
        shell.magic("5M 6M")


def test_the_line_of_a_notebook_lives(
    stand_in: StandIn, handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_magic, "_LIVE_SECONDS", 0.05)
    shell = Notebook()
    swaptide.load_ipython_extension(shell)
    shell.magic("5M")
    assert len(handle.lines) == 1
    (before,), (after,) = shell.called["pre_run_cell"], shell.called["post_run_cell"]
    after()
    assert len(handle.lines) == 1, "nothing has changed"
    stand_in.tell(budget=6)
    after()
    assert handle.lines[1:] == [handle.lines[0].replace("of 5 in", "of 6 in")]
    # While a cell runs.
    before()
    stand_in.tell(budget=7)
    for _ in range(200):
        if len(handle.lines) > 2:
            break
        time.sleep(0.05)
    assert "of 7 in use" in handle.lines[2]
    after()
    swaptide.unload_ipython_extension(shell)
    assert shell.called == {"pre_run_cell": [], "post_run_cell": []}
    assert shell.magics["line"] == {}
    assert stand_in.budget == 7, "the budget stays"
