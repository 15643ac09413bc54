"""What a program may rely on, whatever is done to it: being let go, areas without a cipher, an
engine that ends, a tight cgroup, a container's profile.

docs/semantics.md names these cases behind each promise.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from cases_groups import Ctl, until
from cases_process import PRESSURE, ask, wait_for_line
from cgroups import memory_cgroup
from harness import HERE, MIB, Failure
from legacy import Case, Skip
from processes import descendants
from unprivileged import copy_of


def states(ctl):
    return {process["pid"]: process for process in json.loads(ctl("stats", "--json"))["processes"]}


def asked(what):
    """What a run answers; nothing while it is not there yet."""
    try:
        return what()
    except (Failure, OSError):
        return None


def is_armed(pid):
    """Whether any of the process's memory is registered with a userfaultfd."""
    return any(
        line.startswith("VmFlags:") and " um" in line
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines()
    )


def swapped(context, what, started, out):
    """Waits for a process of a run with pages out, and names it. A failure says what the run
    answers, and whether it lives.
    """
    try:
        return until(context, "a process that is swapped", lambda: asked(out))[0]["pid"]
    except Failure as failure:
        ended = started.process.poll()
        try:
            answer = out()
        except (Failure, OSError) as error:
            answer = repr(error)
        raise Failure(f"{what}: {failure}; status {ended}, answer {answer}") from None


def detach(context):
    """Processes are let go in the middle of everything: all comes back, nothing stays registered,
    and what they fork later is managed anew.
    """
    if context.native:
        return
    # Of a process that is about to fork, several times: the fork may come in when its workers are
    # about to stand still.
    for program, mode in (
        ("torture", "threads"),
        ("torture", "single"),
        *[("forks", "nested")] * 3,
        ("threads", "storm"),
    ):
        started = context.start([context.binary(program), 96, 4, context.seed, mode])
        ctl = Ctl(context, started.pid)
        out = lambda: [
            p
            for p in states(ctl).values()
            if p["state"] == "engaged" and p["swapped_pool_bytes"] > 4 * MIB
        ]
        first = swapped(context, f"{program} {mode}", started, out)
        context.expect(is_armed(first), "managed, and not registered")
        status, _, errors = ask(context, "detach", str(first))
        # It may have come to its own end meanwhile.
        context.expect(
            status == 0 or not Path(f"/proc/{first}/smaps").exists(),
            f"detach: status {status}: {errors}",
        )
        after = (asked(lambda: states(ctl)) or {}).get(first)
        if after is not None:
            context.expect(
                after["state"] == "detached" and after["swapped_pool_bytes"] == 0,
                f"{program} {mode}: {after}",
            )
            context.expect(
                asked(lambda: is_armed(first)) is not True,
                f"{program} {mode}: some of it is still registered",
            )
        # And everybody else, if anybody is there by then.
        ask(context, "detach", str(started.pid))
        done = started.finish()
        context.expect(
            f"OK {program} {mode}" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
        )


def detach_refused(context):
    """Where what is out would not fit, one line says so and nothing has changed."""
    if context.native:
        return
    ctl = lambda *words: ask(context, *words)
    with memory_cgroup(context, 130 * MIB) as group:
        if group is None:
            raise Skip("no memory cgroup can be made here")
        program = context.start([context.python, PRESSURE, 150, "wait"], preexec=group.enter)
        inside = wait_for_line(context, program, "ready").split()[1]
        status, text, errors = ctl("detach", inside)
        is_refused = status == 2 and len(errors.splitlines()) == 1 and "would come back" in errors
        context.expect(is_refused, f"{status} {text}{errors}")
        status, text, errors = ctl("stats", "--pid", inside)
        context.expect(f"\n{inside:>8} engaged" in text, f"it is managed as before: {text}{errors}")
        os.kill(program.pid, signal.SIGTERM)
        program.finish(status=7)


def detach_twice(context):
    """A program that was let go keeps its data. One that is in no run, or was let go already, is
    refused.
    """
    if context.native:
        return
    ctl = lambda *words: ask(context, *words)
    program = context.start([context.python, PRESSURE, 100, "wait"])
    inside = wait_for_line(context, program, "ready").split()[1]
    status, _, errors = ctl("detach", "1")
    context.expect(
        status == 2 and len(errors.splitlines()) == 1, f"a process of nobody's: {status} {errors}"
    )
    status, _, errors = ctl("detach", inside)
    context.expect(status == 0 and errors == "", f"detach: {status} {errors}")
    context.expect(not is_armed(int(inside)), "some of it is still registered")
    status, _, errors = ctl("detach", inside)
    context.expect(status == 2 and "none of these" in errors, f"twice: {status} {errors}")
    # It reads all its data again before it ends.
    os.kill(program.pid, signal.SIGTERM)
    program.finish(status=7)


