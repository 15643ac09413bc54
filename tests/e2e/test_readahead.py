"""How much comes in with a page."""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from ctl import ask
from harness import HERE


@pytest.mark.swaptide(budget=48, swaps=False, native=False)
def test_swap_in(case):
    """How much comes in for a fault: what the counters say of page-cluster, of zeros, of folios,
    and of snapshots that are out of date.
    """
    large = [f"hugepages-{64 << k}kB/swpin" for k in range(6)]
    report = case.directory / "report.json"

    def stats(data, order, *options, stale="0"):
        # On a busy machine so short a program may be over before the supervisor has come to its
        # turn.
        for _ in range(4):
            seen, said = once(data, order, *options, stale=stale)
            if seen["engaged"]:
                break
        return seen, said

    def once(data, order, *options, stale):
        words = case.command(case.swaptide, options=["--report", report, *options])
        words += [
            "lab-work",
            "--target",
            "64M",
            "--data",
            data,
            "--order",
            order,
            "--hint",
            "none",
            "--pressure",
            "64M",
        ]
        done = subprocess.run(
            [str(word) for word in words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "SWAPTIDE_TEST_STALE": stale},
        )
        said = f"{data} {order} {options} {stale}: status {done.returncode}, {done.stderr!r}"
        assert done.returncode == 0, said
        result = json.loads(report.read_text())
        assert result["errors"]["pages_poisoned"] == 0, f"{said}: {result['errors']}"
        return result["stats"], said

    seen, said = stats("quarter", "seq")
    assert seen["zswpin"] > 8000 and seen["swpin_stale"] == 0, f"{said}: {seen}"
    assert sum(seen[name] for name in large) > 0 and seen["hugepages-64kB/zswpout"] > 1000, (
        f"{said}: {seen}"
    )
    assert 0 < seen["swap_ra_hit"] <= seen["swap_ra"], f"{said}: {seen}"
    seen, said = stats("zeros", "seq")
    assert seen["swpin_zero"] > 8000 and seen["swpout_zero"] > 8000, f"{said}: {seen}"
    assert seen["zswpin"] + seen["pswpin"] < 1000, f"zeros are loaded; {said}: {seen}"
    # Out of date at every third load: it is dropped, the page asked for comes alone, and the
    # program sees what it wrote.
    for data in ("quarter", "sixth"):
        seen, said = stats(data, "seq", stale="3")
        assert seen["swpin_stale"] > 50 and seen["hugepages-64kB/swpin_fallback"] > 0, (
            f"{said}: {seen}"
        )
    seen, said = stats("sixth", "seq", stale="1")
    assert sum(seen[name] for name in large) == 0 and seen["swpin_stale"] > 100, f"{said}: {seen}"
    for cluster, blocks in (("0", False), ("3", False), ("4", True)):
        seen, said = stats("sixth", "seq", "--page-cluster", cluster)
        assert seen["pswpin"] > 4000 and seen["zswpin"] > 100, f"{said}: {seen}"
        assert (sum(seen[name] for name in large) > 0) == blocks, f"{said}: {seen}"
        assert (seen["swap_ra"] > 0) == (cluster != "0"), f"{said}: {seen}"
    seen, said = stats("sixth", "sparse")
    touched = 64 * 16
    loaded = seen["pswpin"] + seen["zswpin"] + seen["swpin_zero"]
    assert touched * 0.8 < loaded < touched * 1.25, (
        f"{loaded} pages for {touched} touches; {said}: {seen}"
    )

    # During the run: nothing is read ahead, then again as the faults carry it.
    words = case.command(
        case.swaptide,
        "lab-work",
        "--target",
        "64M",
        "--data",
        "sixth",
        "--order",
        "seq",
        "--hint",
        "none",
        "--pressure",
        "64M",
        "--rounds",
        "4",
        options=["--no-daemon"],
    )
    with subprocess.Popen(
        [str(word) for word in words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:

        def ctl(*words):
            status, text, errors = ask(case, "readahead", "--pid", str(running.pid), *words)
            return status, text or errors

        def read_ahead():
            return json.loads(ask(case, "stats", "--pid", str(running.pid), "--json")[1])["stats"][
                "swap_ra"
            ]

        def go_on():
            print(file=running.stdin, flush=True)

        try:
            for setting, shown in (
                (None, "default"),
                ("page-cluster=0", "0"),
                ("page-cluster=default", "default"),
                ("largest-order=0", "default"),
            ):
                assert running.stdout.readline() == "ready\n", "the program is not ready"
                if setting:
                    assert ctl(setting) == (0, ""), f"{setting}: {ctl(setting)}"
                assert ctl()[1].splitlines()[0] == f"page-cluster {shown}", (
                    f"after {setting}: {ctl()}"
                )
                for wrong in (
                    ("page-cluster=10",),
                    ("page-cluster=1", "window=2"),
                    ("largest-order",),
                ):
                    status, why = ctl(*wrong)
                    assert status == 2 and why.count("\n") == 1, (
                        f"{wrong}: status {status}, {why!r}"
                    )
                before = read_ahead()
                go_on()
                assert "refault_s" in running.stdout.readline(), "nothing was touched"
                more = read_ahead() - before
                assert (more > 4000) == (setting in (None, "page-cluster=default")), (
                    f"after {setting}: {more} pages read ahead"
                )
                go_on()
            assert running.wait(60) == 0, f"status {running.returncode}"
        finally:
            running.kill()
    swap_in_kept_in_part(case)


def swap_in_kept_in_part(case):
    """Large swap-ins of which a part is kept: every second fill ends half way, every fifth load is
    out of date. What is kept is charged at once.
    """
    words = case.command(
        case.swaptide,
        "lab-work",
        "--target",
        "64M",
        "--data",
        "quarter",
        "--order",
        "seq",
        "--hint",
        "none",
        "--pressure",
        "64M",
        "--rounds",
        "3",
        options=["--no-daemon"],
    )
    began = time.monotonic()
    with subprocess.Popen(
        [str(word) for word in words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SWAPTIDE_TEST_PART": "2", "SWAPTIDE_TEST_STALE": "5"},
    ) as running:

        def seen():
            return json.loads(ask(case, "stats", "--pid", str(running.pid), "--json")[1])

        def charged_and_taken():
            """What the process is charged, and what the kernel says it has, in KiB."""
            [process] = [
                process for process in seen()["processes"] if process["state"] == "engaged"
            ]
            rollup = Path(f"/proc/{process['pid']}/smaps_rollup").read_text()
            taken = int(re.search(r"^Anonymous: +(\d+) kB$", rollup, re.M).group(1))
            return process["resident_bytes"] >> 10, taken

        try:
            for _ in range(3):
                assert running.stdout.readline() == "ready\n", "the program is not ready"
                print(file=running.stdin, flush=True)
                assert "refault_s" in running.stdout.readline(), "nothing was touched"
                for _ in range(50):
                    charged, taken = charged_and_taken()
                    # Both are read while the engine tidies up: they agree in the end.
                    if abs(charged - taken) < 1024:
                        break
                    time.sleep(0.1)
                assert abs(charged - taken) < 1024, f"charged {charged} KiB, and has {taken} KiB"
                stats = seen()["stats"]
                print(file=running.stdin, flush=True)
            assert running.wait(60) == 0, f"status {running.returncode}"
            assert stats["swpin_stale"] > 50 and stats["zswpin"] > 20_000, f"{stats}"
            # Three times 64M came in while their thread waited: at least a tenth of a second, and
            # no more than there was time.
            assert 100_000 < stats["stall_us"] < (time.monotonic() - began) * 1e6, f"{stats}"
        finally:
            running.kill()


@pytest.mark.full
@pytest.mark.swaptide(budget=24, swaps=False, native=False)
def test_cluster_readahead(case):
    """A swap file on a rotational disk: with a page comes what was written next to it, as long as
    that is used. On a solid disk nothing does.
    """
    report = case.directory / "report.json"
    for option, cluster in (("yes", None), ("yes", "5"), ("yes", "0"), ("no", None)):
        words = [
            case.swaptide,
            "run",
            "--ram",
            f"{case.budget}M",
            "--report",
            report,
            "--swap",
            f"file:{case.directory},rotational={option}",
        ]
        words += ["--page-cluster", cluster] if cluster else []
        # A second pass in the same order finds pages there for that reason too, on every disk.
        reads = option == "yes" and cluster != "0"
        rounds = 2 if reads else 1
        words += ["--", case.python, HERE / "py" / "together.py", "8000", str(rounds)]
        done = subprocess.run(
            [str(word) for word in words], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        result = json.loads(report.read_text())
        seen = result["stats"]
        said = (
            f"rotational={option}, page-cluster {cluster}: status {done.returncode}, "
            f"{done.stdout!r}, {done.stderr!r}: {seen}"
        )
        assert done.returncode == 0 and done.stdout == f"8000 pages, {rounds} rounds, 0 wrong\n", (
            said
        )
        assert (
            result["errors"]["pages_poisoned"] == 0
            and seen["pswpout"] > 8000
            and seen["pswpin"] > 4000 * rounds
        ), said
        ahead, hits = seen["swap_ra"], seen["swap_ra_hit"]
        if reads:
            # Of blocks of eight all but the page asked for, nearly every one of them wanted.
            assert ahead > 0.7 * seen["pswpin"] and hits > 0.9 * ahead, said
        else:
            assert ahead < 0.1 * seen["pswpin"], said
