"""Groups, tiers and the daemon, as they are used: by `swaptide run`, `swaptide ctl` and
`swaptide daemon`.
"""

import fcntl
import json
import os
import pty
import random
import select
import signal
import socket
import struct
import subprocess
import termios
import time

from cases_process import PRESSURE, Server, ask, process_of, wait_for_line
from harness import MIB
from legacy import Case
from processes import descendants


def until(context, what, true, seconds=20):
    """Waits until `true` answers with something that is true, and gives that."""
    end = time.monotonic() + seconds
    while True:
        answer = true()
        if answer:
            return answer
        context.expect(time.monotonic() < end, f"{what} did not come true in {seconds} s")
        if time.monotonic() >= end:
            return None
        time.sleep(0.05)


class Ctl:
    """`swaptide ctl` for one run (or, without a process, for the daemon)."""

    def __init__(self, context, pid=None, env=None):
        self.context = context
        self.env = env
        self.pid = ["--pid", str(pid)] if pid else []

    def __call__(self, *words):
        status, text, errors = ask(self.context, words[0], *self.pid, *words[1:], env=self.env)
        self.context.expect(status == 0 and errors == "", f"ctl {words}: status {status}: {errors}")
        return text

    def refused(self, named, *words):
        status, text, errors = ask(self.context, words[0], *self.pid, *words[1:], env=self.env)
        lines = errors.splitlines()
        said = f"ctl {words}: status {status}, {text!r}, {errors!r}"
        self.context.expect(
            status == 2 and len(lines) == 1 and named in lines[0],
            f"{said}; expected one line that names {named}",
        )

    def value(self, group, key):
        text = self("group", group, key).strip()
        return int(text) if text.isdigit() else text

    def event(self, group, kind, name):
        words = self("group", group, f"{kind}.events").split()
        return int(words[words.index(name) + 1])

    def stalled(self, group):
        """Seconds in which a thread of the group has waited for memory."""
        return int(self("group", group, "ram.pressure").split("total=")[1]) / 1e6


def started(context, argv, options, line="ready"):
    """A program that is under way, the number of its process, and its ctl."""
    program = context.start(argv, options=options)
    inside = int(wait_for_line(context, program, line).split()[1])
    return program, inside, Ctl(context, program.pid)


def ended(context, program, status=7):
    os.kill(program.pid, signal.SIGTERM)
    return program.finish(status)


def groups(context):
    """A group's bounds hold, its settings are made whole or not at all, and what it has is counted
    to it and all above it.
    """
    if context.native:
        return
    options = [
        "--group",
        "/web/front",
        "--swap",
        "zram:8M",
        "--swap",
        f"file:{context.directory}:512M",
    ]
    program, inside, ctl = started(context, [context.python, PRESSURE, 160, "wait"], options)
    view = json.loads(ctl("stats", "--json"))
    context.expect(
        all(process["group"] == "/web/front" for process in view["processes"]),
        f"not in their group: {view}",
    )
    context.expect(
        ctl.value("/web/front", "ram.max") == "max" and ctl.value("/web/front", "processes") >= 1,
        "nothing is set yet",
    )
    # The figures are live, and each is asked for by a call of its own: they agree as soon as
    # reclaim rests.
    held = lambda *groups: [ctl.value(group, "swap.current") for group in groups]
    same = lambda found: found if found[0] >= 8 * MIB and len(set(found)) == 1 else None
    until(
        context,
        "the same swap.current in a group and in all above it",
        lambda: same(held("/web/front", "/web", "/")),
    )

    for named, words in (
        ("ram.max", ["ram.max=lots"]),
        ("token 1", ["ram.max=40M", "swap.tiers=-SSD"]),
        ("ram.most", ["ram.most=4M"]),
        ("ram.current", ["ram.current=0"]),
        ("1x", ["processes=1x"]),
    ):
        ctl.refused(named, "group", "/web/front", *words)
    ctl.refused("/no/such", "group", "/no/such")
    ctl.refused("web", "group", "web", "ram.max=1G")
    ctl.refused("ram.max", "group", "/made", "ram.max=lots")
    ctl.refused("/made", "group", "/made")
    ctl.refused("1 is no process", "group", "/web", "processes=1")
    context.expect(
        ctl.value("/web/front", "ram.max") == "max", "something was set that was refused as a whole"
    )

    # What rests in a budget of 48M may be some MiB less than that. So the first bounds are below
    # what there is.
    had = ctl.value("/web", "ram.current")
    ctl("group", "/web", f"ram.max={had - 4 * MIB}", f"ram.high={had - 6 * MIB}")
    most = until(
        context, "the bounds of /web", lambda: ctl.value("/web", "ram.current") < had - 4 * MIB
    )
    context.expect(
        most is None or ctl.event("/", "ram", "high") >= 1,
        f"no event below {had}: {ctl('group', '/web')!r}",
    )
    ctl("group", "/web", "ram.high=28M")
    until(context, "28M for /web", lambda: ctl.value("/web", "ram.current") < 29 * MIB)
    ctl("group", "/web", "ram.high=max", "ram.max=max")

    # Moved, its charges go along, exactly.
    ctl("group", "/batch", f"processes={inside}", "swap.max=1G")
    until(context, "charges that moved", lambda: ctl.value("/web", "swap.current") == 0)
    swap = (
        until(context, "all of the run's swap.current in /batch", lambda: same(held("/batch", "/")))
        or [0]
    )[0]
    ctl.refused("processes are in it", "group", "/batch", "--remove")
    ctl("group", "/web/front", "--remove")
    ctl.refused("/web/front", "group", "/web/front")

    # No lease goes past the maximum.
    ctl("group", "/batch", f"swap.max={swap}", "ram.max=16M")
    until(context, "a refused lease", lambda: ctl.event("/batch", "swap", "max") > 0)
    context.expect(ctl.value("/batch", "swap.current") <= swap, "past swap.max")
    ctl("group", "/batch", "swap.max=max", "ram.max=max")
    done = ended(context, program)
    seen = {group["path"]: group["values"] for group in done.report["groups"]}
    context.expect(
        sorted(seen) == ["/", "/batch", "/web"] and int(seen["/"]["ram.current"]) >= 0, f"{seen}"
    )
    # By then the program is gone, and with it its charges.
    context.expect(seen["/"]["swap.current"] == "0", f"{seen['/']}")