def strain(mode, megabytes=128, seconds=5):
    def run(context):
        context.c("strain", mode, megabytes=megabytes, seconds=seconds)

    return run


def strain_abort(context):
    """A program that ends by SIGABRT with most of it out ends, and soon: whether or not a core is
    written.
    """
    program = context.start([context.binary("strain"), 128, 1, context.seed, "abort"])
    program.finish(status=134)


def confined(context):
    """A filter of system calls that ends threads for what they call: what was out is there, or the
    process ends. Never zeros.
    """
    for mode in ("own", "threads"):
        for seed in (context.seed, context.seed + 1):
            program = context.start([context.binary("confined"), 128, 2, seed, mode])
            done = program.finish(status=None)
            text = done.text()
            context.expect("FAILED" not in text, f"{mode}: wrong data: {text!r}")
            context.expect(
                text.endswith(f"OK confined {mode}\n"),
                f"{mode}: status {done.status}, {text!r}, {done.errors()[-300:]!r}",
            )


def cipher(context):
    """What leaves memory cannot be read where it lies, unless it was said that it may be; then it
    can, and is right all the same.
    """
    if context.native:
        return
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
        device = f"file:{context.directory}:512M{options}"
        program = context.start(
            [context.python, "-c", script],
            stdin=subprocess.PIPE,
            options=["--swap", "zram:8M", "--swap", device],
        )
        wait_for_line(context, program, "ready")
        seen = json.loads(Ctl(context, program.pid)("devices", "--json"))[0]
        context.expect(
            seen["cipher"] == ("none" if plain else "aes-256-gcm")
            and seen["used_bytes"] > 16 * MIB,
            f"{seen}",
        )
        found = 0
        for pid in descendants(program.pid):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    target = os.readlink(fd)
                except FileNotFoundError:
                    continue  # Closed since: a socket of this very request, say.
                if str(context.directory) in target and target.endswith("(deleted)"):
                    with open(fd, "rb") as file:
                        found += sum(
                            block.count(b"the secret that is searched for")
                            for block in iter(lambda: file.read(1 << 20), b"")
                        )
        context.expect(
            (found > 1000) == plain and (found == 0) != plain,
            f"{device}: the text is there {found} times",
        )
        program.process.stdin.write(b"\n")
        program.process.stdin.flush()
        done = program.finish()
        context.expect(done.text().endswith("OK\n"), f"{device}: {done.text()!r}")


def debugger(context):
    """gdb stops and leaves a program again and again while its memory goes and comes: it ends with
    the right data. A debugger that has stopped the pager may wait for a thread that waits for the
    pager: it is ended then, and nothing is lost."""
    program = context.start([context.binary("heap"), 128, 8, context.seed, "threads"])
    target = until(
        context,
        "a program",
        lambda: [pid for pid in [program.pid, *descendants(program.pid)] if comm(pid) == "heap"],
    )[0]
    for _ in range(4):
        time.sleep(0.7)
        words = [
            "timeout",
            "-s",
            "KILL",
            "4",
            "gdb",
            "-nx",
            "-batch",
            "-p",
            str(target),
            "-ex",
            "detach",
        ]
        if subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True).returncode != 0:
            # One that was ended while it attached may leave the program stopped, and the run with
            # it.
            for pid in (target, program.pid):
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    pass
    done = program.finish()
    context.expect(
        "OK heap threads" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
    )


