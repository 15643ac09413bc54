"""Programs that load no library: static ones, Go's, musl's. The agent is put into them."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import cgroups
from confine import PROFILE, run_confined
from ctl import until
from harness import HERE, MIB, Failure, PeakTooHigh, compiled_as, full, param, visit
from processes import comm, descendants

KINDS = ["static", "pie", "musl", "musl-static"]

INJECT = ["--inject"]

# Until it is found nothing holds a program that maps memory: it fills what it can.
UNTIL_MANAGED = 48


def program(case, name, kind):
    return compiled_as(kind, name, case.suite.root / "bin")


def run(case, name, kind, megabytes, seconds, mode, **how):
    words = [program(case, name, kind), megabytes, seconds, case.seed, mode]
    done = case.run(words, options=INJECT, **how)
    assert f"OK {name} {mode}" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
    return done


@pytest.mark.swaptide(budget=32, allowance=UNTIL_MANAGED, forks=True)
@pytest.mark.parametrize("kind", KINDS)
def test_foreign(case, kind):
    """Threads, a heap, moves, a fork, and a timer's signals meanwhile."""
    run(case, "foreign", kind, 96, 1, "all")


@pytest.mark.swaptide(budget=32, allowance=256, forks=True)
@pytest.mark.parametrize(("kind", "seconds"), [param("static", 5), param("musl-static", 5)])
def test_torture_foreign(case, kind, seconds):
    """The torture program without what has limits past libc."""
    run(case, "torture", kind, 96, seconds, "threads")


@pytest.mark.full
@pytest.mark.swaptide(budget=32, limit=1500, allowance=256, forks=True)
@pytest.mark.parametrize("kind", KINDS)
def test_full_torture_foreign(case, kind):
    run(case, "torture", kind, 96, case.stretched(60), "threads")


@pytest.mark.swaptide(budget=32, allowance=192, forks=True)
@pytest.mark.parametrize("kind", ["static", "musl-static"])
def test_foreign_daemon(case, kind):
    """A process ends as soon as it has forked: its child has everything."""
    run(case, "foreign", kind, 96, 1, "daemon")


@pytest.mark.swaptide(budget=32, allowance=UNTIL_MANAGED)
def test_foreign_moves(case):
    """Threads move memory to and fro, and nothing waits until the engine knows of it."""
    run(case, "forkmove", "static", 48, 4, "alone")


@pytest.mark.swaptide(budget=32, allowance=128, forks=True)
@pytest.mark.parametrize("kind", ["static", "musl-static"])
def test_foreign_forkmove(case, kind):
    """The same while others fork."""
    run(case, "forkmove", kind, 48, 3, "libc")


@pytest.mark.swaptide(budget=32, allowance=128, forks=True)
@pytest.mark.parametrize(("mode", "megabytes"), [("execs", 64), ("signals", 40)])
def test_foreign_forks(case, mode, megabytes):
    """A process that executes another program keeps its number; a fork that a signal meets is made,
    or is interrupted. Nothing is stopped, or killed."""
    run(case, "foreign", "static", megabytes, 1, mode)


@pytest.mark.swaptide(budget=32, allowance=192, forks=True)
@pytest.mark.parametrize("kind", ["static", "musl-static"])
def test_foreign_children(case, kind):
    """Children that execute nothing come under the budget when they stay."""
    run(case, "foreign", kind, 96, 1, "children")


@pytest.mark.swaptide(budget=32, allowance=8, forks=True)
@pytest.mark.parametrize("inject", ["large", "always"])
def test_foreign_at_once(case, inject):
    """A child that was forked before anything has looked at its parent."""
    words = [program(case, "foreign", "static"), 160, 1, case.seed, "at-once"]
    done = case.run(words, options=[f"--inject={inject}"])
    assert done.text() == "OK foreign at-once\n"