# Grows by so many MiB as each line says, three quarters of every page zeros; what it has is looked
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
    right = all(block[4096 * n + 1000:4096 * n + 1024] == first for block, firsts in held for n, first in enumerate(firsts))
    print("OK" if right else "WRONG", flush=True)
"""


def zswap_groups(context):
    """A group's `zswap.max` bounds what its processes have in compressed memory, and
    `zswap.writeback=0` keeps all of it from the swap areas.
    """
    if context.native:
        return
    options = ["--group", "/a", "--swap", "zram:1G", "--swap", f"file:{context.directory}:512M"]

    def under_way():
        program = context.start(
            [context.python, "-c", GROWS], options=options, stdin=subprocess.PIPE
        )
        inside = int(wait_for_line(context, program, "ready").split()[1])
        ctl = Ctl(context, program.pid)

        def grow(megabytes, line):
            program.process.stdin.write(f"{megabytes}\n".encode())
            program.process.stdin.flush()
            wait_for_line(context, program, line)

        def ends():
            program.process.stdin.close()
            program.process.stdin = None
            done = program.finish()
            context.expect("OK" in done.text(), f"it ended with {done.text()[-200:]!r}")
            return json.loads(program.report_path.read_text())["stats"]

        stats = lambda: process_of(context, inside)
        return ctl, grow, stats, ends

    # Bounded: what does not fit goes on to the file.
    most = 3 * MIB
    ctl, grow, stats, ends = under_way()
    ctl("group", "/a", f"zswap.max={most}")
    context.expect(ctl.value("/a", "zswap.max") == most, "it was not taken")
    grow(120, "grew 1")
    until(context, "the bound of compressed memory", lambda: stats()[1]["pool_bytes"] <= most + MIB)
    context.expect(stats()[0]["pswpout"] * 4096 > 50 * MIB, f"little went to the file: {stats()}")
    ctl("group", "/a", "zswap.max=max")
    grow(40, "grew 2")
    until(
        context,
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
    context.expect(
        seen["pswpout"] == seen["zswpwb"] == 0 and seen["zswpout"] * 4096 > 40 * MIB,
        f"something was written, or nothing is out: {seen}",
    )
    ctl("group", "/a", "zswap.writeback=1")
    grow(80, "grew 2")
    until(context, "write-back", lambda: stats()[0]["pswpout"] > 0)
    seen = ends()
    context.expect(seen["pswpin"] > 0, f"nothing came back from the file: {seen}")


def swap_high(context):
    """Past `swap.high` a group's growth is slowed down, and only its growth; nothing is ended, and
    below it all goes on as fast as before.
    """
    if context.native:
        return
    script = """if True:
        import mmap, os, sys, time
        old = os.urandom(80 << 20)
        print("ready", os.getpid(), flush=True)
        for line in sys.stdin:
            began = time.monotonic()
            fresh = mmap.mmap(-1, 4 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for at in range(0, 4 << 20, 4096):
                fresh[at] = 1
            print("grew", time.monotonic() - began, flush=True)
        print("OK" if len(set(old[::4096])) == 256 else "WRONG", flush=True)
    """
    options = ["--group", "/a/b", "--swap", "zram:4M", "--swap", f"file:{context.directory}:512M"]
    program = context.start([context.python, "-c", script], options=options, stdin=subprocess.PIPE)
    wait_for_line(context, program, "ready")
    ctl = Ctl(context, program.pid)
    output = program.directory / "stdout"

    def grows():
        before = output.read_text().count("grew")
        program.process.stdin.write(b"go\n")
        program.process.stdin.flush()
        until(context, "growth", lambda: output.read_text().count("grew") > before, 60)
        return float(output.read_text().split()[-1])

    def waits():
        return int(json.loads(ctl("stats", "--json"))["stats"]["swap_high_waits"])

    free = min(grows() for _ in range(3))
    context.expect(waits() == 0, "somebody waited without a bound")
    swap = until(context, "swapped pages", lambda: ctl.value("/a", "swap.current"))
    ctl("group", "/a", f"swap.high={swap * 10 // 11}")
    time.sleep(0.3)
    stalled = ctl.stalled("/a")
    slow = grows()
    waited = ctl.stalled("/a") - stalled
    context.expect(
        slow / 2 < waited < slow + 0.5,
        f"4M took {slow:.3f} s past swap.high, and ram.pressure says that {waited:.3f} s of it "
        f"were waited for",
    )
    context.expect(
        slow > free + 0.5 and waits() > 0, f"4M took {free:.3f} s, and {slow:.3f} s past swap.high"
    )
    context.expect(ctl.event("/a", "swap", "high") >= 1, "no event")
    ctl("group", "/a", "swap.high=max")
    time.sleep(0.3)
    again = min(grows() for _ in range(3))
    context.expect(again < slow / 2, f"4M take {again:.3f} s without a bound again")
    program.process.stdin.close()
    program.process.stdin = None
    done = program.finish()
    context.expect("OK" in done.text(), f"it did not end with OK: {done.text()[-200:]}")


def tiers(context):
    """Tiers are changed as a whole or not at all, a tier with a device in use stays, and a group's
    pages keep off what it excludes.
    """
    if context.native:
        return
    for name in ("fast", "slow"):
        (context.directory / name).mkdir()
    fast, slow = (f"file:{context.directory}/{name}" for name in ("fast", "slow"))
    options = [
        "--tiers",
        "+SSD:100 +HDD:-1",
        "--group",
        "/a",
        "--swap",
        "zram:8M",
        "--swap",
        f"{fast}:256M,prio=200",
        "--swap",
        f"{slow}:512M,prio=5",
    ]
    program, inside, ctl = started(context, [context.python, PRESSURE, 120, "wait"], options)
    table = "Name            Idx  PrioStart  PrioEnd\nSSD             0    100        32767\nHDD             1    -1         99\n"
    context.expect(ctl("tiers") == table, f"the table is {ctl('tiers')!r}")
    ctl.refused('"-SSD"', "tiers", "+NET:50 -SSD")
    ctl.refused("token 2", "tiers", "+NET:50 +NET:60")
    ctl.refused("HDD:7", "tiers", "HDD:7")
    context.expect(ctl("tiers") == table, "something was changed that was refused as a whole")
    ctl("tiers", "+NET:50, SSD:150")
    rows = [
        (row["name"], row["index"], row["start"], row["end"])
        for row in json.loads(ctl("tiers", "--json"))
    ]
    context.expect(
        rows == [("SSD", 0, 150, 32767), ("NET", 2, 50, 149), ("HDD", 1, -1, 49)], f"{rows}"
    )

    def used(name):
        return {view["name"]: view["used_bytes"] for view in json.loads(ctl("devices", "--json"))}[
            name
        ]

    context.expect(
        used(fast) > 0 and used(slow) == 0, f"the higher priority comes first: {ctl('devices')}"
    )
    ctl("group", "/a/b", f"processes={inside}", "swap.tiers=+SSD")
    ctl("group", "/a", "swap.tiers=-SSD")
    context.expect(ctl.value("/a/b", "swap.tiers") == "SSD NET HDD", "its own")
    context.expect(
        ctl.value("/a/b", "swap.tiers.effective") == "NET HDD", "no more than its parent"
    )
    before = used(fast)
    ctl("group", "/a", "ram.max=20M")
    until(context, "pages on the slow device", lambda: used(slow) > 4 * MIB)
    context.expect(used(fast) <= before, "pages went where they may not go")
    ctl("group", "/a", "swap.tiers=", "ram.max=max")
    ended(context, program)


def shares(context):
    """Two groups of one run: a maximum holds beside a group without one, and what is kept for a
    group stays with it.
    """
    if context.native:
        return
    config = context.directory / "groups.toml"
    config.write_text('[groups."/kept"]\nram.low = "40M"\n[groups."/small"]\nram.max = "24M"\n')
    command = f"{context.python} {PRESSURE} 70 wait & {context.python} {PRESSURE} 70 wait & wait"
    broken = context.directory / "broken.toml"
    broken.write_text('ram = "64M"\n[groups."/x"]\nram.most = 1\n')
    refused = subprocess.run(
        [context.swaptide, "run", "--config", broken, "--", "true"], capture_output=True, text=True
    )
    context.expect(
        refused.returncode == 2
        and "broken.toml:3: " in refused.stderr
        and "most" in refused.stderr,
        f"{refused}",
    )

    program = context.start(["sh", "-c", command], options=["--config", str(config)])
    ctl = Ctl(context, program.pid)
    output = context.directory / "run1" / "stdout"
    until(context, "both programs", lambda: output.read_text().count("ready") == 2, 60)
    pids = [line.split()[1] for line in output.read_text().splitlines() if line.startswith("ready")]
    ctl("group", "/kept", f"processes={pids[0]}")
    ctl("group", "/small", f"processes={pids[1]}")
    until(context, "24M for /small", lambda: ctl.value("/small", "ram.current") < 24 * MIB)
    ctl("reclaim", "/small", "4M")
    for pid in pids:
        os.kill(int(pid), signal.SIGTERM)
    program.finish(status=0)
    text = output.read_text()
    context.expect(text.count("SIGTERM 1") == 2, f"not both programs verified their data: {text}")


def top(context):
    """`swaptide top`: a frame as text and as JSON, and live in a terminal that is as it was
    afterwards.
    """
    if context.native:
        return
    options = [
        "--group",
        "/web",
        "--swap",
        "zram:8M",
        "--swap",
        f"file:{context.directory}:512M,prio=7",
        "--tiers",
        "+SSD:-1",
    ]
    program, inside, ctl = started(context, [context.python, PRESSURE, 96, "wait"], options)
    words = [context.swaptide, "top", "--pid", str(program.pid)]
    frame = subprocess.run([*words, "--once"], capture_output=True, text=True, timeout=20)
    context.expect(
        frame.returncode == 0 and frame.stderr == "" and "\x1b" not in frame.stdout,
        f"top --once: {frame}",
    )
    rows = [line.split() for line in frame.stdout.splitlines() if line.strip()]
    context.expect(
        any(row[0] == str(inside) and row[2] == "/web" for row in rows),
        f"the process is not shown: {frame.stdout}",
    )
    context.expect(
        any(row[0].startswith("file:") and "SSD" in row for row in rows),
        f"the area is not shown: {frame.stdout}",
    )
    data = json.loads(
        subprocess.run([*words, "--json"], capture_output=True, text=True, timeout=20).stdout
    )
    context.expect(
        data["scene"]["runs"][0]["pid"] == program.pid and "zswpin" in data["rates"],
        f"top --json: {data}",
    )
    refused = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
    )
    context.expect(
        refused.returncode == 2 and "--once" in refused.stderr, f"without a terminal: {refused}"
    )

    for key in (b"q", b"\x03", None):
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        before = termios.tcgetattr(slave)
        live = subprocess.Popen(
            [*words, "--interval", "0.2"], stdin=slave, stdout=slave, stderr=slave
        )
        seen = b""

        def more():
            nonlocal seen
            while select.select([master], [], [], 0.05)[0]:
                seen += os.read(master, 65536)
            return str(inside).encode() in seen and b"/web" in seen

        until(context, "a screen", more)
        seen = b""
        # Numbers change, and only what changed is drawn again.
        os.write(master, b"\x1b[B")
        until(context, "a key that is heard", lambda: more() or seen)
        if key:
            os.write(master, key)
        else:
            live.terminate()
        until(context, "its end", lambda: (more(), live.poll() is not None)[1])
        more()
        context.expect(
            live.returncode == 0, f"top ends with {live.returncode} at {key}: {seen[-300:]}"
        )
        context.expect(b"\x1b[?1049l" in seen, f"the screen of before is not back: {seen[-300:]}")
        context.expect(termios.tcgetattr(slave) == before, "the terminal is not as it was")
        os.close(master)
        os.close(slave)
    ended(context, program)


class Daemon:
    """A daemon in a directory of the case, and what is asked of it."""

    def __init__(self, context, config):
        self.context = context
        self.env = {**os.environ, "SWAPTIDE_DIRECTORY": str(context.directory / "sockets")}
        self.config = context.directory / "daemon.toml"
        self.config.write_text(config)
        self.errors = context.directory / "daemon.errors"
        self.ctl = Ctl(context, env=self.env)
        self.process = None
        self.start()

    def start(self):
        words = [self.context.swaptide, "daemon", "--config", str(self.config)]
        with open(self.errors, "ab") as errors:
            self.process = subprocess.Popen(
                words, env=self.env, stdin=subprocess.DEVNULL, stderr=errors
            )
        until(
            self.context,
            "a daemon that answers",
            lambda: ask(self.context, "tiers", env=self.env)[0] == 0,
        )

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.process.terminate()
        status = self.process.wait(timeout=20)
        self.context.expect(status == 0, f"the daemon ends with status {status}")
        said = self.errors.read_text()
        self.context.expect(said == "", f"the daemon complained: {said}")

    def program(self, megabytes, *options):
        """A program that is kept by it; the number of the case's run, and of the process."""
        program = self.context.start(
            [self.context.python, PRESSURE, megabytes, "wait"], options=options, env=self.env
        )
        return program, int(wait_for_line(self.context, program, "ready").split()[1])


CONFIG = """ram = "112M"
swap = ["zram:32M", "file:{place}:1G"]
tiers = "+FAST:100 +SLOW:-1"

[groups."/a"]
ram.low = "8M"

[groups."/b"]
ram.max = "64M"

[daemon]
metrics = "{place}/metrics"
"""


def listed(daemon):
    return [int(line.split()[0]) for line in daemon.ctl("list").splitlines()]


def daemon_joins(context):
    """Runs join a daemon: one budget over all, groups, a configuration that is read again, metrics;
    at the end nothing stays behind.
    """
    if context.native:
        return
    place = context.directory / "swap"
    place.mkdir()
    config = CONFIG.format(place=place)
    daemon = Daemon(context, config)
    context.expect(
        oct((context.directory / "sockets" / "daemon.sock").stat().st_mode & 0o777) == "0o600",
        "the socket is open to others",
    )
    second = subprocess.run(
        [context.swaptide, "daemon", "--config", str(daemon.config)],
        env=daemon.env,
        capture_output=True,
        text=True,
    )
    context.expect(
        second.returncode == 2 and "runs there already" in second.stderr,
        f"a second daemon: {second}",
    )
    refused = subprocess.run(
        [context.swaptide, "run", "--swap", "zram:8M", "--", "true"],
        env=daemon.env,
        capture_output=True,
        text=True,
    )
    context.expect(
        refused.returncode == 2 and "--no-daemon" in refused.stderr,
        f"--swap beside a daemon: {refused}",
    )

    first, one = daemon.program(80, "--group", "/a")
    second, other = daemon.program(80, "--group", "/b/inner")
    frame = subprocess.run(
        [context.swaptide, "top", "--once"], env=daemon.env, capture_output=True, text=True
    ).stdout
    context.expect(
        "daemon: 2 runs" in frame
        and "of 112M" in frame
        and str(one) in frame
        and str(other) in frame,
        f"top: {frame}",
    )
    context.expect(
        sorted(listed(daemon)) == sorted([first.pid, second.pid]), f"ctl list: {daemon.ctl('list')}"
    )
    view = json.loads(Ctl(context, one, daemon.env)("stats", "--json"))
    context.expect(
        view["pid"] == first.pid and {p["group"] for p in view["processes"]} == {"/a"}, f"{view}"
    )
    until(context, "the budget", lambda: daemon.ctl.value("/", "ram.current") < 118 * MIB)
    until(context, "64M for /b", lambda: daemon.ctl.value("/b", "ram.current") < 66 * MIB)

    daemon.config.write_text(config.replace("ram.max", "ram.most"))
    daemon.ctl.refused("daemon.toml:9: ", "reload")
    daemon.config.write_text(config.replace('"64M"', '"40M"'))
    daemon.ctl("reload")
    until(context, "40M for /b", lambda: daemon.ctl.value("/b", "ram.current") < 41 * MIB)
    daemon.config.write_text(config.replace('"64M"', '"48M"'))
    os.kill(daemon.process.pid, signal.SIGHUP)
    until(
        context, "a file that was read again", lambda: daemon.ctl.value("/b", "ram.max") == 48 * MIB
    )

    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(place / "metrics"))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        text = b"".join(iter(lambda: client.recv(65536), b"")).decode()
    for line in (
        "swaptide_budget_bytes 117440512",
        'swaptide_group_processes{group="/b"}',
        'swaptide_group_stalled_seconds_total{group="/b"} ',
        f'pid="{first.pid}"',
        "# EOF",
    ):
        context.expect(line in text, f"{line} is not among the metrics: {text[:2000]}")

    # The list of devices is followed: what is new comes, what is gone goes, what ctl added stays,
    # and what cannot be had changes nothing.
    def names():
        return sorted(view["name"] for view in json.loads(daemon.ctl("devices", "--json")))

    for name in ("listed", "added"):
        (context.directory / name).mkdir()
    daemon.ctl("swapon", f"file:{context.directory}/added:64M,prio=2")
    old, new = f'"file:{place}:1G"', f'"file:{context.directory}/listed:512M,prio=3"'
    daemon.config.write_text(config.replace(old, f"{old}, {new}"))
    daemon.ctl("reload")
    added, listed_one, first_one = (
        f"file:{context.directory}/added",
        f"file:{context.directory}/listed",
        f"file:{place}",
    )
    context.expect(
        names() == sorted([added, listed_one, first_one]), f"after a device was listed: {names()}"
    )
    for wrong, named in (
        (f'"file:{place}:2G"', "off the list"),
        (f'{old}, "file:/no/such/place:64M"', "no/such"),
    ):
        daemon.config.write_text(config.replace(old, wrong).replace('"64M"', '"32M"'))
        daemon.ctl.refused(named, "reload")
        context.expect(
            daemon.ctl.value("/b", "ram.max") != 32 * MIB, "something of a refused file counts"
        )
    daemon.config.write_text(config.replace(old, new))
    daemon.ctl("reload")
    until(
        context,
        "a device that was taken off the list",
        lambda: names() == sorted([added, listed_one]),
    )
    daemon.config.write_text(config.replace('"64M"', '"48M"'))
    daemon.ctl("reload")
    until(context, "the list of before", lambda: names() == sorted([added, first_one]))
    daemon.ctl("swapoff", added)

    # A group goes out, stays there, and comes back in one go.
    daemon.ctl("freeze", "/a")
    frozen = daemon.ctl.value("/a", "ram.current")
    context.expect(frozen < 24 * MIB, f"{frozen} bytes of a frozen group are in memory")
    daemon.ctl("group", "/b", "ram.max=24M")
    until(context, "24M for /b", lambda: daemon.ctl.value("/b", "ram.current") < 25 * MIB)
    daemon.ctl("preload", "/a")
    back = daemon.ctl.value("/a", "ram.current")
    context.expect(
        back > frozen + 24 * MIB, f"{frozen} bytes were in memory, and after preload {back}"
    )
    daemon.ctl("reclaim", "/a", "8M")

    for program in (first, second):
        done = ended(context, program)
        context.expect(
            int(done.report["stats"]["zswpout"]) > 100, f"its own report: {done.report['stats']}"
        )
    until(context, "no run", lambda: listed(daemon) == [])
    until(context, "no charge", lambda: daemon.ctl.value("/", "swap.current") == 0)
    daemon.stop()
    left = [
        path.name for path in place.iterdir() if path.name not in ("metrics", "listed", "added")
    ] + os.listdir(context.directory / "sockets" / "daemon")
    context.expect(left == ["lock"], f"left behind: {left}")


