"""Forks, execs, and moves of memory while a process forks: C programs that verify every page."""

import os
import time

import pytest

from harness import Failure, full, param

FORK_MODES = (
    "tree",
    "nested",
    "threaded",
    "orphan",
    "killed",
    "many",
    "exec",
    "vfork",
    "spawn",
    "closefds",
    "grown",
    "left",
    "guarded",
)


@pytest.mark.swaptide(budget=32, allowance=8, forks=True)
@pytest.mark.parametrize(
    "mode",
    [
        *("tree", "nested", "threaded", "killed", "vfork", "left"),
        *[full(mode) for mode in ("orphan", "exec", "spawn", "closefds", "grown", "guarded")],
        # Four children at a time are pushed to their floors of 8 MiB only after they have begun.
        full("many", allowance=24),
    ],
)
def test_forks(case, mode):
    # Three processes, and six, want everything at once.
    case.run_c("forks", mode, megabytes=48 if mode in ("tree", "nested") else 96)


@pytest.mark.swaptide(budget=32, allowance=8, forks=True)
def test_forks_daemon(case):
    """The command exits at once; its daemon must still find its data, and say so in a file."""
    result = case.directory / "result"
    case.run([case.binary("forks"), 96, 0, case.seed, "daemon", result])
    while not result.exists():
        if case.hung is not None:
            raise Failure("the daemon said nothing")
        time.sleep(0.05)
    assert result.read_text() == "OK daemon\n", f"the daemon wrote {result.read_text()!r}"


@pytest.mark.unprivileged
@pytest.mark.swaptide(budget=32, forks=True)
@pytest.mark.parametrize(
    ("words", "megabytes"),
    [
        param(("forks", "tree"), 48, allowance=8),
        full(("forks", "threaded"), 96, allowance=8),
        full(("forks", "many"), 96, allowance=24),
        full(("forks", "closefds"), 96, allowance=8),
        full(("forks", "grown"), 96, allowance=8),
        full(("forks", "left"), 96, allowance=8),
        full(("forks", "parted"), 40, allowance=96),
        full(("forks", "guarded"), 96, allowance=8),
        param(("forkmove", "libc"), 96, allowance=64),
        param(("torture", "threads"), 96, allowance=128),
        param(("processes", "clones"), 40, allowance=96),
        param(("processes", "plain"), 96, allowance=24),
        param(("advice",), 96, allowance=24),
    ],
)
def test_unprivileged(case, words, megabytes):
    """Without a capability, forks are followed by ptrace: children begin in the agent, and past
    libc they get nothing, or their parents are let go before."""
    case.run_c(*words, megabytes=megabytes)


@pytest.mark.full
@pytest.mark.swaptide(budget=32, allowance=24, forks=True)
@pytest.mark.parametrize(
    "words",
    [
        *[param(("forks", mode), id=mode) for mode in FORK_MODES],
        param(("torture", "threads"), allowance=128),
        param(("torture", "single"), allowance=128),
        param(("forkmove", "libc"), allowance=128),
        param(("neighbours",), allowance=128),
        param(("execs",), allowance=128),
    ],
)
def test_followed(case, words):
    """As where the kernel reports no forks, with the rights of the user who runs the suite."""
    env = {**os.environ, "SWAPTIDE_TEST_FOLLOWED_FORKS": "1"}
    case.run_c(*words, megabytes=96, seconds=case.stretched(5), env=env)


@pytest.mark.swaptide(budget=32, allowance=16, forks=True)
def test_execs(case):
    case.run_c("execs", megabytes=96)


@pytest.mark.swaptide(budget=32, forks=True)
@pytest.mark.parametrize(
    ("mode", "megabytes"), [param("libc", 96, allowance=64), param("raw", 36, allowance=96)]
)
def test_forkmove(case, mode, megabytes):
    """Mappings move while the process forks, through libc or past it: a child past libc takes all
    that it has out of the budget."""
    case.run_c("forkmove", mode, megabytes=megabytes)


@pytest.mark.swaptide(budget=32, allowance=256, forks=True)
def test_forktwice(case):
    """A child past libc forks at once, and the parent writes meanwhile: the grandchild has what was
    there at the forks."""
    case.run_c("forktwice", "raw", megabytes=72)


@pytest.mark.swaptide(budget=24, allowance=160, forks=True)
def test_forkgrown(case):
    """A child past libc unmaps something and has a neighbour grow over it: a grandchild has zeros
    there."""
    case.run_c("forkgrown", "raw", megabytes=56)


@pytest.mark.swaptide(budget=24, allowance=16, forks=True)
@pytest.mark.parametrize("mode", ["wipe", "apart"])
def test_forkleft(case, mode):
    """What a move leaves mapped is in the child, after other memory was kept apart from it."""
    env = {**os.environ, "SWAPTIDE_TEST_FOLLOWED_FORKS": "1"}
    case.run_c("forkleft", mode, megabytes=48, env=env)


@pytest.mark.swaptide(budget=32, forks=True)
@pytest.mark.parametrize("mode", [param("libc", allowance=32), param("raw", allowance=128)])
def test_forkdrop(case, mode):
    """A parent gives pages up as soon as its fork has returned: its child still has them."""
    case.run_c("forkdrop", mode, megabytes=64)
