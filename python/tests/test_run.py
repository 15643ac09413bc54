"""Programs under a budget of their own."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

import swaptide
from conftest import StandIn
from swaptide import RefusedError, SwaptideError, _run


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_run_has_output_status_and_report(stand_in: StandIn) -> None:
    words = program("import sys; print(input()); sys.exit(3)")
    done = swaptide.run(
        words,
        ram="1G",
        swap=["zram:1G"],
        options=["--strict"],
        input="hello",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr, done.args) == (3, "hello\n", "", words)
    assert (done.report.exit_status, done.report.pages_out) == (3, 7)
    (asked,) = stand_in.asked()
    report = asked.index("--report")
    assert asked[:report] == ["run", "--quiet", "--ram", "1G"]
    assert asked[report + 2 :] == ["--swap", "zram:1G", "--strict", "--", *words]
    with pytest.raises(subprocess.CalledProcessError) as failed:
        swaptide.run(words, ram="1G", input=b"hello", capture_output=True, check=True)
    assert (failed.value.returncode, failed.value.stdout) == (3, b"hello\n")


def test_a_refused_run(stand_in: StandIn) -> None:
    stand_in.tell(refuses={"run": "--ram: 1B is too small; the minimum is 16M"})
    with pytest.raises(RefusedError, match="^--ram: 1B is too small; the minimum is 16M$"):
        swaptide.run(["true"], ram=1, capture_output=True)
    with pytest.raises(RefusedError, match="standard error"):
        swaptide.run(["true"], ram=1, stderr=subprocess.DEVNULL)


def test_a_program_may_end_with_the_status_of_a_refusal(stand_in: StandIn) -> None:
    assert swaptide.run(program("import sys; sys.exit(2)"), ram="1G").returncode == 2


def test_options_that_are_not_taken(stand_in: StandIn) -> None:
    with pytest.raises(TypeError, match="shell"):
        swaptide.run(["true"], ram="1G", shell=True)
    assert stand_in.asked() == []


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"capture_output": True, "stdout": subprocess.PIPE}, "capture_output"),
        ({"capture_output": True, "stderr": subprocess.PIPE}, "capture_output"),
        ({"input": b"", "stdin": subprocess.PIPE}, "stdin"),
    ],
)
def test_options_that_exclude_each_other(
    stand_in: StandIn, how: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        swaptide.run(["true"], ram="1G", **how)
    assert stand_in.asked() == []


@pytest.mark.parametrize("left", ["", '{"exit_sta'])
def test_a_run_that_left_no_report(stand_in: StandIn, left: str) -> None:
    stand_in.tell(left=left)
    done = swaptide.run(program("print(5)"), ram="1G", capture_output=True, text=True)
    assert done.stdout == "5\n"
    with pytest.raises(SwaptideError, match="without a report, with status 0"):
        _ = done.report


def test_a_process_that_must_not_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_run, "_END_SECONDS", 0.1)
    refused: list[int] = []
    kill = os.kill

    def refuses_once(pid: int, number: int) -> None:
        if number == signal.SIGKILL and not refused:
            refused.append(pid)
            raise PermissionError
        kill(pid, number)

    words = ["sh", "-c", "sh -c 'sleep 20; :'; :"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        while len(_run._below(process.pid)) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        below = _run._below(process.pid)
        monkeypatch.setattr(os, "kill", refuses_once)
        _run._end(process)
    assert refused == below[:1]