@pytest.mark.swaptide(budget=32, allowance=UNTIL_MANAGED, forks=True)
def test_foreign_refused(case):
    """A child that would not fit into the cgroup is refused, and the cgroup kills nothing."""
    with cgroups.memory_cgroup(case, 112 << 20) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        case.enter = group.enter
        run(case, "foreign", "static", 160, 1, "refused")
        assert group.killed() == 0


GO = r"""
package main

import ("fmt"; "io"; "os"; "runtime/pprof"; "strconv"; "sync")

func word(x uint64) uint64 {
    x += 0x9e3779b97f4a7c15
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9
    return x ^ (x >> 31)
}

func main() {
    megabytes, _ := strconv.Atoi(os.Args[1])
    const parts = 8
    pprof.StartCPUProfile(io.Discard)
    var all sync.WaitGroup
    for part := 0; part < parts; part++ {
        all.Add(1)
        go func(part int) {
            defer all.Done()
            words := make([]uint64, megabytes << 20 / 8 / parts)
            for round := 0; round < 3; round++ {
                for i := 0; i < len(words); i += 16 {
                    if round > 0 && words[i] != word(uint64(part << 40 + i)) {
                        fmt.Println("FAILED", part, i)
                        os.Exit(3)
                    }
                    words[i] = word(uint64(part << 40 + i))
                }
            }
            names := map[string]int{}
            for i := 0; i < 100000; i++ { names[strconv.Itoa(i * part)] = i }
        }(part)
    }
    all.Wait()
    pprof.StopCPUProfile()
    fmt.Println("OK")
}
"""


# Starts what its other arguments say, and keeps words of its own meanwhile.
GO_PARENT = r"""
package main

import ("fmt"; "os"; "os/exec"; "strconv")

func main() {
    megabytes, _ := strconv.Atoi(os.Args[1])
    words := make([]uint64, megabytes << 20 / 8)
    for i := range words { words[i] = uint64(i) * 0x9e3779b97f4a7c15 }
    child := exec.Command(os.Args[2], os.Args[3:]...)
    child.Stdout, child.Stderr = os.Stdout, os.Stderr
    if err := child.Run(); err != nil {
        fmt.Println("FAILED", err)
        os.Exit(3)
    }
    for i := range words {
        if words[i] != uint64(i) * 0x9e3779b97f4a7c15 {
            fmt.Println("FAILED", i)
            os.Exit(3)
        }
    }
    fmt.Println("OK")
}
"""

# The same in Python, which prints nothing of its own.
PYTHON_PARENT = """
import subprocess, sys
megabytes, words = int(sys.argv[1]), sys.argv[2:]
numbers = list(range(1_000_000, 1_000_000 + megabytes * (1 << 20) // 40))
subprocess.check_call(words)
assert numbers == list(range(1_000_000, 1_000_000 + len(numbers)))
"""


GO_MAKE = "words := make([]uint64, megabytes << 20 / 8 / parts)"
CGO_IMPORT = """"sync"; "unsafe")

// #include <stdlib.h>
import "C"
"""
CGO_MAKE = """room := C.malloc(C.size_t(megabytes << 20 / parts))
            words := unsafe.Slice((*uint64)(room), megabytes << 20 / 8 / parts)"""


USERS = pytest.mark.parametrize("user", ["root", param("nobody", marks=[pytest.mark.unprivileged])])


def go_program(case, source, cgo, *options):
    """A program of Go's, built with what `go build` takes."""
    file = case.directory / "main.go"
    file.write_text(source)
    built = case.directory / "filler"
    subprocess.run(
        ["go", "build", *options, "-o", built, file],
        env=os.environ | {"CGO_ENABLED": cgo, "GOCACHE": str(case.directory / "cache")},
        check=True,
    )
    case.directory.chmod(0o755)
    return built


@pytest.mark.full
@pytest.mark.swaptide(budget=256, limit=180, needs=("go",), allowance=64)
@USERS
def test_foreign_go(case, user):
    """Goroutines fill and verify four times the budget while they are profiled."""
    built = go_program(case, GO, "0")
    assert case.run([built, 1024], options=INJECT).text() == "OK\n"


