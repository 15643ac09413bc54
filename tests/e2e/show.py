#!/usr/bin/env python3
"""Runs one program without swaptide and with it, shows the memory of both as they go, and compares
what they print.

show.py --swaptide PATH --ram MIB [--bar MIB] -- PROGRAM ARGUMENTS...
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

from processes import descendants, status_fields

MIB = 1 << 20
WIDTH = 50


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swaptide", required=True)
    parser.add_argument("--ram", type=int, required=True, help="budget in MiB")
    parser.add_argument("--bar", type=int, default=0, help="MiB that a full bar stands for")
    parser.add_argument("command", nargs="+")
    return parser.parse_args()


def resident(pid):
    """MiB of anonymous memory of the process and all below it."""
    total = 0
    for process in [pid] + descendants(pid):
        anonymous = status_fields(process).get("RssAnon", "0 kB")
        total += int(anonymous.split()[0])
    return total / 1024


class Bar:
    """One line, rewritten where the output is a terminal, added to every second where it is not."""

    def __init__(self, full, budget):
        self.full, self.budget, self.shown = full, budget, time.monotonic()
        self.terminal = sys.stdout.isatty()

    def show(self, seconds, used, said):
        if time.monotonic() - self.shown < (0.1 if self.terminal else 2.0):
            return
        self.shown = time.monotonic()
        scale = WIDTH / max(self.full, used)
        cells = ["#" if at < used * scale else "." for at in range(WIDTH)]
        if self.budget:
            cells[min(WIDTH - 1, int(self.budget * scale))] = "|"
        line = f"  {seconds:5.1f} s  [{''.join(cells)}] {used:6.0f} MiB  {said[:44]}"
        print(
            f"\r{line:<125}" if self.terminal else line,
            end="" if self.terminal else "\n",
            flush=True,
        )

    def end(self):
        if self.terminal:
            print("\r" + " " * 125 + "\r", end="", flush=True)


def watch(command, full, budget):
    """Runs `command`; its exit status, its output, the seconds it took, its peak in MiB."""
    bar = Bar(full, budget)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        peak = 0.0
        try:
            while process.poll() is None:
                used = resident(process.pid)
                peak = max(peak, used)
                said = os.pread(err.fileno(), 1 << 16, max(0, os.fstat(err.fileno()).st_size - 200))
                bar.show(
                    time.monotonic() - started,
                    used,
                    said.decode(errors="replace").strip().split("\n")[-1].strip(),
                )
                time.sleep(0.02)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
        wall = time.monotonic() - started
        bar.end()
        out.seek(0)
        err.seek(0)
        text, errors = out.read(), err.read().decode(errors="replace")
    if process.returncode != 0:
        sys.exit(f"show.py: {command[0]} ended with status {process.returncode}: {errors[-500:]}")
    return text, wall, peak


def main():
    options = arguments()
    print(f"  without swaptide: {' '.join(options.command[:1])} may use all the memory there is")
    plain, plain_wall, plain_peak = watch(options.command, options.bar or 1, 0)
    print(f"  without swaptide: {plain_wall:.1f} s, {plain_peak:.0f} MiB of memory")
    print(f"  with swaptide:    the same in a budget of {options.ram} MiB (the | in the bar)")
    with tempfile.TemporaryDirectory() as directory:
        report_path = os.path.join(directory, "report.json")
        run = [
            options.swaptide,
            "run",
            "--ram",
            f"{options.ram}M",
            "--quiet",
            "--report",
            report_path,
            "--",
            *options.command,
        ]
        swapped, wall, peak = watch(run, max(options.bar, plain_peak), options.ram)
        with open(report_path, encoding="utf-8") as file:
            report = json.load(file)
    stats = report["stats"]
    same = plain == swapped
    out = stats["zswpout"] + stats["pswpout"] + stats["swpout_zero"] - stats["zswpwb"]
    back = stats["zswpin"] + stats["pswpin"] + stats["swpin_zero"]
    rows = [
        ("its output", "the same, byte for byte" if same else "DIFFERENT"),
        (
            "memory it uses",
            f"{plain_peak:.0f} MiB, {plain_peak / options.ram:.1f} times the budget",
        ),
        (
            "peak resident",
            f"{report['peak_resident_bytes'] / MIB:.0f} MiB of {options.ram} MiB (from outside: "
            f"{peak:.0f} MiB)",
        ),
        ("resident + swapped", f"{report['peak_footprint_bytes'] / MIB:.0f} MiB"),
        ("pages out, in", f"{out:,} out, {back:,} in"),
        ("time", f"{wall:.1f} s; {plain_wall:.1f} s without swaptide and with all the memory"),
    ]
    for name, value in rows:
        print(f"  {name:<20} {value}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
