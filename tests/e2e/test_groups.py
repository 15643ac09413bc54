"""Groups and tiers as they are used: `swaptide run`, `swaptide ctl` and `swaptide top`."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time

import pytest

from ctl import PRESSURE, Ctl, ask, ended, started, until, wait_for_line
from harness import MIB


@pytest.mark.swaptide(budget=32, allowance=4, native=False)
def test_ctl(case):
    """A run can be asked for its counters by the numbers of its own process and of the program, and
    not when it is over.
    """
    program = case.start([case.python, PRESSURE, 100, "wait"])
    inside = wait_for_line(case, program, "ready").split()[1]
    status, text, errors = ask(case, "stats", "--pid", str(program.pid), "--json")
    assert status == 0, f"ctl stats: status {status}: {errors}"
    view = json.loads(text)
    assert view["pid"] == program.pid and view["stats"]["zswpout"] > 1000, (
        f"not this run, or it swaps nothing: {text}"
    )
    status, text, errors = ask(case, "stats", "--pid", inside)
    assert status == 0 and f"\n{inside:>8} engaged" in text, f"status {status}: {text}{errors}"
    os.kill(program.pid, signal.SIGTERM)
    program.finish(status=7)
    status, text, errors = ask(case, "stats", "--pid", str(program.pid))
    assert status == 2 and len(errors.splitlines()) == 1, (
        f"it is over, and status is {status}: {text}{errors}"
    )


@pytest.mark.swaptide(budget=96, native=False)
def test_ctl_budget(case):
    """The budget of a run changes in both directions; the report has the largest one."""
    program, _, ctl = started(case, [case.python, PRESSURE, 64, "wait"], [])

    def resident():
        return json.loads(ctl("stats", "--json"))["resident_bytes"]

    assert int(ctl("budget")) == 96 * MIB and resident() > 64 * MIB
    ctl.refused("1B is too small; the minimum is 16M", "budget", "1")
    ctl.refused('"much" is not a size', "budget", "much")
    assert int(ctl("budget")) == 96 * MIB
    ctl("budget", "24M")
    assert int(ctl("budget")) == 24 * MIB
    until(case, "pages go out", lambda: resident() <= 26 * MIB)
    ctl("budget", "128M")
    done = ended(case, program)
    assert done.report["budget_bytes"] == 128 * MIB, done.report["budget_bytes"]


@pytest.mark.swaptide(budget=48, allowance=8, native=False)
def test_groups(case):
    """A group's bounds hold, its settings are made whole or not at all, and what it has is counted
    to it and all above it.
    """
    options = [
        "--group",
        "/web/front",
        "--swap",
        "zram:8M",
        "--swap",
        f"file:{case.directory}:512M",
    ]
    program, inside, ctl = started(case, [case.python, PRESSURE, 160, "wait"], options)
    view = json.loads(ctl("stats", "--json"))
    assert all(process["group"] == "/web/front" for process in view["processes"]), (
        f"not in their group: {view}"
    )
    assert (
        ctl.value("/web/front", "ram.max") == "max" and ctl.value("/web/front", "processes") >= 1
    ), "nothing is set yet"

    # The figures are live, and each is asked for by a call of its own: they agree as soon as
    # reclaim rests.
    def held(*groups):
        return [ctl.value(group, "swap.current") for group in groups]

    def same(found):
        return found if found[0] >= 8 * MIB and len(set(found)) == 1 else None

    until(
        case,
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
    ctl.refused("1 is not a process", "group", "/web", "processes=1")
    assert ctl.value("/web/front", "ram.max") == "max", (
        "something was set that was refused as a whole"
    )

    # What rests in a budget of 48M may be some MiB less than that. So the first bounds are below
    # what there is.
    had = ctl.value("/web", "ram.current")
    ctl("group", "/web", f"ram.max={had - 4 * MIB}", f"ram.high={had - 6 * MIB}")
    most = until(
        case, "the bounds of /web", lambda: ctl.value("/web", "ram.current") < had - 4 * MIB
    )
    assert most is None or ctl.event("/", "ram", "high") >= 1, (
        f"no event below {had}: {ctl('group', '/web')!r}"
    )
    ctl("group", "/web", "ram.high=28M")
    until(case, "28M for /web", lambda: ctl.value("/web", "ram.current") < 29 * MIB)
    ctl("group", "/web", "ram.high=max", "ram.max=max")

    # Moved, its charges go along, exactly.
    ctl("group", "/batch", f"processes={inside}", "swap.max=1G")
    until(case, "charges that moved", lambda: ctl.value("/web", "swap.current") == 0)
    swap = (
        until(case, "all of the run's swap.current in /batch", lambda: same(held("/batch", "/")))
        or [0]
    )[0]
    ctl.refused("processes are in it", "group", "/batch", "--remove")
    ctl("group", "/web/front", "--remove")
    ctl.refused("/web/front", "group", "/web/front")

    # No lease goes past the maximum.
    ctl("group", "/batch", f"swap.max={swap}", "ram.max=16M")
    until(case, "a refused lease", lambda: ctl.event("/batch", "swap", "max") > 0)
    assert ctl.value("/batch", "swap.current") <= swap, "past swap.max"
    ctl("group", "/batch", "swap.max=max", "ram.max=max")
    done = ended(case, program)
    seen = {group["path"]: group["values"] for group in done.report["groups"]}
    assert sorted(seen) == ["/", "/batch", "/web"] and int(seen["/"]["ram.current"]) >= 0, f"{seen}"
    # By then the program is gone, and with it its charges.
    assert seen["/"]["swap.current"] == "0", f"{seen['/']}"


@pytest.mark.swaptide(budget=48, allowance=8, native=False)
def test_tiers(case):
    """Tiers are changed as a whole or not at all, a tier with a device in use stays, and a group's
    pages keep off what it excludes.
    """
    for name in ("fast", "slow"):
        (case.directory / name).mkdir()
    fast, slow = (f"file:{case.directory}/{name}" for name in ("fast", "slow"))
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
    program, inside, ctl = started(case, [case.python, PRESSURE, 120, "wait"], options)
    table = (
        "Name            Idx  PrioStart  PrioEnd\n"
        "SSD             0    100        32767\n"
        "HDD             1    -1         99\n"
    )
    assert ctl("tiers") == table, f"the table is {ctl('tiers')!r}"
    ctl.refused('"-SSD"', "tiers", "+NET:50 -SSD")
    ctl.refused("token 2", "tiers", "+NET:50 +NET:60")
    ctl.refused("HDD:7", "tiers", "HDD:7")
    assert ctl("tiers") == table, "something was changed that was refused as a whole"
    ctl("tiers", "+NET:50, SSD:150")
    rows = [
        (row["name"], row["index"], row["start"], row["end"])
        for row in json.loads(ctl("tiers", "--json"))
    ]
    assert rows == [("SSD", 0, 150, 32767), ("NET", 2, 50, 149), ("HDD", 1, -1, 49)], f"{rows}"

    def used(name):
        return {view["name"]: view["used_bytes"] for view in json.loads(ctl("devices", "--json"))}[
            name
        ]

    assert used(fast) > 0 and used(slow) == 0, f"the higher priority comes first: {ctl('devices')}"
    ctl("group", "/a/b", f"processes={inside}", "swap.tiers=+SSD")
    ctl("group", "/a", "swap.tiers=-SSD")
    assert ctl.value("/a/b", "swap.tiers") == "SSD NET HDD", "its own"
    assert ctl.value("/a/b", "swap.tiers.effective") == "NET HDD", "no more than its parent"
    before = used(fast)
    ctl("group", "/a", "ram.max=20M")
    until(case, "pages on the slow device", lambda: used(slow) > 4 * MIB)
    assert used(fast) <= before, "pages went where they may not go"
    ctl("group", "/a", "swap.tiers=", "ram.max=max")
    ended(case, program)


@pytest.mark.full
@pytest.mark.swaptide(budget=48, allowance=8, native=False)
def test_swap_high(case):
    """Past `swap.high` a group's growth is slowed down, and only its growth; nothing is ended, and
    below it all is as fast as before.
    """
    script = """if True:
        import mmap, os, sys, time
        old = os.urandom(80 << 20)
        print("ready", os.getpid(), flush=True)
        for line in sys.stdin:
            began = time.monotonic()
            fresh = mmap.mmap(-1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for at in range(0, 2 << 20, 4096):
                fresh[at] = 1
            print("grew", time.monotonic() - began, flush=True)
        print("OK" if len(set(old[::4096])) == 256 else "WRONG", flush=True)
    """
    options = ["--group", "/a/b", "--swap", "zram:4M", "--swap", f"file:{case.directory}:512M"]
    program = case.start([case.python, "-c", script], options=options, stdin=subprocess.PIPE)
    wait_for_line(case, program, "ready")
    ctl = Ctl(case, program.pid)
    output = program.directory / "stdout"

    def grows():
        before = output.read_text().count("grew")
        program.process.stdin.write(b"go\n")
        program.process.stdin.flush()
        until(case, "growth", lambda: output.read_text().count("grew") > before, 60)
        return float(output.read_text().split()[-1])

    def waits():
        return int(json.loads(ctl("stats", "--json"))["stats"]["swap_high_waits"])

    free = min(grows() for _ in range(3))
    assert waits() == 0, "a thread waited without a bound"
    swap = until(case, "swapped pages", lambda: ctl.value("/a", "swap.current"))
    ctl("group", "/a", f"swap.high={swap * 10 // 11}")
    time.sleep(0.3)
    stalled = ctl.stalled("/a")
    slow = grows()
    waited = ctl.stalled("/a") - stalled
    assert slow / 2 < waited < slow + 0.5, (
        f"2M took {slow:.3f} s past swap.high, and ram.pressure says that {waited:.3f} s of it "
        f"were waited for"
    )
    assert slow > free + 0.5 and waits() > 0, (
        f"2M took {free:.3f} s, and {slow:.3f} s past swap.high"
    )
    assert ctl.event("/a", "swap", "high") >= 1, "no event"
    ctl("group", "/a", "swap.high=max")
    time.sleep(0.3)
    again = min(grows() for _ in range(3))
    assert again < slow / 2, f"2M take {again:.3f} s without a bound again"
    program.process.stdin.close()
    program.process.stdin = None
    done = program.finish()
    assert "OK" in done.text(), f"it did not end with OK: {done.text()[-200:]}"


@pytest.mark.swaptide(budget=96, allowance=8, forks=True, native=False)
def test_shares(case):
    """Two groups of one run: a maximum holds next to a group without one, and what is kept for a
    group stays with it.
    """
    config = case.directory / "groups.toml"
    config.write_text('[groups."/kept"]\nram.low = "40M"\n[groups."/small"]\nram.max = "24M"\n')
    command = f"{case.python} {PRESSURE} 70 wait & {case.python} {PRESSURE} 70 wait & wait"
    broken = case.directory / "broken.toml"
    broken.write_text('ram = "64M"\n[groups."/x"]\nram.most = 1\n')
    refused = subprocess.run(
        case.command("true", ram=None, options=["--config", broken]), capture_output=True, text=True
    )
    assert (
        refused.returncode == 2 and "broken.toml:3: " in refused.stderr and "most" in refused.stderr
    ), f"{refused}"

    program = case.start(["sh", "-c", command], options=["--config", str(config)])
    ctl = Ctl(case, program.pid)
    output = case.directory / "run1" / "stdout"
    until(case, "both programs", lambda: output.read_text().count("ready") == 2, 60)
    pids = [line.split()[1] for line in output.read_text().splitlines() if line.startswith("ready")]
    ctl("group", "/kept", f"processes={pids[0]}")
    ctl("group", "/small", f"processes={pids[1]}")
    until(case, "24M for /small", lambda: ctl.value("/small", "ram.current") < 24 * MIB)
    ctl("reclaim", "/small", "4M")
    for pid in pids:
        os.kill(int(pid), signal.SIGTERM)
    program.finish(status=0)
    text = output.read_text()
    assert text.count("SIGTERM 1") == 2, f"not both programs verified their data: {text}"


@pytest.mark.swaptide(budget=48, allowance=8, native=False)
def test_top(case):
    """`swaptide top`: a frame as text and as JSON, and live in a terminal that is as it was
    afterwards.
    """
    options = [
        "--group",
        "/web",
        "--swap",
        "zram:8M",
        "--swap",
        f"file:{case.directory}:512M,prio=7",
        "--tiers",
        "+SSD:-1",
    ]
    program, inside, ctl = started(case, [case.python, PRESSURE, 96, "wait"], options)
    words = [case.swaptide, "top", "--pid", str(program.pid)]
    frame = subprocess.run([*words, "--once"], capture_output=True, text=True, timeout=20)
    assert frame.returncode == 0 and frame.stderr == "" and "\x1b" not in frame.stdout, (
        f"top --once: {frame}"
    )
    rows = [line.split() for line in frame.stdout.splitlines() if line.strip()]
    assert any(row[0] == str(inside) and row[2] == "/web" for row in rows), (
        f"the process is not shown: {frame.stdout}"
    )
    assert any(row[0].startswith("file:") and "SSD" in row for row in rows), (
        f"the area is not shown: {frame.stdout}"
    )
    data = json.loads(
        subprocess.run([*words, "--json"], capture_output=True, text=True, timeout=20).stdout
    )
    assert data["scene"]["runs"][0]["pid"] == program.pid and "zswpin" in data["rates"], (
        f"top --json: {data}"
    )
    refused = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
    )
    assert refused.returncode == 2 and "--once" in refused.stderr, f"without a terminal: {refused}"

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

        until(case, "a screen", more)
        seen = b""
        # Numbers change, and only what changed is drawn again.
        os.write(master, b"\x1b[B")
        until(case, "a key that is heard", lambda: more() or seen)
        if key:
            os.write(master, key)
        else:
            live.terminate()
        until(case, "its end", lambda: (more(), live.poll() is not None)[1])
        more()
        assert live.returncode == 0, f"top ends with {live.returncode} at {key}: {seen[-300:]}"
        assert b"\x1b[?1049l" in seen, f"the screen of before is not back: {seen[-300:]}"
        assert termios.tcgetattr(slave) == before, "the terminal is not as it was"
        os.close(master)
        os.close(slave)
    ended(case, program)
