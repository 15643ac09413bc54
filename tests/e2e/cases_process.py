"""What passes through `swaptide run` unchanged: exit statuses, streams, terminals, signals, the
environment, other programs.
"""

import fcntl
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import termios
import time
from pathlib import Path

from harness import HERE, MIB, Failure, digest, status_of_signal
from legacy import Case, Skip
from processes import descendants, is_zombie

PRESSURE = HERE / "py" / "pressure.py"


def exit_codes(context):
    for code in (0, 1, 7, 255):
        context.run(["sh", "-c", f"exit {code}"], status=code)
    for name in ("TERM", "KILL", "ABRT", "SEGV"):
        context.run(
            ["sh", "-c", f"kill -{name} $$"], status=status_of_signal(getattr(signal, f"SIG{name}"))
        )


def summary(context):
    """Without --quiet there is one line of summary on stderr, and nothing on stdout."""
    done = context.start(["true"], quiet=False).process
    done.wait()
    directory = context.directory / "run1"
    lines = (directory / "stderr").read_text().splitlines()
    context.expect(done.returncode == 0, f"exit status {done.returncode}: {lines}")
    context.expect((directory / "stdout").read_text() == "", "there is something on stdout")
    context.expect(
        context.native or len(lines) == 1, f"{len(lines)} lines on stderr instead of one of summary"
    )


def pipes(context):
    """20 MB of random bytes through a pipe on each side come out as they went in."""
    source = context.directory / "input"
    source.write_bytes(random.Random(context.seed).randbytes(20 << 20))
    reader, writer = os.pipe()
    feeder = context.start(["cat", source], native=True, stdout=writer)
    os.close(writer)
    program = context.start(["cat"], stdin=reader)
    os.close(reader)
    done = program.finish()
    feeder.finish()
    context.expect(digest(done.stdout) == digest(source), "what came out is not what went in")
    context.expect(
        context.run(["sh", "-c", "cat; echo end >&2"], stdin=source).errors() == "end\n",
        "stderr is not untouched",
    )


def environment(context):
    """The variables and the directory the program sees are the ones it was started with, LD_PRELOAD
    and swaptide's apart.
    """
    where = context.directory / "a directory with spaces"
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
    context.compare([context.python, "-c", script, "", "a b", "--ram", "*"], env=names, cwd=where)


def chains(context):
    """Programs that become and start others, with and without an environment."""
    context.compare(
        [
            "sh",
            "-c",
            "echo one; sh -c 'echo two; exec env -i /bin/sh -c \"echo three; exec /bin/echo four\"'",
        ]
    )
    context.compare(["sh", "-c", "for i in 1 2 3 4 5 6 7 8; do (echo $i) | cat; done"])
    context.compare(["sh", "-c", "seq 1000 | xargs -n 50 echo | sort | tail -n 3"])
    context.compare(
        [
            context.python,
            "-c",
            "import subprocess as s; print(s.run(['sh', '-c', 'exit 9']).returncode)",
        ]
    )


def chain_pressure(context):
    """Programs that swap although others started them and exec stands between them and the command."""
    script = f"env MORE=1 {context.python} {PRESSURE} 60 closefds; sh -c 'exec {context.python} {PRESSURE} 60 closefds'"
    done = context.run(["sh", "-c", script])
    context.expect(done.text() == "OK closefds\nOK closefds\n", f"it printed {done.text()!r}")


def cleared_environment(context):
    """The budget holds also for a program that is started with an empty environment."""
    done = context.run(["sh", "-c", f"env -i {context.python} {PRESSURE} 100 closefds"])
    context.expect(done.text() == "OK closefds\n", f"it printed {done.text()!r}")


def few_files(context):
    """With hardly any descriptors a program is not managed, but it runs, and forks, as without
    swaptide.
    """
    for files in (5, 8, 12):
        script = f"ulimit -n {files}; exec {context.binary('processes')} 48 1 {context.seed} clones"
        done = context.run(["sh", "-c", script])
        context.expect(
            done.text() == "OK processes clones\n", f"with {files} files it printed {done.text()!r}"
        )


def pressure(megabytes, mode):
    def run(context):
        done = context.run([context.python, PRESSURE, megabytes, mode])
        context.expect(done.text() == f"OK {mode}\n", f"it printed {done.text()!r}")

    return run


def wait_for_line(context, program, start):
    """Waits until the program's output has a line that begins with `start`; the line."""
    path = program.directory / "stdout"
    while context.hung is None:
        for line in path.read_text().splitlines():
            if line.startswith(start):
                return line
        if program.process.poll() is not None:
            program.finish(status=None)
            raise Failure(
                f"it ended with status {program.process.returncode} before it said {start!r}"
            )
        time.sleep(0.02)
    raise Failure(f"it never said {start!r}")