def comm(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None


def tight_cgroup(context):
    """Real programs in a memory cgroup that ends them a tenth past the budget: none is ended."""
    if context.native:
        return
    budget = 96
    # Every group of the sparse mapping's pages has a page table of its own, and every GiB of it
    # another: 36M, which kernels charge or do not.
    for words, last, tables in (
        ([context.python, PRESSURE, 256, "closefds"], "OK closefds", 0),
        ([context.binary("heap"), 256, 6, context.seed, "threads"], "OK heap threads", 0),
        ([context.binary("sparse"), 256, 6, context.seed], "OK sparse", 37),
    ):
        # The supervisor, the kernel's own of the cgroup (page tables, stacks) and the page cache's
        # least come on top.
        with memory_cgroup(context, (budget * 11 // 10 + 16 + tables) * MIB) as group:
            if group is None:
                raise Skip("no memory cgroup can be made here")
            program = context.start(words, budget=budget, preexec=group.enter)
            done = program.finish(status=None)
            context.expect(
                done.status == 0, f"{words}: status {done.status}: {done.errors()[-300:]!r}"
            )
            context.expect(last is None or last in done.text(), f"{words}: {done.text()[-200:]!r}")
            context.expect(
                group.killed() == 0, f"{words}: {group.killed()} processes were ended for memory"
            )


PROFILE = HERE.parent.parent / "packaging" / "seccomp.json"


def profile(context):
    """Under the container engines' profile in packaging/, and nothing else allowed, programs swap,
    fork and start others.
    """
    if context.native:
        return
    confine = [context.python, HERE / "confine.py", PROFILE]
    for words, last in (
        ([context.binary("torture"), 96, 4, context.seed, "threads"], "OK torture threads"),
        ([context.binary("forks"), 96, 3, context.seed, "tree"], "OK forks tree"),
    ):
        report = context.directory / "report.json"
        command = [
            *confine,
            context.swaptide,
            "run",
            "--ram",
            f"{context.budget}M",
            "--quiet",
            "--report",
            report,
            "--",
            *words,
        ]
        done = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        context.expect(
            done.returncode == 0 and last in done.stdout,
            f"{words}: {done.returncode}: {done.stdout[-200:]!r} {done.stderr[-400:]!r}",
        )
        stats = json.loads(report.read_text())["stats"]
        context.expect(
            stats["zswpout"] + stats["pswpout"] > 1000, f"{words}: nothing was swapped out"
        )
    # Without the system call, as in many engines' own profiles, the device does, where there is
    # one; else it is said at once and in one line.
    command = [
        *confine,
        "--without",
        "userfaultfd",
        context.swaptide,
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
    context.expect(
        (done.returncode, lines) == ((0, 0) if os.path.exists("/dev/userfaultfd") else (2, 1)),
        f"{done.returncode}: {done.stderr!r}",
    )


def unprivileged(context):
    """As nobody: it is said at once, in one line, why nothing is started, and what helps."""
    if context.native:
        return
    if os.geteuid() != 0:
        raise Skip("only root can become nobody")
    # A copy where nobody can get at it.
    swaptide = copy_of(context.swaptide, context.directory)
    words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", str(swaptide)]
    words += ["run", "--ram", "64M", "--", "true"]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    lines = done.stderr.splitlines()
    # Where the kernel gives an ordinary user a userfaultfd at all, what is missing is the event of
    # a fork.
    helps = len(lines) == 1 and (
        "vm.unprivileged_userfaultfd=1" in lines[0] or "CAP_SYS_PTRACE" in lines[0]
    )
    context.expect(done.returncode == 2 and helps, f"{done.returncode}: {done.stderr!r}")


def wrong_pages(stream, size=4096):
    """Reads pages of `streams` to the end of the pipe: how many came, and the first that is none."""
    pages = 0
    while block := stream.read(size):
        is_whole = len(block) == size and block == block[:8] * (size // 8) and any(block[:8])
        if not is_whole:
            stream.read()
            return pages, block
        pages += 1
    return pages, None


def streamed(context, words, env=None):
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
    context.expect(wrong is None, f"page {pages} on stdout is wrong: {what}; {said!r}")
    return running.returncode, pages, said


def engine_ends(context):
    """An engine whose check fails, whose handler is gone, or that gets no memory, with much of the
    program out: the process ends by SIGABRT. Its threads write pages to a pipe until then, and none
    of them is wrong."""
    if context.native:
        return
    for kind, expected in (
        (1, "a check failed"),
        (2, "a check failed in a worker"),
        (3, "the thread that answers faults is gone"),
        (4, ""),
    ):
        words = [context.swaptide, "run", "--ram", f"{context.budget}M", "--quiet", "--"]
        words += [context.binary("streams"), 128, 20, context.seed]
        started = time.monotonic()
        status, pages, said = streamed(
            context, words, env={**os.environ, "SWAPTIDE_TEST_FAIL": str(kind)}
        )
        result = f"kind {kind}: status {status} after {time.monotonic() - started:.1f} s, {pages} pages, {said!r}"
        context.expect(status == 134 and pages > 0, result)
        is_said = expected in said and "stopped rather than given wrong data" in said
        context.expect(not expected or is_said, result)


CASES = [
    Case("engine-ends", engine_ends, 32, swaps=False),
    Case("cipher", cipher, 32, allowance=16),
    Case("debugger", debugger, 32, needs=("gdb",), allowance=8),
    Case("tight-cgroup", tight_cgroup, 96, full=True, allowance=8),
    Case("profile", profile, 32, swaps=False, forks=True),
    Case("unprivileged", unprivileged, 32, swaps=False),
    *[
        Case(f"strain-{mode}", strain(mode), 32, allowance=allowance)
        for mode, allowance in (
            ("vmas", 16),
            ("threads", 24),
            ("uring", 8),
            ("limits", 8),
            ("nothp", 8),
        )
    ],
    Case("strain-abort", strain_abort, 32, allowance=8),
    Case("confined", confined, 32, allowance=160),
    Case("detach", detach, 32, limit=150, forks=True, allowance=400),
    Case("detach-refused", detach_refused, 48, allowance=120),
    Case("detach-twice", detach_twice, 48, allowance=120),
]