def daemon_shared(context):
    """Shared memory of runs that a daemon keeps: each run's pager is held to its group's bound, and
    uses the daemon's areas.
    """
    if context.native:
        return
    place = context.directory / "swap"
    place.mkdir()
    daemon = Daemon(context, CONFIG.format(place=place).replace("zram:32M", "zram:6M"))
    words = [context.binary("shared"), 96, 4, context.seed, "hammer"]
    programs = [
        context.start(words, options=["--shared", "--group", group], env=daemon.env)
        for group in ("/a", "/b")
    ]
    looks = []
    while any(program.process.poll() is None for program in programs):
        looks.append(daemon.ctl.value("/b", "ram.current"))
        time.sleep(0.02)
    for program in programs:
        done = program.finish(status=0)
        context.expect(
            "OK shared hammer" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
        )
        seen = done.report["stats"]
        context.expect(
            seen["pswpout"] > 1000 and seen["pswpin"] > 1000,
            f"nothing went to the daemon's file: {seen}",
        )
    # What is seen at a moment may be far past the bound, while its pager makes room for what was
    # touched; without the bound it would be 96 and more most of the time.
    looks = sorted(looks)
    usual, often, most = looks[len(looks) // 2], looks[len(looks) * 19 // 20], looks[-1]
    context.expect(
        MIB < usual < 64 * MIB * 11 // 10 and often < 96 * MIB,
        f"/b usually had {usual >> 20} MiB of 64, more than {often >> 20} in a look of twenty, "
        f"and {most >> 20} at most",
    )
    until(
        context, "nothing held by who is gone", lambda: daemon.ctl.value("/b", "swap.current") == 0
    )
    daemon.stop()


def daemon_killed(context):
    """A daemon is killed and started again: programs go on meanwhile, it finds them, and takes back
    what dead ones had.
    """
    if context.native:
        return
    place = context.directory / "swap"
    place.mkdir()
    daemon = Daemon(context, CONFIG.format(place=place))
    program, inside = daemon.program(120, "--group", "/a")
    victim, other = daemon.program(60, "--group", "/b")
    daemon.ctl("group", "/a", "ram.high=80M", "swap.tiers=-FAST")
    for number in range(1, 4):
        daemon.kill()
        os.kill(inside, signal.SIGUSR1)
        wait_for_line(context, program, f"USR1 number {number}")
        daemon.start()
        context.expect(daemon.ctl.value("/a", "ram.high") == 80 * MIB, "its settings are gone")
        context.expect(daemon.ctl.value("/a", "swap.tiers") == "SLOW", "its tiers are gone")
        context.expect(
            program.pid in listed(daemon), f"it does not know the run: {daemon.ctl('list')}"
        )
        until(context, "its process", lambda: daemon.ctl.value("/a", "processes") >= 1)
    daemon.ctl("group", "/a", "ram.max=40M")
    until(context, "a limit that sinks", lambda: daemon.ctl.value("/a", "ram.current") < 42 * MIB)

    # A whole run is killed while no daemon is there to see it.
    daemon.kill()
    daemon_less = [other, victim.pid]
    for pid in daemon_less:
        os.kill(pid, signal.SIGKILL)
    victim.process.wait()
    daemon.start()
    until(
        context,
        "charges of the dead",
        lambda: (
            daemon.ctl.value("/b", "swap.current") == 0 and daemon.ctl.value("/b", "processes") == 0
        ),
    )
    until(context, "one run", lambda: listed(daemon) == [program.pid])
    daemon.ctl("group", "/a", "ram.max=max")
    ended(context, program)
    until(context, "no charge", lambda: daemon.ctl.value("/", "swap.current") == 0)
    daemon.stop()


# MiB of every fourth program: those of the first kind are in a group with a bound, the last are
# larger than the others.
SIZES = (12, 12, 12, 24)


def daemon_network(context):
    """A daemon's network areas: it is started again while a server is away, and what dead processes
    had is trimmed.
    """
    if context.native:
        return
    server = Server(context)
    try:
        daemon = Daemon(
            context,
            f'ram = "64M"\nswap = ["zram:8M", "{server.url()},prio=9", '
            f'"file:{context.directory}:1G,prio=1"]\n',
        )

        def nbd():
            return next(
                view
                for view in json.loads(daemon.ctl("devices", "--json"))
                if view["type"] == "nbd"
            )

        def blocks():
            return os.stat(server.image).st_blocks * 512

        program, inside = daemon.program(120)
        until(context, "pages on the server", lambda: nbd()["used_bytes"] > 16 * MIB)
        server.kill()
        daemon.kill()
        daemon.start()
        seen = nbd()
        context.expect(
            seen["state"] == "away" and seen["used_bytes"] > 16 * MIB, f"the server is away: {seen}"
        )
        server.start()
        until(context, "the server to be back", lambda: nbd()["state"] == "open")
        os.kill(inside, signal.SIGUSR1)
        ended(context, program)
        until(context, "no charge", lambda: daemon.ctl.value("/", "swap.current") == 0)

        victim, inside = daemon.program(120)
        until(context, "pages on the server", lambda: nbd()["used_bytes"] > 16 * MIB)
        full = blocks()
        for pid in (inside, *descendants(victim.pid), victim.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        victim.process.wait()
        until(context, "no charge", lambda: nbd()["used_bytes"] == 0)
        until(context, "trimmed space", lambda: blocks() < full / 8)
        context.expect(full > 16 * MIB, f"only {full} bytes were there")
        daemon.stop()
    finally:
        server.kill()


def daemon_crowd(context):
    """Sixty-four programs under one daemon: the budget is held, no group is above its bound, every
    limit is what is fair by demand, and equal programs have like shares."""
    if context.native:
        return
    place = context.directory / "swap"
    place.mkdir()
    daemon = Daemon(
        context, f'ram = "384M"\nswap = ["file:{place}:4G"]\n[groups."/small"]\nram.max = "96M"\n'
    )
    programs = []
    for number in range(64):
        options = ["--group", "/small" if number % 4 == 0 else "/large"]
        argv = [context.binary("heap"), SIZES[number % 4], 150, context.seed + number]
        programs.append(context.start(argv, options=options, env=daemon.env))
    until(context, "all programs", lambda: daemon.ctl.value("/", "processes") >= 64, 60)
    time.sleep(15)
    most, small, looks = 0, 0, 0
    parts, limits, fairs = [0] * 64, [0] * 64, [0] * 64
    end = time.monotonic() + 90
    while looks < 40 and time.monotonic() < end:
        text = subprocess.run(
            [context.swaptide, "top", "--json"], env=daemon.env, capture_output=True, text=True
        ).stdout
        scene = json.loads(text)["scene"]
        values = {group["path"]: group["values"] for group in scene["groups"]}
        most = max(most, int(values["/"]["ram.current"]))
        small = max(small, int(values["/small"]["ram.current"]))
        resident = {
            run["pid"]: sum(process["resident_bytes"] for process in run["processes"])
            for run in scene["runs"]
        }
        if all(resident.get(program.pid) for program in programs):
            looks += 1
            parts = [part + resident[program.pid] for part, program in zip(parts, programs)]
            total = lambda run, key: sum(process[key] for process in run["processes"])
            limit, fair = (
                {run["pid"]: total(run, key) for run in scene["runs"]}
                for key in ("limit_bytes", "fair_bytes")
            )
            limits = [sum_ + limit[program.pid] for sum_, program in zip(limits, programs)]
            fairs = [sum_ + fair[program.pid] for sum_, program in zip(fairs, programs)]
        time.sleep(0.25)
    context.expect(looks >= 4, f"only {looks} looks saw all programs")
    parts, limits, fairs = (
        [value / looks / MIB for value in values] for values in (parts, limits, fairs)
    )
    off = [limit / fair - 1 for limit, fair in zip(limits, fairs)]
    print(
        f"  limits beside what is fair by demand: {min(off):+.1%} to {max(off):+.1%}; over "
        f"{looks} looks"
    )
    context.expect(
        all(abs(part) < 0.1 for part in off), f"limits are not within 10% of what is fair: {off}"
    )
    for kind, size in enumerate(SIZES):
        own = parts[kind::4]
        fair = sum(own) / len(own)
        worst = max(own, key=lambda part: abs(part - fair))
        sigma = (sum((part / fair - 1) ** 2 for part in own) / len(own)) ** 0.5
        print(
            f"  {size}M, {'/large' if kind else '/small'}: {fair:.2f}M each, the furthest "
            f"{worst:.2f}M, deviation {sigma:.1%}; "
            f"limits {min(limits[kind::4]):.2f} to {max(limits[kind::4]):.2f}M, fair "
            f"{min(fairs[kind::4]):.2f} to {max(fairs[kind::4]):.2f}M"
        )
        context.expect(
            all(fair / 1.25 < part < fair * 1.25 for part in own),
            f"programs of {size}M have {fair:.2f}M on average, and one {worst:.2f}M: {parts}",
        )
    context.expect(
        most < 384 * MIB * 1.05, f"the budget is 384M, and {most / MIB:.1f}M were in use"
    )
    context.expect(small < 96 * MIB * 1.05, f"/small may have 96M, and had {small / MIB:.1f}M")
    for program in programs:
        done = program.finish()
        context.expect(
            "OK heap" in done.text(), f"it did not verify its memory: {done.text()[-200:]}"
        )
    until(context, "no charge", lambda: daemon.ctl.value("/", "swap.current") == 0)
    daemon.stop()


def daemon_storm(context):
    """Programs, their supervisors, the daemon and NBD servers are killed at random: what survives
    verifies its memory, and everything comes back.
    """
    if context.native:
        return
    place = context.directory / "swap"
    place.mkdir()
    # One export with a mirror, one without; both servers always come back, the second in time.
    servers = [Server(context, name) for name in ("mirrored", "plain")]
    try:
        storm(context, place, servers)
    finally:
        for server in servers:
            server.kill()


def storm(context, place, servers):
    mirrored, plain = (server.url() for server in servers)
    swap = f'"zram:24M", "{mirrored},prio=9,mirror={place}", "{plain},prio=9", "file:{place}:2G"'
    daemon = Daemon(context, f'ram = "160M"\nswap = [{swap}]\n[groups."/a"]\nram.max = "96M"\n')
    away, killed = {}, 0
    chance = random.Random(context.seed)
    seconds = 300 if context.case.limit > 400 else 60
    end = time.monotonic() + seconds
    running = {}
    finished = 0
    while time.monotonic() < end:
        while len(running) < 5 and time.monotonic() < end - 10:
            length = chance.randint(4, 10)
            kind = chance.choice([("heap",), ("torture", "single"), ("forks", "nested")])
            argv = [
                context.binary(kind[0]),
                chance.randint(32, 64),
                length,
                context.seed,
                *kind[1:],
            ]
            group = chance.choice(["/a", "/a/b", "/c"])
            program = context.start(argv, options=["--group", group], env=daemon.env)
            running[program.pid] = (program, kind)
        time.sleep(chance.uniform(0.05, 0.6))
        draw = chance.random()
        for server, back in list(away.items()):
            if time.monotonic() > back:
                server.start()
                del away[server]
        if draw < 0.06 and len(away) < 2:
            server = chance.choice([server for server in servers if server not in away])
            server.kill()
            killed += 1
            away[server] = time.monotonic() + chance.uniform(0.2, 12 if server is servers[0] else 6)
        elif draw < 0.18:
            daemon.kill()
            time.sleep(chance.uniform(0, 0.3))
            daemon.start()
        elif draw < 0.45 and any(kind[0] != "forks" for _, kind in running.values()):
            # A whole run, in any order; one that forks all the time would leave orphans.
            program, _ = running.pop(
                chance.choice([pid for pid, (_, kind) in running.items() if kind[0] != "forks"])
            )
            victims = [pid for pid in descendants(program.pid)] + [program.pid]
            chance.shuffle(victims)
            for pid in victims:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            program.process.wait()
        for pid, (program, kind) in list(running.items()):
            if program.process.poll() is not None:
                del running[pid]
                text = (program.directory / "stdout").read_text()
                said = f"{kind}: status {program.process.returncode}: {text[-300:]} {(program.directory / 'stderr').read_text()[-300:]}"
                context.expect(
                    program.process.returncode == 0 and f"OK {kind[0]}" in text,
                    f"a survivor: {said}",
                )
                finished += 1
    for server in away:
        server.start()
    for program, kind in running.values():
        program.process.wait()
        text = (program.directory / "stdout").read_text()
        context.expect(
            program.process.returncode == 0 and f"OK {kind[0]}" in text,
            f"a survivor, at the end: {kind}: {text[-300:]}",
        )
        finished += 1
    context.expect(finished >= 5, f"only {finished} programs came to their end")
    until(context, "no run", lambda: listed(daemon) == [])
    until(context, "no charge", lambda: daemon.ctl.value("/", "swap.current") == 0)
    used = [view["used_bytes"] for view in json.loads(daemon.ctl("devices", "--json"))]
    context.expect(used == [0, 0, 0], f"extents that nobody has: {used}")
    context.expect(killed > 0, "no server was killed")
    print(f"  {finished} programs came to their end, servers were killed {killed} times")
    daemon.stop()


CASES = [
    Case("groups", groups, 48, allowance=8),
    Case("tiers", tiers, 48, allowance=8),
    Case("swap-high", swap_high, 48, allowance=8),
    Case("zswap-groups", zswap_groups, 48, allowance=16),
    Case("top", top, 48, allowance=8),
    Case("shares", shares, 96, allowance=8, forks=True),
    Case("daemon-joins", daemon_joins, 112, allowance=8, swaps=False),
    Case("daemon-shared", daemon_shared, 112, allowance=32, swaps=False, forks=True),
    Case("daemon-killed", daemon_killed, 112, allowance=8, swaps=False),
    Case("daemon-network", daemon_network, 64, needs=("nbdkit",), allowance=8, swaps=False),
    Case(
        "daemon-crowd",
        daemon_crowd,
        384,
        allowance=64,
        swaps=False,
        full=True,
        limit=400,
        forks=True,
    ),
    Case(
        "daemon-storm",
        daemon_storm,
        160,
        needs=("nbdkit",),
        allowance=64,
        swaps=False,
        full=True,
        limit=300,
        forks=True,
    ),
    Case(
        "daemon-storm-long",
        daemon_storm,
        160,
        needs=("nbdkit",),
        allowance=64,
        swaps=False,
        full=True,
        limit=900,
        forks=True,
    ),
]