@pytest.mark.full
@pytest.mark.swaptide(budget=256, limit=300, needs=("go",), allowance=64)
@USERS
def test_foreign_cgo(case, user):
    """Go and C in one program that is linked statically: the memory is malloc's."""
    source = GO.replace('"sync")', CGO_IMPORT).replace(GO_MAKE, CGO_MAKE)
    static = ("-ldflags", "-linkmode external -extldflags -static")
    built = go_program(case, source, "1", *static)
    assert case.run([built, 1024], options=INJECT).text() == "OK\n"


@pytest.mark.full
@pytest.mark.swaptide(budget=32, allowance=UNTIL_MANAGED, needs=("busybox", "sort"))
def test_foreign_sort(case):
    """busybox's sort, linked statically, of a million lines."""
    lines = case.directory / "lines"
    with lines.open("w") as file:
        state = case.seed
        for _ in range(1_000_000):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            file.write(f"{state:020}\n")
    wanted = subprocess.run(
        ["sort", lines], env=os.environ | {"LC_ALL": "C"}, capture_output=True, check=True
    )
    done = case.run([shutil.which("busybox"), "sort", lines])
    assert done.stdout.read_bytes() == wanted.stdout


@pytest.mark.full
@pytest.mark.swaptide(budget=32, allowance=UNTIL_MANAGED, limit=180, needs=("gdb", "strace"))
@pytest.mark.parametrize("tool", ["gdb", "strace"])
@pytest.mark.parametrize("kind", ["static", "musl"])
def test_foreign_debugger(case, tool, kind):
    """A debugger, or a tracer of system calls, comes to an injected program again and again and
    leaves it: it finds it untraced, and the program ends with the right data."""
    binary = program(case, "heap", kind)
    started = case.start([binary, 128, 8, case.seed, "threads"], options=INJECT)
    target = until(
        case,
        "a program",
        lambda: [pid for pid in descendants(started.pid) if comm(pid) == binary.name[:15]],
    )[0]
    calls = case.directory / "calls"
    words = {
        "gdb": ["gdb", "-nx", "-batch", "-p", target, "-ex", "detach"],
        "strace": ["strace", "-f", "-A", "-o", calls, "-p", target],
    }[tool]
    for _ in range(4):
        time.sleep(0.7)
        said = visit(words, "KILL" if tool == "gdb" else "INT", [target, started.pid])
        assert "not permitted" not in said, f"{tool}: {said[-300:]!r}"
    if tool == "strace":
        assert calls.stat().st_size > 1000, "it saw no calls"
    done = started.finish()
    assert "OK heap threads" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"


@pytest.mark.swaptide(budget=64, allowance=UNTIL_MANAGED, needs=("busybox",), forks=True)
def test_foreign_tree(case):
    """Static programs that are started by a shell with hooks, by Python, and by a static shell,
    which starts one with hooks in turn."""
    static, dynamic = program(case, "foreign", "static"), case.binary("foreign")
    busybox = shutil.which("busybox")
    words = f"96 1 {case.seed} all"
    lines = [
        f"{static} {words}",
        f"{busybox} sh -c '{static} {words}; {dynamic} {words}'",
        f"{case.python} -c \"import subprocess as s; s.check_call('{static} {words}'.split())\"",
    ]
    for line in lines:
        done = case.run(["sh", "-ec", f"{line}; exit 0"], options=INJECT)
        wanted = "OK foreign all\n" * line.count(words)
        assert done.text() == wanted, f"{line}: {done.text()!r}"


