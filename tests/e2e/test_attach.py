"""`swaptide attach`: running processes come under a budget, are let go, and are as before."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import unprivileged
from ctl import PRESSURE, ask, until, wait_for_line
from harness import MIB, Failure, compiled_as
from processes import descendants, is_zombie

KINDS = ["dynamic", "static", "musl"]


class Attached:
    """`swaptide attach` to a process of the case."""

    def __init__(self, case, pid, *options, ram=None, command=None, preexec=None):
        self.case, self.pid = case, pid
        self.directory = case.directory / f"attach{time.monotonic_ns()}"
        self.directory.mkdir(mode=0o777)
        self.directory.chmod(0o777)
        self.errors = self.directory / "errors"
        self.report = self.directory / "report.json"
        words = [command or case.swaptide, "attach", "--ram", f"{ram or case.budget}M"]
        words += ["--report", self.report, *options, pid]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [str(word) for word in words],
                stdin=subprocess.DEVNULL,
                stderr=errors,
                preexec_fn=preexec,
            )

    def said(self):
        return self.errors.read_text()

    def processes(self):
        status, text, _ = ask(self.case, "stats", "--pid", str(self.process.pid), "--json")
        views = json.loads(text)["processes"] if status == 0 else []
        return {view["pid"]: view for view in views}

    def is_swapped(self, pid=None, megabytes=4):
        """Whether a process has pages out."""
        view = self.processes().get(pid or self.pid)
        if self.process.poll() is not None:
            raise Failure(f"attach has ended with {self.process.returncode}: {self.said()}")
        if view is None:
            return False
        return view["swapped_pool_bytes"] + view["swapped_file_bytes"] > megabytes * MIB

    def until_swapped(self, pid=None, megabytes=4, seconds=20):
        is_out = lambda: self.is_swapped(pid, megabytes)  # noqa: E731
        until(self.case, f"process {pid or self.pid} has pages out", is_out, seconds)
        return self

    def ends(self, status=0, seconds=60):
        code = self.process.wait(timeout=seconds)
        assert code == status, f"attach: status {code}: {self.said()}"
        return self

    def lets_go(self):
        self.process.send_signal(signal.SIGINT)
        return self.ends()


def is_over(pid):
    return not Path(f"/proc/{pid}").exists() or is_zombie(pid)


def threads_of_swaptide(pid):
    names = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/comm")]
    return [name for name in names if name.startswith("swaptide")]


def assert_clean(pid):
    """Nothing of swaptide's is in a process but a page of code, and nothing is registered."""
    assert not threads_of_swaptide(pid), f"threads: {threads_of_swaptide(pid)}"
    smaps = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    flags = [line for line in smaps if line.startswith("VmFlags:") and " um" in line]
    assert not flags, "memory is registered still"
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert not any(name in maps for name in ("libswaptide", "memfd:swaptide", "io_uring")), maps


def running(case, name, kind, *arguments):
    """A program that runs without swaptide."""
    program = compiled_as(kind, name, case.suite.root / "bin")
    started = case.start([program, *arguments], native=True)
    time.sleep(0.3)
    return started


def pressure(case, megabytes, mode="wait"):
    """A Python program with verified memory, and its number."""
    started = case.start([case.python, PRESSURE, megabytes, mode], native=True)
    return started, int(wait_for_line(case, started, "ready").split()[1])


@pytest.mark.swaptide(budget=32, native=False)
@pytest.mark.parametrize("kind", KINDS)
def test_attach(case, kind):
    """The torture program does all it can meanwhile; it is never let go."""
    started = running(case, "torture", kind, 96, 5, case.seed, "threads")
    attached = Attached(case, started.pid).until_swapped()
    done = started.finish()
    assert "OK torture threads" in done.text(), done.text()[-300:]
    attached.ends()
    report = json.loads(attached.report.read_text())
    assert report["exit_status"] == 0 and report["stats"]["zswpout"] > 0, report


def cycles(case, kind, seconds):
    """Attaches to a busy program and lets it go again, until it ends; how often."""
    started = running(case, "torture", kind, 64, seconds, case.seed, "threads")
    count = 0
    while started.process.poll() is None:
        attached = Attached(case, started.pid)
        while attached.process.poll() is None and started.process.poll() is None:
            view = attached.processes().get(started.pid, {"swapped_pool_bytes": 0})
            if view["swapped_pool_bytes"] > 2 * MIB:
                attached.process.send_signal(signal.SIGINT)
                break
            time.sleep(0.02)
        code = attached.process.wait(timeout=60)
        if started.process.poll() is None:
            assert code == 0, f"attach: status {code}: {attached.said()}"
            assert_clean(started.pid)
            count += 1
    done = started.finish()
    assert "OK torture threads" in done.text(), done.text()[-300:]
    case.note(f"{count} cycles")
    return count


@pytest.mark.swaptide(budget=32, native=False)
@pytest.mark.parametrize("kind", KINDS)
def test_attach_cycles(case, kind):
    """Forks are right in between: the filter that stays has a reader."""
    assert cycles(case, kind, 4) > 2


