"""Programs that mean harm, inside of a run and outside, as root and as nobody: nothing outside the
run ends or is charged, and the daemon lives.

docs/security.md names these cases. Each fails without the repair that it is for."""

import ctypes
import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import unprivileged
from ctl import CONFIG, PRESSURE, Daemon, ask, ended, until, wait_for_line
from harness import HERE, MIB, Failure
from processes import descendants, open_files

OFFSETS = {name: str(at) for name, at in json.loads((HERE / "segment.json").read_text()).items()}


def environment(**more):
    return {**os.environ, **OFFSETS, "VICTIM": "1", **more}


def need_root():
    if os.geteuid() != 0:
        pytest.skip("only root can drop privileges")


def hostile(case, *words, status=0, last=None, env=None, options=(), **how):
    """Runs the hostile program to its end, which must be as it says."""
    argv = [case.binary("hostile"), *words]
    done = case.run(argv, status=status, env=env or environment(), options=options, **how)
    last = last or f"OK {words[0]}"
    assert last in done.text(), f"{words}: {done.text()!r}"
    return done


class Bystander:
    """A process of root's outside of every run, with memory."""

    def __init__(self, megabytes):
        script = f"import time; held = bytearray(b'x' * ({megabytes} << 20)); "
        script += "print('there', flush=True); time.sleep(100)"
        self.process = subprocess.Popen(["python3", "-c", script], stdout=subprocess.PIPE)
        self.process.stdout.readline()
        self.pid = self.process.pid

    def lives(self):
        return self.process.poll() is None

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.mark.swaptide(budget=16, swaps=False, native=False)
def test_security_deputy(case):
    """A program names a process of another user in the segment: the supervisor neither ends it nor
    counts its memory.
    """
    need_root()
    victim = Bystander(96)
    try:
        for options in (["--strict"], []):
            done = hostile(case, "deputy", str(victim.pid), options=options)
            peak = int(done.report["peak_resident_bytes"])
            assert victim.lives(), f"{options}: the supervisor ended a process outside of the run"
            assert peak < 64 * MIB, (
                f"{options}: {peak / MIB:.0f} MiB: the memory of a process outside of the run is "
                f"charged"
            )
    finally:
        victim.end()


def with_daemon(case):
    place = case.directory / "swap"
    place.mkdir()
    return Daemon(case, CONFIG.format(place=place))


@pytest.mark.daemon
@pytest.mark.swaptide(budget=112, swaps=False, native=False)
def test_security_mirror(case):
    """An area's mirror that is not there, as one word of the segment: neither supervisor nor daemon
    ends, nor an engine of another program.
    """
    need_root()
    device = ["--swap", "zram:4M", "--swap", f"file:{case.directory}:256M"]
    hostile(case, "mirror", options=device)
    daemon = with_daemon(case)
    program, _ = daemon.program(80, "--group", "/a")
    hostile(case, "mirror", env=environment(SWAPTIDE_DIRECTORY=daemon.env["SWAPTIDE_DIRECTORY"]))
    assert daemon.process.poll() is None, "the daemon has ended"
    assert program.pid in [int(line.split()[0]) for line in daemon.ctl("list").splitlines()], (
        "the other run is gone"
    )
    ended(case, program)
    daemon.stop()


@pytest.mark.daemon
@pytest.mark.swaptide(budget=112, swaps=False, native=False)
def test_security_truncate(case):
    """The segment can be neither cut nor made longer: not that of a run, not that of a daemon, not
    that of a daemon which was started again.
    """
    hostile(case, "truncate")
    daemon = with_daemon(case)
    program, inside = daemon.program(80, "--group", "/a")
    env = environment(SWAPTIDE_DIRECTORY=daemon.env["SWAPTIDE_DIRECTORY"])
    hostile(case, "truncate", env=env)
    assert daemon.process.poll() is None and program.process.poll() is None, (
        "daemon or program ended with the segment"
    )
    daemon.kill()
    daemon.start()
    until(case, "its process", lambda: daemon.ctl.value("/a", "processes") >= 1)
    hostile(case, "truncate", env=env)
    os.kill(inside, signal.SIGUSR1)
    wait_for_line(case, program, "USR1 number 1")
    ended(case, program)
    daemon.stop()


