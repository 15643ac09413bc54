"""What a program may rely on, whatever is done to it: limits, filters, debuggers, areas without a
cipher, an engine that ends, a container's profile.

docs/semantics.md names these cases behind each promise."""

import json
import os
import subprocess
import time

import pytest

from confine import PROFILE, run_confined
from ctl import Ctl, until, wait_for_line
from harness import HERE, MIB, full, param, visit
from processes import comm, descendants, open_files
from unprivileged import copy_of


@pytest.mark.swaptide(budget=32, allowance=8)
@pytest.mark.parametrize(
    "mode",
    [
        param("vmas", allowance=16),
        full("threads", allowance=24),
        "uring",
        full("limits"),
        full("limited"),
        full("nothp"),
    ],
)
def test_strain(case, mode):
    case.run_c("strain", mode)


@pytest.mark.swaptide(budget=32, allowance=8)
def test_strain_abort(case):
    """A program that ends by SIGABRT with most of it out ends, and soon: whether or not a core is
    written.
    """
    program = case.start([case.binary("strain"), 128, 1, case.seed, "abort"])
    program.finish(status=134)


@pytest.mark.swaptide(budget=32, allowance=160)
def test_confined(case):
    """A filter of system calls that ends threads for what they call: what was out is there, or the
    process ends. Never zeros.
    """
    for mode in ("own", "threads"):
        for seed in (case.seed, case.seed + 1):
            program = case.start([case.binary("confined"), 128, 2, seed, mode])
            done = program.finish(status=None)
            text = done.text()
            assert "FAILED" not in text, f"{mode}: wrong data: {text!r}"
            assert text.endswith(f"OK confined {mode}\n"), (
                f"{mode}: status {done.status}, {text!r}, {done.errors()[-300:]!r}"
            )


@pytest.mark.swaptide(budget=32, allowance=16, native=False)
def test_cipher(case):
    """What leaves memory cannot be read where it lies, unless it was said that it may be; then it
    can, and is right all the same.
    """
    # A line of text in every page, among bytes that do not compress, so that pages go to the file
    # as they are.
    script = """if True:
        import os, time, zlib
        mark = b"the secret that is " + b"searched for"
        blocks = [b"".join(mark + os.urandom(4064) for _ in range(256)) for _ in range(96)]
        sums = [zlib.crc32(block) for block in blocks]
        print("ready", os.getpid(), flush=True)
        input()
        print("OK" if [zlib.crc32(block) for block in blocks] == sums else "WRONG")
    """
    for options, plain in (("", False), (",cipher=aes-256-gcm", False), (",cipher=none", True)):
        device = f"file:{case.directory}:512M{options}"
        program = case.start(
            [case.python, "-c", script],
            stdin=subprocess.PIPE,
            options=["--swap", "zram:8M", "--swap", device],
        )
        wait_for_line(case, program, "ready")
        seen = json.loads(Ctl(case, program.pid)("devices", "--json"))[0]
        assert (
            seen["cipher"] == ("none" if plain else "aes-256-gcm") and seen["used_bytes"] > 16 * MIB
        ), f"{seen}"
        found = 0
        for pid in descendants(program.pid):
            for fd, target in open_files(pid):
                if str(case.directory) in target and target.endswith("(deleted)"):
                    with open(fd, "rb") as file:
                        found += sum(
                            block.count(b"the secret that is searched for")
                            for block in iter(lambda: file.read(1 << 20), b"")
                        )
        assert (found > 1000) == plain and (found == 0) != plain, (
            f"{device}: the text is there {found} times"
        )
        program.process.stdin.write(b"\n")
        program.process.stdin.flush()
        done = program.finish()
        assert done.text().endswith("OK\n"), f"{device}: {done.text()!r}"


@pytest.mark.full
@pytest.mark.swaptide(budget=32, needs=("gdb",), allowance=8)
def test_debugger(case):
    """gdb stops and leaves a program again and again while its memory goes and comes: it ends with
    the right data. A debugger that has stopped the pager may wait for a thread that waits for the
    pager: it is ended then, and nothing is lost."""
    program = case.start([case.binary("heap"), 128, 8, case.seed, "threads"])
    target = until(
        case,
        "a program",
        lambda: [pid for pid in [program.pid, *descendants(program.pid)] if comm(pid) == "heap"],
    )[0]
    for _ in range(4):
        time.sleep(0.7)
        words = ["gdb", "-nx", "-batch", "-p", target, "-ex", "detach"]
        visit(words, "KILL", [target, program.pid])
    done = program.finish()
    assert "OK heap threads" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"


@pytest.mark.full
@pytest.mark.swaptide(budget=32, swaps=False, forks=True, native=False)
def test_profile(case):
    """Under the container engines' profile in packaging/, and nothing else allowed, programs swap,
    fork and start others.
    """
    confine = [case.python, HERE / "confine.py", PROFILE]
    for words, last in (
        ([case.binary("torture"), 96, 4, case.seed, "threads"], "OK torture threads"),
        ([case.binary("forks"), 96, 3, case.seed, "tree"], "OK forks tree"),
    ):
        report = case.directory / "report.json"
        done = run_confined(case, confine, words, report)
        assert done.returncode == 0 and last in done.stdout, (
            f"{words}: {done.returncode}: {done.stdout[-200:]!r} {done.stderr[-400:]!r}"
        )
        stats = json.loads(report.read_text())["stats"]
        assert stats["zswpout"] + stats["pswpout"] > 1000, f"{words}: nothing was swapped out"
    # Without the system call, as in many engines' own profiles, the device does, where there is
    # one; else it is said at once and in one line.
    command = [
        *confine,
        "--without",
        "userfaultfd",
        case.swaptide,
        "run",
        "--ram",
        "32M",
        "--quiet",
        "--",
        "true",
    ]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    lines = len(done.stderr.splitlines())
    assert (done.returncode, lines) == ((0, 0) if os.path.exists("/dev/userfaultfd") else (2, 1)), (
        f"{done.returncode}: {done.stderr!r}"
    )


