"""Processes that begin, end, drop rights and are cloned in every way."""

import os

import pytest

from harness import full, param


@pytest.mark.swaptide(budget=32, forks=True)
@pytest.mark.parametrize(
    ("mode", "megabytes"),
    [
        full("dropped", 48, allowance=8),
        param("interrupted", 96, allowance=8),
        # Children that cannot be managed take what they have out of the others' budget.
        full("namespaces", 24, budget=24, allowance=96),
        full("plain", 96, allowance=24),
        full("clones", 64, budget=48, allowance=128),
        # Nothing of what two processes share is swapped while one of them may outlive the other.
        full("shared", 96, allowance=256),
    ],
)
def test_processes(case, mode, megabytes):
    case.run_c("processes", mode, megabytes=megabytes)


@pytest.mark.full
@pytest.mark.swaptide(budget=32, allowance=8, forks=True)
def test_processes_leader(case):
    """The first thread ends and the process does not; then the last one ends, and so must the
    process, with that status.
    """
    case.run_c("processes", "leader", megabytes=96, seconds=4, status=7)


@pytest.mark.swaptide(budget=32, allowance=96, forks=True)
@pytest.mark.parametrize(
    ("mode", "megabytes"), [param("unshare", 1, swaps=False), param("raw", 64)]
)
def test_namespaces(case, mode, megabytes):
    """A program of one thread enters a user namespace, and the engine's threads are not in its way,
    whether memory is managed by then or not.
    """
    words = [case.binary("namespaces"), megabytes, 0.3, case.seed, mode]
    if case.run(words, native=True, status=None).status != 0:
        pytest.skip("user namespaces are not permitted")
    assert case.run(words).text() == "OK namespaces executed\n"


@pytest.mark.swaptide(budget=32, forks=True, needs=("bwrap",))
def test_sandbox(case):
    """A program in mount and user namespaces of its own, behind a file system that is mounted
    again."""
    words = ["bwrap", "--unshare-user", "--dev-bind", "/", "/"]
    if case.run([*words, "true"], native=True, status=None).status != 0:
        pytest.skip("user namespaces are not permitted")
    done = case.run([*words, case.binary("torture"), 96, 2, case.seed, "threads"])
    assert done.text() == "OK torture threads\n", done.text()


# Every one without a place has all its memory, and budgets are for those that can be managed.
@pytest.mark.swaptide(budget=16, allowance=1200, forks=True)
def test_processes_crowd(case):
    """More processes than swaptide has places for."""
    case.run_c(
        "processes",
        "crowd",
        megabytes=24,
        seconds=5,
        env={**os.environ, "SWAPTIDE_TEST_SLOTS": "4"},
    )


# Maps 100 MiB, and after that as much as its limit permits.
MAPS = """if True:
    import mmap
    first = mmap.mmap(-1, 100 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, 100 << 20, 4096):
        first[at] = 1
    held = []
    try:
        while len(held) < 400:
            held.append(mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError:
        pass
    print(len(held) * 16)
"""


@pytest.mark.swaptide(budget=48, allowance=128, swaps=False)
def test_few_addresses(case):
    """With a limit on its addresses or its data a program is not managed, and it may map as much as
    without swaptide.
    """
    for option in ("-v", "-d"):
        words = ["sh", "-c", f'ulimit {option} 3000000; exec "$@"', "sh", case.python, "-c", MAPS]
        mapped = [int(case.run(words, native=native).text()) for native in (True, False)]
        # The preloaded library has addresses of its own.
        assert mapped[0] > 1000 and mapped[1] > mapped[0] - 256, f"ulimit {option}: {mapped} MiB"


@pytest.mark.swaptide(budget=32, allowance=128, swaps=False, forks=True)
def test_few_files(case):
    """With hardly any descriptors a program is not managed, but it runs, and forks, as without
    swaptide.
    """
    for files in (5, 8, 12):
        script = f"ulimit -n {files}; exec {case.binary('processes')} 48 1 {case.seed} clones"
        done = case.run(["sh", "-c", script])
        assert done.text() == "OK processes clones\n", (
            f"with {files} files it printed {done.text()!r}"
        )
