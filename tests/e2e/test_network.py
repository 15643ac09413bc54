"""Swap areas on servers: network block devices."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time

import pytest

from ctl import ask, until, wait_for_line
from harness import MIB, status_of_signal
from processes import descendants
from server_faults import EXTENT
from servers import Misbehaving, Server, forward

pytestmark = [pytest.mark.network]


@pytest.mark.full
@pytest.mark.swaptide(budget=32, limit=120, needs=("nbdkit",), allowance=128, native=False)
def test_network(case):
    """A network export as swap space: its server is killed and comes back in the middle; for good,
    what is written goes elsewhere.
    """
    server = Server(case)
    try:

        def finished(started, last):
            done = started.finish()
            assert last in done.text(), f"it did not end with {last}: {done.text()[-300:]!r}"
            report = json.loads(started.report_path.read_text())
            assert report["errors"]["pages_poisoned"] == 0, f"pages were lost: {report['errors']}"
            return {device["type"]: device["peak_used_bytes"] for device in report["devices"]}

        options = ["--swap", "zram:4M", "--swap", f"{server.url()},prio=9"]
        for mode in ("single", "threads"):
            started = case.start([case.binary("torture"), 96, 8, case.seed, mode], options=options)
            time.sleep(3)
            server.kill()
            time.sleep(1.5)
            server.start()
            used = finished(started, f"OK torture {mode}")
            assert used["nbd"] > 8 << 20, f"the export is hardly used: {used}"
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
        options += ["--swap", f"file:{case.directory}:1G,prio=1"]
        started = case.start([case.python, "-c", script], options=options)
        time.sleep(4)
        server.kill()
        time.sleep(12)
        server.start()
        used = finished(started, "OK")
        assert used["nbd"] > 4 << 20 and used["file"] > 4 << 20, f"not both are used: {used}"
        occupied = case.directory / "occupied"
        occupied.write_bytes(b"a file system" + bytes(64 << 20))
        server.kill()
        server.image = occupied
        server.start()
        refused = subprocess.run(
            case.command("true", ram=None, options=["--swap", server.url()]),
            capture_output=True,
            text=True,
        )
        assert refused.returncode == 2 and "it may hold data" in refused.stderr, (
            f"it is not empty: {refused}"
        )
    finally:
        server.kill()


def lose_mirrored_server(case, modes):
    """A network export with a mirror: its server is killed for good in the middle, nothing is lost
    and no thread waits for it.
    """
    local = case.directory / "local"
    local.mkdir()
    for number, mode in enumerate(modes):
        server = Server(case)
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
            program = case.start([case.binary(binary), 96, 12, case.seed, *words], options=options)

            # First the export alone, then the file.
            def answer(*words):
                return ask(case, words[0], "--pid", str(program.pid), *words[1:])

            end = time.monotonic() + 10
            while answer("group", "/g", "swap.tiers=-SSD")[0] != 0:
                assert time.monotonic() < end, "the run does not answer"
                time.sleep(0.05)
            time.sleep(4)
            before = json.loads(answer("devices", "--json")[1])
            server.kill()
            answer("group", "/g", "swap.tiers=")
            done = program.finish()
            assert f"OK {binary}" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
            report = json.loads(program.report_path.read_text())
            assert report["errors"]["pages_poisoned"] == 0, f"pages were lost: {report['errors']}"
            used = {device["type"]: device for device in before}
            seen = {device["type"]: device for device in report["devices"]}
            assert used["nbd"]["used_bytes"] >= 4 << 20, f"the export is hardly used: {before}"
            assert seen["file"]["peak_used_bytes"] >= 2 << 20, (
                f"what was written later went nowhere: {seen}"
            )
            assert seen["nbd"]["mirror"]["errors"] == 0, f"the mirror failed: {seen}"
            assert report["fault_us"]["max"] < 20e6, (
                f"a fault waited for the server: {report['fault_us']}"
            )
        finally:
            server.kill()


@pytest.mark.swaptide(budget=32, limit=120, needs=("nbdkit",), allowance=128, native=False)
def test_network_mirror(case):
    lose_mirrored_server(case, ["threads"])


@pytest.mark.full
@pytest.mark.swaptide(budget=32, limit=240, needs=("nbdkit",), allowance=128, native=False)
def test_full_network_mirror(case):
    lose_mirrored_server(case, ["threads", "single", "forks"])


@pytest.mark.full
@pytest.mark.swaptide(budget=16, limit=120, needs=("nbdkit",), allowance=128, native=False)
def test_network_delay(case):
    """A server that takes 20 ms to answer: threads wait for it at the same time, and a thread
    that needs nothing of it does not wait, though it is stopped for 3 s.
    """
    server = Server(case, filters=["--filter=delay"], parameters=["rdelay=20ms"])
    options = ["--swap", "zram:2M", "--swap", server.url()]
    try:
        for mode in ((), ("forks",), ("raw",)):
            # Then, some of the loads of several pages are out of date at their second look.
            env = {**os.environ, "SWAPTIDE_TEST_STALE": "19"} if mode else None
            program = case.start(
                [case.binary("remote"), 40, 8 if not mode else 4, case.seed, *mode],
                options=options,
                env=env,
            )
            wait_for_line(case, program, "filled")
            time.sleep(1.5)
            if not mode:
                server.process.send_signal(signal.SIGSTOP)
                time.sleep(3)
                server.process.send_signal(signal.SIGCONT)
            done = program.finish()
            assert "OK remote" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
            report = json.loads(program.report_path.read_text())
            assert report["errors"]["pages_poisoned"] == 0, f"pages were lost: {report['errors']}"
            if mode:
                continue
            turn = int(done.text().split("longest turn ")[1].split()[0])
            assert turn < 1500, (
                f"a thread that needs nothing of the server waited for it for {turn} ms"
            )
            # One after the other, there would be time for 50 in a second.
            served = report["stats"]["pswpin"]
            assert served > 2000, (
                f"{served} pages came from the server in 5 s: they were waited for one after the "
                f"other"
            )
        # A thread that is gone with what others wait for: the process ends with a message.
        words = case.command(case.binary("remote"), 40, 8, case.seed, options=["--quiet", *options])
        done = subprocess.run(
            [str(word) for word in words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            env={**os.environ, "SWAPTIDE_TEST_FAIL": "5"},
        )
        said = f"status {done.returncode}, {done.stdout!r}, {done.stderr!r}"
        assert (
            done.returncode == 134
            and "a reader thread has ended" in done.stderr
            and "OK" not in done.stdout
        ), said
    finally:
        server.kill()


def in_doubt(done, counts):
    """What of the export stayed unused, of a run that lost nothing."""
    assert counts.get("haunted", 0) == 0, f"written where something was in doubt: {counts}"
    assert done.report["errors"]["pages_poisoned"] == 0, f"lost: {done.report['errors']}"
    (export,) = (device for device in done.report["devices"] if device["type"] == "nbd")
    return export["in_doubt_bytes"]


@pytest.mark.full
@pytest.mark.swaptide(budget=32, limit=120, allowance=128, native=False)
def test_network_late_cut(case):
    """The server hangs up, and carries out the write or trim that was under way when something else
    is written there. But nothing is: its space is not leased.
    """
    server = Misbehaving(case, "late", case.seed, {"ghost": 100}, size=160 * MIB)
    try:
        done = case.start(
            [case.binary("torture"), 80, 15, case.seed, "single"],
            options=["--swap", "zram:4M", "--swap", server.url()],
        ).finish()
        late = server.end().get("ghost", 0)
    finally:
        server.end()
    assert "OK torture single" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
    assert late >= 4, f"hardly anything was late: {server.counts}"
    unused = in_doubt(done, server.counts)
    assert 0 < unused <= 3 * late * EXTENT, f"{unused} in doubt: {server.counts}"


# Fills memory, verifies it and gives it up, again and again: the space of what failed is soon
# another page's.
DROPS = r"""
import random, sys, time, zlib
megabytes, seconds, seed = map(int, sys.argv[1:4])
chance = random.Random(seed)
end = time.monotonic() + seconds
while time.monotonic() < end:
    blocks = [chance.randbytes(1 << 20) for _ in range(megabytes)]
    sums = [zlib.crc32(block) for block in blocks]
    assert [zlib.crc32(block) for block in blocks] == sums, "wrong data"
    assert [zlib.crc32(block) for block in blocks] == sums, "wrong data"
    del blocks
