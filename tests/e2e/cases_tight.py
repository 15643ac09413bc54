"""Real programs in a memory cgroup that ends them a tenth past the budget: none is ended, and all
answer as they do without it.
"""

from cases_real import gcc, java, node, python, redis, sort, sqlite, stress
from cgroups import memory_cgroup
from harness import MIB
from legacy import Case, Skip


def tight(run, tenths=11):
    """`run` with what it starts under swaptide in a cgroup of so many tenths of the budget: the
    budget and a tenth. Nothing is added for the kernel's own memory and for pages of files: the
    former fits into the tenth in programs of this size (2 to 10 MiB), and the latter are given up
    for others."""

    def confined(context):
        if context.native:
            return
        limit = context.budget * MIB * tenths // 10
        with memory_cgroup(context, limit) as group:
            if group is None:
                raise Skip("no memory cgroup can be made here")
            context.enter = group.enter
            try:
                run(context)
            finally:
                group.end_of_sampling()
                at_most = ", ".join(
                    f"{value / MIB:.1f} {name}" for name, value in group.peaks.items()
                )
                said = (
                    f"limit {limit / MIB:.1f} MiB, most charged {group.peak() / MIB:.1f}, of it "
                    f"at most {at_most}; "
                    f"charges that met the limit: {group.failed()}, processes ended: "
                    f"{group.killed()}"
                )
                print(f"  {context.case.name}: {said}", flush=True)
            context.expect(group.killed() == 0, f"processes were ended for memory: {said}")
            # Without it the case would show nothing.
            context.expect(
                group.peaks["anon"] > context.budget * MIB // 2,
                f"hardly anything was charged to the cgroup: {said}",
            )

    return confined


def case(name, run, budget, tenths=11, **how):
    return Case(f"tight-{name}", tight(run, tenths), budget, limit=240, **how)


CASES = [
    case("walk", python("walk.py", 1024), 256, allowance=4),
    # A budget of all that the cgroup has: what the kernel and others need of it goes off.
    case("whole", python("walk.py", 512), 128, tenths=10, allowance=4),
    case("sort", sort(192, 192), 128, needs=("sort",), allowance=4),
    # A dict that grows doubles in a mapping of 20 MiB that nobody has seen yet: with other programs
    # on all CPUs its first pages may come before it is managed.
    case("python", python("structures.py", 80), 256, full=True, allowance=4),
    case("redis", redis(200000), 96, full=True, needs=("redis-server",), allowance=16, forks=True),
    case("sqlite", sqlite(600000), 96, full=True, needs=("sqlite3",), allowance=4),
    case("gcc", gcc(2, 200), 96, full=True, needs=("gcc",), allowance=8, forks=True),
    case("java", java("G1", 220000), 96, full=True, needs=("java",), allowance=64),
    case("node", node(150000), 112, full=True, needs=("node",), allowance=16),
    case(
        "stress-ng", stress(10, 256), 128, full=True, needs=("stress-ng",), allowance=8, forks=True
    ),
]
