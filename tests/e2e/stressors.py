#!/usr/bin/env python3
"""Measures stress-ng's memory stressors without and with swaptide and prints a table.

For each stressor of the classes vm and memory: the exit status, what --verify said, the bogo
operations, and the peak of memory (from the report, and sampled from outside). `test_unusual.py`
runs the same under stated bounds. Usage: stressors.py --swaptide PATH [--ram MIB] [--seconds N]
[--json FILE] [STRESSOR...]
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from processes import Sampler, adopt_orphans, kill_tree, reap_orphans

MIB = 1 << 20
CLASSES = ("vm", "memory")
WORKERS = 2
GRACE = 40
"""Seconds past its time after which a stressor counts as hung."""


@dataclass
class Outcome:
    """One run of one stressor."""

    status: int = 0
    hung: bool = False
    failures: int = 0
    """Lines in which stress-ng reports a verification failure or a worker that was killed."""
    said: str = ""
    operations: int = 0
    wall: float = 0.0
    peak: int = 0
    """From the report; 0 without swaptide."""
    sampled: int = 0


def stressors():
    """The stressors of the classes, each once."""
    found = []
    for name in CLASSES:
        result = subprocess.run(
            ["stress-ng", "--class", f"{name}?"], capture_output=True, text=True, check=False
        )
        found += (result.stdout + result.stderr).partition("stressors:")[2].split()
    return sorted(set(found))


def command(name, seconds, yaml):
    return [
        "stress-ng",
        f"--{name}",
        str(WORKERS),
        "--verify",
        "--timeout",
        str(seconds),
        "--seed",
        "1",
        "--metrics",
        "--yaml",
        str(yaml),
    ]


def run(name, seconds, swaptide=None, ram=64, options=()):
    """Runs one stressor to its end, plain or under `swaptide`."""
    with tempfile.TemporaryDirectory(prefix="budget-stressor-") as directory:
        directory = Path(directory)
        yaml, report = directory / "yaml", directory / "report.json"
        argv = command(name, seconds, yaml)
        if swaptide is not None:
            argv = [
                swaptide,
                "run",
                "--ram",
                f"{ram}M",
                "--report",
                str(report),
                "--quiet",
                *options,
                "--",
                *argv,
            ]
        with open(directory / "said", "w+b") as said:
            began = time.monotonic()
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=directory
            )
            sampler = Sampler(process.pid)
            outcome = Outcome()
            try:
                outcome.status = process.wait(timeout=seconds + GRACE)
            except subprocess.TimeoutExpired:
                outcome.hung = True
                kill_tree(process.pid)
                process.send_signal(signal.SIGKILL)
                outcome.status = process.wait()
            outcome.wall = time.monotonic() - began
            outcome.sampled = sampler.stop()
        reap_orphans()
        text = (directory / "said").read_text(errors="replace")
        bad = [
            line
            for line in text.splitlines()
            if re.search(r"fail:|swaptide:|terminated on signal|killed", line)
        ]
        outcome.failures, outcome.said = len(bad), " | ".join(bad[:3])
        if yaml.exists():
            outcome.operations = sum(
                int(n) for n in re.findall(r"bogo-ops: (\d+)", yaml.read_text())
            )
        if report.exists():
            outcome.peak = int(json.loads(report.read_text())["peak_resident_bytes"])
        return outcome


HEADING = (
    f"{'stressor':<14} {'plain':>5} {'under':>5} {'fails':>5} {'peak':>6} {'outside':>7} "
    f"{'plainpk':>7} "
    f"{'bogo':>9} {'ratio':>6} {'wall':>5}"
)


def row(name, plain, under):
    ratio = under.operations / plain.operations if plain.operations else float("nan")
    status = "hung" if under.hung else str(under.status)
    return (
        f"{name:<14} {plain.status:>5} {status:>5} {under.failures:>5} {under.peak / MIB:>6.1f} "
        f"{under.sampled / MIB:>7.1f} "
        f"{plain.sampled / MIB:>7.1f} {plain.operations:>9} {ratio:>6.2f} {under.wall:>5.1f}"
        + (f"  {under.said[:150]}" if under.said and not plain.said else "")
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swaptide", required=True, metavar="PATH")
    parser.add_argument("--ram", type=int, default=64, metavar="MIB")
    parser.add_argument("--seconds", type=int, default=4, metavar="N")
    parser.add_argument("--json", metavar="FILE", help="also write the outcomes there")
    parser.add_argument(
        "--plain", metavar="FILE", help="take the plain runs from a file written by --json"
    )
    parser.add_argument("names", nargs="*", metavar="STRESSOR")
    options = parser.parse_args()
    adopt_orphans()
    swaptide = str(Path(options.swaptide).resolve())
    earlier = json.loads(Path(options.plain).read_text()) if options.plain else {}
    outcomes = {}
    print(HEADING, flush=True)
    for name in options.names or stressors():
        plain = Outcome(**earlier[name]["plain"]) if name in earlier else run(name, options.seconds)
        under = run(name, options.seconds, swaptide, options.ram)
        outcomes[name] = {"plain": asdict(plain), "under": asdict(under)}
        print(row(name, plain, under), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