def shared_killed(context):
    """The supervisor is killed while it holds pages of shared memory: who needs them is stopped,
    and says why.
    """
    if context.native:
        return
    program = context.start(
        [context.binary("shared"), 64, 60, context.seed, "hammer"],
        options=["--shared", "--swap", "zram:1G"],
    )
    supervisor, workers = None, []
    while len(workers) < 5:
        context.expect(program.process.poll() is None, "it ended by itself")
        if context.hung is not None:
            return
        tree = descendants(program.pid)
        workers = [pid for pid in tree if Path(f"/proc/{pid}/comm").read_text().strip() == "shared"]
        supervisor = next((pid for pid in tree if pid not in workers), None)
        time.sleep(0.05)
    time.sleep(1)
    os.kill(supervisor, signal.SIGKILL)
    code = program.process.wait()
    said = (program.directory / "stderr").read_text()
    # The first process ends as the others do, or says that one of them has ended so.
    text = (program.directory / "stdout").read_text()
    is_last = code == 134 or code == 3 and "signal 6" in text
    context.expect(
        is_last and "stopped rather than given wrong data" in said,
        f"status {code}, {said!r}, {text!r}",
    )
    while context.hung is None and any(
        os.path.exists(f"/proc/{pid}/comm") and not is_zombie(pid) for pid in workers
    ):
        time.sleep(0.05)
    wrong = [
        line
        for line in (program.directory / "stdout").read_text().splitlines()
        if "FAILED" in line and "signal 6" not in line
    ]
    context.expect(not wrong, f"somebody saw wrong data: {wrong!r}")


def signals(context):
    """USR1 and TERM sent to `swaptide run` arrive once each; so do those sent to the program
    itself.
    """
    program = context.start([context.python, PRESSURE, 100, "wait"])
    target = int(wait_for_line(context, program, "ready").split()[1])
    for number, pid in enumerate((program.pid, target, program.pid), 1):
        os.kill(pid, signal.SIGUSR1)
        # Two that wait at the same time are one.
        wait_for_line(context, program, f"USR1 number {number}")
    time.sleep(0.3)
    os.kill(program.pid, signal.SIGTERM)
    done = program.finish(status=7)
    context.expect(
        done.text().splitlines()[-1] == "USR1 3 then SIGTERM 1",
        f"it counted {done.text().splitlines()[-1]!r}",
    )


def killed(context):
    """A program ended by a signal while much of it is swapped out: the status says so, and nothing
    stays behind.
    """
    for number in (signal.SIGKILL, signal.SIGSEGV):
        program = context.start([context.python, PRESSURE, 100, "wait"])
        os.kill(int(wait_for_line(context, program, "ready").split()[1]), number)
        program.finish(status=status_of_signal(number))


def run_killed(context):
    """`swaptide run` itself is killed: the program must not go on with pages missing, and must not
    hang.
    """
    program = context.start([context.python, PRESSURE, 100, "wait"])
    target = int(wait_for_line(context, program, "ready").split()[1])
    program.process.kill()
    program.process.wait()
    if context.native:
        return
    # Either it is ended with its supervisor, or it carries on and verifies: both are right, a wrong
    # page is not.
    try:
        os.kill(target, signal.SIGTERM)
    except ProcessLookupError:
        pass
    while context.hung is None and os.path.exists(f"/proc/{target}/comm"):
        try:
            if os.waitpid(target, os.WNOHANG)[0]:
                break
        except ChildProcessError:
            pass
        time.sleep(0.05)
    lines = (program.directory / "stdout").read_text().splitlines()
    context.expect(
        not any("differs" in line for line in lines), f"it went on with wrong data: {lines[-1]!r}"
    )
    context.expect(not os.path.exists(f"/proc/{target}") or is_zombie(target), "it is still there")


def read_terminal(context, master, until):
    """Everything the terminal shows until it shows `until` (None: until it is closed)."""
    seen = b""
    while context.hung is None and (until is None or until not in seen):
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


