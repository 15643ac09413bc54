"""What `swaptide run` passes through: statuses, streams, terminals, signals, the environment."""

import contextlib
import fcntl
import json
import os
import pty
import random
import resource
import select
import signal
import subprocess
import termios
import time

import pytest

from ctl import PRESSURE, wait_for_line
from harness import Failure, digest, full, param, status_of_signal
from processes import is_zombie


@pytest.mark.swaptide(budget=32, swaps=False)
def test_exit_codes(case):
    for code in (0, 1, 7, 255):
        case.run(["sh", "-c", f"exit {code}"], status=code)
    for name in ("TERM", "KILL", "ABRT", "SEGV"):
        case.run(
            ["sh", "-c", f"kill -{name} $$"], status=status_of_signal(getattr(signal, f"SIG{name}"))
        )


@pytest.mark.swaptide(budget=32, swaps=False)
def test_summary(case):
    """Without --quiet there is one line of summary on stderr, and nothing on stdout."""
    done = case.start(["true"], quiet=False).process
    done.wait()
    directory = case.directory / "run1"
    lines = (directory / "stderr").read_text().splitlines()
    assert done.returncode == 0, f"exit status {done.returncode}: {lines}"
    assert (directory / "stdout").read_text() == "", "there is something on stdout"
    assert case.native or len(lines) == 1, f"{len(lines)} lines on stderr instead of one of summary"


