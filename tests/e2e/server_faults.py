"""Programs that verify all they read, with swap space on a server that misbehaves (nbd_server.py).

What may be lost is what the promise says: nothing where the server comes back, or where there is a
mirror; with a server that loses what it said it had, a page is a bus error for its reader, and
never wrong."""

import signal

from harness import MIB, status_of_signal
from servers import Misbehaving

EXTENT = 2 * MIB

# The faults of each plan, one in N requests; and the areas it has besides the export.
PLANS = {
    # The way to the server, and the server as a whole: nothing is lost, and there is nowhere else
    # to go.
    "connections": (
        {
            "cut": 60,
            "short": 60,
            "late": 25,
            "noise": 80,
            "stranger": 80,
            "shutdown": 90,
            "away": 1.5,
            "hangs": 1.5,
        },
        (),
    ),
    # What it answers: nothing is lost of what it has, what it does not take goes elsewhere.
    "answers": (
        {"refused": 40, "full": 40, "torn": 40, "flipped": 60, "late": 60, "cut": 120},
        ("file",),
    ),
    # All of that, and it has lost or damaged what it said it had: a mirror makes up for it. There
    # is nowhere else to go.
    "mirror": (
        {
            "lost": 30,
            "damaged": 30,
            "refused": 60,
            "torn": 60,
            "cut": 60,
            "noise": 90,
            "late": 60,
            "away": 2.5,
        },
        ("mirror",),
    ),
    # The same without a mirror: its reader gets a bus error, or it is never read; nothing is
    # wrong.
    "lies": ({"lost": 400, "damaged": 400, "cut": 90, "late": 60}, ("file",)),
}

# A device that does not take a page must not keep it in memory while there is another one. Without
# (a write is tried again elsewhere), it is 48 MiB.
MOST_PAST_BUDGET = 24 * MIB


def run_with_faults(case, number, plan, program, megabytes, seconds, seed):
    """One program with one server. Gives what went wrong there, and how the program ended."""
    faults, others = PLANS[plan]
    if seconds < 10:
        # Time in which the servers are stopped does not count.
        faults = {
            **{kind: 0.4 if kind in ("away", "hangs") else n for kind, n in faults.items()},
            "latest": 0.06,
        }
    if seed % 2:
        faults = {**faults, "structured": 1}
    local = case.directory / f"local-{number}"
    local.mkdir()
    server = Misbehaving(case, f"server-{number}", seed, faults)
    try:
        mirror = f",mirror={local}" if "mirror" in others else ""
        options = ["--swap", "zram:4M", "--swap", f"{server.url()},prio=9{mirror}", "--group", "/g"]
        if "file" in others:
            options += ["--swap", f"file:{local}:1G,prio=1"]
        done = case.start(
            [case.binary(program[0]), megabytes, seconds, seed, *program[1:]], options=options
        ).finish(status=None)
        counts = server.end()
    finally:
        server.end()
    said = (
        f"{plan}, {' '.join(program)}, seed {seed}: status {done.status}, "
        f"{done.text()[-600:]!r}, {done.errors()[-300:]!r}, {counts}"
    )
    assert "FAILED" not in done.text(), f"wrong data: {said}"
    poisoned = done.report["errors"]["pages_poisoned"]
    if plan == "lies" and poisoned:
        assert done.status == status_of_signal(signal.SIGBUS), (
            f"{poisoned} pages were lost without a bus error: {said}"
        )
    else:
        assert poisoned == 0, f"{poisoned} pages were lost: {said}"
        assert done.status == 0 and done.text().endswith(f"OK {' '.join(program)}\n"), (
            f"it did not end with OK: {said}"
        )
    # Without any of it the case would show nothing. Of what is read again and again the mirror has
    # all.
    missing = [
        kind for kind in faults if kind not in ("structured", "latest") and not counts.get(kind)
    ]
    # A program that the first damaged page ended may not have come to the others.
    assert not missing or seconds < 10 or poisoned, f"nothing of {missing} has happened: {said}"
    assert (
        sum(counts.get(kind, 0) for kind in faults) >= 10 and done.report["stats"]["pswpin"] > 200
    ), f"hardly used: {said}, {done.report['stats']}"
    # What has ended holds nothing, wherever it was.
    held = {group["path"]: group["values"]["swap.current"] for group in done.report["groups"]}
    # One extent of the export may be kept from all processes at this moment, because its server is
    # being told to trim it.
    used = {
        device["type"]: device["used_bytes"]
        for device in done.report["devices"]
        if "used_bytes" in device
    }
    assert set(held.values()) == {"0"} and used["nbd"] <= EXTENT and not used.get("file"), (
        f"left: {held}, {used}: {said}"
    )
    past = done.report["errors"]["past_budget_bytes"]
    assert plan != "answers" or past < MOST_PAST_BUDGET, (
        f"{past} bytes past the budget, with room on the second device: {said}"
    )
    return counts, done