def terminal(context):
    """A pseudo-terminal as controlling terminal: all three streams are one, a line can be typed,
    ctrl-C arrives once.
    """
    master, slave = pty.openpty()

    def own_the_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    program = context.start(
        [context.python, PRESSURE, 100, "terminal"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        preexec=own_the_terminal,
    )
    os.close(slave)
    seen = read_terminal(context, master, b"terminals True True True")
    os.write(master, b"hello\n")
    seen += read_terminal(context, master, b"line hello")
    os.write(master, b"\x03")
    seen += read_terminal(context, master, None)
    program.finish(status=8)
    os.close(master)
    context.expect(b"SIGINT 1" in seen, f"the terminal showed {seen[-200:]!r}")


def stopped(context):
    """STOP and CONT: a stopped program goes on where it was."""
    program = context.start([context.python, PRESSURE, 100, "wait"])
    target = int(wait_for_line(context, program, "ready").split()[1])
    os.kill(target, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(target, signal.SIGCONT)
    os.kill(program.pid, signal.SIGTERM)
    program.finish(status=7)


def ask(context, *words, env=None):
    """`swaptide ctl` with these words: its exit status and what it printed."""
    words = [context.swaptide, "ctl", *words]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env)
    return done.returncode, done.stdout, done.stderr


def ctl(context):
    """A run can be asked for its counters by the numbers of its own process and of the program, and
    not when it is over.
    """
    if context.native:
        return
    program = context.start([context.python, PRESSURE, 100, "wait"])
    inside = wait_for_line(context, program, "ready").split()[1]
    status, text, errors = ask(context, "stats", "--pid", str(program.pid), "--json")
    context.expect(status == 0, f"ctl stats: status {status}: {errors}")
    view = json.loads(text)
    context.expect(
        view["pid"] == program.pid and view["stats"]["zswpout"] > 1000,
        f"not this run, or it swaps nothing: {text}",
    )
    status, text, errors = ask(context, "stats", "--pid", inside)
    context.expect(
        status == 0 and f"\n{inside:>8} engaged" in text, f"status {status}: {text}{errors}"
    )
    os.kill(program.pid, signal.SIGTERM)
    program.finish(status=7)
    status, text, errors = ask(context, "stats", "--pid", str(program.pid))
    context.expect(
        status == 2 and len(errors.splitlines()) == 1,
        f"it is over, and status is {status}: {text}{errors}",
    )


def areas(context):
    """Swap areas come and go while programs, and the children they fork, use them; what cannot go
    stays, and says why.
    """
    if context.native:
        return
    place = context.directory
    for name in "abc":
        (place / name).mkdir()

    def devices(pid):
        until = time.monotonic() + 10
        while True:
            status, text, errors = ask(context, "devices", "--pid", pid, "--json")
            if status == 0:
                return {view["name"]: view for view in json.loads(text)}
            # The run may not have begun yet.
            context.expect(time.monotonic() < until, f"ctl devices: status {status}: {errors}")
            time.sleep(0.02)

    def asked(status, *words):
        said = ask(context, *words)
        context.expect(
            said[0] == status and len(said[2].splitlines()) == (status != 0), f"{words}: {said}"
        )
        return said[2]

    for program, mode in (("torture", "single"), ("forks", "nested")):
        argv = [context.binary(program), 96, 9, context.seed, mode]
        first, second, third = (f"file:{place}/{name}" for name in "abc")
        started = context.start(argv, options=["--swap", "zram:4M", "--swap", f"{first}:1G,prio=5"])
        pid = str(started.pid)
        until = time.monotonic() + 20
        while not (seen := devices(pid)) or seen[first]["used_bytes"] < 16 << 20:
            context.expect(time.monotonic() < until, f"nothing goes to the swap area: {seen}")
            time.sleep(0.05)
        context.expect(
            "no room" in asked(2, "swapoff", first, "--pid", pid), "the only one is in use"
        )
        asked(2, "swapoff", "nonsense", "--pid", pid)
        asked(2, "swapon", f"file:{place}/no/such/place", "--pid", pid)
        asked(2, "swapon", "zram:4M", "--pid", pid)
        context.expect(list(devices(pid)) == [first], "nothing has changed")
        for before, after, priority in ((first, second, 3), (second, third, 9), (third, first, 1)):
            asked(0, "swapon", f"{after}:1G,prio={priority}", "--pid", pid)
            asked(0, "swapoff", before, "--pid", pid)
            seen = devices(pid)
            context.expect(
                list(seen) == [after] and seen[after]["used_bytes"] > 0,
                f"{before} has not gone to {after}: {seen}",
            )
        done = started.finish()
        context.expect(
            f"OK {program} {mode}" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
        )


def block_device(context):
    """A block device is swap space when it is marked as such, whole and nobody else's; it keeps the
    mark.
    """
    image = context.directory / "image"
    if context.native:
        return
    if os.geteuid() != 0:
        raise Skip("only root can make a loop device")
    with open(image, "wb") as file:
        file.truncate(512 << 20)
    made = subprocess.run(["losetup", "-f", "--show", str(image)], capture_output=True, text=True)
    if made.returncode != 0:
        raise Skip(f"no loop device can be made here: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        argv = [context.binary("torture"), 96, 4, context.seed, "single"]
        refused = subprocess.run(
            [context.swaptide, "run", "--swap", device, "--", "true"],
            capture_output=True,
            text=True,
        )
        context.expect(
            refused.returncode == 2 and f"mkswap {device}" in refused.stderr,
            f"it is not marked: {refused}",
        )
        subprocess.run(["mkswap", device], check=True, capture_output=True)
        for _ in range(2):
            started = context.start(argv, options=["--swap", "zram:4M", "--swap", device])
            done = started.finish()
            context.expect(
                "OK torture single" in done.text(),
                f"it did not end with OK: {done.text()[-300:]!r}",
            )
            seen = json.loads(started.report_path.read_text())["devices"][1]
            context.expect(
                seen["type"] == "block" and seen["peak_used_bytes"] > 16 << 20,
                f"hardly used: {seen}",
            )
    finally:
        subprocess.run(["losetup", "-d", device], check=True)


class Server:
    """An NBD server that keeps its export in a file, so that it can be killed and started again."""

    def __init__(self, context, name="nbd", filters=(), parameters=()):
        self.filters, self.parameters = filters, parameters
        self.socket, self.image = (
            context.directory / f"{name}.socket",
            context.directory / f"{name}.export",
        )
        with open(self.image, "wb") as file:
            file.truncate(1 << 30)
        self.process = None
        self.start()

    def url(self):
        return f"nbd+unix:///?socket={self.socket}"

    def start(self):
        self.socket.unlink(missing_ok=True)
        words = [
            "nbdkit",
            "--foreground",
            "--unix",
            str(self.socket),
            *self.filters,
            "file",
            str(self.image),
            *self.parameters,
        ]
        self.process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not self.socket.exists():
            time.sleep(0.01)

    def kill(self):
        self.process.kill()
        self.process.wait()


def network(context):
    """A network export as swap space: its server is killed and comes back in the middle; for good,
    what is written goes elsewhere.
    """
    if context.native:
        return
    server = Server(context)
    try:

        def finished(started, last):
            done = started.finish()
            context.expect(
                last in done.text(), f"it did not end with {last}: {done.text()[-300:]!r}"
            )
            report = json.loads(started.report_path.read_text())
            context.expect(
                report["errors"]["pages_poisoned"] == 0, f"pages were lost: {report['errors']}"
            )
            return {device["type"]: device["peak_used_bytes"] for device in report["devices"]}

        options = ["--swap", "zram:4M", "--swap", f"{server.url()},prio=9"]
        for mode in ("single", "threads"):
            started = context.start(
                [context.binary("torture"), 96, 8, context.seed, mode], options=options
            )
            time.sleep(3)
            server.kill()
            time.sleep(1.5)
            server.start()
            used = finished(started, f"OK torture {mode}")
            context.expect(used["nbd"] > 8 << 20, f"the export is hardly used: {used}")
        # What a program writes while the server is away goes to the next area; what it reads of the
        # server waits.
        script = """if True:
            import os, time, zlib
            blocks, sums, end = [], [], time.monotonic() + 14
            for number in range(130):
                blocks.append(os.urandom(1 << 20))
                sums.append(zlib.crc32(blocks[-1]))
                time.sleep(0.08)
            time.sleep(max(0, end - time.monotonic()))
            print("OK" if [zlib.crc32(block) for block in blocks] == sums else "WRONG")
        """
        options += ["--swap", f"file:{context.directory}:1G,prio=1"]
        started = context.start([context.python, "-c", script], options=options)
        time.sleep(4)
        server.kill()
        time.sleep(12)
        server.start()
        used = finished(started, "OK")
        context.expect(
            used["nbd"] > 4 << 20 and used["file"] > 4 << 20, f"not both are used: {used}"
        )
        occupied = context.directory / "occupied"
        occupied.write_bytes(b"a file system" + bytes(64 << 20))
        server.kill()
        server.image = occupied
        server.start()
        refused = subprocess.run(
            [context.swaptide, "run", "--swap", server.url(), "--", "true"],
            capture_output=True,
            text=True,
        )
        context.expect(
            refused.returncode == 2 and "somebody's data" in refused.stderr,
            f"it is not empty: {refused}",
        )
    finally:
        server.kill()


def swap_full(context):
    """Swap space that is too small: the program keeps its memory and goes past the budget, and with
    --strict it is killed.
    """
    if context.native:
        return
    for number, device in enumerate(("zram:4M", f"file:{context.directory}:16M")):
        for strict in (False, True):
            report = context.directory / f"report-{number}-{strict}.json"
            words = [
                context.swaptide,
                "run",
                "--ram",
                f"{context.budget}M",
                "--swap",
                device,
                "--report",
                report,
            ]
            words += ["--strict"] if strict else []
            words += ["--", context.python, PRESSURE, "150", "closefds"]
            done = subprocess.run(
                [str(word) for word in words],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
            )
            said = f"{device}, strict {strict}: status {done.returncode}, {done.stdout!r}, {done.stderr!r}"
            context.expect(done.returncode == (137 if strict else 0), said)
            context.expect((done.stdout == "OK closefds\n") != strict, said)
            context.expect("swap space ran out" in done.stderr, said)
            errors = json.loads(report.read_text())["errors"]
            context.expect(
                errors["swap_full"] > 0 and errors["pages_poisoned"] == 0, f"{said}: {errors}"
            )


def cluster_readahead(context):
    """A swap file on a rotational disk: with a page comes what was written beside it, as long as
    that is wanted. On one that does not, not.
    """
    if context.native:
        return
    report = context.directory / "report.json"
    for option, cluster in (("yes", None), ("yes", "5"), ("yes", "0"), ("no", None)):
        words = [
            context.swaptide,
            "run",
            "--ram",
            f"{context.budget}M",
            "--report",
            report,
            "--swap",
            f"file:{context.directory},rotational={option}",
        ]
        words += ["--page-cluster", cluster] if cluster else []
        # Who goes the same way a second time finds pages there for that reason too, on every disk.
        reads = option == "yes" and cluster != "0"
        rounds = 2 if reads else 1
        words += ["--", context.python, HERE / "py" / "together.py", "8000", str(rounds)]
        done = subprocess.run(
            [str(word) for word in words], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        result = json.loads(report.read_text())
        seen = result["stats"]
        said = f"rotational={option}, page-cluster {cluster}: status {done.returncode}, {done.stdout!r}, {done.stderr!r}: {seen}"
        context.expect(
            done.returncode == 0 and done.stdout == f"8000 pages, {rounds} rounds, 0 wrong\n", said
        )
        context.expect(
            result["errors"]["pages_poisoned"] == 0
            and seen["pswpout"] > 8000
            and seen["pswpin"] > 4000 * rounds,
            said,
        )
        ahead, hits = seen["swap_ra"], seen["swap_ra_hit"]
        if reads:
            # Of blocks of eight all but the page asked for, nearly every one of them wanted.
            context.expect(ahead > 0.7 * seen["pswpin"] and hits > 0.9 * ahead, said)
        else:
            context.expect(ahead < 0.1 * seen["pswpin"], said)


def zswap_limit(context):
    """Compressed memory with a bound and an acceptance threshold: at the bound it refuses pages,
    which go to the file, until it has fallen.
    """
    if context.native:
        return
    report = context.directory / "report.json"
    percent = 15

    def once(data, order, options, shared=False, stale="0"):
        words = [
            context.swaptide,
            "run",
            "--ram",
            f"{context.budget}M",
            "--report",
            report,
            "--swap",
            f"zram:1G{options}",
            "--swap",
            f"file:{context.directory}",
            *(["--shared"] if shared else []),
            "--",
            context.swaptide,
        ]
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
        context.expect(done.returncode == 0, said)
        result = json.loads(report.read_text())
        context.expect(result["errors"]["pages_poisoned"] == 0, f"{said}: {result['errors']}")
        return result, said

    for data, order in (("quarter", "seq"), ("quarter", "full"), ("third", "full")):
        result, said = once(data, order, f",max_pool_percent={percent},accept_threshold_percent=60")
        seen, device = result["stats"], result["devices"][0]
        context.expect(
            device["max_pool_percent"] == percent and device["accept_threshold_percent"] == 60,
            f"{said}: {device}",
        )
        context.expect(
            seen["pool_limit_hit"] > 0 and seen["reject_pool_full"] > seen["pool_limit_hit"],
            f"{said}: {seen}",
        )
        # What is refused is written, and the oldest pages of compressed memory make room all the
        # same.
        context.expect(
            seen["pswpout"] >= seen["reject_pool_full"] + seen["reject_compress_poor"],
            f"{said}: {seen}",
        )
        context.expect(seen["zswpwb"] > 0 and seen["zswpout"] > 0, f"{said}: {seen}")
        context.expect(
            (seen["reject_compress_poor"] > 8000) == (data == "third"), f"{said}: {seen}"
        )
        # Batches on their way when the bound is met come on top of it.
        most = context.budget * MIB * (percent + 8) // 100
        context.expect(
            result["peak_pool_bytes"] < most,
            f"{said}: pool {result['peak_pool_bytes']}, at most {most}",
        )
    # The same while every third load of several pages is out of date at its second look: it is
    # dropped, and nothing is lost.
    result, said = once("quarter", "seq", f",max_pool_percent={percent}", stale="3")
    seen = result["stats"]
    context.expect(seen["swpin_stale"] > 50 and seen["reject_pool_full"] > 0, f"{said}: {seen}")
    result, said = once("quarter", "full", f",max_pool_percent={percent}", shared=True)
    seen = result["stats"]
    context.expect(
        seen["pool_limit_hit"] > 0 and seen["reject_pool_full"] > 0 and seen["pswpin"] > 0,
        f"{said}: {seen}",
    )
    # Without, nothing is ever refused.
    result, said = once("quarter", "full", "")
    seen = result["stats"]
    context.expect(
        seen["pool_limit_hit"] == seen["reject_pool_full"] == 0 and seen["zswpout"] > 0,
        f"{said}: {seen}",
    )
    context.expect("max_pool_percent" not in result["devices"][0], f"{said}: {result['devices']}")


def swap_in(context):
    """How much comes in for a fault: what the counters say of page-cluster, of zeros, of folios,
    and of snapshots that are out of date.
    """
    if context.native:
        return
    large = [f"hugepages-{64 << k}kB/swpin" for k in range(6)]
    report = context.directory / "report.json"

    def stats(data, order, *options, stale="0"):
        # On a busy machine so short a program may be over before the supervisor has come to its
        # turn.
        for _ in range(4):
            seen, said = once(data, order, *options, stale=stale)
            if seen["engaged"]:
                break
        return seen, said

    def once(data, order, *options, stale):
        words = [
            context.swaptide,
            "run",
            "--ram",
            f"{context.budget}M",
            "--report",
            report,
            *options,
            "--",
            context.swaptide,
        ]
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
        context.expect(done.returncode == 0, said)
        result = json.loads(report.read_text())
        context.expect(result["errors"]["pages_poisoned"] == 0, f"{said}: {result['errors']}")
        return result["stats"], said

    seen, said = stats("quarter", "seq")
    context.expect(seen["zswpin"] > 8000 and seen["swpin_stale"] == 0, f"{said}: {seen}")
    context.expect(
        sum(seen[name] for name in large) > 0 and seen["hugepages-64kB/zswpout"] > 1000,
        f"{said}: {seen}",
    )
    context.expect(0 < seen["swap_ra_hit"] <= seen["swap_ra"], f"{said}: {seen}")
    seen, said = stats("zeros", "seq")
    context.expect(seen["swpin_zero"] > 8000 and seen["swpout_zero"] > 8000, f"{said}: {seen}")
    context.expect(seen["zswpin"] + seen["pswpin"] < 1000, f"zeros are loaded; {said}: {seen}")
    # Out of date at every third load: it is dropped, the page asked for comes alone, and the
    # program sees what it wrote.
    for data in ("quarter", "sixth"):
        seen, said = stats(data, "seq", stale="3")
        context.expect(
            seen["swpin_stale"] > 50 and seen["hugepages-64kB/swpin_fallback"] > 0,
            f"{said}: {seen}",
        )
    seen, said = stats("sixth", "seq", stale="1")
    context.expect(
        sum(seen[name] for name in large) == 0 and seen["swpin_stale"] > 100, f"{said}: {seen}"
    )
    for cluster, blocks in (("0", False), ("3", False), ("4", True)):
        seen, said = stats("sixth", "seq", "--page-cluster", cluster)
        context.expect(seen["pswpin"] > 4000 and seen["zswpin"] > 100, f"{said}: {seen}")
        context.expect((sum(seen[name] for name in large) > 0) == blocks, f"{said}: {seen}")
        context.expect((seen["swap_ra"] > 0) == (cluster != "0"), f"{said}: {seen}")
    seen, said = stats("sixth", "sparse")
    touched = 64 * 16
    loaded = seen["pswpin"] + seen["zswpin"] + seen["swpin_zero"]
    context.expect(
        touched * 0.8 < loaded < touched * 1.25,
        f"{loaded} pages for {touched} touches; {said}: {seen}",
    )

    # While the run goes on: nothing is read ahead, then again as the faults carry it.
    words = [
        context.swaptide,
        "run",
        "--no-daemon",
        "--ram",
        f"{context.budget}M",
        "--",
        context.swaptide,
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
    ]
    with subprocess.Popen(
        [str(word) for word in words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:

        def ctl(*words):
            status, text, errors = ask(context, "readahead", "--pid", str(running.pid), *words)
            return status, text or errors

        def read_ahead():
            return json.loads(ask(context, "stats", "--pid", str(running.pid), "--json")[1])[
                "stats"
            ]["swap_ra"]

        def go_on():
            print(file=running.stdin, flush=True)

        try:
            for setting, shown in (
                (None, "default"),
                ("page-cluster=0", "0"),
                ("page-cluster=default", "default"),
                ("largest-order=0", "default"),
            ):
                context.expect(running.stdout.readline() == "ready\n", "the program is not ready")
                if setting:
                    context.expect(ctl(setting) == (0, ""), f"{setting}: {ctl(setting)}")
                context.expect(
                    ctl()[1].splitlines()[0] == f"page-cluster {shown}", f"after {setting}: {ctl()}"
                )
                for wrong in (
                    ("page-cluster=10",),
                    ("page-cluster=1", "window=2"),
                    ("largest-order",),
                ):
                    status, why = ctl(*wrong)
                    context.expect(
                        status == 2 and why.count("\n") == 1, f"{wrong}: status {status}, {why!r}"
                    )
                before = read_ahead()
                go_on()
                context.expect("refault_s" in running.stdout.readline(), "nothing was touched")
                more = read_ahead() - before
                context.expect(
                    (more > 4000) == (setting in (None, "page-cluster=default")),
                    f"after {setting}: {more} pages read ahead",
                )
                go_on()
            context.expect(running.wait(60) == 0, f"status {running.returncode}")
        finally:
            running.kill()
    swap_in_kept_in_part(context)


def swap_in_kept_in_part(context):
    """Large swap-ins of which a part is kept: every second fill ends half way, every fifth load is
    out of date. What is kept is charged at once.
    """
    words = [
        context.swaptide,
        "run",
        "--no-daemon",
        "--ram",
        f"{context.budget}M",
        "--",
        context.swaptide,
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
    ]
    began = time.monotonic()
    with subprocess.Popen(
        [str(word) for word in words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SWAPTIDE_TEST_PART": "2", "SWAPTIDE_TEST_STALE": "5"},
    ) as running:

        def seen():
            return json.loads(ask(context, "stats", "--pid", str(running.pid), "--json")[1])

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
                context.expect(running.stdout.readline() == "ready\n", "the program is not ready")
                print(file=running.stdin, flush=True)
                context.expect("refault_s" in running.stdout.readline(), "nothing was touched")
                for _ in range(50):
                    charged, taken = charged_and_taken()
                    # Both are read while the engine tidies up: they agree in the end.
                    if abs(charged - taken) < 1024:
                        break
                    time.sleep(0.1)
                context.expect(
                    abs(charged - taken) < 1024, f"charged {charged} KiB, and has {taken} KiB"
                )
                stats = seen()["stats"]
                print(file=running.stdin, flush=True)
            context.expect(running.wait(60) == 0, f"status {running.returncode}")
            context.expect(stats["swpin_stale"] > 50 and stats["zswpin"] > 20_000, f"{stats}")
            # Three times 64M came in while their thread waited: at least a tenth of a second, and
            # no more than there was time.
            context.expect(
                100_000 < stats["stall_us"] < (time.monotonic() - began) * 1e6, f"{stats}"
            )
        finally:
            running.kill()


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7 if all(there == row(k) for k, there in enumerate(rows)) else 1))
    print("ready", os.getpid(), flush=True)
    time.sleep(60)
"""


def codecs(context):
    """The codec and its level are chosen: every page comes back, and the stronger one takes less
    memory for a page.
    """
    if context.native:
        return
    sizes = []
    for options, codec, level in (
        (",codec=lz4", "lz4", None),
        (",codec=snappy", "snappy", None),
        (",codec=zstd", "zstd", 1),
        (",level=9,codec=zstd", "zstd", 9),
    ):
        program = context.start(
            [context.python, "-c", CODECS], options=["--swap", f"zram:1G{options}"]
        )
        inside = int(wait_for_line(context, program, "ready").split()[1])
        end = time.monotonic() + 10
        while (process := process_of(context, inside)[1])["swapped_pool_bytes"] < 10 * MIB:
            context.expect(time.monotonic() < end, f"{options}: hardly anything is out: {process}")
            time.sleep(0.05)
        os.kill(inside, signal.SIGTERM)
        program.finish(status=7)
        device = json.loads(program.report_path.read_text())["devices"][0]
        context.expect(
            (device["codec"], device.get("zstd_level")) == (codec, level), f"{options}: {device}"
        )
        sizes.append(process["pool_bytes"] / process["swapped_pool_bytes"])
    # What a level makes of a page is the codec's own test's matter: here half-filled blocks would
    # hide it.
    context.expect(
        min(sizes[:2]) * 0.9 > max(sizes[2:]),
        f"bytes for one that is out, by lz4, snappy, zstd 1, zstd 9: {sizes}",
    )


def process_of(context, pid):
    """What a run says of all its processes together, and of one of them."""
    status, text, errors = ask(context, "stats", "--pid", str(pid), "--json")
    context.expect(status == 0, f"ctl stats: status {status}: {errors}")
    view = json.loads(text)
    return view["stats"], next(process for process in view["processes"] if process["pid"] == pid)


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


def calm(context):
    """What is out of a program that rests gets smaller though there is room enough, nothing comes
    in for it, and it is right afterwards.
    """
    if context.native:
        return
    program = context.start([context.python, "-c", RESTS])
    inside = int(wait_for_line(context, program, "ready").split()[1])

    def seen():
        stats, process = process_of(context, inside)
        return {
            name: stats[name] for name in ("zswprecomp", "zswprecomp_tried", "pgmajfault")
        }, process

    before, then = seen()
    end = time.monotonic() + 20
    after, now = before, then
    # With lz4 alone it is 52% and more.
    while now["pool_bytes"] > now["swapped_pool_bytes"] * 49 // 100:
        context.expect(
            time.monotonic() < end,
            f"compressed memory did not get smaller: {before} {then}, later {after} {now}",
        )
        time.sleep(0.1)
        after, now = seen()
    context.expect(
        after["zswprecomp"] > 1000, f"hardly anything was compressed again: {after} {now}"
    )
    context.expect(
        after["pgmajfault"] - before["pgmajfault"] < 100,
        f"it rests: {before['pgmajfault']} faults, then {after['pgmajfault']}",
    )
    os.kill(program.pid, signal.SIGTERM)
    program.finish(status=7)


def bad_input(context):
    """Wrong arguments: exit status 2 and one line that names what is wrong."""
    if context.native:
        return
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
            [context.swaptide, "run", *words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        lines = result.stderr.splitlines()
        said = f"{' '.join(words)}: exit status {result.returncode}, stderr {result.stderr[:300]!r}"
        context.expect(result.returncode == 2, f"{said}; expected status 2")
        context.expect(
            len(lines) == 1 and named in lines[0], f"{said}; expected one line that names {named}"
        )


def network_mirror(context):
    """A network export with a mirror: its server is killed for good in the middle, nothing is lost
    and nobody waits for it.
    """
    if context.native:
        return
    local = context.directory / "local"
    local.mkdir()
    for number, mode in enumerate(("threads", "single", "forks")[: 3 if context.case.full else 1]):
        server = Server(context)
        try:
            options = [
                "--tiers",
                "+SSD:100 +NET:-1",
                "--swap",
                "zram:4M",
                "--swap",
                f"file:{local}:1G,prio=100",
                "--group",
                "/g",
                "--swap",
                f"{server.url()},prio=9,mirror={local if number else 'SSD'}",
            ]
            binary, words = ("forks", ["nested"]) if mode == "forks" else ("torture", [mode])
            program = context.start(
                [context.binary(binary), 96, 12, context.seed, *words], options=options
            )
            # First the export alone, then the file.
            answer = lambda *words: ask(context, words[0], "--pid", str(program.pid), *words[1:])
            end = time.monotonic() + 10
            while answer("group", "/g", "swap.tiers=-SSD")[0] != 0:
                context.expect(time.monotonic() < end, "the run does not answer")
                time.sleep(0.05)
            time.sleep(4)
            before = json.loads(answer("devices", "--json")[1])
            server.kill()
            answer("group", "/g", "swap.tiers=")
            done = program.finish()
            context.expect(
                f"OK {binary}" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
            )
            report = json.loads(program.report_path.read_text())
            context.expect(
                report["errors"]["pages_poisoned"] == 0, f"pages were lost: {report['errors']}"
            )
            used = {device["type"]: device for device in before}
            seen = {device["type"]: device for device in report["devices"]}
            context.expect(
                used["nbd"]["used_bytes"] >= 4 << 20, f"the export is hardly used: {before}"
            )
            context.expect(
                seen["file"]["peak_used_bytes"] >= 2 << 20,
                f"what was written later went nowhere: {seen}",
            )
            context.expect(seen["nbd"]["mirror"]["errors"] == 0, f"the mirror failed: {seen}")
            context.expect(
                report["fault_us"]["max"] < 20e6,
                f"a fault waited for the server: {report['fault_us']}",
            )
        finally:
            server.kill()


def far(context):
    """A server that takes 20 ms to answer: threads wait for it side by side, and who wants nothing
    of it does not wait, though it stands still for 3 s.
    """
    if context.native:
        return
    server = Server(context, filters=["--filter=delay"], parameters=["rdelay=20ms"])
    options = ["--swap", "zram:2M", "--swap", server.url()]
    try:
        for mode in ((), ("forks",), ("raw",)):
            # Then, some of the loads of several pages are out of date at their second look.
            env = {**os.environ, "SWAPTIDE_TEST_STALE": "19"} if mode else None
            program = context.start(
                [context.binary("far"), 40, 8 if not mode else 4, context.seed, *mode],
                options=options,
                env=env,
            )
            wait_for_line(context, program, "filled")
            time.sleep(1.5)
            if not mode:
                server.process.send_signal(signal.SIGSTOP)
                time.sleep(3)
                server.process.send_signal(signal.SIGCONT)
            done = program.finish()
            context.expect(
                "OK far" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
            )
            report = json.loads(program.report_path.read_text())
            context.expect(
                report["errors"]["pages_poisoned"] == 0, f"pages were lost: {report['errors']}"
            )
            if mode:
                continue
            turn = int(done.text().split("longest turn ")[1].split()[0])
            context.expect(
                turn < 1500, f"who wants nothing of the server waited for it for {turn} ms"
            )
            # One after the other, there would be time for 50 in a second.
            served = report["stats"]["pswpin"]
            context.expect(
                served > 2000,
                f"{served} pages came from the server in 5 s: they were waited for one after the "
                f"other",
            )
        # A thread that is gone with what others wait for: the process ends with a message.
        words = [
            context.swaptide,
            "run",
            "--ram",
            f"{context.budget}M",
            "--quiet",
            *options,
            "--",
            context.binary("far"),
            40,
            8,
            context.seed,
        ]
        done = subprocess.run(
            [str(word) for word in words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            env={**os.environ, "SWAPTIDE_TEST_FAIL": "5"},
        )
        said = f"status {done.returncode}, {done.stdout!r}, {done.stderr!r}"
        context.expect(
            done.returncode == 134
            and "a thread that reads from servers is gone" in done.stderr
            and "OK" not in done.stdout,
            said,
        )
    finally:
        server.kill()


CASES = [
    Case("exit-codes", exit_codes, 32, swaps=False),
    Case("summary", summary, 32, swaps=False),
    Case("bad-input", bad_input, 32, swaps=False),
    Case("ctl", ctl, 32, allowance=4),
    Case("areas", areas, 32, forks=True, allowance=128),
    Case("block-device", block_device, 32, needs=("losetup", "mkswap"), allowance=64),
    Case("network-mirror", network_mirror, 32, needs=("nbdkit",), limit=120, allowance=128),
    Case(
        "full-network-mirror",
        network_mirror,
        32,
        full=True,
        needs=("nbdkit",),
        limit=240,
        allowance=128,
    ),
    Case("network", network, 32, needs=("nbdkit",), limit=120, allowance=128),
    Case("far", far, 16, needs=("nbdkit",), limit=120, allowance=128),
    Case("swap-full", swap_full, 32, swaps=False),
    Case("swap-in", swap_in, 48, swaps=False),
    Case("cluster-readahead", cluster_readahead, 24, swaps=False),
    Case("calm", calm, 64, allowance=4),
    # It fills its memory in a few hundredths of a second.
    Case("codecs", codecs, 24, allowance=16),
    Case("zswap-limit", zswap_limit, 48, swaps=False),
    Case("pipes", pipes, 32, swaps=False),
    Case("environment", environment, 48, swaps=False),
    Case("chains", chains, 48, swaps=False, forks=True),
    Case("chain-pressure", chain_pressure, 32, allowance=8, forks=True),
    Case("cleared-environment", cleared_environment, 32, allowance=4),
    Case("few-files", few_files, 32, swaps=False, allowance=128, forks=True),
    Case("signals-passed", signals, 32, allowance=4),
    Case("killed", killed, 32, allowance=4),
    Case("shared-run-killed", shared_killed, 32, allowance=64, forks=True, swaps=False),
    Case("run-killed", run_killed, 32, allowance=4),
    Case("stopped", stopped, 32, allowance=4),
    Case("terminal", terminal, 32, allowance=4),
    Case("closefds-self", pressure(100, "closefds"), 32, allowance=4),
    Case("closefds-spawn", pressure(100, "spawn"), 32, allowance=16, forks=True),
]
