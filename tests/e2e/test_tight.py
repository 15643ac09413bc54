"""Real programs in a memory cgroup that ends them a tenth past the budget: none is ended, and all
answer as they do without it."""

import pytest

from cgroups import memory_cgroup
from ctl import PRESSURE
from harness import MIB, param
from workloads import gcc, java, node, python, redis, sort, sqlite, stress


def run_in_cgroup(case, tenths, workload, *arguments):
    """A workload, with what it starts under swaptide in a cgroup of `tenths` of the budget. Nothing
    is added for the kernel's own memory and for pages of files: the former fits into a tenth in
    programs of this size (2 to 10 MiB), and the latter are reclaimed."""
    limit = case.budget * MIB * tenths // 10
    with memory_cgroup(case, limit) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        case.enter = group.enter
        try:
            workload(case, *arguments)
        finally:
            group.end_of_sampling()
            at_most = ", ".join(f"{value / MIB:.1f} {name}" for name, value in group.peaks.items())
            said = (
                f"limit {limit / MIB:.1f} MiB, most charged {group.peak() / MIB:.1f}, of it "
                f"at most {at_most}; charges that met the limit: {group.failed()}, processes "
                f"ended: {group.killed()}"
            )
            case.note(said)
        assert group.killed() == 0, f"processes were ended for memory: {said}"
        # Without it the case would show nothing.
        assert group.peaks["anon"] > case.budget * MIB // 2, (
            f"hardly anything was charged to the cgroup: {said}"
        )


def long(*values, **options):
    return param(11, *values, marks=[pytest.mark.full], **options)


@pytest.mark.swaptide(limit=240, native=False)
@pytest.mark.parametrize(
    ("tenths", "workload", "arguments"),
    [
        long(python, ("walk.py", 1024), id="walk", budget=256, allowance=4),
        # A budget of all that the cgroup has: what the kernel and others need of it goes off.
        param(10, python, ("walk.py", 512), id="whole", budget=128, allowance=4),
        long(sort, (192, 192), id="sort", budget=128, needs=("sort",), allowance=4),
        # A dict that grows doubles in a mapping of 20 MiB that is not managed yet: with other
        # programs on all CPUs its first pages may come before it is managed.
        long(python, ("structures.py", 80), id="python", budget=256, allowance=4),
        long(
            redis,
            (200000,),
            id="redis",
            budget=96,
            needs=("redis-server",),
            allowance=16,
            forks=True,
        ),
        long(sqlite, (600000,), id="sqlite", budget=96, needs=("sqlite3",), allowance=4),
        long(gcc, (2, 200), id="gcc", budget=96, needs=("gcc",), allowance=8, forks=True),
        long(java, ("G1", 220000), id="java", budget=96, needs=("java",), allowance=64),
        long(node, (150000,), id="node", budget=112, needs=("node",), allowance=16),
        long(
            stress,
            (10, 256),
            id="stress-ng",
            budget=128,
            needs=("stress-ng",),
            allowance=8,
            forks=True,
        ),
    ],
)
def test_tight(case, tenths, workload, arguments):
    run_in_cgroup(case, tenths, workload, *arguments)


@pytest.mark.full
@pytest.mark.swaptide(budget=96, allowance=8, native=False)
def test_tight_cgroup(case):
    """Real programs in a memory cgroup that ends them a tenth past the budget: none is ended."""
    budget = 96
    # Every group of the sparse mapping's pages has a page table of its own, and every GiB of it
    # another: 36M, which kernels charge or do not.
    for words, last, tables in (
        ([case.python, PRESSURE, 256, "closefds"], "OK closefds", 0),
        ([case.binary("heap"), 256, 6, case.seed, "threads"], "OK heap threads", 0),
        ([case.binary("sparse"), 256, 6, case.seed], "OK sparse", 37),
    ):
        # The supervisor, the kernel's own of the cgroup (page tables, stacks) and the page cache's
        # least come on top.
        with memory_cgroup(case, (budget * 11 // 10 + 16 + tables) * MIB) as group:
            if group is None:
                pytest.skip("no memory cgroup can be made here")
            program = case.start(words, budget=budget, preexec=group.enter)
            done = program.finish(status=None)
            assert done.status == 0, f"{words}: status {done.status}: {done.errors()[-300:]!r}"
            assert last is None or last in done.text(), f"{words}: {done.text()[-200:]!r}"
            assert group.killed() == 0, f"{words}: {group.killed()} processes were ended for memory"