@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_bad_input(case):
    """Wrong arguments: exit status 2 and one line that names what is wrong."""
    tries = [
        (["--ram", "lots", "--", "true"], "--ram"),
        (["--ram", "1K", "--", "true"], "--ram"),
        (["--ram", "64M", "--", "/no/such/program"], "/no/such/program"),
        (
            ["--ram", "64M", "--report", "/no/such/directory/r.json", "--", "true"],
            "/no/such/directory",
        ),
        (
            ["--ram", "64M", "--swap", "file:/no/such/directory/f:1G", "--", "true"],
            "/no/such/directory",
        ),
        (["--ram", "64M", "--swap", "nonsense", "--", "true"], "--swap"),
    ]
    for words, named in tries:
        result = subprocess.run(
            [case.swaptide, "run", *words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        lines = result.stderr.splitlines()
        said = f"{' '.join(words)}: exit status {result.returncode}, stderr {result.stderr[:300]!r}"
        assert result.returncode == 2, f"{said}; expected status 2"
        assert len(lines) == 1 and named in lines[0], (
            f"{said}; expected one line that names {named}"
        )


@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_doctor_fix(case):
    """A check that fails has the command that repairs it, in JSON as in the text."""
    environment = os.environ | {"SWAPTIDE_AGENT": "/no/agent.so"}

    def doctor(*words):
        done = subprocess.run(
            [case.swaptide, "doctor", *words],
            env=environment,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 1, f"exit status {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    findings = json.loads(doctor("--json"))["findings"]
    failed = {found["name"]: found["fix"] for found in findings if not found["ok"]}
    assert {"library", "open files"} <= failed.keys(), f"not failed as expected: {findings}"
    assert all(failed.values()), f"without a command: {failed}"
    lines = doctor().splitlines()
    for found in findings:
        line = next(line for line in lines if line[4:].startswith(f"{found['name']}:"))
        if found["ok"]:
            assert found["fix"] is None and line.startswith("ok "), f"{found}, {line}"
        else:
            assert line.startswith("NO ") and line.endswith(f" : {found['fix']}"), (
                f"{found}, {line}"
            )


@pytest.mark.swaptide(budget=32, swaps=False)
def test_pipes(case):
    """20 MB of random bytes through a pipe on each side come out as they went in."""
    source = case.directory / "input"
    source.write_bytes(random.Random(case.seed).randbytes(20 << 20))
    reader, writer = os.pipe()
    feeder = case.start(["cat", source], native=True, stdout=writer)
    os.close(writer)
    program = case.start(["cat"], stdin=reader)
    os.close(reader)
    done = program.finish()
    feeder.finish()
    assert digest(done.stdout) == digest(source), "what came out is not what went in"
    assert case.run(["sh", "-c", "cat; echo end >&2"], stdin=source).errors() == "end\n", (
        "stderr is not untouched"
    )


@pytest.mark.swaptide(budget=48, swaps=False)
def test_environment(case):
    """The variables and the directory the program sees are the ones it was started with, LD_PRELOAD
    and swaptide's apart.
    """
    where = case.directory / "a directory with spaces"
    where.mkdir()
    names = {
        "PATH": os.environ["PATH"],
        "HOME": "/",
        "ODD": "two words\nand a line",
        "EMPTY": "",
        "LC_ALL": "C",
    }
    script = (
        "import os, sys; print(os.getcwd()); print(sys.argv[1:]);"
        "print(sorted(i for i in os.environ.items() if i[0] != 'LD_PRELOAD' and not "
        "i[0].startswith('SWAPTIDE')))"
    )
    case.compare([case.python, "-c", script, "", "a b", "--ram", "*"], env=names, cwd=where)


@pytest.mark.swaptide(budget=48, swaps=False, forks=True)
def test_chains(case):
    """Programs that become and start others, with and without an environment."""
    case.compare(
        [
            "sh",
            "-c",
            "echo one; sh -c 'echo two; exec env -i sh -c \"echo three; exec /bin/echo four\"'",
        ]
    )
    case.compare(["sh", "-c", "for i in 1 2 3 4 5 6 7 8; do (echo $i) | cat; done"])
    case.compare(["sh", "-c", "seq 1000 | xargs -n 50 echo | sort | tail -n 3"])
    case.compare(
        [
            case.python,
            "-c",
            "import subprocess as s; print(s.run(['sh', '-c', 'exit 9']).returncode)",
        ]
    )


@pytest.mark.swaptide(budget=32, allowance=8, forks=True)
def test_chain_pressure(case):
    """Programs that others start, with an exec between them and the command, swap all the same."""
    words = f"{case.python} {PRESSURE} 60 closefds"
    script = f"env MORE=1 {words}; sh -c 'exec {words}'"
    done = case.run(["sh", "-c", script])
    assert done.text() == "OK closefds\nOK closefds\n", f"it printed {done.text()!r}"


@pytest.mark.full
@pytest.mark.swaptide(budget=32, allowance=4)
def test_cleared_environment(case):
    """The budget holds also for a program that is started with an empty environment."""
    done = case.run(["sh", "-c", f"env -i {case.python} {PRESSURE} 100 closefds"])
    assert done.text() == "OK closefds\n", f"it printed {done.text()!r}"


@pytest.mark.swaptide(budget=32, allowance=4)
def test_signals_passed(case):
    """USR1 and TERM sent to `swaptide run` arrive once each; so do those sent to the program
    itself.
    """
    program = case.start([case.python, PRESSURE, 100, "wait"])
    target = int(wait_for_line(case, program, "ready").split()[1])
    for number, pid in enumerate((program.pid, target, program.pid), 1):
        os.kill(pid, signal.SIGUSR1)
        # Two that wait at the same time are one.
        wait_for_line(case, program, f"USR1 number {number}")
    time.sleep(0.3)
    os.kill(program.pid, signal.SIGTERM)
    done = program.finish(status=7)
    assert done.text().splitlines()[-1] == "USR1 3 then SIGTERM 1", (
        f"it counted {done.text().splitlines()[-1]!r}"
    )


@pytest.mark.swaptide(budget=32, allowance=4)
def test_killed(case):
    """A program ended by a signal while much of it is swapped out: the status says so, and nothing
    stays behind.
    """
    for number in (signal.SIGKILL, signal.SIGSEGV):
        program = case.start([case.python, PRESSURE, 100, "wait"])
        os.kill(int(wait_for_line(case, program, "ready").split()[1]), number)
        program.finish(status=status_of_signal(number))


@pytest.mark.swaptide(budget=32, allowance=4)
def test_run_killed(case):
    """`swaptide run` itself is killed: the program must not continue with pages missing, and
    must not hang.
    """
    program = case.start([case.python, PRESSURE, 100, "wait"])
    target = int(wait_for_line(case, program, "ready").split()[1])
    program.process.kill()
    program.process.wait()
    if case.native:
        return
    # Either it is ended with its supervisor, or it carries on and verifies: both are right, a wrong
    # page is not.
    with contextlib.suppress(ProcessLookupError):
        os.kill(target, signal.SIGTERM)
    while case.hung is None and os.path.exists(f"/proc/{target}/comm"):
        try:
            if os.waitpid(target, os.WNOHANG)[0]:
                break
        except ChildProcessError:
            pass
        time.sleep(0.05)
    lines = (program.directory / "stdout").read_text().splitlines()
    assert not any("differs" in line for line in lines), (
        f"it went on with wrong data: {lines[-1]!r}"
    )
    assert not os.path.exists(f"/proc/{target}") or is_zombie(target), "it is still there"


@pytest.mark.swaptide(budget=32, allowance=4)
def test_stopped(case):
    """STOP and CONT: a stopped program continues where it was."""
    program = case.start([case.python, PRESSURE, 100, "wait"])
    target = int(wait_for_line(case, program, "ready").split()[1])
    os.kill(target, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(target, signal.SIGCONT)
    os.kill(program.pid, signal.SIGTERM)
    program.finish(status=7)


def read_terminal(case, master, until):
    """Everything the terminal shows until it shows `until` (None: until it is closed)."""
    seen = b""
    while case.hung is None and (until is None or until not in seen):
        ready, _, _ = select.select([master], [], [], 0.2)
        if not ready:
            continue
        try:
            more = os.read(master, 4096)
        except OSError:
            more = b""
        if not more:
            break
        seen += more
    return seen


@pytest.mark.swaptide(budget=32, allowance=4)
def test_terminal(case):
    """A pseudo-terminal as controlling terminal: all three streams are one, a line can be typed,
    ctrl-C arrives once.
    """
    master, slave = pty.openpty()

    def own_the_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    program = case.start(
        [case.python, PRESSURE, 100, "terminal"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        preexec=own_the_terminal,
    )
    os.close(slave)
    seen = read_terminal(case, master, b"terminals True True True")
    os.write(master, b"hello\n")
    seen += read_terminal(case, master, b"line hello")
    os.write(master, b"\x03")
    seen += read_terminal(case, master, None)
    program.finish(status=8)
    os.close(master)
    assert b"SIGINT 1" in seen, f"the terminal showed {seen[-200:]!r}"


@pytest.mark.swaptide(budget=32)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        param("self", "closefds", id="self", allowance=4),
        full("spawn", "spawn", id="spawn", allowance=16, forks=True),
    ],
)
def test_closefds(case, name, mode):
    """Programs that close every descriptor that is not theirs."""
    done = case.run([case.python, PRESSURE, 100, mode])
    assert done.text() == f"OK {mode}\n", f"it printed {done.text()!r}"


@pytest.mark.swaptide(budget=32, swaps=False)
def test_inherits(case):
    """Closed streams, ignored and blocked signals, timers, and the environment as it stands are the
    program's as without swaptide.
    """
    program = [case.binary("inherits"), 1, 1, case.seed]
    shows = [*program, "shows"]
    env = {name: text for name, text in os.environ.items() if name.startswith("SWAPTIDE")}
    env["PATH"] = os.environ["PATH"]
    plain = case.run([*program, "gives", *shows], native=True, env=env).text().splitlines()
    # It names the process that swaptide is by what no other process has, so it is taken out.
    plain.remove("LISTEN_PIDFDID=3")
    words = shows if case.native else case.command(*shows, options=("--quiet",))
    lines = case.run([*program, "gives", *words], native=True, env=env).text().splitlines()
    lines = [line for line in lines if line != "LISTEN_PIDFDID=3"]
    assert "LISTEN_PID of this process" in plain and plain[-1] == "OK inherits shows", f"{plain}"
    if lines != plain:
        raise Failure("it has\n" + "\n".join(lines) + "\ninstead of\n" + "\n".join(plain))


@pytest.mark.swaptide(budget=32, swaps=False)
def test_inherits_alarm(case):
    """A timer that was set before ends the program."""
    program = [case.binary("inherits"), 1, 1, case.seed]
    words = [*program, "waits"]
    words = words if case.native else case.command(*words, options=("--quiet",))
    case.run([*program, "alarms", *words], native=True, status=status_of_signal(signal.SIGALRM))


@pytest.mark.swaptide(budget=32, swaps=False)
def test_inherits_parent(case):
    """The program's parent is the supervisor: a signal to it is dropped, and orphans come to it."""
    program = [case.binary("inherits"), 1, 1, case.seed]
    words = [*program, "child"]
    words = words if case.native else case.command(*words, options=("--quiet",))
    lines = case.run([*program, "parent", *words], native=True).text().splitlines()
    kin, came = ("another process", "the") if case.native else ("the program's parent", "no")
    assert lines == [
        f"an orphan is a child of {kin}",
        "OK inherits child",
        f"status 0, {came} signal came",
        "OK inherits parent",
    ], f"it printed {lines}"


@pytest.mark.swaptide(budget=32)
def test_leaves(case):
    """A program unmounts the directory in which it was started, and relative paths that were given
    to swaptide are those of that directory.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    place, swap = case.directory / "place", case.directory / "swap"
    place.mkdir()
    swap.mkdir()
    program = [case.binary("leaves"), 64, 1, case.seed]
    words = [*program, "unmounts", place]
    if not case.native:
        swaps = ["--swap", "zram:2M", "--swap", "file:../swap:256M"]
        words = case.command(*words, options=("--quiet", "--report", "../report.json", *swaps))
    done = case.run([*program, "mounts", place, *words], native=True, status=None)
    if done.status == 77:
        pytest.skip("mount namespaces are not permitted")
    lines = done.text().splitlines()
    assert done.status == 0 and lines[-1:] == ["OK leaves unmounts"], f"{done.status}: {lines}"
    if not case.native:
        stats = json.loads((case.directory / "report.json").read_text())["stats"]
        assert stats["pswpout"] > 0, f"nothing went to the file: {stats}"