@pytest.mark.full
@pytest.mark.swaptide(budget=256, limit=180, needs=("go", "/usr/bin/python3"), forks=True)
@USERS
@pytest.mark.parametrize("options", [param([], id="large"), param(INJECT, id="always")])
def test_foreign_budget_tree(case, user, options):
    """Go, a shell, Python and static C, each the child of the one before, within one budget."""
    parent = go_program(case, GO_PARENT, "0")
    file = case.directory / "parent.py"
    file.write_text(PYTHON_PARENT)
    static = openly(case, "foreign", "static")
    # One that every user may execute.
    line = f"/usr/bin/python3 {file} 96 {static} 160 1 {case.seed} all; exit 0"
    done = case.run([parent, 160, "sh", "-ec", line], options=options)
    assert done.text() == "OK foreign all\nOK\n"
    peak, most = int(done.report["peak_resident_bytes"]), case.budget * MIB * 1.05
    if peak > most:
        raise PeakTooHigh(f"peak {peak / MIB:.1f} MiB, allowed {most / MIB:.1f}")


@pytest.mark.swaptide(budget=32, allowance=64, swaps=False, forks=True, needs=("unshare",))
def test_foreign_namespace(case):
    """In another pid namespace it is left alone: the numbers of its threads are not those here."""
    if os.getuid() != 0:
        pytest.skip("only root may make a namespace")
    words = [program(case, "foreign", "static"), 8, 1, case.seed, "all"]
    done = case.run(["unshare", "-p", "--fork", *words], options=INJECT)
    assert done.text() == "OK foreign all\n"


@pytest.mark.swaptide(budget=32, allowance=64, swaps=False, forks=True)
@pytest.mark.parametrize("kind", ["static", "musl"])
def test_foreign_alone(case, kind):
    """Where none is to be given the agent, such a program runs unmanaged in a tree."""
    words = f"{program(case, 'foreign', kind)} 8 1 {case.seed} all"
    done = case.run(["sh", "-c", f"{words}; exit 0"], options=["--inject=never"])
    assert done.text() == "OK foreign all\n"


@pytest.mark.swaptide(budget=64, allowance=UNTIL_MANAGED, forks=True)
@pytest.mark.parametrize("kind", ["static", "musl"])
def test_foreign_large(case, kind):
    """Without an option such programs are given the agent when they have some memory."""
    words = f"{program(case, 'foreign', kind)} 160 1 {case.seed} all"
    done = case.run(["sh", "-ec", f"{words}; {words}; exit 0"])
    assert done.text() == "OK foreign all\nOK foreign all\n"


@pytest.mark.swaptide(
    budget=64, allowance=64, swaps=False, needs=("busybox",), forks=True, limit=240
)
@pytest.mark.parametrize("programs", [param(300, id="some"), full(1000, id="many")])
def test_foreign_storm(case, programs):
    """Static programs, one after the other; each ends with its own status."""
    busybox = shutil.which("busybox")
    loop = (
        f"i=0; while [ $i -lt {programs} ]; do "
        f"{busybox} sh -c 'exit '$((i % 7)); [ $? -eq $((i % 7)) ] || exit 9; i=$((i + 1)); "
        "done; echo all"
    )
    for shell in (["sh"], [busybox, "sh"]):
        assert case.run([*shell, "-c", loop], options=INJECT).text() == "all\n"


@pytest.mark.swaptide(budget=64, allowance=64, swaps=False, forks=True, limit=120)
@pytest.mark.parametrize("kind", KINDS)
def test_foreign_ends(case, kind):
    """Programs that end or execute another one from a second thread while they are given the agent:
    nothing waits for them, and each ends with its own status."""
    done = case.run([program(case, "foreign_ends", kind), case.seed], options=INJECT)
    assert done.text() == "OK foreign_ends\n"


@pytest.mark.swaptide(budget=64, allowance=64, swaps=False, forks=True, limit=180)
@pytest.mark.parametrize("who", ["first", "other"])
@pytest.mark.parametrize(("threads", "turns"), [param(3, 100, id="few"), full(32, 300, id="many")])
def test_foreign_exec_race(case, who, threads, turns):
    """A thread executes a program while the others, which run, are stopped: nothing waits for ever,
    no signal is lost, and nothing stays traced."""
    words = [program(case, "exec_race", "static"), turns, threads, who, case.seed]
    assert case.run(words, options=INJECT).text() == "OK exec_race\n"


