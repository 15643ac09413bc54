"""The purpose-made C programs: each verifies its own data, so their expected output is one line."""

import os
import time

from harness import Failure
from legacy import Case


def program(name, *mode, megabytes=128, seconds=3):
    options = ["--shared"] if name == "shared" else []

    def run(context):
        context.c(
            name,
            *mode,
            megabytes=megabytes,
            seconds=60 if context.case.full else seconds,
            options=options,
        )

    return run


def followed(name, *mode):
    """As where the kernel tells nobody of forks, whatever it would."""
    return lambda context: context.c(
        name,
        *mode,
        megabytes=96,
        seconds=20,
        env={**os.environ, "SWAPTIDE_TEST_FOLLOWED_FORKS": "1"},
    )


def daemon(context):
    """The command exits at once; its daemon must still find its data, and say so in a file."""
    result = context.directory / "result"
    context.run([context.binary("forks"), 96, 0, context.seed, "daemon", result])
    while not result.exists():
        if context.hung is not None:
            raise Failure("the daemon said nothing")
        time.sleep(0.05)
    context.expect(result.read_text() == "OK daemon\n", f"the daemon wrote {result.read_text()!r}")


def ends_by_itself(context):
    """The first thread ends and the process does not; then the last one ends, and so must the
    process, with that status.
    """
    context.c("processes", "leader", megabytes=96, seconds=4, status=7)


def tortured_with_mishaps(context, number, seconds, mode, seed):
    """The torture program while every seventh transfer to or from the first swap area fails, is
    torn or short, is slow or finds no room: nothing is lost, and the area is given up for the other
    one."""
    places = [context.directory / f"{name}-{number}" for name in ("failing", "good")]
    for place in places:
        place.mkdir()
    swap = ["--swap", f"file:{places[0]}:1G,prio=9", "--swap", f"file:{places[1]}:1G"]
    program = context.start(
        [context.binary("torture"), 96, seconds, seed, mode],
        options=swap,
        env={**os.environ, "SWAPTIDE_TEST_MISHAPS": "7"},
    )
    done = program.finish()
    context.expect(
        f"OK torture {mode}" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
    )
    devices, errors, stats = done.report["devices"], done.report["errors"], done.report["stats"]
    said = f"{mode}, seed {seed}: {devices}, {errors}, {stats}"
    failing, good = (
        next(
            (device["state"], device["errors"])
            for device in devices
            if str(place) in device.get("name", "")
        )
        for place in places
    )
    context.expect(failing[0] == "retired" and failing[1] >= 8 and good == ("open", 0), said)
    context.expect(errors["pages_poisoned"] == 0 and stats["pswpout"] > 1000, said)


def torture_mishaps(context):
    """Devices that fail under the torture program, with one thread and with several."""
    if context.native:
        return
    for number, mode in enumerate(("single", "threads")):
        tortured_with_mishaps(context, number, 5, mode, context.seed)


def own_memory(context):
    """The engine maps and unmaps memory of its own without pause, while the torture program's
    mappings come and go in the same places and each is looked for: none of its own is ever taken
    for the program's. (It ends with a message then; or its threads wait for themselves.)"""
    for mode in ("threads", "single"):
        context.c(
            "torture", mode, megabytes=96, seconds=4, env={**os.environ, "SWAPTIDE_TEST_FAIL": "6"}
        )


def tortured(context):
    """Ten minutes of it: half a minute each with another seed, every fourth time two at once. And
    five with devices that fail.
    """
    for turn in range(20):
        seeds = [context.seed * 1000 + turn, context.seed * 1000 + 500 + turn][
            : 2 if turn % 4 == 1 else 1
        ]
        mode = "single" if turn % 4 == 3 else "threads"
        for program in [
            context.start([context.binary("torture"), 192, 30, seed, mode]) for seed in seeds
        ]:
            done = program.finish()
            context.expect(
                f"OK torture {mode}" in done.text(),
                f"it did not end with OK: {done.text()[-300:]!r}",
            )
        if turn % 2 == 0 and not context.native:
            tortured_with_mishaps(context, turn, 30, mode, context.seed * 1000 + turn)


