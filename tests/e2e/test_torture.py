"""Mappings that come, grow, move and go at full speed, next to forks. What is not managed yet, and
what is shared, comes on top of the budget."""

import os

import pytest

from harness import full, param
from server_faults import PLANS, run_with_faults


@pytest.mark.swaptide(budget=32, allowance=128, forks=True)
@pytest.mark.parametrize(
    ("mode", "seconds"), [param("threads", 6), full("single", 4), param("sends", 6)]
)
def test_torture(case, mode, seconds):
    case.run_c("torture", mode, megabytes=96, seconds=seconds)


def torture_with_servers(case, megabytes, seconds, mode):
    """Three fault servers, which read however few threads fault."""
    program = case.start(
        [case.binary("torture"), megabytes, seconds, case.seed, mode],
        env={**os.environ, "SWAPTIDE_TEST_FAIL": "18"},
    )
    done = program.finish()
    assert f"OK torture {mode}" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
    stats = done.report["stats"]
    assert stats["faults_by_servers"] > 100, stats


@pytest.mark.swaptide(budget=32, allowance=128, forks=True, native=False)
@pytest.mark.parametrize("mode", ["threads", "sends"])
def test_torture_servers(case, mode):
    torture_with_servers(case, 96, 6, mode)


@pytest.mark.full
@pytest.mark.swaptide(budget=48, limit=900, allowance=192, forks=True, native=False)
def test_full_torture_servers(case):
    torture_with_servers(case, 192, case.stretched(60), "threads")


@pytest.mark.full
@pytest.mark.swaptide(budget=48, limit=900, allowance=192, forks=True)
def test_full_torture_sends(case):
    case.run_c("torture", "sends", megabytes=192, seconds=case.stretched(60))


def run_with_failing_area(case, number, seconds, mode, seed):
    """The torture program while every seventh transfer to or from the first swap area fails, is
    torn or short, is slow or finds no room: nothing is lost, and the area is given up for the other
    one."""
    places = [case.directory / f"{name}-{number}" for name in ("failing", "good")]
    for place in places:
        place.mkdir()
    swap = ["--swap", f"file:{places[0]}:1G,prio=9", "--swap", f"file:{places[1]}:1G"]
    program = case.start(
        [case.binary("torture"), 96, seconds, seed, mode],
        options=swap,
        env={**os.environ, "SWAPTIDE_TEST_IO_FAULTS": "7"},
    )
    done = program.finish()
    assert f"OK torture {mode}" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
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
    assert failing[0] == "retired" and failing[1] >= 8 and good == ("open", 0), said
    assert errors["pages_poisoned"] == 0 and stats["pswpout"] > 1000, said


@pytest.mark.swaptide(budget=32, allowance=128, forks=True, native=False)
def test_torture_io_faults(case):
    """Devices that fail under the torture program, with one thread and with several."""
    for number, mode in enumerate(("single", "threads")):
        run_with_failing_area(case, number, 5, mode, case.seed)


@pytest.mark.swaptide(budget=32, allowance=128, forks=True)
def test_own_memory(case):
    """The engine maps and unmaps memory of its own without pause, while the torture program's
    mappings come and go in the same places and each is looked for: none of its own is ever taken
    for the program's. (It ends with a message then; or its threads wait for themselves.)"""
    for mode in ("threads", "single"):
        case.run_c(
            "torture", mode, megabytes=96, seconds=4, env={**os.environ, "SWAPTIDE_TEST_FAIL": "6"}
        )


@pytest.mark.full
@pytest.mark.swaptide(budget=48, limit=2400, allowance=192, forks=True)
def test_full_torture(case):
    """A minute of it: a quarter each with another seed, every fourth time two at once. And half a
    minute with devices that fail.
    """
    for turn in range(case.stretched(4)):
        seeds = [case.seed * 1000 + turn, case.seed * 1000 + 500 + turn][
            : 2 if turn % 4 == 1 else 1
        ]
        mode = "single" if turn % 4 == 3 else "threads"
        for program in [
            case.start([case.binary("torture"), 192, 15, seed, mode]) for seed in seeds
        ]:
            done = program.finish()
            assert f"OK torture {mode}" in done.text(), (
                f"it did not end with OK: {done.text()[-300:]!r}"
            )
        if turn % 2 == 0 and not case.native:
            run_with_failing_area(case, turn, 15, mode, case.seed * 1000 + turn)


# While a server is away there is nowhere to go.
@pytest.mark.network
@pytest.mark.swaptide(budget=32, allowance=160, forks=True, native=False)
def test_torture_network(case):
    """The torture program with a server that misbehaves in every way, a few seconds each."""
    plans = (
        ("connections", ("torture", "threads"), 48, 2),
        ("answers", ("torture", "threads"), 96, 3),
        ("mirror", ("torture", "single"), 64, 2),
        ("lies", ("heap", "threads"), 96, 2),
    )
    for number, (plan, program, megabytes, seconds) in enumerate(plans):
        run_with_faults(case, number, plan, program, megabytes, seconds, case.seed)


@pytest.mark.network
@pytest.mark.full
@pytest.mark.swaptide(budget=32, limit=2400, allowance=160, forks=True, native=False)
def test_full_torture_network(case):
    """A minute of it, each time with another seed. Prints what happened."""
    sums = {}
    for turn in range(case.stretched(len(PLANS))):
        plan = list(PLANS)[turn % len(PLANS)]
        mode = "single" if turn // len(PLANS) % 2 else "threads"
        program = ("heap", mode) if plan == "lies" else ("torture", mode)
        seed = case.seed * 1000 + turn
        counts, done = run_with_faults(case, turn, plan, program, 96, 60 // len(PLANS), seed)
        for kind, n in counts.items():
            sums[kind] = sums.get(kind, 0) + n
        case.note(
            f"{plan}, {' '.join(program)}, seed {seed}: status {done.status}, "
            f"{done.report['errors']['pages_poisoned']} pages poisoned, "
            f"{done.report['stats']['pswpout']} out, {done.report['stats']['pswpin']} in, "
            f"{done.wall:.0f} s",
        )
    case.note(f"what happened there: {dict(sorted(sums.items()))}")
    missing = {kind for faults, _ in PLANS.values() for kind in faults} - {
        kind for kind, n in sums.items() if n
    }
    assert not missing, f"nothing of {missing} has happened in any of the runs"