@pytest.mark.swaptide(budget=16, swaps=False, native=False)
def test_security_maps(case):
    """A process that is a set-uid program when its request is answered: no process is handed that
    program's mappings.
    """
    need_root()
    if not os.path.exists("/usr/bin/su"):
        raise Failure("there is no /usr/bin/su")
    hostile(case, "maps", "/usr/bin/su", status=137)
    hostile(case, "race", "/usr/bin/su", "60", last="OK race")


def set_uid_program(case):
    """A copy of the hostile program that is set-uid root, which every user can execute."""
    program = case.directory / "program"
    shutil.copy(case.binary("hostile"), program)
    for place in (case.directory, case.suite.root, case.binary("hostile").parent):
        place.chmod(0o755)
    program.chmod(0o4755)
    return program


@pytest.mark.swaptide(budget=24, swaps=False, native=False)
def test_security_follow(case):
    """A program of another user in root's run asks that its fork be followed, and executes a
    set-uid program instead, which forks: that one's child begins where it should. The same where
    root's supervisor follows forks.
    """
    need_root()
    program = set_uid_program(case)
    argv = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    argv += [case.binary("hostile"), "follow", program]
    for more in ({}, {"SWAPTIDE_TEST_FOLLOWED_FORKS": "1"}):
        done = case.run(argv, env=environment(**more))
        expected = "refused\nbegun: user 65534, effective 0\nOK follow\n"
        assert done.text() == expected, f"{more}: {done.text()!r}"


@pytest.mark.unprivileged
@pytest.mark.swaptide(budget=24, swaps=False, native=False)
def test_security_follow_executed(case):
    """In a run that follows forks: a process that executes a program is no longer followed, and
    that program has no rights of its own.
    """
    need_root()
    program = set_uid_program(case)
    done = case.run([case.binary("hostile"), "follow", program], env=environment())
    expected = "followed\nbegun: user 65534, effective 65534\nOK follow\n"
    assert done.text() == expected, f"{done.text()!r}"


