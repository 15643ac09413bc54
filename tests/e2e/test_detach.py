"""`swaptide ctl detach`: processes are let go, all comes back, and nothing stays registered."""

import json
import os
import signal
from pathlib import Path

import pytest

from cgroups import memory_cgroup
from ctl import PRESSURE, Ctl, ask, until, wait_for_line
from harness import MIB, Failure


def states(ctl):
    return {process["pid"]: process for process in json.loads(ctl("stats", "--json"))["processes"]}


def asked(what):
    """What a run answers; nothing while it is not there yet."""
    try:
        return what()
    except (AssertionError, OSError):
        return None


def is_armed(pid):
    """Whether any of the process's memory is registered with a userfaultfd."""
    return any(
        line.startswith("VmFlags:") and " um" in line
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines()
    )


def swapped(case, what, started, out):
    """Waits for a process of a run with pages out, and names it. A failure says what the run
    answers, and whether it lives.
    """
    try:
        return until(case, "a process that is swapped", lambda: asked(out))[0]["pid"]
    except AssertionError as failure:
        ended = started.process.poll()
        try:
            answer = out()
        except (AssertionError, OSError) as error:
            answer = repr(error)
        raise Failure(f"{what}: {failure}; status {ended}, answer {answer}") from None


@pytest.mark.swaptide(budget=32, limit=150, allowance=400, forks=True, native=False)
def test_detach(case):
    """Processes are let go in the middle of everything: all comes back, nothing stays registered,
    and what they fork later is managed again.
    """
    # Of a process that is about to fork, several times: the fork may come in when its workers are
    # about to be quiesced.
    for program, mode in (
        ("torture", "threads"),
        ("torture", "single"),
        *[("forks", "nested")] * 3,
        ("threads", "storm"),
    ):
        started = case.start([case.binary(program), 56, 2, case.seed, mode])
        ctl = Ctl(case, started.pid)

        def out():
            return [
                p
                for p in states(ctl).values()
                if p["state"] == "engaged" and p["swapped_pool_bytes"] > 4 * MIB
            ]

        first = swapped(case, f"{program} {mode}", started, out)
        assert is_armed(first), "managed, and not registered"
        status, _, errors = ask(case, "detach", str(first))
        # It may have come to its own end meanwhile.
        assert status == 0 or not Path(f"/proc/{first}/smaps").exists(), (
            f"detach: status {status}: {errors}"
        )
        after = (asked(lambda: states(ctl)) or {}).get(first)
        if after is not None:
            assert after["state"] == "detached" and after["swapped_pool_bytes"] == 0, (
                f"{program} {mode}: {after}"
            )
            assert asked(lambda: is_armed(first)) is not True, (
                f"{program} {mode}: some of it is still registered"
            )
        # And all others, if any are there by then.
        ask(case, "detach", str(started.pid))
        done = started.finish()
        assert f"OK {program} {mode}" in done.text(), (
            f"it did not end with OK: {done.text()[-300:]!r}"
        )


@pytest.mark.swaptide(budget=48, allowance=120, native=False)
def test_detach_refused(case):
    """Where what is out would not fit, one line says so and nothing has changed."""

    def ctl(*words):
        return ask(case, *words)

    with memory_cgroup(case, 130 * MIB) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        program = case.start([case.python, PRESSURE, 150, "wait"], preexec=group.enter)
        inside = wait_for_line(case, program, "ready").split()[1]
        status, text, errors = ctl("detach", inside)
        is_refused = status == 2 and len(errors.splitlines()) == 1 and "would come back" in errors
        assert is_refused, f"{status} {text}{errors}"
        status, text, errors = ctl("stats", "--pid", inside)
        assert f"\n{inside:>8} engaged" in text, f"it is managed as before: {text}{errors}"
        os.kill(program.pid, signal.SIGTERM)
        program.finish(status=7)


@pytest.mark.swaptide(budget=48, allowance=120, native=False)
def test_detach_twice(case):
    """A program that was let go keeps its data. One that is in no run, or was let go already, is
    refused.
    """

    def ctl(*words):
        return ask(case, *words)

    program = case.start([case.python, PRESSURE, 100, "wait"])
    inside = wait_for_line(case, program, "ready").split()[1]
    status, _, errors = ctl("detach", "1")
    assert status == 2 and len(errors.splitlines()) == 1, f"a process of no run: {status} {errors}"
    status, _, errors = ctl("detach", inside)
    assert status == 0 and errors == "", f"detach: {status} {errors}"
    assert not is_armed(int(inside)), "some of it is still registered"
    status, _, errors = ctl("detach", inside)
    assert status == 2 and "none of these" in errors, f"twice: {status} {errors}"
    # It reads all its data again before it ends.
    os.kill(program.pid, signal.SIGTERM)
    program.finish(status=7)
