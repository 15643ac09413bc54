#!/usr/bin/env python3
"""Runs real programs and purpose-made ones under `swaptide run` in a fraction of their memory and
compares what they do with what they do without it. See --help; the cases are in cases_*.py, the C
programs in c/."""

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from harness import NATIVE, Binaries, run_case
from processes import adopt_orphans, kill_tree

# Every cases_*.py has a list of that name.
CASES = [
    case
    for path in sorted(Path(__file__).resolve().parent.glob("cases_*.py"))
    for case in importlib.import_module(path.stem).CASES
]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--swaptide",
        metavar="PATH",
        help="the binary; `native`: all without swaptide",
    )
    parser.add_argument(
        "--limit",
        type=int,
        metavar="SECONDS",
        help="give every case this long instead of its own limit",
    )
    parser.add_argument(
        "--begin-within",
        type=float,
        metavar="SECONDS",
        help="begin no case after this time: those left are named, and count neither as passed "
        "nor as failed",
    )
    parser.add_argument("--full", action="store_true", help="also the long cases")
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="seed of all generated data (default 1)"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument(
        "--keep", action="store_true", help="keep the files of cases that passed, too"
    )
    parser.add_argument("--stop", action="store_true", help="stop after the first case that fails")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only cases whose name begins so")
    return parser.parse_args()


def chosen(options):
    """The cases to run, in the order of the names given, and those left out only because they are
    long. A full name also chooses a long case.
    """
    names = options.names
    unknown = [name for name in names if not any(case.name.startswith(name) for case in CASES)]
    if unknown:
        sys.exit(f"run.py: no case begins with {', '.join(unknown)}; --list shows all")
    wanted = {
        case.name: case for name in names or [""] for case in CASES if case.name.startswith(name)
    }
    asked = list(wanted.values())
    run = [case for case in asked if options.full or not case.full or case.name in names]
    return run, [case for case in asked if case not in run]


def interrupted(_number, _frame):
    """A TERM (a time-out of the caller, say) ends the suite like ctrl-C: with nothing left running."""
    raise KeyboardInterrupt


def main():
    options = arguments()
    run, long = chosen(options)
    if options.list:
        for case in CASES:
            print(
                f"{case.name:<24} {'full' if case.full else 'quick':<6} {case.budget:>4} MiB  "
                f"limit {case.limit} s"
            )
        return 0
    swaptide = options.swaptide
    if swaptide is None:
        sys.exit("run.py: --swaptide PATH is missing; `--swaptide native` runs without swaptide")
    if swaptide != NATIVE:
        swaptide = str(Path(swaptide).resolve())
        if not os.access(swaptide, os.X_OK):
            sys.exit(
                f"run.py: --swaptide {options.swaptide}: no such program; build it with cargo "
                f"build --release"
            )
    adopt_orphans()
    signal.signal(signal.SIGTERM, interrupted)
    root = Path(tempfile.mkdtemp(prefix="swaptide-test-"))
    (root / "bin").mkdir()
    binaries = Binaries(root / "bin")
    passed = failed = 0
    late = None if options.begin_within is None else time.monotonic() + options.begin_within
    left = []
    try:
        for case in long:
            print(f"SKIP {case.name} (only with --full)", flush=True)
        for case in run:
            if late is not None and time.monotonic() > late:
                left.append(case.name)
                continue
            if options.limit:
                case.limit = options.limit
            outcome = run_case(case, swaptide, root, options.seed, binaries, options.keep)
            print(outcome, flush=True)
            if outcome.skipped is not None:
                continue
            if outcome.why is None:
                passed += 1
            else:
                failed += 1
                if options.stop:
                    break
    except KeyboardInterrupt:
        failed += 1
        print(f"FAILED {case.name}: interrupted", flush=True)
    finally:
        kill_tree(os.getpid())
        if failed == 0 and not options.keep:
            shutil.rmtree(root, ignore_errors=True)
    if left:
        print(f"LEFT OUT for want of time, {len(left)} cases: {' '.join(left)}", flush=True)
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