@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_unprivileged(case):
    """As the user nobody: one line says at once why nothing is started, and what helps."""
    if os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    # A copy that the user nobody can read.
    swaptide = copy_of(case.swaptide, case.directory)
    words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", str(swaptide)]
    words += ["run", "--ram", "64M", "--", "true"]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    lines = done.stderr.splitlines()
    # Where the kernel gives an ordinary user a userfaultfd at all, what is missing is the event of
    # a fork.
    helps = len(lines) == 1 and (
        "vm.unprivileged_userfaultfd=1" in lines[0] or "CAP_SYS_PTRACE" in lines[0]
    )
    assert done.returncode == 2 and helps, f"{done.returncode}: {done.stderr!r}"


def wrong_pages(stream, size=4096):
    """Reads pages of `streams` to the end of the pipe: how many came, and the first wrong one."""
    pages = 0
    while block := stream.read(size):
        is_whole = len(block) == size and block == block[:8] * (size // 8) and any(block[:8])
        if not is_whole:
            stream.read()
            return pages, block
        pages += 1
    return pages, None


def streamed(case, words, env=None):
    """Runs a program under swaptide that writes pages to its stdout, and checks each of them."""
    words = [str(word) for word in words]
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as running:
        pages, wrong = wrong_pages(running.stdout)
        said = running.stderr.read().decode(errors="replace")
    what = (
        None if wrong is None else f"{len(wrong)} bytes, {wrong[:8].hex()} ... {wrong[-8:].hex()}"
    )
    assert wrong is None, f"page {pages} on stdout is wrong: {what}; {said!r}"
    return running.returncode, pages, said


def small_pool(case):
    """Most of what goes out goes to a file."""
    return ["--swap", "zram:2M", "--swap", f"file:{case.directory}:1G"]


@pytest.mark.swaptide(budget=32, allowance=96, forks=True, native=False)
def test_short_of_memory_child(case):
    """The first 60 reads of a swap area in each process fail for want of memory: every page comes
    back all the same, in a child that is given all its memory.
    """
    done = case.run_c(
        "forklock",
        "fails",
        megabytes=96,
        seconds=4,
        options=small_pool(case),
        env={**os.environ, "SWAPTIDE_TEST_FAIL": "14"},
    )
    stats, errors = done.report["stats"], done.report["errors"]
    assert stats["pswpin"] > 100 and errors["pages_poisoned"] == 0, f"{stats}, {errors}"


@pytest.mark.swaptide(
    budget=32, allowance=96, native=False, complaint="for want of memory or descriptors"
)
def test_short_for_good(case):
    """All reads of a swap area fail so: the process ends with a message. No page is given up."""
    argv = [case.binary("torture"), 96, 10, case.seed, "single"]
    env = {**os.environ, "SWAPTIDE_TEST_FAIL": "15"}
    done = case.run(argv, status=134, options=small_pool(case), env=env)
    said = done.errors()
    assert "for want of memory or descriptors" in said, said
    assert done.report["errors"]["pages_poisoned"] == 0, f"{done.report['errors']}"


@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_engine_ends(case):
    """An engine whose check fails, whose handler is gone, or that gets no memory, with much of the
    program out: the process ends by SIGABRT. Its threads write pages to a pipe until then, and none
    of them is wrong."""
    for kind, expected in (
        (1, "a check failed"),
        (2, "a check failed in a worker"),
        (3, "the handler thread has ended"),
        (4, ""),
    ):
        words = case.command(options=["--quiet"])
        words += [case.binary("streams"), 128, 20, case.seed]
        started = time.monotonic()
        status, pages, said = streamed(
            case, words, env={**os.environ, "SWAPTIDE_TEST_FAIL": str(kind)}
        )
        wall = time.monotonic() - started
        result = f"kind {kind}: status {status} after {wall:.1f} s, {pages} pages, {said!r}"
        assert status == 134 and pages > 0, result
        is_said = expected in said and "stopped rather than given wrong data" in said
        assert not expected or is_said, result


@pytest.mark.swaptide(budget=32, native=False)
def test_engine_ends_leader(case):
    """The message arrives where the first thread of the program has ended, whose descriptors
    `/proc/self` has.
    """
    words = case.command(options=["--quiet"])
    words += [case.binary("streams"), 128, 20, case.seed, "leader"]
    status, pages, said = streamed(case, words, env={**os.environ, "SWAPTIDE_TEST_FAIL": "1"})
    is_said = "a check failed" in said and "stopped rather than given wrong data" in said
    assert status == 134 and pages > 0 and is_said, f"status {status}, {pages} pages, {said!r}"