class FalseDaemon:
    """Answers as a daemon does, at a socket in a directory that is given to `owner`; notes what it
    is asked. The kernel says of the socket that `listener` listens there."""

    def __init__(self, directory, owner, listener, descriptor=None):
        self.asked = []
        self.descriptor = descriptor
        directory.mkdir(mode=0o700, exist_ok=True)
        path = directory / "daemon.sock"
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(path))
        path.chmod(0o777)
        child = os.fork()
        if child == 0:
            os.setresuid(listener, listener, listener)
            self.socket.listen()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        os.chown(directory, owner, owner)
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        while True:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            with client:
                client.settimeout(5)
                line = client.recv(8192)
                if line:
                    self.asked.append(line)
                if self.descriptor is not None and b"look" in line:
                    joined = {"budget": 1 << 30, "pool_cap": 1 << 28, "codec": 0, "group": "/"}
                    answer = json.dumps({"joined": joined}).encode() + b"\n"
                    socket.send_fds(client, [answer], [self.descriptor])

    def close(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join()


@pytest.mark.swaptide(budget=24, swaps=False, native=False)
def test_security_false_daemon(case):
    """Another user has made the directory in which a daemon would be, or listens there, or hands
    out a segment that can be cut: nothing is told to it, and the run says why it does not begin.
    """
    need_root()
    other = 65533
    mine = os.geteuid()
    size = 4 << 20
    file = os.memfd_create("segment", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    for name, owner, listener, descriptor, said in (
        ("made", other, other, None, "another user's directory"),
        ("listens", mine, other, None, "user 65533 answers there"),
        ("segment", mine, mine, file, "could be cut"),
    ):
        directory = case.directory / name
        daemon = FalseDaemon(directory, owner, listener, descriptor)
        env = environment(SWAPTIDE_DIRECTORY=str(directory))
        words = [case.swaptide, "run", "--ram", "24M", "--", "echo", "begun"]
        done = subprocess.run(
            words, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        daemon.close()
        assert done.returncode == 2 and done.stdout == "" and said in done.stderr, f"{name}: {done}"
        assert len(done.stderr.splitlines()) == 1 and "--no-daemon" in done.stderr, f"{done}"
        assert descriptor is not None or daemon.asked == [], f"{name} was told {daemon.asked}"
    os.close(file)
    # An ordinary user without a directory of its own: one next to other temporary files is.
    shared = case.directory / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    case.directory.chmod(0o755)
    case.suite.root.chmod(0o755)
    directory = shared / f"swaptide-{unprivileged.NOBODY}"
    daemon = FalseDaemon(directory, other, other)
    directory.chmod(0o711)
    env = environment(TMPDIR=str(shared))
    for name in ("XDG_RUNTIME_DIR", "SWAPTIDE_DIRECTORY", "SWAPTIDE_NO_DAEMON"):
        env.pop(name, None)
    swaptide = unprivileged.copy_of(case.swaptide, case.directory)
    for number, words in enumerate((["run", "--", "echo", "begun"], ["ctl", "list"], ["top"])):
        scratch = case.directory / f"device{number}"
        scratch.mkdir()
        done = subprocess.run(
            [swaptide, *words],
            env=env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            preexec_fn=partial(unprivileged.become_nobody, scratch),
        )
        assert done.returncode == 2 and done.stdout == "", f"{words}: {done}"
        assert "another user's directory" in done.stderr, f"{words}: {done}"
    daemon.close()
    assert daemon.asked == [], f"a user's directory that is another's: it was told {daemon.asked}"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o711 and (directory / "daemon.sock").exists()


UNDUMPABLE = """if True:
    import ctypes, os, signal, sys, zlib
    blocks = [os.urandom(65536) for _ in range(100 * 16)]
    sums = [zlib.crc32(block) for block in blocks]
    assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    print("ready", os.getpid(), flush=True)
    signal.sigwait([signal.SIGUSR1])
    print("OK" if [zlib.crc32(block) for block in blocks] == sums else "WRONG", flush=True)
"""
PR_CAPBSET_DROP = 24
CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON = 19, 21, 38


def without_looking():
    """For `preexec_fn`: what is executed may not look into others, as in a container."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "dropping a capability")


@pytest.mark.daemon
@pytest.mark.swaptide(budget=112, swaps=False, native=False)
def test_security_undumpable(case):
    """A daemon that is started again and may not ask a program whether it has the segment (it is
    not dumpable): what the program has on the areas stays its own.
    """
    need_root()
    place = case.directory / "swap"
    place.mkdir()
    daemon = Daemon(case, CONFIG.format(place=place), without_looking)
    program, inside = daemon.started([case.python, "-c", UNDUMPABLE], "--group", "/a")
    daemon.ctl("group", "/a", "ram.max=24M")
    until(
        case,
        "pages on the file",
        lambda: json.loads(daemon.ctl("devices", "--json"))[0]["used_bytes"] > 32 * MIB,
    )
    daemon.kill()
    daemon.start()
    # It descends from a run that is kept, so it is kept and charged.
    until(case, "its process", lambda: daemon.ctl.value("/a", "processes") == 1)
    assert json.loads(daemon.ctl("devices", "--json"))[0]["used_bytes"] > 32 * MIB
    os.kill(inside, signal.SIGUSR1)
    done = program.finish()
    assert done.text().endswith("OK\n"), f"{done.text()!r}"
    daemon.stop()


@pytest.mark.swaptide(budget=32, allowance=16, forks=True, native=False)
def test_security_holders(case):
    """A child of a fork of which the supervisor cannot have a descriptor, for the run has more
    processes than its limit of open files allows: it keeps what it inherited.
    """
    devices = ["--swap", "zram:2M", "--swap", f"file:{case.directory}:400M"]

    def few_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    case.run_c("holders", "crowd", megabytes=64, options=devices, preexec=few_files)


@pytest.mark.full
@pytest.mark.swaptide(budget=32, allowance=16, forks=True, native=False)
def test_security_holders_number(case):
    """A child of a fork that has the number of one which has just ended, before the supervisor has
    heard of that: it keeps what it inherited.
    """
    need_root()
    devices = ["--swap", "zram:2M", "--swap", f"file:{case.directory}:400M"]
    case.run_c("holders", "number", megabytes=64, options=devices)


@pytest.mark.swaptide(budget=32, allowance=8, forks=True, native=False)
def test_security_requests(case):
    """Requests of every kind from the wrong process, half, too long, with descriptors, or never
    sent: a program next to them works on.
    """
    need_root()
    heap = f"{case.binary('heap')} 64 4 {case.seed} threads"
    attack = f"{case.binary('hostile')} requests 3000 {case.seed}"
    # Its own name in the environment of the shell: the hostile program is of another user, in the
    # same run.
    done = case.run(
        ["sh", "-c", f"{attack} & {heap}; h=$?; wait $!; echo $? $h"], env=environment(), status=0
    )
    assert (
        "OK requests" in done.text()
        and "OK heap threads" in done.text()
        and done.text().endswith("0 0\n")
    ), f"{done.text()!r}"


@pytest.mark.daemon
@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_security_scribble(case):
    """Random words all over the segment of a run, and of a daemon: its own run may suffer;
    supervisor, daemon and all others live on.
    """
    need_root()
    victim = Bystander(96)
    try:
        for seed in (case.seed, case.seed + 1):
            report = case.directory / f"report-{seed}.json"
            words = [
                case.swaptide,
                "run",
                "--ram",
                "32M",
                "--strict",
                "--quiet",
                "--report",
                report,
                "--swap",
                "zram:4M",
            ]
            words += [
                "--swap",
                f"file:{case.directory}:64M",
                "--",
                case.binary("hostile"),
                "scribble",
                "2",
                seed,
            ]
            done = subprocess.run(
                [str(word) for word in words],
                env=environment(VICTIM=str(victim.pid)),
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=60,
            )
            assert (
                report.exists() and json.loads(report.read_text())["exit_status"] == done.returncode
            ), (
                f"no report: the supervisor has ended: {done.returncode}, {done.stdout!r}, "
                f"{done.stderr!r}"
            )
            assert victim.lives(), "a process outside of the run was ended"
        daemon = with_daemon(case)
        env = {
            **environment(VICTIM=str(victim.pid)),
            "SWAPTIDE_DIRECTORY": daemon.env["SWAPTIDE_DIRECTORY"],
        }
        words = case.command(
            case.binary("hostile"),
            "scribble",
            "3",
            str(case.seed),
            ram=None,
            options=["--quiet", "--strict"],
        )
        attack = subprocess.Popen(
            [str(word) for word in words],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while attack.poll() is None:
            assert daemon.process.poll() is None, (
                f"the daemon ended with {daemon.process.returncode}"
            )
            for question in ("list", "tiers", "devices"):
                ask(case, question, env=daemon.env)
            time.sleep(0.1)
        assert daemon.process.poll() is None, f"the daemon ended with {daemon.process.returncode}"
        assert victim.lives(), "a process outside of the runs was ended"
        status, text, errors = ask(case, "list", env=daemon.env)
        assert status == 0, f"the daemon does not answer: {text!r} {errors!r}"
        daemon.process.terminate()
        daemon.process.wait(timeout=20)
    finally:
        victim.end()


# Each request (swaptide-ipc/src/wire.rs), and how many bytes it has behind its letter.
REQUESTS = ["S0", "A1", "U0", "H8", "P0", "M0", "T0", "I0", "F20", "R8", "J0", "G8", "V20", "K0"]


@pytest.mark.swaptide(budget=32, native=False)
def test_security_inject(case):
    """A program asks for every failure that tests can have: the supervisor, which is the pager of
    its shared memory, goes by its own environment, and so does the engine. All pages come back.
    """
    areas = ["--swap", "zram:2M", "--swap", f"file:{case.directory}:256M"]
    done = hostile(case, "inject", "48", str(case.seed), options=["--shared", *areas])
    stats, errors = done.report["stats"], done.report["errors"]
    assert stats["pswpin"] > 1000 and errors["pages_poisoned"] == 0, f"{stats}, {errors}"


@pytest.mark.swaptide(budget=32, native=False)
def test_security_sockets(case):
    """The run's socket is for those that descend from its supervisor: not for others of its user,
    nor for root in a container with its network.
    """
    # Asked by a program of the run, what needs no userfaultfd and no --shared is given.
    hostile = case.binary("hostile")
    words = [case.swaptide, "run", "--quiet", "--ram", "32M"]
    words += ["--swap", f"file:{case.directory}:64M", "--", hostile, "ask", "-", *REQUESTS]
    done = subprocess.run(words, capture_output=True, text=True)
    given = "".join(re.findall(r"^(.) given$", done.stdout, re.MULTILINE))
    assert given == "SAUPMTI", f"a program of the run is given: {done.stdout!r} {done.stderr!r}"
    program = case.start([case.python, PRESSURE, 60, "wait"], env=environment())
    inside = wait_for_line(case, program, "ready").split()[1]
    variables = Path(f"/proc/{inside}/environ").read_bytes().split(b"\0")
    name = next(
        v.split(b"=", 1)[1].decode() for v in variables if v.startswith(b"SWAPTIDE_SOCKET=")
    )
    assert f"@{name}" in Path("/proc/net/unix").read_text(), "the name of the socket"
    ways = {"another process of the user": []}
    if os.geteuid() == 0:
        ways["a process of the user nobody"] = [
            "setpriv",
            "--reuid",
            "65534",
            "--regid",
            "65534",
            "--clear-groups",
        ]
        ways["root of another pid namespace"] = ["unshare", "--pid", "--fork", "--mount-proc"]
    os.chmod(hostile.parent, 0o755)
    for asker, prefix in ways.items():
        words = [*prefix, str(hostile), "ask", name, *REQUESTS]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True)
        assert done.stdout == "".join(f"{word[0]} refused\n" for word in REQUESTS), (
            f"{asker} asks: {done.stdout!r} {done.stderr!r}"
        )
    # The control sockets of ctl.
    if os.geteuid() == 0:
        for path in ("/run/swaptide", os.environ.get("SWAPTIDE_DIRECTORY", "")):
            for place in Path(path).glob("*.sock") if path else ():
                words = [
                    "setpriv",
                    "--reuid",
                    "65534",
                    "--regid",
                    "65534",
                    "--clear-groups",
                    "python3",
                    "-c",
                    "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])",
                    str(place),
                ]
                done = subprocess.run(words, capture_output=True, text=True)
                assert "PermissionError" in done.stderr, (
                    f"the user nobody opens {place}: {done.stderr!r}"
                )
    ended(case, program)


# Connects to a run's socket and leaves there what its last holder waits for: connections that have
# something to send, to a process that does not read.
LINGERS = """
import array, os, signal, socket, struct, sys, time
is_outside = len(sys.argv) > 1
name = b"\\0" + (sys.argv[1] if is_outside else os.environ["SWAPTIDE_SOCKET"]).encode()
near, far = [], []
for _ in range(24):
    server = socket.create_server(("127.0.0.1", 0))
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    one.connect(server.getsockname())
    far.append(server.accept()[0])
    one.setblocking(False)
    try:
        while True:
            one.send(bytes(65536))
    except BlockingIOError:
        near.append(one)
# A process that ends waits for no socket: the last to drop them is the supervisor, or no process.
if not is_outside:
    os.kill(os.getppid(), signal.SIGSTOP)
begins, begin = os.pipe()
sender = os.fork()
if sender == 0:
    os.close(begin)
    os.read(begins, 1)
    for number, one in enumerate(near):
        packet = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = array.array("i", [one.fileno()] * 20)
        try:
            packet.connect(name)
            said = b"HS"[number % 2 :][:1]
            packet.sendmsg([said], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        except OSError:
            pass
        packet.detach()
    os._exit(0)
for one in near:
    one.close()
os.close(begin)
os.waitpid(sender, 0)
if not is_outside:
    os.kill(os.getppid(), signal.SIGCONT)
print("ready", os.getpid(), flush=True)
time.sleep(600)
"""
AS_NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]


def assert_ends(case, program, what):
    """The run takes a signal at once: its supervisor attends to it."""
    time.sleep(0.5)
    os.kill(program.pid, signal.SIGTERM)
    until(case, what, lambda: program.process.poll() is not None, seconds=15)


@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_security_lingers(case):
    """What another user, or a program of the run, leaves in a connection to the supervisor keeps it
    for a moment, and not for as long as a socket may linger.
    """
    program = case.start([case.python, PRESSURE, 8, "wait"])
    inside = wait_for_line(case, program, "ready").split()[1]
    variables = Path(f"/proc/{inside}/environ").read_bytes().split(b"\0")
    name = next(v.split(b"=", 1)[1] for v in variables if v.startswith(b"SWAPTIDE_SOCKET="))
    prefix = AS_NOBODY if os.geteuid() == 0 else []
    words = [*prefix, "python3", "-c", LINGERS, name.decode()]
    # Slow, so that it is the last to drop what was sent.
    supervisor = int(Path(f"/proc/{inside}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(supervisor, signal.SIGSTOP)
    attack = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    try:
        assert attack.stdout.readline().startswith(b"ready")
        os.kill(supervisor, signal.SIGCONT)
        assert_ends(case, program, "the end of a run that a stranger has written to")
        program.finish(7)
    finally:
        if program.process.poll() is None:
            os.kill(supervisor, signal.SIGCONT)
        attack.kill()
        attack.wait()
        attack.stdout.close()
    program = case.start([case.python, "-c", LINGERS])
    inside = int(wait_for_line(case, program, "ready").split()[1])
    try:
        assert_ends(case, program, "the end of a run whose program has written to it")
        program.finish(143)
    finally:
        if os.path.exists(f"/proc/{inside}"):
            os.kill(inside, signal.SIGKILL)


# Waits for a file, and starts a program then.
STARTS_LATER = """
import os, subprocess, sys, time
print("ready", os.getpid(), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
words = [sys.executable, "-c", "held = bytearray(64 << 20); print('child')"]
done = subprocess.run(words, capture_output=True, text=True, timeout=40)
print(done.stdout.strip(), flush=True)
"""
# Has the name of a supervisor that is gone, and says what it hears there.
IMPOSTOR = """
import socket, sys
listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listening.bind(b"\\0" + sys.argv[1].encode())
listening.listen()
print("listens", flush=True)
held = []
while True:
    held.append(listening.accept()[0])
    said, came, *_ = held[-1].recvmsg(64, 1024)
    print("heard", said.hex() or "nothing", len(came), flush=True)
"""


@pytest.mark.swaptide(budget=16, allowance=96, swaps=False, native=False)
def test_security_impostor(case):
    """Another user takes the name of a supervisor that was killed: the run's processes do not speak
    to that user, and send no descriptor there.
    """
    need_root()
    mark = case.directory / "mark"
    program = case.start([case.python, "-c", STARTS_LATER, mark])
    inside = wait_for_line(case, program, "ready").split()[1]
    variables = Path(f"/proc/{inside}/environ").read_bytes().split(b"\0")
    name = next(v.split(b"=", 1)[1] for v in variables if v.startswith(b"SWAPTIDE_SOCKET="))
    supervisor = int(Path(f"/proc/{inside}/stat").read_text().rsplit(")", 1)[1].split()[1])
    assert supervisor != program.pid, "the process that the user started is the supervisor"
    os.kill(supervisor, signal.SIGKILL)
    is_free = lambda: name.decode() not in Path("/proc/net/unix").read_text()  # noqa: E731
    until(case, "the end of the supervisor's socket", is_free)
    words = [*AS_NOBODY, "python3", "-c", IMPOSTOR, name.decode()]
    impostor = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    try:
        assert impostor.stdout.readline() == "listens\n"
        mark.touch()
        wait_for_line(case, program, "child")
    finally:
        impostor.kill()
        heard = impostor.communicate()[0].splitlines()
    assert heard and set(heard) == {"heard nothing 0"}, heard
    program.process.wait()


@pytest.mark.swaptide(budget=24, swaps=False, native=False)
def test_security_fsize(case):
    """One process with a limit on the size of files, whether or not it ignores the signal: it keeps
    its data, and the swap file stays for the others.
    """
    report = case.directory / "report.json"
    binary = case.binary("hostile")
    heap = f"{case.binary('heap')} 80 1 {case.seed} threads"
    script = f"{binary} fill 40 1 && {binary} fill 40 0 && {heap}"
    words = case.command(
        "sh",
        "-c",
        script,
        ram="24M",
        options=[
            "--quiet",
            "--swap",
            "zram:2M",
            "--swap",
            f"file:{case.directory}:256M",
            "--report",
            report,
        ],
    )
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment(),
    )
    said = f"status {done.returncode}, {done.stdout!r}, {done.stderr!r}"
    assert (
        done.returncode == 0
        and done.stdout.count("OK fill") == 2
        and "OK heap threads" in done.stdout
    ), said
    seen = json.loads(report.read_text())
    area = next(area for area in seen["devices"] if area["type"] == "file")
    assert area["state"] == "open" and area["errors"] == 0, (
        f"the limit of one process counts against the device: {area}"
    )
    assert area["peak_used_bytes"] > 16 * MIB, f"others do not use it: {area}"


@pytest.mark.full
@pytest.mark.swaptide(budget=24, swaps=False, native=False)
def test_security_strict(case):
    """--strict ends a run whose memory stays above its budget for 5 s, whatever it is, and none
    that peaks for a moment.
    """
    # All at the same time: most of it is waiting.
    binary = case.binary("hostile")
    shared = "import mmap, time; m = mmap.mmap(-1, 48 << 20); m.write(b'x' * (48 << 20)); "
    shared += "time.sleep({0}); m.close(); time.sleep(4); print('OK lock')"
    ways = (
        ([binary, "lock", 48, 11], ["--strict"], 137),
        ([binary, "lock", 48, 3], ["--strict"], 0),
        ([binary, "lock", 48, 8], [], 0),
        ([case.python, "-c", shared.format(11)], ["--strict"], 137),
        ([case.python, "-c", shared.format(2)], ["--strict"], 0),
    )
    started = []
    for words, options, _ in ways:
        argv = case.command(*words, ram="24M", options=["--quiet", *options])
        started.append(
            subprocess.Popen(
                [str(word) for word in argv],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                stdin=subprocess.DEVNULL,
                env=environment(),
            )
        )
    for (words, options, status), process in zip(ways, started):
        stdout, stderr = process.communicate()
        said = f"{words[1:]} {options}: status {process.returncode}, {stdout!r}, {stderr!r}"
        assert process.returncode == status, said
        assert ("OK lock" in stdout) == (status == 0), said
        assert ("stayed above the 24M budget for 5 s" in stderr) == (status == 137), said


PUNCHED = """if True:
    import os, sys, time, gc
    mark = b"the secret that is " + b"searched for"
    blocks = [b"".join(mark + os.urandom(4064) for _ in range(512)) for _ in range(32)]
    print("ready", os.getpid(), flush=True)
    input()
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    print("forked", flush=True)
    input()
    del blocks
    gc.collect()
    print("freed", flush=True)
    input()
    print("OK", flush=True)
"""


@pytest.mark.swaptide(budget=24, allowance=16, forks=True, native=False)
def test_security_punched(case):
    """What parent and child had in common goes from the swap file when the last of them frees it,
    while it lives; the file shrinks.
    """
    device = f"file:{case.directory}:512M,cipher=none"
    program = case.start(
        [case.python, "-c", PUNCHED],
        stdin=subprocess.PIPE,
        options=["--swap", "zram:4M", "--swap", device],
        env=environment(),
    )

    def go_on():
        program.process.stdin.write(b"\n")
        program.process.stdin.flush()

    def file():
        for pid in descendants(program.pid):
            for fd, target in open_files(pid):
                if (
                    str(case.directory) in target
                    and target.endswith("(deleted)")
                    and os.stat(fd).st_size > 100 * MIB
                ):
                    return open(fd, "rb")
        raise Failure("the swap file is not open in the supervisor")

    wait_for_line(case, program, "ready")
    with file() as swap:

        def found():
            swap.seek(0)
            os.fsync(swap.fileno())
            return sum(
                block.count(b"the secret that is searched for")
                for block in iter(lambda: swap.read(1 << 20), b"")
            )

        until(case, "pages in the file", lambda: os.fstat(swap.fileno()).st_blocks * 512 > 24 * MIB)
        before, blocks = found(), os.fstat(swap.fileno()).st_blocks
        assert before > 1000, f"the text is there {before} times"
        go_on()
        wait_for_line(case, program, "forked")
        go_on()
        wait_for_line(case, program, "freed")
        time.sleep(0.5)
        after, less = found(), os.fstat(swap.fileno()).st_blocks
        # What is left lies in extents with pages of the program's own.
        assert after < before / 4 and less < blocks / 2, (
            f"the text was there {before} times and is {after}; blocks {blocks}, then {less}"
        )
    go_on()
    done = program.finish()
    assert done.text().endswith("OK\n"), f"{done.text()!r}"


DROPPED = """if True:
    import os, time, zlib
    assert os.getuid() == 65534
    blocks = [os.urandom(4096) * 256 for _ in range(64)]
    sums = [zlib.crc32(block) for block in blocks]
    time.sleep(1)
    print("OK" if [zlib.crc32(block) for block in blocks] == sums else "WRONG")
"""


@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_security_userfaultfd(case):
    """--userfaultfd=same-user: no process of another user is given a userfaultfd, and none of them
    is managed; else those of all users are.
    """
    need_root()
    if (
        not Path("/dev/userfaultfd").exists()
        or Path("/proc/sys/vm/unprivileged_userfaultfd").read_text().strip() != "0"
    ):
        pytest.skip("users need no help to a userfaultfd here, or there is none to be had")
    for users, managed in (("all", True), ("same-user", False)):
        report = case.directory / f"report-{users}.json"
        words = case.command(
            "setpriv",
            "--reuid",
            "65534",
            "--regid",
            "65534",
            "--clear-groups",
            "/usr/bin/python3",
            "-c",
            DROPPED,
            ram="32M",
            options=["--quiet", f"--userfaultfd={users}", "--report", report],
        )
        done = subprocess.run(
            [str(word) for word in words], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert done.stdout == "OK\n" and done.returncode == 0, (
            f"{users}: {done.returncode} {done.stdout!r} {done.stderr!r}"
        )
        stats = json.loads(report.read_text())["stats"]
        out = stats["zswpout"] + stats["pswpout"]
        assert (out > 0) == managed, f"{users}: {out} pages went out"
    wrong = subprocess.run(
        case.command("true", ram=None, options=["--userfaultfd=none"]),
        capture_output=True,
        text=True,
    )
    assert (
        wrong.returncode == 2
        and len(wrong.stderr.splitlines()) == 1
        and "same-user" in wrong.stderr
    ), f"{wrong}"


@pytest.mark.daemon
@pytest.mark.swaptide(budget=112, swaps=False, native=False)
def test_security_reopened(case):
    """A link in place of a swap file, put there while no daemon is there: the daemon does not write
    to what it leads to, and says so.
    """
    daemon = with_daemon(case)
    place = case.directory / "swap"
    program, inside = daemon.program(120, "--group", "/a")
    daemon.ctl("group", "/a", "ram.max=32M")
    until(
        case,
        "pages on the file",
        lambda: json.loads(daemon.ctl("devices", "--json"))[0]["used_bytes"] > 8 * MIB,
    )
    names = [path for path in place.iterdir() if path.name.startswith(".swaptide-")]
    assert len(names) == 1, f"{names}"
    daemon.kill()
    target = case.directory / "precious"
    with open(target, "wb") as file:
        file.truncate(2 << 30)
    names[0].unlink()
    names[0].symlink_to(target)
    daemon.start()
    said = daemon.errors.read_text()
    assert "takes no more pages" in said and "is not the one that was used before" in said, (
        f"{said!r}"
    )
    os.kill(inside, signal.SIGUSR1)
    wait_for_line(case, program, "USR1 number 1")
    other, _ = daemon.program(60)
    ended(case, other)
    ended(case, program)
    assert target.stat().st_blocks == 0, "something was written to where the link leads"
    assert names[0].is_symlink(), "another's link was removed"
    daemon.process.terminate()
    daemon.process.wait(timeout=20)


@pytest.mark.daemon
@pytest.mark.swaptide(budget=112, swaps=False, native=False)
def test_security_kept(case):
    """A daemon that has only systemd's store to find its segment by: it is handed the descriptor,
    and knows what it knew.
    """
    store = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    place = case.directory / "swap"
    place.mkdir()
    notify = str(case.directory / "notify")
    store.bind(notify)
    store.settimeout(20)
    os.environ["NOTIFY_SOCKET"] = notify
    try:
        daemon = Daemon(case, CONFIG.format(place=place))
    finally:
        del os.environ["NOTIFY_SOCKET"]
    fds = []
    while not fds:
        text, fds, _, _ = socket.recv_fds(store, 4096, 4)
    assert b"FDSTORE=1" in text and b"FDNAME=swaptide-segment" in text, f"{text!r}"
    daemon.ctl("group", "/b", "ram.max=48M")
    inode = os.fstat(fds[0]).st_ino
    for lie in (False, True):
        daemon.kill()
        handed = os.memfd_create("swaptide", os.MFD_ALLOW_SEALING) if lie else os.dup(fds[0])
        if lie:
            os.ftruncate(handed, os.fstat(fds[0]).st_size)
        start = "LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=swaptide-segment "
        start += f'exec "$0" daemon --config "$1" 3<&{handed} {handed}<&-'
        with open(daemon.errors, "ab") as errors:
            daemon.process = subprocess.Popen(
                ["bash", "-c", start, case.swaptide, str(daemon.config)],
                env=daemon.env,
                pass_fds=[handed],
                stdin=subprocess.DEVNULL,
                stderr=errors,
            )
        until(case, "a daemon that answers", lambda: ask(case, "tiers", env=daemon.env)[0] == 0)
        held = {
            os.stat(fd).st_ino
            for fd, target in open_files(daemon.process.pid)
            if "memfd:swaptide" in target
        }
        # This process has it open, too: what it was handed instead is not taken.
        assert held == {inode}, f"{held}, not {inode}; lie: {lie}"
        assert daemon.ctl.value("/b", "ram.max") == 48 * MIB, "its settings are gone"
        os.close(handed)
    os.close(fds[0])
    store.close()
    daemon.stop()