@pytest.mark.full
@pytest.mark.swaptide(budget=64, allowance=64, swaps=False, forks=True, native=False)
def test_foreign_stops(case):
    """A program stops itself that another thread has executed than the one that was traced: the
    launcher stops with it. Where that thread was too late the program ends without."""
    words = [program(case, "foreign", "static"), 400, 1, case.seed, "stops"]
    turns = [is_met_and_stops(case, words) for _ in range(12)]
    while not any(turns) and len(turns) < 40:
        turns.append(is_met_and_stops(case, words))
    assert any(turns), "the moment was never met"
    case.note(f"met {sum(turns)} times of {len(turns)}")


def is_met_and_stops(case, words):
    running = case.start(words)
    output, pid = running.directory / "stdout", running.process.pid

    def is_met():
        return "executed" in output.read_text()

    until(case, "its stop, or its end", lambda: is_met() or running.process.poll() is not None)
    is_one = is_met()
    if is_one:
        until(case, "the launcher's stop", lambda: proc_state(pid) == "T")
        os.kill(pid, signal.SIGCONT)
    assert "OK foreign" in running.finish().text()
    return is_one


def proc_state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.swaptide(budget=32, forks=True, native=False, needs=("setpriv",))
def test_foreign_confined(case):
    """Under a filter that refuses to read and write another process's memory, as Docker's before
    version 23 does, without the capability for which that allows it."""
    report = case.directory / "report.json"
    confine = ["setpriv", "--bounding-set", "-sys_ptrace"]
    confine += [case.python, HERE / "confine.py", PROFILE]
    for call in ("process_vm_readv", "process_vm_writev"):
        confine += ["--without", call]
    words = [program(case, "foreign", "static"), 96, 1, case.seed, "all"]
    done = run_confined(case, confine, words, report)
    assert (done.returncode, done.stdout) == (0, "OK foreign all\n"), done
    stats = json.loads(report.read_text())["stats"]
    assert stats["zswpout"] + stats["pswpout"] > 1000, "nothing was swapped out"


@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_foreign_not_asked(case):
    """Where none is to be given the agent, one that loads no library is refused in one line."""
    words = [program(case, "foreign", "static"), 8, 1, 1, "all"]
    started = case.start(words, options=["--inject=never"])
    status = started.process.wait(timeout=30)
    said = (started.directory / "stderr").read_text()
    if status != 2 or "leave --inject=never out" not in said:
        raise Failure(f"exit status {status}: {said!r}")


def openly(case, name, kind):
    """The program where all users get at it."""
    copied = case.directory / f"{name}-{kind}"
    shutil.copy(program(case, name, kind), copied)
    copied.chmod(0o755)
    case.directory.chmod(0o755)
    return copied


@pytest.mark.unprivileged
@pytest.mark.swaptide(budget=32, allowance=256, forks=True)
@pytest.mark.parametrize(
    ("name", "kind", "mode"),
    [
        ("foreign", "static", "all"),
        ("foreign", "musl", "daemon"),
        ("foreign", "static", "children"),
        ("torture", "musl-static", "threads"),
        ("forkmove", "static", "libc"),
    ],
)
def test_foreign_unprivileged(case, name, kind, mode):
    """Without a capability, where the kernel reports no forks."""
    words = [openly(case, name, kind), 48 if name == "forkmove" else 96, 2, case.seed, mode]
    done = case.run(words, options=INJECT)
    assert f"OK {name} {mode}" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"


@pytest.mark.swaptide(budget=32, allowance=UNTIL_MANAGED, forks=True, needs=("chroot",))
def test_foreign_root(case):
    """In another root the agent's file is not there: it is copied."""
    if os.getuid() != 0:
        pytest.skip("only root may enter another root")
    root = case.directory / "root"
    (root / "proc").mkdir(parents=True)
    shutil.copy(program(case, "foreign", "static"), root / "program")
    words = ["chroot", root, "/program", 96, 1, case.seed, "all"]
    assert "OK foreign all" in case.run(words, options=INJECT).text()
