"""Compressed memory: its bounds, its codecs, and pages that are compressed again."""

import json
import os
import signal
import subprocess
import time

import pytest

from ctl import Ctl, process_of, until, wait_for_line
from harness import MIB


@pytest.mark.full
@pytest.mark.swaptide(budget=48, swaps=False, native=False)
def test_zswap_limit(case):
    """Compressed memory with a bound and an acceptance threshold: at the bound it refuses pages,
    which go to the file, until it has fallen.
    """
    report = case.directory / "report.json"
    percent = 15

    def once(data, order, options, shared=False, stale="0"):
        words = case.command(
            case.swaptide,
            options=[
                "--report",
                report,
                "--swap",
                f"zram:1G{options}",
                "--swap",
                f"file:{case.directory}",
                *(["--shared"] if shared else []),
            ],
        )
        words += [
            "lab-work",
            "--target",
            "96M",
            "--data",
            data,
            "--order",
            order,
            "--hint",
            "none",
            "--pressure",
            "64M",
        ]
        words += ["--shared"] if shared else []
        done = subprocess.run(
            [str(word) for word in words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "SWAPTIDE_TEST_STALE": stale},
        )
        said = f"{data} {order} {options} {shared}: status {done.returncode}, {done.stderr!r}"
        assert done.returncode == 0, said
        result = json.loads(report.read_text())
        assert result["errors"]["pages_poisoned"] == 0, f"{said}: {result['errors']}"
        return result, said

    for data, order in (("quarter", "seq"), ("quarter", "full"), ("third", "full")):
        result, said = once(data, order, f",max_pool_percent={percent},accept_threshold_percent=60")
        seen, device = result["stats"], result["devices"][0]
        assert device["max_pool_percent"] == percent and device["accept_threshold_percent"] == 60, (
            f"{said}: {device}"
        )
        assert seen["pool_limit_hit"] > 0 and seen["reject_pool_full"] > seen["pool_limit_hit"], (
            f"{said}: {seen}"
        )
        # What is refused is written, and the oldest pages of compressed memory make room all the
        # same.
        assert seen["pswpout"] >= seen["reject_pool_full"] + seen["reject_compress_poor"], (
            f"{said}: {seen}"
        )
        assert seen["zswpwb"] > 0 and seen["zswpout"] > 0, f"{said}: {seen}"
        assert (seen["reject_compress_poor"] > 8000) == (data == "third"), f"{said}: {seen}"
        # Batches on their way when the bound is met come on top of it.
        most = case.budget * MIB * (percent + 8) // 100
        assert result["peak_pool_bytes"] < most, (
            f"{said}: pool {result['peak_pool_bytes']}, at most {most}"
        )
    # The same while every third load of several pages is out of date at its second look: it is
    # dropped, and nothing is lost.
    result, said = once("quarter", "seq", f",max_pool_percent={percent}", stale="3")
    seen = result["stats"]
    assert seen["swpin_stale"] > 50 and seen["reject_pool_full"] > 0, f"{said}: {seen}"
    result, said = once("quarter", "full", f",max_pool_percent={percent}", shared=True)
    seen = result["stats"]
    assert seen["pool_limit_hit"] > 0 and seen["reject_pool_full"] > 0 and seen["pswpin"] > 0, (
        f"{said}: {seen}"
    )
    # Without, nothing is ever refused.
    result, said = once("quarter", "full", "")
    seen = result["stats"]
    assert seen["pool_limit_hit"] == seen["reject_pool_full"] == 0 and seen["zswpout"] > 0, (
        f"{said}: {seen}"
    )
    assert "max_pool_percent" not in result["devices"][0], f"{said}: {result['devices']}"


# Grows by as many MiB as each line says, three quarters of every page zeros; what it has is looked
# at when no more lines come.
GROWS = """if True:
    import mmap, os, sys
    held = []
    print("ready", os.getpid(), flush=True)
    for line in sys.stdin:
        block = mmap.mmap(-1, int(line) << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        firsts = []
        for at in range(0, len(block), 4096):
            block[at:at + 1024] = os.urandom(1024)
            firsts.append(block[at + 1000:at + 1024])
        held.append((block, firsts))
        print("grew", len(held), flush=True)
    right = all(
        block[4096 * n + 1000:4096 * n + 1024] == first
        for block, firsts in held for n, first in enumerate(firsts)
    )
    print("OK" if right else "WRONG", flush=True)
"""


@pytest.mark.swaptide(budget=48, allowance=16, native=False)
def test_zswap_groups(case):
    """A group's `zswap.max` bounds what its processes have in compressed memory, and
    `zswap.writeback=0` keeps all of it from the swap areas.
    """
    options = ["--group", "/a", "--swap", "zram:1G", "--swap", f"file:{case.directory}:512M"]

    def under_way():
        program = case.start([case.python, "-c", GROWS], options=options, stdin=subprocess.PIPE)
        inside = int(wait_for_line(case, program, "ready").split()[1])
        ctl = Ctl(case, program.pid)

        def grow(megabytes, line):
            program.process.stdin.write(f"{megabytes}\n".encode())
            program.process.stdin.flush()
            wait_for_line(case, program, line)

        def ends():
            program.process.stdin.close()
            program.process.stdin = None
            done = program.finish()
            assert "OK" in done.text(), f"it ended with {done.text()[-200:]!r}"
            return json.loads(program.report_path.read_text())["stats"]

        def stats():
            return process_of(case, inside)

        return ctl, grow, stats, ends

    # Bounded: what does not fit goes to the file.
    most = 3 * MIB
    ctl, grow, stats, ends = under_way()
    ctl("group", "/a", f"zswap.max={most}")
    assert ctl.value("/a", "zswap.max") == most, "it was not taken"
    grow(120, "grew 1")
    until(case, "the bound of compressed memory", lambda: stats()[1]["pool_bytes"] <= most + MIB)
    assert stats()[0]["pswpout"] * 4096 > 50 * MIB, f"little went to the file: {stats()}"
    ctl("group", "/a", "zswap.max=max")
    grow(40, "grew 2")
    until(
        case,
        "more compressed memory than the old bound",
        lambda: stats()[1]["pool_bytes"] > most + MIB,
    )
    ends()

    # Kept from the file, until it may.
    ctl, grow, stats, ends = under_way()
    ctl("group", "/a", "zswap.writeback=0")
    grow(100, "grew 1")
    time.sleep(1)
    seen = stats()[0]
    assert seen["pswpout"] == seen["zswpwb"] == 0 and seen["zswpout"] * 4096 > 40 * MIB, (
        f"something was written, or nothing is out: {seen}"
    )
    ctl("group", "/a", "zswap.writeback=1")
    grow(80, "grew 2")
    until(case, "write-back", lambda: stats()[0]["pswpout"] > 0)
    seen = ends()
    assert seen["pswpin"] > 0, f"nothing came back from the file: {seen}"


