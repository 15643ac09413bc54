"""Uses the package `swaptide` in one of several ways, verifies its data, and prints `OK MODE`.

limited.py MODE RAM MB
"""

import hashlib
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import swaptide

MIB = 1 << 20
PIECE = 1 << 16


def piece(at):
    return random.Random(at).randbytes(PIECE // 3).ljust(PIECE, b"%d" % (at % 10))


def fill(megabytes):
    """Memory that compresses 3 to 1, and its digest."""
    data = bytearray(b"".join(map(piece, range(megabytes * MIB // PIECE))))
    return data, hashlib.sha256(data).digest()


def is_right(data, digest):
    return hashlib.sha256(data).digest() == digest


def until(what, true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what}: {swaptide.stats()}"
        time.sleep(0.05)


def is_unlimited():
    """No budget, and nothing of swaptide's in this process."""
    try:
        swaptide.stats()
    except swaptide.NotLimitedError:
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        return not any(name.startswith("swaptide") for name in names)
    return False


def limit(ram, megabytes):
    """A budget that is set, changed and ended, in a process with threads and a forked child."""
    data, digest = fill(megabytes)
    assert is_unlimited()
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    swaptide.limit(ram)
    until("pages go out", lambda: swaptide.stats().swapped_bytes > megabytes * MIB // 4)
    now = swaptide.stats()
    assert now.budget_bytes <= megabytes * MIB // 2, now
    assert [process.pid for process in now.processes] == [os.getpid()], now
    assert is_right(data, digest)
    swaptide.limit(2 * now.budget_bytes)
    assert swaptide.stats().budget_bytes == 2 * now.budget_bytes
    swaptide.limit(ram)
    # A child has all of it, and the same budget.
    pid = os.fork()
    if pid == 0:
        is_good = is_right(data, digest) and swaptide.stats().pid == now.pid
        os._exit(0 if is_good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    subprocess.run([sys.executable, "-c", "print(len(bytearray(9 << 20)))"], check=True)
    swaptide.release()
    assert is_unlimited()
    assert is_right(data, digest)
    # Again, and now it ends with the process.
    swaptide.limit(ram)
    until("pages go out again", lambda: swaptide.stats().swapped_bytes > megabytes * MIB // 4)
    over.set()
    thread.join()
    assert is_right(data, digest)


def budget(ram, megabytes):
    """Budgets of blocks, one in the other."""
    data, digest = fill(megabytes)
    with swaptide.budget(megabytes * MIB * 3 // 4):
        outer = swaptide.stats()
        with swaptide.budget(ram):
            inner = swaptide.stats()
            assert inner.budget_bytes < outer.budget_bytes and inner.pid == outer.pid
            until("pages go out", lambda: swaptide.stats().swapped_bytes > megabytes * MIB // 2)
            assert is_right(data, digest)
        assert swaptide.stats().budget_bytes == outer.budget_bytes
    after = swaptide.stats()
    assert after.budget_bytes > outer.budget_bytes and after.pid == outer.pid
    with swaptide.budget(ram):
        until("pages go out again", lambda: swaptide.stats().swapped_bytes > megabytes * MIB // 4)
    swaptide.release()
    assert is_unlimited()
    assert is_right(data, digest)


def inside(ram, megabytes):
    """Under `swaptide run`: the run's budget changes."""
    before = swaptide.stats()
    swaptide.limit(ram)
    now = swaptide.stats()
    assert now.pid == before.pid and now.budget_bytes < before.budget_bytes
    data, digest = fill(megabytes)
    until("pages go out", lambda: swaptide.stats().swapped_bytes > megabytes * MIB // 4)
    assert is_right(data, digest)
    with swaptide.budget(before.budget_bytes):
        assert swaptide.stats().budget_bytes == before.budget_bytes
    assert swaptide.stats().budget_bytes == now.budget_bytes
    try:
        swaptide.release()
    except swaptide.SwaptideError as error:
        assert f"the run {before.pid}, which" in str(error)
    else:
        raise AssertionError("a run that others have started was let go")


def runs(ram, megabytes):
    """Programs under budgets of their own; this process has none."""
    words = [sys.executable, __file__, "inside", ram, str(megabytes)]
    done = swaptide.run(words, ram=megabytes * MIB, capture_output=True, text=True, check=True)
    assert done.stdout == "OK inside\n", done
    assert done.report.pages_out > 0 and done.report.exit_status == 0
    for words, program in (
        (["sh", "-c", "sleep 600 & echo $!; wait"], "sleep"),
        # It has to be killed.
        (["sh", "-c", "trap '' TERM; sleep 600 & echo $!; while :; do wait; done"], "sleep"),
    ):
        try:
            swaptide.run(words, ram=ram, timeout=1, capture_output=True, text=True)
        except subprocess.TimeoutExpired as expired:
            comm = Path(f"/proc/{int(expired.stdout)}/comm")
            until("what it started has ended", lambda at=comm: not at.exists(), 10)
        else:
            raise AssertionError(f"{program} ended")
    try:
        swaptide.run(["true"], ram=1, capture_output=True)
    except swaptide.RefusedError as error:
        assert "too small" in str(error)
    else:
        raise AssertionError("a budget of one byte was taken")
    assert is_unlimited()


def refused(_ram, _megabytes):
    """What cannot be: an error with swaptide's line, and no budget."""
    for ram, named in (("1", "too small"), ("much", "much")):
        try:
            swaptide.limit(ram)
        except swaptide.RefusedError as error:
            assert named in str(error) and "\n" not in str(error), error
        else:
            raise AssertionError(f"a budget of {ram} was taken")
        assert is_unlimited()


def pooled(seed, megabytes):
    data, digest = fill(megabytes)
    swapped = swaptide.stats().swapped_bytes
    return is_right(data, digest), swapped, seed


def forks(ram, megabytes):
    """A pool of forked processes: each child has all of its parent's memory, and is managed."""
    data, digest = fill(megabytes // 2)
    swaptide.limit(ram)
    tasks = [(seed, megabytes // 2) for seed in range(4)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert all(done[0] for done in pool.starmap(pooled, tasks))
    assert is_right(data, digest)


MODES = (limit, budget, inside, runs, refused, forks)


def main():
    mode, ram, megabytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    next(one for one in MODES if one.__name__ == mode)(ram, megabytes)
    print("OK", mode, flush=True)


if __name__ == "__main__":
    main()