@pytest.mark.full
@pytest.mark.swaptide(budget=32, native=False, limit=600)
@pytest.mark.parametrize("kind", KINDS)
def test_full_attach_cycles(case, kind):
    assert cycles(case, kind, case.stretched(100)) >= 200


@pytest.mark.swaptide(budget=32, native=False)
def test_attach_leaves_one_page(case):
    """Each attachment unmaps the page of code that the one before has left; nothing else stays,
    also of reading a swap file."""
    started, pid = pressure(case, 64)
    file = ["--swap", f"file:{case.directory}"]

    def mappings():
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return [line.split()[0] for line in lines if " r-xp 00000000 00:00 0" in line]

    before = mappings()
    for _ in range(3):
        Attached(case, pid, *file).until_swapped(megabytes=16).lets_go()
        assert_clean(pid)
        left = [line for line in mappings() if line not in before]
        assert len(left) == 1, f"pages of code that stay: {left}"
        start, end = (int(word, 16) for word in left[0].split("-"))
        assert end - start == 4096, left
    os.kill(pid, signal.SIGTERM)
    started.finish(7)


@pytest.mark.swaptide(budget=24, native=False)
def test_attach_background(case):
    """The command ends when the process is under the budget; ctl finds it by the process. What is
    refused is told by the command."""
    started, pid = pressure(case, 64)
    attached = Attached(case, pid, "--background").ends()
    (line,) = attached.said().splitlines()
    run = json.loads(ask(case, "stats", "--pid", str(pid), "--json")[1])["pid"]
    assert line.endswith(f"24M from now on; swaptide ctl detach {run} lets them go"), line
    assert run not in descendants(pid)

    def is_swapped():
        view = json.loads(ask(case, "stats", "--pid", str(pid), "--json")[1])["processes"][0]
        return view["swapped_pool_bytes"] + view["swapped_file_bytes"] > 16 * MIB

    until(case, "it has pages out", is_swapped)
    refused(case, "is under swaptide already", pid, more=["--background"])
    status, _, errors = ask(case, "detach", str(run))
    assert status == 0, errors
    until(case, "the run has ended", lambda: is_over(run))
    assert json.loads(attached.report.read_text())["budget_bytes"] == 24 * MIB
    assert_clean(pid)
    os.kill(pid, signal.SIGTERM)
    started.finish(7)


@pytest.mark.swaptide(budget=24, native=False)
def test_attach_python(case):
    """A program that waits is read back when it is asked; detached by ctl."""
    started, pid = pressure(case, 96)
    attached = Attached(case, pid).until_swapped(megabytes=48)
    status, _, errors = ask(case, "detach", str(pid))
    assert status == 0, errors
    attached.ends()
    assert_clean(pid)
    os.kill(pid, signal.SIGTERM)
    started.finish(7)


TREE = """
import os, subprocess, sys, time
mode = sys.argv[1]
data = bytearray(os.urandom(1 << 20) * 48)
check = hash(bytes(data))
print("ready", os.getpid(), flush=True)
sys.stdin.readline()
pid = os.fork()
if pid == 0:
    os._exit(0 if hash(bytes(data)) == check else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "a forked child"
fill = "import sys; d = bytearray(b'x' * (80 << 20)); print('filled', flush=True); " \\
    "sys.stdin.readline(); assert d == b'x' * (80 << 20)"
child = subprocess.Popen([sys.executable, "-c", fill], stdin=subprocess.PIPE,
    stdout=subprocess.PIPE)
child.stdout.readline()
print("child", child.pid, flush=True)
sys.stdin.readline()
child.communicate(b"\\n")
assert child.returncode == 0
assert hash(bytes(data)) == check
print("OK tree", flush=True)
"""


def told(program):
    program.process.stdin.write(b"\n")
    program.process.stdin.flush()


@pytest.mark.swaptide(budget=32, native=False)
def test_attach_tree(case):
    """What an attached process forks has all of its memory; what it starts is in the budget, and
    forks go on when all was let go."""
    argv = [case.python, "-c", TREE, "tree"]
    started = case.start(argv, native=True, stdin=subprocess.PIPE)
    pid = int(wait_for_line(case, started, "ready").split()[1])
    attached = Attached(case, pid).until_swapped(megabytes=16)
    told(started)
    child = int(wait_for_line(case, started, "child").split()[1])
    attached.until_swapped(child, megabytes=16)
    attached.lets_go()
    for one in (pid, child):
        assert_clean(one)
    told(started)
    assert "OK tree" in started.finish().text()


EXECS = """
import os, signal, sys, time
data = bytearray(os.urandom(4096) * 256 * 64)
words = [sys.executable, "-c", sys.argv[1], sys.argv[1]]
signal.signal(signal.SIGUSR1, lambda *_: os.execv(sys.executable, words))
print("ready", os.getpid(), flush=True)
while True:
    time.sleep(1)
"""