# Pieces of a few numbers: the further back a codec looks for the longest piece, the less is left.
CODECS = """if True:
    import os, random, signal, sys, time
    numbers = random.Random(5)
    def pieces():
        words = [b"%x" % numbers.getrandbits(64) for _ in range(40)]
        for _ in range(640):
            at = numbers.randrange(8)
            yield numbers.choice(words)[at:at + numbers.randint(4, 9)]
    texts = [b"".join(pieces())[:4000] for _ in range(200)]
    row = lambda k: b"%08d" % k + texts[k % 200][k // 200 * 16:] + texts[k % 200][:k // 200 * 16]
    rows = [row(k) for k in range(7000)]
    def end(*_):
        sys.exit(7 if all(there == row(k) for k, there in enumerate(rows)) else 1)
    signal.signal(signal.SIGTERM, end)
    print("ready", os.getpid(), flush=True)
    time.sleep(60)
"""


# It fills its memory in a few hundredths of a second.
@pytest.mark.full
@pytest.mark.swaptide(budget=28, allowance=16, native=False)
def test_codecs(case):
    """The codec and its level are chosen: every page comes back, and the stronger one takes less
    memory for a page.
    """
    sizes = []
    for options, codec, level in (
        (",codec=lz4", "lz4", None),
        (",codec=snappy", "snappy", None),
        (",codec=zstd", "zstd", 1),
        (",level=9,codec=zstd", "zstd", 9),
    ):
        program = case.start([case.python, "-c", CODECS], options=["--swap", f"zram:1G{options}"])
        inside = int(wait_for_line(case, program, "ready").split()[1])
        end = time.monotonic() + 10
        while (process := process_of(case, inside)[1])["swapped_pool_bytes"] < 10 * MIB:
            assert time.monotonic() < end, f"{options}: hardly anything is out: {process}"
            time.sleep(0.05)
        os.kill(inside, signal.SIGTERM)
        program.finish(status=7)
        device = json.loads(program.report_path.read_text())["devices"][0]
        assert (device["codec"], device.get("zstd_level")) == (codec, level), f"{options}: {device}"
        sizes.append(process["pool_bytes"] / process["swapped_pool_bytes"])
    # What a level makes of a page is the codec's own test's matter: here half-filled blocks would
    # hide it.
    assert min(sizes[:2]) * 0.9 > max(sizes[2:]), (
        f"bytes for one that is out, by lz4, snappy, zstd 1, zstd 9: {sizes}"
    )


# Half of each page repeats the other half, and is text that lz4 finds nothing in and zstd half of
# it.
RESTS = """if True:
    import os, random, signal, sys, time
    def rows():
        numbers = random.Random(7)
        return (numbers.randbytes(1024).hex().encode() * 2 for _ in range(72 << 8))
    data = bytearray(72 << 20)
    for k, row in enumerate(rows()):
        data[k << 12:k + 1 << 12] = row
    def end(*_):
        whole = all(data[k << 12:k + 1 << 12] == row for k, row in enumerate(rows()))
        os._exit(7 if whole else 1)
    signal.signal(signal.SIGTERM, end)
    print("ready", os.getpid(), flush=True)
    while True:
        time.sleep(60)
"""


@pytest.mark.swaptide(budget=64, allowance=4, native=False)
def test_idle_recompress(case):
    """What is out of a program that rests gets smaller though there is room enough, nothing comes
    in for it, and it is right afterwards.
    """
    program = case.start([case.python, "-c", RESTS])
    inside = int(wait_for_line(case, program, "ready").split()[1])

    def seen():
        stats, process = process_of(case, inside)
        return {
            name: stats[name] for name in ("zswprecomp", "zswprecomp_tried", "pgmajfault")
        }, process

    before, then = seen()
    end = time.monotonic() + 20
    after, now = before, then
    # With lz4 alone it is 52% and more.
    while now["pool_bytes"] > now["swapped_pool_bytes"] * 49 // 100:
        assert time.monotonic() < end, (
            f"compressed memory did not get smaller: {before} {then}, later {after} {now}"
        )
        time.sleep(0.1)
        after, now = seen()
    assert after["zswprecomp"] > 1000, f"hardly anything was compressed again: {after} {now}"
    assert after["pgmajfault"] - before["pgmajfault"] < 100, (
        f"it rests: {before['pgmajfault']} faults, then {after['pgmajfault']}"
    )
    os.kill(program.pid, signal.SIGTERM)
    program.finish(status=7)