def crowd(context):
    """More processes than swaptide has places for."""
    context.c("processes", "crowd", megabytes=24, env={**os.environ, "SWAPTIDE_TEST_SLOTS": "4"})


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
    "guarded",
)

CASES = [
    Case("heap-single", program("heap", "single"), 32, allowance=8),
    Case("heap-threads", program("heap", "threads"), 32, allowance=4),
    Case("stack", program("stack"), 32, allowance=2),
    Case("bss", program("bss", megabytes=300), 64, allowance=2),
    # The first of it is written before anything is managed.
    Case("libraries", program("libraries"), 32, allowance=8),
    Case("sparse", program("sparse"), 32, allowance=2),
    Case("neighbours", program("neighbours"), 32, allowance=8, forks=True),
    # How far the first turn gets before it is managed is a race.
    Case("zeros", program("zeros", megabytes=192), 32, allowance=8),
    Case("onepage", program("onepage"), 32, allowance=4),
    Case("hugepages", program("hugepages"), 32, allowance=4),
    Case("threads-touch", program("threads", "touch"), 32, allowance=4),
    Case("threads-storm", program("threads", "storm"), 32, allowance=12),
    Case("threads-c11", program("threads", "c11"), 32, allowance=12),
    *[
        Case(f"begins-{mode}", program("begins", mode, megabytes=200), 32, allowance=2)
        for mode in ("reserve", "plain", "populate", "advise")
    ],
    Case("ops-single", program("ops", "single"), 32, allowance=2),
    Case("ops-threads", program("ops", "threads"), 32, allowance=4),
    Case("advice", program("advice"), 32, allowance=4, forks=True),
    Case("signals", program("signals"), 32, allowance=2),
    Case("sysio", program("sysio"), 32, allowance=4),
    # Three processes, and six, that all want everything at once.
    # Four children at a time are pushed to their floors of 8 MiB only after they have begun.
    *[
        Case(
            f"forks-{mode}",
            program("forks", mode, megabytes=48 if mode in ("tree", "nested") else 96),
            32,
            allowance=24 if mode == "many" else 8,
            forks=True,
        )
        for mode in FORK_MODES
    ],
    # Without a capability, forks are followed (ptrace): children begin in the agent, and past libc
    # they get nothing, or their parents are let go before.
    *[
        Case(
            f"unprivileged-{'-'.join(words)}",
            program(*words, megabytes=megabytes),
            32,
            allowance=allowance,
            forks=True,
            unprivileged=True,
        )
        for words, megabytes, allowance in (
            (("forks", "tree"), 48, 8),
            (("forks", "threaded"), 96, 8),
            (("forks", "many"), 96, 24),
            (("forks", "closefds"), 96, 8),
            (("forks", "grown"), 96, 8),
            (("forks", "guarded"), 96, 8),
            (("forkmove", "libc"), 96, 64),
            (("torture", "threads"), 96, 128),
            (("processes", "clones"), 40, 96),
            (("processes", "plain"), 96, 24),
            (("advice",), 96, 24),
        )
    ],
    # The same with the rights of who runs this: all that fork.
    *[
        Case(f"followed-{mode}", followed("forks", mode), 32, allowance=24, forks=True, full=True)
        for mode in FORK_MODES
    ],
    *[
        Case(
            f"followed-{'-'.join(words)}",
            followed(*words),
            32,
            allowance=128,
            forks=True,
            full=True,
        )
        for words in (
            ("torture", "threads"),
            ("torture", "single"),
            ("forkmove", "libc"),
            ("neighbours",),
            ("execs",),
        )
    ],
    Case("execs", program("execs", megabytes=96), 32, allowance=16, forks=True),
    # Mappings that move while the process forks, and past libc while it forks: such children take
    # all they have out of the budget.
    Case("forkmove-libc", program("forkmove", "libc", megabytes=96), 32, allowance=64, forks=True),
    Case(
        "forkmove-raw",
        program("forkmove", "raw", megabytes=36, seconds=3),
        32,
        allowance=96,
        forks=True,
    ),
    # One region for all; what is read and written by several at once does not go out while a forked
    # child is on its way.
    *[
        Case(
            f"shared-{mode}",
            program("shared", mode, megabytes=64),
            32,
            allowance=allowance,
            forks=True,
        )
        for mode, allowance in (
            ("hammer", 4),
            ("chains", 16),
            ("killed", 24),
            ("changes", 16),
            ("meetings", 8),
            ("starts", 16),
            ("both", 16),
        )
    ],
    # A child past libc gets everything, and nothing of it goes out while that lives.
    Case("shared-raw", program("shared", "raw", megabytes=64), 32, allowance=64, forks=True),
    Case("remap", program("remap", megabytes=96), 32, allowance=4),
    Case("regrow-mremap", program("regrow", "mremap", megabytes=48), 32, allowance=4),
    Case("regrow-realloc", program("regrow", "realloc", megabytes=48), 32, allowance=4),
    Case(
        "processes-dropped",
        program("processes", "dropped", megabytes=48),
        32,
        allowance=8,
        forks=True,
    ),
    Case(
        "processes-interrupted",
        program("processes", "interrupted", megabytes=96),
        32,
        allowance=8,
        forks=True,
    ),
    # Children that cannot be managed take what they have out of everybody else's budget.
    Case(
        "processes-namespaces",
        program("processes", "namespaces", megabytes=24),
        24,
        allowance=96,
        forks=True,
    ),
    Case(
        "processes-plain", program("processes", "plain", megabytes=96), 32, allowance=24, forks=True
    ),
    Case(
        "processes-clones",
        program("processes", "clones", megabytes=64),
        48,
        allowance=128,
        forks=True,
    ),
    # Nothing of what two processes share is swapped while one of them may outlive the other.
    Case(
        "processes-shared",
        program("processes", "shared", megabytes=96),
        32,
        allowance=256,
        forks=True,
    ),
    Case("processes-leader", ends_by_itself, 32, allowance=8, forks=True),
    # Every one without a place has all its memory, and budgets are for those that can be managed.
    Case("processes-crowd", crowd, 16, allowance=1200, forks=True),
    # Mappings come, grow and go at full speed beside forks: what is not managed yet, and what is
    # shared, comes on top.
    Case(
        "torture-threads",
        program("torture", "threads", megabytes=96, seconds=6),
        32,
        allowance=128,
        forks=True,
    ),
    Case(
        "torture-single",
        program("torture", "single", megabytes=96, seconds=4),
        32,
        allowance=128,
        forks=True,
    ),
    Case("forks-daemon", daemon, 32, allowance=8, forks=True),
    # The same for a minute each, and more of it.
    Case("torture-mishaps", torture_mishaps, 32, allowance=128, forks=True),
    Case("own-memory", own_memory, 32, allowance=128, forks=True),
    Case("full-torture", tortured, 48, full=True, limit=2400, allowance=192, forks=True),
    Case(
        "long-heap",
        program("heap", "threads", megabytes=512),
        96,
        full=True,
        limit=240,
        allowance=4,
    ),
    Case(
        "long-ops", program("ops", "threads", megabytes=384), 64, full=True, limit=240, allowance=4
    ),
    Case(
        "long-touch",
        program("threads", "touch", megabytes=384),
        64,
        full=True,
        limit=240,
        allowance=4,
    ),
    Case("long-sysio", program("sysio", megabytes=384), 64, full=True, limit=240, allowance=4),
    Case(
        "long-tree",
        program("forks", "tree", megabytes=256),
        64,
        full=True,
        limit=240,
        allowance=16,
        forks=True,
    ),
    Case(
        "long-threaded",
        program("forks", "threaded", megabytes=256),
        64,
        full=True,
        limit=240,
        allowance=16,
        forks=True,
    ),
    Case(
        "long-shared",
        program("shared", "hammer", megabytes=256),
        64,
        full=True,
        limit=240,
        allowance=8,
        forks=True,
    ),
    Case(
        "long-shared-changes",
        program("shared", "changes", megabytes=256),
        64,
        full=True,
        limit=240,
        allowance=24,
        forks=True,
    ),
    Case(
        "long-killed",
        program("forks", "killed", megabytes=256),
        64,
        full=True,
        limit=240,
        allowance=16,
        forks=True,
    ),
]
