"""`swaptide daemon`: runs that join it, what it shares out, and what happens when it is killed."""

import contextlib
import itertools
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from ctl import CONFIG, Ctl, Daemon, ended, listed, until, wait_for_line
from harness import MIB
from processes import descendants
from servers import Server

pytestmark = [pytest.mark.daemon]


PACKAGING = Path(__file__).resolve().parents[2] / "packaging"


def metrics_of(place):
    """What a daemon answers on the socket `metrics` in a directory."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(place / "metrics"))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        return b"".join(iter(lambda: client.recv(65536), b"")).decode()


def names_of_series(text):
    """The metrics that queries name."""
    known = r"(?:swaptide_(?:budget|group|area|run)|container_(?:memory|spec))_[a-z_]+"
    return set(re.findall(rf"\b{known}\b", text))


@pytest.mark.swaptide(budget=112, allowance=8, swaps=False, native=False)
def test_daemon_dashboard(case):
    """The dashboard and the alert rules ask for metrics that there are, all of them, and so does
    the table of docs/containers.md. A run in another pid namespace is refused."""
    place = case.directory / "swap"
    place.mkdir()
    daemon = Daemon(case, CONFIG.format(place=place))
    labels = "container=web pod=front-1 namespace=shop other"
    daemon.env["SWAPTIDE_CONTAINER"] = labels
    program, _ = daemon.program(80, "--group", "/b")
    web = '{container="web",pod="front-1",namespace="shop"'

    def value(name):
        found = re.search(rf"^{name}{web}[^}}]*}} (\d+)$", metrics_of(place), re.M)
        return int(found[1]) if found else 0

    until(case, "its budget", lambda: value("container_spec_memory_limit_bytes") == 64 * MIB)
    until(case, "pages out", lambda: value("container_memory_swap") > 16 * MIB)
    until(case, "64M", lambda: value("container_memory_working_set_bytes") < 67 * MIB)
    there = {
        line.partition("{")[0].partition(" ")[0]
        for line in metrics_of(place).split("\r\n\r\n")[1].splitlines()
        if not line.startswith("#")
    }
    dashboard = json.loads((PACKAGING / "grafana-dashboard.json").read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    queries += [
        variable["query"]["query"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]
    rules = (PACKAGING / "prometheus-rules.yml").read_text()
    page = (PACKAGING.parent / "docs" / "containers.md").read_text()
    for what, text in (("dashboard", "\n".join(queries)), ("rules", rules), ("page", page)):
        assert names_of_series(text), what
        assert names_of_series(text) <= there, (what, names_of_series(text) - there)
    assert there == names_of_series("\n".join(queries)), "not on the dashboard"
    assert {name for name in there if name.startswith("container_")} <= names_of_series(page)

    apart = ["unshare", "--pid", "--fork", "--mount-proc", *case.command("true", ram=None)]
    refused = subprocess.run(apart, env=daemon.env, capture_output=True, text=True)
    assert refused.returncode == 2 and "pid namespace" in refused.stderr, refused
    assert len(refused.stderr.splitlines()) == 1, refused.stderr
    ended(case, program)
    daemon.stop()


@pytest.mark.full
@pytest.mark.swaptide(budget=32, needs=("promtool",), native=False)
def test_daemon_rules(case):
    """promtool accepts the alert rules, and what a daemon exports; the rules fire when they are
    to."""
    for words in (("check", "rules", "prometheus-rules.yml"), ("test", "rules", RULE_TESTS)):
        done = subprocess.run(["promtool", *words], cwd=PACKAGING, capture_output=True, text=True)
        assert done.returncode == 0 and "SUCCESS" in done.stdout, done


RULE_TESTS = "prometheus-rules.test.yml"


@pytest.mark.swaptide(budget=112, allowance=8, swaps=False, native=False)
def test_daemon_joins(case):
    """Runs join a daemon: one budget over all, groups, a configuration that is read again, metrics;
    at the end nothing stays behind.
    """
    place = case.directory / "swap"
    place.mkdir()
    config = CONFIG.format(place=place)
    daemon = Daemon(case, config)
    assert oct((case.directory / "sockets" / "daemon.sock").stat().st_mode & 0o777) == "0o600", (
        "the socket is open to others"
    )
    second = subprocess.run(
        [case.swaptide, "daemon", "--config", str(daemon.config)],
        env=daemon.env,
        capture_output=True,
        text=True,
    )
    assert second.returncode == 2 and "a daemon is already running" in second.stderr, (
        f"a second daemon: {second}"
    )
    refused = subprocess.run(
        case.command("true", ram=None, options=["--swap", "zram:8M"]),
        env=daemon.env,
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2 and "--no-daemon" in refused.stderr, (
        f"--swap with a daemon: {refused}"
    )

    first, one = daemon.program(80, "--group", "/a")
    second, other = daemon.program(80, "--group", "/b/inner")
    frame = subprocess.run(
        [case.swaptide, "top", "--once"], env=daemon.env, capture_output=True, text=True
    ).stdout
    assert (
        "daemon: 2 runs" in frame
        and "of 112M" in frame
        and str(one) in frame
        and str(other) in frame
    ), f"top: {frame}"
    assert sorted(listed(daemon)) == sorted([first.pid, second.pid]), (
        f"ctl list: {daemon.ctl('list')}"
    )
    view = json.loads(Ctl(case, one, daemon.env)("stats", "--json"))
    assert view["pid"] == first.pid and {p["group"] for p in view["processes"]} == {"/a"}, f"{view}"
    until(case, "the budget", lambda: daemon.ctl.value("/", "ram.current") < 118 * MIB)
    until(case, "64M for /b", lambda: daemon.ctl.value("/b", "ram.current") < 66 * MIB)

    daemon.config.write_text(config.replace("ram.max", "ram.most"))
    daemon.ctl.refused("the budget is the daemon's", "budget", "64M")
    daemon.ctl.refused("daemon.toml:9: ", "reload")
    daemon.config.write_text(config.replace('"64M"', '"40M"'))
    assert json.loads(daemon.ctl("reload", "--json")) == {"reloaded": True}
    until(case, "40M for /b", lambda: daemon.ctl.value("/b", "ram.current") < 41 * MIB)
    daemon.config.write_text(config.replace('"64M"', '"48M"'))
    os.kill(daemon.process.pid, signal.SIGHUP)
    until(case, "a file that was read again", lambda: daemon.ctl.value("/b", "ram.max") == 48 * MIB)

    text = metrics_of(place)
    for line in (
        "swaptide_budget_bytes 117440512",
        'swaptide_group_processes{group="/b"}',
        'swaptide_group_stalled_seconds_total{group="/b"} ',
        f'pid="{first.pid}"',
        "# EOF",
    ):
        assert line in text, f"{line} is not among the metrics: {text[:2000]}"

    # The list of devices is followed: what is new comes, what is gone goes, what ctl added stays,
    # and what cannot be had changes nothing.
    def names():
        return sorted(view["name"] for view in json.loads(daemon.ctl("devices", "--json")))

    for name in ("listed", "added"):
        (case.directory / name).mkdir()
    daemon.ctl("swapon", f"file:{case.directory}/added:64M,prio=2")
    old, new = f'"file:{place}:1G"', f'"file:{case.directory}/listed:512M,prio=3"'
    daemon.config.write_text(config.replace(old, f"{old}, {new}"))
    daemon.ctl("reload")
    added, listed_one, first_one = (
        f"file:{case.directory}/added",
        f"file:{case.directory}/listed",
        f"file:{place}",
    )
    assert names() == sorted([added, listed_one, first_one]), (
        f"after a device was listed: {names()}"
    )
    for wrong, named in (
        (f'"file:{place}:2G"', "from the list"),
        (f'{old}, "file:/no/such/place:64M"', "no/such"),
    ):
        daemon.config.write_text(config.replace(old, wrong).replace('"64M"', '"32M"'))
        daemon.ctl.refused(named, "reload")
        assert daemon.ctl.value("/b", "ram.max") != 32 * MIB, "something of a refused file counts"
    daemon.config.write_text(config.replace(old, new))
    daemon.ctl("reload")
    until(
        case,
        "a device that was taken off the list",
        lambda: names() == sorted([added, listed_one]),
    )
    daemon.config.write_text(config.replace('"64M"', '"48M"'))
    daemon.ctl("reload")
    until(case, "the list of before", lambda: names() == sorted([added, first_one]))
    daemon.ctl("swapoff", added)

    # A group goes out, stays there, and comes back in one go.
    daemon.ctl("freeze", "/a")
    frozen = daemon.ctl.value("/a", "ram.current")
    assert frozen < 24 * MIB, f"{frozen} bytes of a frozen group are in memory"
    daemon.ctl("group", "/b", "ram.max=24M")
    until(case, "24M for /b", lambda: daemon.ctl.value("/b", "ram.current") < 25 * MIB)
    daemon.ctl("preload", "/a")
    back = daemon.ctl.value("/a", "ram.current")
    assert back > frozen + 24 * MIB, f"{frozen} bytes were in memory, and after preload {back}"
    daemon.ctl("reclaim", "/a", "8M")

    # A run that joins is told the budget of now.
    daemon.config.write_text(config.replace('"112M"', '"104M"'))
    daemon.ctl("reload")
    told = case.directory / "told.json"
    words = [case.swaptide, "run", "--quiet", "--report", told, "--", "true"]
    subprocess.run(words, env=daemon.env, check=True)
    assert json.loads(told.read_text())["budget_bytes"] == 104 * MIB

    for program in (first, second):
        done = ended(case, program)
        assert int(done.report["stats"]["zswpout"]) > 100, f"its own report: {done.report['stats']}"
    until(case, "no run", lambda: listed(daemon) == [])
    until(case, "no charge", lambda: daemon.ctl.value("/", "swap.current") == 0)
    daemon.stop()
    left = [
        path.name for path in place.iterdir() if path.name not in ("metrics", "listed", "added")
    ] + os.listdir(case.directory / "sockets" / "daemon")
    assert left == ["lock"], f"left behind: {left}"


@pytest.mark.swaptide(budget=112, swaps=False, native=False)
def test_daemon_full_table(case):
    """A client that the daemon has no descriptor for waits, and so does the daemon."""
    place = case.directory / "swap"
    place.mkdir()
    daemon = Daemon(case, CONFIG.format(place=place))
    pid = daemon.process.pid
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    table = Path(f"/proc/{pid}/fd")
    free = next(fd for fd in itertools.count() if not (table / str(fd)).exists())

    def used():
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    for path in (case.directory / "sockets" / "daemon.sock", place / "metrics"):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, most))
        before = used()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            time.sleep(0.7)
            spent = used() - before
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
        assert spent < 0.25, f"{path.name}: {spent} s of CPU time within 0.7 s"
    assert daemon.ctl("tiers"), "no answer afterwards"
    daemon.stop()


@pytest.mark.full
@pytest.mark.swaptide(budget=112, allowance=32, swaps=False, forks=True, native=False)
def test_daemon_shared(case):
    """Shared memory of runs that a daemon keeps: each run's pager is held to its group's bound, and
    uses the daemon's areas.
    """
    place = case.directory / "swap"
    place.mkdir()
    daemon = Daemon(case, CONFIG.format(place=place).replace("zram:32M", "zram:6M"))
    words = [case.binary("shared"), 96, 4, case.seed, "hammer"]
    programs = [
        case.start(words, options=["--shared", "--group", group], env=daemon.env)
        for group in ("/a", "/b")
    ]
    looks = []
    while any(program.process.poll() is None for program in programs):
        looks.append(daemon.ctl.value("/b", "ram.current"))
        time.sleep(0.02)
    for program in programs:
        done = program.finish(status=0)
        assert "OK shared hammer" in done.text(), f"it did not end with OK: {done.text()[-300:]!r}"
        seen = done.report["stats"]
        assert seen["pswpout"] > 1000 and seen["pswpin"] > 1000, (
            f"nothing went to the daemon's file: {seen}"
        )
    # What is seen at a moment may be far past the bound, while its pager makes room for what was
    # touched; without the bound it would be 96 and more most of the time.
    looks = sorted(looks)
    usual, often, most = looks[len(looks) // 2], looks[len(looks) * 19 // 20], looks[-1]
    assert MIB < usual < 64 * MIB * 11 // 10 and often < 96 * MIB, (
        f"/b usually had {usual >> 20} MiB of 64, more than {often >> 20} in a look of twenty, "
        f"and {most >> 20} at most"
    )
    until(
        case, "nothing held by what has ended", lambda: daemon.ctl.value("/b", "swap.current") == 0
    )
    daemon.stop()


@pytest.mark.swaptide(budget=112, allowance=8, swaps=False, native=False)
def test_daemon_killed(case):
    """A daemon is killed and started again: programs continue meanwhile, it finds them, and takes
    back what dead ones had.
    """
    place = case.directory / "swap"
    place.mkdir()
    daemon = Daemon(case, CONFIG.format(place=place))
    program, inside = daemon.program(120, "--group", "/a")
    victim, other = daemon.program(60, "--group", "/b")
    daemon.ctl("group", "/a", "ram.high=80M", "swap.tiers=-FAST")
    for number in range(1, 4):
        daemon.kill()
        os.kill(inside, signal.SIGUSR1)
        wait_for_line(case, program, f"USR1 number {number}")
        daemon.start()
        assert daemon.ctl.value("/a", "ram.high") == 80 * MIB, "its settings are gone"
        assert daemon.ctl.value("/a", "swap.tiers") == "SLOW", "its tiers are gone"
        assert program.pid in listed(daemon), f"it does not know the run: {daemon.ctl('list')}"
        until(case, "its process", lambda: daemon.ctl.value("/a", "processes") >= 1)
    daemon.ctl("group", "/a", "ram.max=40M")
    until(case, "a limit that sinks", lambda: daemon.ctl.value("/a", "ram.current") < 42 * MIB)

    # A whole run is killed while no daemon is there to see it.
    daemon.kill()
    daemon_less = [other, victim.pid]
    for pid in daemon_less:
        os.kill(pid, signal.SIGKILL)
    victim.process.wait()
    daemon.start()
    until(
        case,
        "charges of the dead",
        lambda: (
            daemon.ctl.value("/b", "swap.current") == 0 and daemon.ctl.value("/b", "processes") == 0
        ),
    )
    until(case, "one run", lambda: listed(daemon) == [program.pid])
    daemon.ctl("group", "/a", "ram.max=max")
    ended(case, program)
    until(case, "no charge", lambda: daemon.ctl.value("/", "swap.current") == 0)
    daemon.stop()


@pytest.mark.full
@pytest.mark.network
@pytest.mark.swaptide(budget=64, needs=("nbdkit",), allowance=8, swaps=False, native=False)
def test_daemon_network(case):
    """A daemon's network areas: it is started again while a server is away, and what dead processes
    had is trimmed.
    """
    server = Server(case)
    try:
        daemon = Daemon(
            case,
            f'ram = "64M"\nswap = ["zram:8M", "{server.url()},prio=9", '
            f'"file:{case.directory}:1G,prio=1"]\n',
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
        until(case, "pages on the server", lambda: nbd()["used_bytes"] > 16 * MIB)
        server.kill()
        daemon.kill()
        daemon.start()
        seen = nbd()
        assert seen["state"] == "away" and seen["used_bytes"] > 16 * MIB, (
            f"the server is away: {seen}"
        )
        server.start()
        until(case, "the server to be back", lambda: nbd()["state"] == "open")
        os.kill(inside, signal.SIGUSR1)
        ended(case, program)
        until(case, "no charge", lambda: daemon.ctl.value("/", "swap.current") == 0)

        victim, inside = daemon.program(120)
        until(case, "pages on the server", lambda: nbd()["used_bytes"] > 16 * MIB)
        full = blocks()
        for pid in (inside, *descendants(victim.pid), victim.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        victim.process.wait()
        until(case, "no charge", lambda: nbd()["used_bytes"] == 0)
        until(case, "trimmed space", lambda: blocks() < full / 8)
        assert full > 16 * MIB, f"only {full} bytes were there"
        daemon.stop()
    finally:
        server.kill()


# MiB of every fourth program: those of the first kind are in a group with a bound, the last are
# larger than the others.
SIZES = (12, 12, 12, 24)


@pytest.mark.full
@pytest.mark.swaptide(budget=384, limit=400, allowance=64, swaps=False, forks=True, native=False)
def test_daemon_crowd(case):
    """Sixty-four programs under one daemon: the budget is held, no group is above its bound, every
    limit is what is fair by demand, and equal programs have like shares."""
    place = case.directory / "swap"
    place.mkdir()
    daemon = Daemon(
        case, f'ram = "384M"\nswap = ["file:{place}:4G"]\n[groups."/small"]\nram.max = "96M"\n'
    )
    programs = []
    for number in range(64):
        options = ["--group", "/small" if number % 4 == 0 else "/large"]
        argv = [case.binary("heap"), SIZES[number % 4], 150, case.seed + number]
        programs.append(case.start(argv, options=options, env=daemon.env))
    until(case, "all programs", lambda: daemon.ctl.value("/", "processes") >= 64, 60)
    time.sleep(15)
    most, small, looks = 0, 0, 0
    parts, limits, fairs = [0] * 64, [0] * 64, [0] * 64
    end = time.monotonic() + 90
    while looks < 40 and time.monotonic() < end:
        text = subprocess.run(
            [case.swaptide, "top", "--json"], env=daemon.env, capture_output=True, text=True
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

            def total(run, key):
                return sum(process[key] for process in run["processes"])

            limit, fair = (
                {run["pid"]: total(run, key) for run in scene["runs"]}
                for key in ("limit_bytes", "fair_bytes")
            )
            limits = [sum_ + limit[program.pid] for sum_, program in zip(limits, programs)]
            fairs = [sum_ + fair[program.pid] for sum_, program in zip(fairs, programs)]
        time.sleep(0.25)
    assert looks >= 4, f"only {looks} looks saw all programs"
    parts, limits, fairs = (
        [value / looks / MIB for value in values] for values in (parts, limits, fairs)
    )
    off = [limit / fair - 1 for limit, fair in zip(limits, fairs)]
    case.note(
        f"limits compared with what is fair by demand: {min(off):+.1%} to {max(off):+.1%}; over "
        f"{looks} looks"
    )
    assert all(abs(part) < 0.1 for part in off), f"limits are not within 10% of what is fair: {off}"
    for kind, size in enumerate(SIZES):
        own = parts[kind::4]
        fair = sum(own) / len(own)
        worst = max(own, key=lambda part: abs(part - fair))
        sigma = (sum((part / fair - 1) ** 2 for part in own) / len(own)) ** 0.5
        case.note(
            f"{size}M, {'/large' if kind else '/small'}: {fair:.2f}M each, the furthest "
            f"{worst:.2f}M, deviation {sigma:.1%}; "
            f"limits {min(limits[kind::4]):.2f} to {max(limits[kind::4]):.2f}M, fair "
            f"{min(fairs[kind::4]):.2f} to {max(fairs[kind::4]):.2f}M"
        )
        assert all(fair / 1.25 < part < fair * 1.25 for part in own), (
            f"programs of {size}M have {fair:.2f}M on average, and one {worst:.2f}M: {parts}"
        )
    assert most < 384 * MIB * 1.05, f"the budget is 384M, and {most / MIB:.1f}M were in use"
    assert small < 96 * MIB * 1.05, f"/small may have 96M, and had {small / MIB:.1f}M"
    for program in programs:
        done = program.finish()
        assert "OK heap" in done.text(), f"it did not verify its memory: {done.text()[-200:]}"
    until(case, "no charge", lambda: daemon.ctl.value("/", "swap.current") == 0)
    # With half of their memory and a thirtieth of the CPUs, some do.
    daemon.stop(may_stall=True)


def kill_at_random(case, seconds):
    place = case.directory / "swap"
    place.mkdir()
    # One export with a mirror, one without; both servers always come back, the second in time.
    servers = [Server(case, name) for name in ("mirrored", "plain")]
    for server in servers:
        case.at_end(server.kill)
    mirrored, plain = (server.url() for server in servers)
    swap = f'"zram:24M", "{mirrored},prio=9,mirror={place}", "{plain},prio=9", "file:{place}:2G"'
    daemon = Daemon(case, f'ram = "160M"\nswap = [{swap}]\n[groups."/a"]\nram.max = "96M"\n')
    # Where no run is left the daemon begins afresh, and is refused while a server is away.
    lasting = case.start(["sleep", "600"], env=daemon.env)
    away, killed = {}, 0
    chance = random.Random(case.seed)
    end = time.monotonic() + seconds
    running = {}
    finished = 0
    while time.monotonic() < end:
        while len(running) < 5 and time.monotonic() < end - 10:
            length = chance.randint(4, 10)
            kind = chance.choice([("heap",), ("torture", "single"), ("forks", "nested")])
            argv = [
                case.binary(kind[0]),
                chance.randint(32, 64),
                length,
                case.seed,
                *kind[1:],
            ]
            group = chance.choice(["/a", "/a/b", "/c"])
            program = case.start(argv, options=["--group", group], env=daemon.env)
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
            victims = list(descendants(program.pid)) + [program.pid]
            chance.shuffle(victims)
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            program.process.wait()
        for pid, (program, kind) in list(running.items()):
            if program.process.poll() is not None:
                del running[pid]
                text, errors = (
                    (program.directory / name).read_text() for name in ("stdout", "stderr")
                )
                status = program.process.returncode
                said = f"{kind}: status {status}: {text[-300:]} {errors[-300:]}"
                assert program.process.returncode == 0 and f"OK {kind[0]}" in text, (
                    f"a survivor: {said}"
                )
                finished += 1
    for server in away:
        server.start()
    for program, kind in running.values():
        program.process.wait()
        text = (program.directory / "stdout").read_text()
        assert program.process.returncode == 0 and f"OK {kind[0]}" in text, (
            f"a survivor, at the end: {kind}: {text[-300:]}"
        )
        finished += 1
    assert finished >= 5, f"only {finished} programs came to their end"
    lasting.process.terminate()
    lasting.process.wait()
    until(case, "no run", lambda: listed(daemon) == [])
    until(case, "no charge", lambda: daemon.ctl.value("/", "swap.current") == 0)
    used = [view["used_bytes"] for view in json.loads(daemon.ctl("devices", "--json"))]
    assert used == [0, 0, 0], f"extents without an owner: {used}"
    assert killed > 0, "no server was killed"
    case.note(f"{finished} programs came to their end, servers were killed {killed} times")
    # What waits for a server that is away makes no progress.
    daemon.stop(may_stall=True)


@pytest.mark.network
@pytest.mark.full
@pytest.mark.swaptide(
    budget=160, limit=300, needs=("nbdkit",), allowance=64, swaps=False, forks=True, native=False
)
def test_daemon_storm(case):
    """Programs, their supervisors, the daemon and NBD servers are killed at random: what survives
    verifies its memory, and everything comes back."""
    kill_at_random(case, case.stretched(60))