print("OK")
"""


@pytest.mark.full
@pytest.mark.swaptide(budget=32, limit=120, allowance=128, native=False)
def test_network_late_silent(case):
    """As above; the server does not hang up, but answers a write or a trim never."""
    server = Misbehaving(case, "late", case.seed, {"withheld": 500}, size=128 * MIB)
    try:
        done = case.start(
            [case.python, "-c", DROPS, 64, 25, case.seed],
            options=["--swap", "zram:4M", "--swap", server.url()],
        ).finish()
        late = server.end().get("withheld", 0)
    finally:
        server.end()
    assert done.text() == "OK\n", f"it did not end with OK: {done.text()[-300:]!r}"
    assert late >= 2, f"hardly anything was late: {server.counts}"
    unused = in_doubt(done, server.counts)
    assert 0 < unused <= 3 * late * EXTENT, f"{unused} in doubt: {server.counts}"


# Children that are killed while they write, one after the other, and a parent that verifies what it
# has on the same export.
KILLED = r'''
import os, random, signal, sys, time, zlib
CHILD = """
import os, zlib
def block():
    data = os.urandom(1 << 20)
    return data, zlib.crc32(data)
held = [block() for _ in range(20)]
while True:
    for number in range(20):
        data, crc = held[number]
        assert zlib.crc32(data) == crc, "wrong data"
        held[number] = block()