@pytest.mark.swaptide(budget=32, native=False)
def test_attach_exec(case):
    """A process that executes another program while it is let go is let go."""
    started = case.start([case.python, "-c", EXECS, EXECS], native=True)
    pid = int(wait_for_line(case, started, "ready").split()[1])
    attached = Attached(case, pid).until_swapped(megabytes=16)
    attached.process.send_signal(signal.SIGINT)
    time.sleep(0.03)
    os.kill(pid, signal.SIGUSR1)
    attached.ends(seconds=20)
    assert_clean(pid)
    os.kill(pid, signal.SIGKILL)
    started.finish(status=None)


@pytest.mark.swaptide(budget=32, native=False)
def test_attach_twice(case):
    """Of two at once one has the forks of a tree that was let go; the other one is refused, or
    takes over from it later. A fork has all of its memory."""
    started = case.start([case.python, "-c", TREE, "tree"], native=True, stdin=subprocess.PIPE)
    pid = int(wait_for_line(case, started, "ready").split()[1])
    Attached(case, pid).until_swapped(megabytes=16).lets_go()
    both = [Attached(case, pid) for _ in range(2)]
    until(case, "one is refused", lambda: any(one.process.poll() == 2 for one in both))
    winner = next(one for one in both if one.process.poll() is None)
    winner.until_swapped(megabytes=16)
    told(started)
    wait_for_line(case, started, "child")
    winner.lets_go()
    told(started)
    assert "OK tree" in started.finish().text()


@pytest.mark.swaptide(budget=32, native=False)
def test_attach_tree_that_runs(case):
    """Children that were there before come under the budget with it."""
    argv = ["sh", "-c", f"{case.python} {PRESSURE} 48 wait & {case.python} {PRESSURE} 48 wait"]
    started = case.start(argv, native=True)
    children = until(
        case, "both children", lambda: len(found := descendants(started.pid)) == 2 and found
    )

    def is_full(pid):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) > 48 << 8

    until(case, "both are full", lambda: all(map(is_full, children)))
    attached = Attached(case, started.pid)
    for child in children:
        attached.until_swapped(child, megabytes=16)
    attached.lets_go()
    for child in children:
        assert_clean(child)
        os.kill(child, signal.SIGTERM)
    started.finish(status=None)


@pytest.mark.swaptide(budget=32, native=False)
def test_attach_unprivileged(case):
    """An ordinary user, with the device alone."""
    if not unprivileged.is_possible():
        pytest.skip("only root can set it up, where there is a /dev/userfaultfd")
    case.is_unprivileged = True
    swaptide = unprivileged.copy_of(case.swaptide, case.directory)
    program = compiled_as("dynamic", "torture", case.suite.root / "bin")
    case.suite.root.chmod(0o755)
    started = case.start(
        [program, 96, 5, case.seed, "threads"],
        native=True,
        preexec=unprivileged.give_up_root,
    )
    time.sleep(0.3)
    scratch = case.directory / "device"
    scratch.mkdir()

    def become():
        os.environ["SWAPTIDE_DIRECTORY"] = str(case.directory / "sockets")
        unprivileged.become_nobody(scratch)

    attached = Attached(case, started.pid, command=swaptide, preexec=become)
    done = started.finish()
    assert "OK torture threads" in done.text(), done.text()[-300:]
    attached.ends()
    report = json.loads(attached.report.read_text())
    assert report["stats"]["zswpout"] > 0, report


def refused(case, named, pid, more=(), **how):
    attached = Attached(case, pid, *more, **how).ends(status=2)
    lines = attached.said().splitlines()
    assert len(lines) == 1 and named in lines[0], f"{attached.said()!r}, not {named!r}"


TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(0x4206, int(sys.argv[1]), None, None) == 0, ctypes.get_errno()
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.swaptide(budget=32, native=False)
def test_attach_refused(case):
    """What cannot be taken is refused in one line, and is as before."""
    refused(case, "no process", 1 << 22)
    refused(case, "has started this command", os.getpid())
    refused(case, "is too small", 1, ram=1)
    started, pid = pressure(case, 40)
    before = Path(f"/proc/{pid}/maps").read_text()
    os.kill(pid, signal.SIGSTOP)
    until(case, "it stops", lambda: "\nState:\tT" in Path(f"/proc/{pid}/status").read_text())
    refused(case, "is stopped", pid)
    os.kill(pid, signal.SIGCONT)
    tracer = case.start([case.python, "-c", TRACER, pid], native=True, stdin=subprocess.PIPE)
    wait_for_line(case, tracer, "ready")
    refused(case, "is traced by", pid)
    told(tracer)
    tracer.finish()
    if Path("/proc/2/comm").exists() and Path("/proc/2/comm").read_text() == "kthreadd\n":
        refused(case, "its program cannot be read", 2)
    if unprivileged.is_possible():
        swaptide = unprivileged.copy_of(case.swaptide, case.directory)
        how = {"command": swaptide, "preexec": unprivileged.give_up_root}
        refused(case, "another user's", pid, **how)
    assert Path(f"/proc/{pid}/maps").read_text() == before, "its mappings have changed"
    attached = Attached(case, pid).until_swapped()
    refused(case, "is under swaptide already", pid)
    attached.lets_go()
    os.kill(pid, signal.SIGTERM)
    started.finish(7)
