"""Swap space on a server that misbehaves (nbd_server.py), under programs that verify all they read.

What may be lost is what the promise says: nothing where the server comes back, or where there is a
mirror; with a server that loses what it said it had, a page is a bus error for its reader, and
never wrong.
"""

import json
import signal
import subprocess
import sys
import time

from harness import HERE, MIB, status_of_signal
from legacy import Case

EXTENT = 2 * MIB


class Misbehaving:
    """A server process with an export of its own; `counts` are there after `end`."""

    def __init__(self, context, name, seed, mishaps):
        self.socket, image = (
            context.directory / f"{name}.socket",
            context.directory / f"{name}.export",
        )
        with open(image, "wb") as file:
            file.truncate(1 << 30)
        self.counts = None
        words = [
            sys.executable,
            HERE / "nbd_server.py",
            self.socket,
            image,
            seed,
            *[f"{key}={value}" for key, value in mishaps.items()],
        ]
        self.process = subprocess.Popen(
            [str(word) for word in words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        while not self.socket.exists():
            context.expect(self.process.poll() is None, "the server did not start")
            time.sleep(0.01)

    def url(self):
        return f"nbd+unix:///?socket={self.socket}"

    def end(self):
        if self.counts is None:
            self.process.terminate()
            self.counts = json.loads(self.process.communicate()[0] or "{}")
        return self.counts


# Mishaps of every kind of plan, one of so many requests; and the areas beside the export.
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
    # The same without a mirror: its reader gets a bus error, or nobody ever wanted it; nothing is
    # wrong.
    "lies": ({"lost": 400, "damaged": 400, "cut": 90, "late": 60}, ("file",)),
}


# A device that does not take a page must not keep it in memory while there is another one. Without
# (a write is tried again elsewhere), it is 48 MiB.
MOST_PAST_BUDGET = 24 * MIB


def under_mishaps(context, number, plan, program, megabytes, seconds, seed):
    """One program with one server. Gives what went wrong there, and how the program ended."""
    mishaps, beside = PLANS[plan]
    if seconds < 10:
        # What is stood still for is not what the case is short for.
        mishaps = {
            **{kind: 0.4 if kind in ("away", "hangs") else n for kind, n in mishaps.items()},
            "latest": 0.06,
        }
    if seed % 2:
        mishaps = {**mishaps, "structured": 1}
    local = context.directory / f"local-{number}"
    local.mkdir()
    server = Misbehaving(context, f"server-{number}", seed, mishaps)
    try:
        mirror = f",mirror={local}" if "mirror" in beside else ""
        options = ["--swap", "zram:4M", "--swap", f"{server.url()},prio=9{mirror}", "--group", "/g"]
        if "file" in beside:
            options += ["--swap", f"file:{local}:1G,prio=1"]
        done = context.start(
            [context.binary(program[0]), megabytes, seconds, seed, *program[1:]], options=options
        ).finish(status=None)
        counts = server.end()
    finally:
        server.end()
    said = f"{plan}, {' '.join(program)}, seed {seed}: status {done.status}, {done.text()[-600:]!r}, {done.errors()[-300:]!r}, {counts}"
    context.expect("FAILED" not in done.text(), f"wrong data: {said}")
    poisoned = done.report["errors"]["pages_poisoned"]
    if plan == "lies" and poisoned:
        context.expect(
            done.status == status_of_signal(signal.SIGBUS),
            f"{poisoned} pages were lost and nobody was told: {said}",
        )
    else:
        context.expect(poisoned == 0, f"{poisoned} pages were lost: {said}")
        context.expect(
            done.status == 0 and done.text().endswith(f"OK {' '.join(program)}\n"),
            f"it did not end with OK: {said}",
        )
    # Without any of it the case would show nothing. Of what is read again and again the mirror has
    # all.
    missing = [
        kind for kind in mishaps if kind not in ("structured", "latest") and not counts.get(kind)
    ]
    # Who was ended by the first damaged page may not have come to the others.
    context.expect(
        not missing or seconds < 10 or poisoned, f"nothing of {missing} has happened: {said}"
    )
    context.expect(
        sum(counts.get(kind, 0) for kind in mishaps) >= 10 and done.report["stats"]["pswpin"] > 200,
        f"hardly used: {said}, {done.report['stats']}",
    )
    # Nothing is held by who is gone, wherever it was.
    held = {group["path"]: group["values"]["swap.current"] for group in done.report["groups"]}
    # One extent of the export may be kept from everybody at this moment, because its server is
    # being told that nobody needs it.
    used = {
        device["type"]: device["used_bytes"]
        for device in done.report["devices"]
        if "used_bytes" in device
    }
    context.expect(
        set(held.values()) == {"0"} and used["nbd"] <= EXTENT and not used.get("file"),
        f"left: {held}, {used}: {said}",
    )
    past = done.report["errors"]["past_budget_bytes"]
    context.expect(
        plan != "answers" or past < MOST_PAST_BUDGET,
        f"{past} bytes past the budget, with room on the second device: {said}",
    )
    return counts, done


def torture_network(context):
    """The torture program with a server that misbehaves in every way, a few seconds each."""
    if context.native:
        return
    plans = (
        ("connections", ("torture", "threads"), 48, 2),
        ("answers", ("torture", "threads"), 96, 3),
        ("mirror", ("torture", "single"), 64, 2),
        ("lies", ("heap", "threads"), 96, 2),
    )
    for number, (plan, program, megabytes, seconds) in enumerate(plans):
        under_mishaps(context, number, plan, program, megabytes, seconds, context.seed)


def full_torture_network(context):
    """Ten minutes of it, each time with another seed. Prints what happened."""
    if context.native:
        return
    sums = {}
    for turn in range(16):
        plan = list(PLANS)[turn % len(PLANS)]
        mode = "single" if turn // len(PLANS) % 2 else "threads"
        program = ("heap", mode) if plan == "lies" else ("torture", mode)
        seed = context.seed * 1000 + turn
        counts, done = under_mishaps(context, turn, plan, program, 96, 25, seed)
        for kind, n in counts.items():
            sums[kind] = sums.get(kind, 0) + n
        print(
            f"  {plan}, {' '.join(program)}, seed {seed}: status {done.status}, "
            f"{done.report['errors']['pages_poisoned']} pages poisoned, "
            f"{done.report['stats']['pswpout']} out, {done.report['stats']['pswpin']} in, "
            f"{done.wall:.0f} s",
            flush=True,
        )
    print(f"  what happened there: {dict(sorted(sums.items()))}", flush=True)
    missing = {kind for mishaps, _ in PLANS.values() for kind in mishaps} - {
        kind for kind, n in sums.items() if n
    }
    context.expect(not missing, f"nothing of {missing} has happened in any of the runs")


CASES = [
    # As for the torture with files: what is not managed yet, and what is shared, comes on top; and
    # while a server is away there is nowhere to go.
    Case("torture-network", torture_network, 32, allowance=160, forks=True),
    Case(
        "full-torture-network",
        full_torture_network,
        32,
        full=True,
        limit=2400,
        allowance=160,
        forks=True,
    ),
]