"""
megabytes, seconds, seed = map(int, sys.argv[1:4])
chance = random.Random(seed)
blocks = [chance.randbytes(1 << 20) for _ in range(megabytes)]
sums = [zlib.crc32(block) for block in blocks]
end, killed = time.monotonic() + seconds, 0
while time.monotonic() < end:
    children = [os.posix_spawn(sys.executable, [sys.executable, "-c", CHILD], os.environ)
                for _ in range(3)]
    time.sleep(chance.uniform(1.5, 3))
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert ended == -signal.SIGKILL, f"a child ended with {ended}"
    killed += 3
    for _ in range(4):
        at = chance.randrange(megabytes)
        assert zlib.crc32(blocks[at]) == sums[at], "wrong data"
        blocks[at] = chance.randbytes(1 << 20)
        sums[at] = zlib.crc32(blocks[at])
assert [zlib.crc32(block) for block in blocks] == sums, "wrong data"
print("OK", killed)
'''


@pytest.mark.full
@pytest.mark.swaptide(budget=32, limit=150, allowance=128, native=False)
def test_network_late_killed(case):
    """As above; the server is slow, and processes are killed while they write."""
    server = Misbehaving(case, "late", case.seed, {"slow": 0.02}, size=112 * MIB)
    try:
        done = case.start(
            [case.python, "-c", KILLED, 32, 25, case.seed],
            options=["--swap", "zram:4M", "--swap", server.url()],
        ).finish()
        counts = server.end()
    finally:
        server.end()
    assert done.text().startswith("OK "), f"it did not end with OK: {done.text()[-300:]!r}"
    orphans = counts.get("orphan", 0)
    assert orphans >= 3, f"hardly any was killed while it wrote: {counts}, {done.text()!r}"
    assert in_doubt(done, counts) > 0, f"nothing in doubt: {counts}, {done.text()!r}"


@pytest.mark.swaptide(budget=32, limit=120, needs=("nbdkit",), swaps=False, native=False)
def test_network_twice(case):
    """An export that a run of this machine swaps to is refused, however it is spelled, until that
    run has ended, also by SIGKILL.
    """
    server = Server(case)
    link = case.directory / "link.socket"
    link.symlink_to(server.socket)
    other = f"nbd+unix:///?socket={link}"

    def run(*urls):
        areas = [word for url in urls for word in ("--swap", url)]
        words = case.command("true", options=areas)
        return subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    try:
        both = run(server.url(), other)
        assert both.returncode == 2 and "this run swaps to it already" in both.stderr, f"{both}"
        assert len(both.stderr.splitlines()) == 1, f"{both}"
        assert run(server.url()).returncode == 0, "it is free again"
        words = case.command("sleep", "60", options=["--swap", server.url()])
        for end in (signal.SIGTERM, signal.SIGKILL):
            first = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            until(
                case, "a run", lambda pid=first.pid: ask(case, "stats", "--pid", str(pid))[0] == 0
            )
            second = run(other)
            assert second.returncode == 2 and "swaps to it already" in second.stderr, f"{second}"
            status, _, errors = ask(case, "swapon", "--pid", str(first.pid), other)
            assert status == 2 and "swaps to it already" in errors, f"{status}: {errors!r}"
            server.kill()
            server.start()
            assert run(other).returncode == 2, "the server was started again"
            tree = [first.pid, *descendants(first.pid)]
            first.send_signal(end)
            first.wait()
            if end == signal.SIGKILL:
                for pid in tree[1:]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            until(case, "it is free again", lambda: run(other).returncode == 0)
    finally:
        server.kill()


@pytest.mark.full
@pytest.mark.swaptide(budget=32, limit=150, needs=("nbdkit",), allowance=128, native=False)
def test_network_twice_unseen(case):
    """What two runs do to each other that share an export by two ways, which is not seen: their
    readers get SIGBUS, and none reads a wrong page.
    """
    server = Server(case)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=forward, args=(listener, server.socket), daemon=True).start()
    try:
        urls = [server.url(), f"nbd://127.0.0.1:{listener.getsockname()[1]}"]
        runs = []
        for number, url in enumerate(urls):
            started = case.start(
                [case.binary("torture"), 80, 10 - 2 * number, case.seed + number, "single"],
                options=["--swap", "zram:4M", "--swap", url],
            )
            until(
                case,
                "a run",
                lambda pid=started.pid: ask(case, "stats", "--pid", str(pid))[0] == 0,
            )
            runs.append(started)
        ends = [run.finish(status=None) for run in runs]
    finally:
        listener.close()
        server.kill()
    lost = 0
    for done in ends:
        poisoned = done.report["errors"]["pages_poisoned"]
        said = f"status {done.status}, {poisoned} lost, {done.text()[-300:]!r}"
        assert "FAILED" not in done.text(), f"wrong data: {said}"
        if poisoned:
            lost += 1
            assert done.status == status_of_signal(signal.SIGBUS), said
        else:
            assert done.status == 0 and done.text().endswith("OK torture single\n"), said
    assert lost, "nothing was lost: they did not share the export"


@pytest.mark.swaptide(budget=32, limit=120, allowance=128, swaps=False, native=False)
def test_network_private(case):
    """A server of which each connection shows another content is refused. If it begins with that
    later, the readers of what it loses get SIGBUS, and none reads a wrong page.
    """
    server = Misbehaving(case, "private", case.seed, {"private": 0})
    try:
        words = case.command("true", options=["--swap", server.url()])
        done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        said = done.stderr.splitlines()
        assert done.returncode == 2 and len(said) == 1 and "another does not read" in said[0], (
            f"{done}"
        )
    finally:
        server.end()
    server = Misbehaving(case, "later", case.seed, {"private": 100})
    try:
        done = case.start(
            [case.binary("forks"), 96, 8, case.seed, "nested"],
            options=["--swap", "zram:4M", "--swap", server.url()],
        ).finish(status=None)
    finally:
        server.end()
    lost = done.report["errors"]["pages_poisoned"]
    said = f"status {done.status}, {lost} lost, {done.text()[-300:]!r}, {done.errors()[-300:]!r}"
    assert lost > 0, f"nothing was lost: {said}"
    assert done.status != 0 and ", found " not in done.text(), f"a wrong page: {said}"


def outage(case, mode, megabytes, seconds, options, servers):
    """A run of `outage` whose servers stop answering when it has filled its memory. The
    milliseconds of the longest turn of the thread that needs nothing of them, and the report.
    """
    program = case.start(
        [case.binary("outage"), megabytes, seconds, case.seed, mode], options=options
    )
    wait_for_line(case, program, "filled")
    time.sleep(0.5)
    for server in servers:
        server.process.send_signal(signal.SIGSTOP)
    (program.directory / "READY").touch()
    done = program.finish()
    assert f"OK outage {mode}" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
    assert done.report["errors"]["pages_poisoned"] == 0, f"pages were lost: {done.report}"
    return int(done.text().split("longest turn ")[1].split()[0]), done.report


@pytest.mark.full
@pytest.mark.swaptide(budget=32, limit=120, needs=("nbdkit",), native=False)
def test_network_away_two(case):
    """Two servers stop at once, and more threads read of them than there are readers: a thread that
    needs neither of them does not wait.
    """
    servers = [Server(case, name) for name in ("one", "two")]
    local = case.directory / "local"
    local.mkdir()
    options = ["--swap", "zram:2M", "--swap", f"file:{local}:64M,prio=5"]
    for server in servers:
        options += ["--swap", f"{server.url()},prio=5"]
    try:
        turn, report = outage(case, "readers", 64, 15, options, servers)
    finally:
        for server in servers:
            server.kill()
    used = {device["type"]: device["peak_used_bytes"] for device in report["devices"]}
    assert used["nbd"] > 4 * MIB and used["file"] > 4 * MIB, f"hardly used: {report['devices']}"
    assert turn < 3000, f"a thread that needs nothing of the servers waited {turn} ms"


@pytest.mark.full
@pytest.mark.swaptide(budget=32, limit=240, needs=("nbdkit",), native=False)
def test_network_away_hinted(case):
    """A server stops, and the program says that it will need what lies there: no thread has asked
    for it, and so nothing is given up, and the server is waited for once.
    """
    server = Server(case)
    options = ["--swap", "zram:2M", "--swap", server.url()]
    try:
        _, report = outage(case, "hints", 64, 150, options, [server])
    finally:
        server.kill()
    assert report["devices"][1]["peak_used_bytes"] > 16 * MIB, f"{report['devices']}"


@pytest.mark.swaptide(budget=32, limit=120, needs=("nbdkit",), native=False)
def test_network_away_mirrored(case):
    """A server with a mirror stops, and what lies there is given up: no thread waits for that."""
    server = Server(case)
    mirror = case.directory / "mirror"
    mirror.mkdir()
    options = ["--swap", "zram:2M", "--swap", f"{server.url()},mirror={mirror}"]
    try:
        turn, report = outage(case, "gives", 72, 6, options, [server])
    finally:
        server.kill()
    assert turn < 2000, f"a thread waited {turn} ms for a server that has a mirror"
    assert report["devices"][1]["peak_used_bytes"] > 16 * MIB, f"{report['devices']}"


@pytest.mark.full
@pytest.mark.swaptide(budget=32, limit=150, needs=("nbdkit",), native=False)
def test_network_away_swapoff(case):
    """A server stops and is taken from the areas, and the program grows: what is written goes to
    the other area, and the budget holds.
    """
    server = Server(case)
    local = case.directory / "local"
    local.mkdir()
    options = ["--swap", "zram:2M"]
    options += ["--swap", f"{server.url()},prio=5", "--swap", f"file:{local}:256M,prio=5"]
    program = case.start([case.binary("outage"), 48, 25, case.seed, "grows"], options=options)
    try:
        wait_for_line(case, program, "filled")
        time.sleep(0.5)
        server.process.send_signal(signal.SIGSTOP)
        words = [case.swaptide, "ctl", "swapoff", server.url(), "--pid", str(program.pid)]
        taking = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(2)
        (program.directory / "READY").touch()
        done = program.finish()
        taking.kill()
        taking.wait()
    finally:
        server.kill()
    assert "OK outage grows" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
    file = next(device for device in done.report["devices"] if device["type"] == "file")
    assert file["peak_used_bytes"] > 40 * MIB, f"the file is hardly used: {done.report['devices']}"


@pytest.mark.full
@pytest.mark.swaptide(budget=32, limit=120, needs=("nbdkit",), native=False)
def test_network_away_grows(case):
    """A server stops while the program grows and another area has room: the budget holds, and no
    thread waits longer than for one write (5 s).
    """
    server = Server(case)
    local = case.directory / "local"
    local.mkdir()
    options = ["--swap", "zram:2M"]
    options += ["--swap", f"{server.url()},prio=5", "--swap", f"file:{local}:256M,prio=5"]
    try:
        turn, report = outage(case, "grows", 48, 20, options, [server])
    finally:
        server.kill()
    assert turn < 8000, f"a thread that needs nothing of the server waited {turn} ms"
    file = next(device for device in report["devices"] if device["type"] == "file")
    assert file["peak_used_bytes"] > 40 * MIB, f"the file is hardly used: {report['devices']}"
