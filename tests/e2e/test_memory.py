"""Kinds of memory, and calls that change it: C programs that verify every page that they read."""

import os

import pytest

from harness import full, param


@pytest.mark.swaptide(budget=32)
@pytest.mark.parametrize("mode", [full("single", allowance=8), param("threads", allowance=4)])
def test_heap(case, mode):
    case.run_c("heap", mode)


@pytest.mark.swaptide(budget=32, allowance=2)
def test_stack(case):
    case.run_c("stack")


@pytest.mark.swaptide(budget=64, allowance=2)
def test_bss(case):
    case.run_c("bss", megabytes=300)


@pytest.mark.swaptide(budget=120, allowance=24)
@pytest.mark.parametrize("mode", ["locked", "readonly", "unforked"])
def test_unmovable(case, mode):
    """More than the budget cannot go out: the program goes past it, and on, and is told why."""
    done = case.run_c("unmovable", mode, megabytes=126)
    if not case.native:
        pages = done.report["stats"][f"unmovable_{mode}"]
        assert pages * 4 > 64 << 10, f"{pages} pages are told of"


@pytest.mark.swaptide(budget=32, allowance=8)
def test_libraries(case):
    """Memory of libraries; the first of it is written before anything is managed."""
    case.run_c("libraries")


@pytest.mark.swaptide(budget=32, allowance=2)
def test_sparse(case):
    case.run_c("sparse")


@pytest.mark.swaptide(budget=32, allowance=8, forks=True)
def test_neighbours(case):
    case.run_c("neighbours")


@pytest.mark.swaptide(budget=32, allowance=8)
def test_zeros(case):
    """Pages of zeros. How far the first turn gets before it is managed is a race."""
    case.run_c("zeros", megabytes=192)


@pytest.mark.swaptide(budget=32, allowance=4)
def test_onepage(case):
    case.run_c("onepage")


@pytest.mark.swaptide(budget=32, allowance=4)
def test_hugepages(case):
    case.run_c("hugepages")


@pytest.mark.swaptide(budget=32)
@pytest.mark.parametrize(
    "mode",
    [
        param("touch", allowance=4),
        param("storm", allowance=12),
        param("c11", allowance=12),
        param("same", allowance=8),
    ],
)
def test_threads(case, mode):
    done = case.run_c("threads", mode)
    if mode == "storm" and done.report and len(os.sched_getaffinity(0)) > 1:
        served = done.report["stats"]["faults_by_servers"]
        assert served > 0, "several threads faulted, and the handler alone served them"


@pytest.mark.swaptide(budget=64, allowance=12, native=False)
def test_threads_memory(case):
    """Nothing lies on a disk: on few CPUs the handler serves all threads."""
    env = {name: value for name, value in os.environ.items() if name != "SWAPTIDE_TEST_FAIL"}
    done = case.run_c("threads", "storm", megabytes=72, options=["--swap", "zram:1G"], env=env)
    served = done.report["stats"]["faults_by_servers"]
    cpus = len(os.sched_getaffinity(0))
    assert (served > 0) == (cpus >= 4), f"{served} faults were served by servers on {cpus} CPUs"


@pytest.mark.swaptide(budget=32, allowance=12, native=False)
def test_threads_servers(case):
    """Threads touch the same pages, and three fault servers read however few do."""
    env = {**os.environ, "SWAPTIDE_TEST_FAIL": "18"}
    stats = case.run_c("threads", "same", env=env).report["stats"]
    if len(os.sched_getaffinity(0)) > 1:
        assert stats["swpin_exists"] > 0, f"no two loads have met: {stats}"


@pytest.mark.swaptide(budget=32, allowance=4)
@pytest.mark.parametrize("mode", ["one", "moved"])
def test_contexts(case, mode):
    """Threads of user space: stacks that are out are switched to."""
    case.run_c("contexts", mode)


@pytest.mark.swaptide(budget=32, allowance=4)
def test_openmp(case):
    case.run_c("openmp")


@pytest.mark.full
@pytest.mark.swaptide(budget=32, allowance=2)
@pytest.mark.parametrize("mode", ["reserve", "plain", "populate", "advise"])
def test_begins(case, mode):
    """Programs that fill their memory as soon as they begin."""
    case.run_c("begins", mode, megabytes=200)


@pytest.mark.full
@pytest.mark.swaptide(budget=32, allowance=128, forks=True)
def test_begins_forks(case):
    """Forks past libc at the moment in which management begins, several times."""
    for _ in range(10):
        case.run_c("begins", "forks", megabytes=96)


@pytest.mark.swaptide(budget=32)
@pytest.mark.parametrize("mode", [param("single", allowance=2), param("threads", allowance=4)])
def test_ops(case, mode):
    case.run_c("ops", mode)


@pytest.mark.full
@pytest.mark.swaptide(budget=32, allowance=4, forks=True)
def test_advice(case):
    case.run_c("advice")


@pytest.mark.swaptide(budget=32, allowance=2)
def test_signals(case):
    """Signal handlers over memory that is out."""
    case.run_c("signals")


@pytest.mark.swaptide(budget=32, allowance=4)
def test_sysio(case):
    """System calls on buffers that are out."""
    case.run_c("sysio")


@pytest.mark.swaptide(budget=32, allowance=4)
def test_remap(case):
    case.run_c("remap", megabytes=96)


@pytest.mark.swaptide(budget=32, allowance=4)
@pytest.mark.parametrize("mode", ["mremap", "realloc"])
def test_regrow(case, mode):
    case.run_c("regrow", mode, megabytes=48)


@pytest.mark.full
@pytest.mark.swaptide(limit=240)
@pytest.mark.parametrize(
    ("words", "megabytes"),
    [
        param(("heap", "threads"), 512, id="heap", budget=96, allowance=4),
        param(("ops", "threads"), 384, id="ops", budget=64, allowance=4),
        param(("threads", "touch"), 384, id="touch", budget=64, allowance=4),
        param(("sysio",), 384, id="sysio", budget=64, allowance=4),
        param(("forks", "tree"), 256, id="tree", budget=64, allowance=16, forks=True),
        param(("forks", "threaded"), 256, id="threaded", budget=64, allowance=16, forks=True),
        param(("forks", "killed"), 256, id="killed", budget=64, allowance=16, forks=True),
        param(("shared", "hammer"), 256, id="shared", budget=64, allowance=8, forks=True),
        param(("shared", "changes"), 256, id="shared-changes", budget=64, allowance=24, forks=True),
    ],
)
def test_long(case, words, megabytes):
    """The same, and forks and shared memory, for longer and with more memory."""
    options = ["--shared"] if words[0] == "shared" else []
    case.run_c(*words, megabytes=megabytes, seconds=case.stretched(15), options=options)
