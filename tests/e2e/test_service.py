"""`swaptide daemon` as a service manager has it: readiness, reload, drain, and its end."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from ctl import CONFIG, Daemon, ask, ended, listed, until, wait_for_line
from test_terminal import check_shape, documented

pytestmark = [pytest.mark.daemon]

PACKAGING = Path(__file__).resolve().parents[2] / "packaging"


class Manager:
    """The socket of a service manager, and what is told there."""

    def __init__(self, case):
        self.path = case.directory / "notify"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.socket.settimeout(20)
        case.at_end(self.socket.close)

    def env(self):
        return {"NOTIFY_SOCKET": str(self.path)}

    def told(self):
        """The assignments of the next message that is not about a descriptor to be kept."""
        while True:
            text, descriptors, _, _ = socket.recv_fds(self.socket, 4096, 4)
            for descriptor in descriptors:
                os.close(descriptor)
            assignments = dict(line.split("=", 1) for line in text.decode().splitlines())
            if "FDNAME" not in assignments:
                return assignments

    def silent(self):
        self.socket.settimeout(0.3)
        try:
            with contextlib.suppress(TimeoutError):
                return self.told() is None
        finally:
            self.socket.settimeout(20)
        return True


def ready(daemon, *words):
    """What `ctl ready` answers: its status, and its line."""
    status, text, errors = ask(daemon.case, "ready", *words, env=daemon.env)
    return status, text + errors


@pytest.mark.swaptide(budget=112, swaps=False, native=False)
def test_service_notify(case):
    """A service manager is told when the daemon answers, that it reads its configuration again and
    has done so, though it refused it, and that it ends.
    """
    place = case.directory / "swap"
    place.mkdir()
    manager = Manager(case)
    daemon = Daemon(case, CONFIG.format(place=place), env=manager.env())
    assert manager.told() == {"READY": "1", "STATUS": "Taking runs"}
    daemon.kill()
    daemon.launch()
    assert manager.told()["READY"] == "1"
    assert ready(daemon) == (0, "ready, 0 runs, 0 processes\n"), "it said so too early"

    def reloads():
        before = time.monotonic_ns() // 1000
        yield
        told = manager.told()
        assert told.keys() == {"RELOADING", "MONOTONIC_USEC"}, f"{told}"
        assert before <= int(told["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000, f"{told}"
        told = manager.told()
        assert told["READY"] == "1", f"{told}"
        yield told["STATUS"]

    for reload in (
        lambda: daemon.ctl("reload"),
        lambda: os.kill(daemon.process.pid, signal.SIGHUP),
    ):
        turn = reloads()
        next(turn)
        reload()
        assert next(turn) == "Taking runs"
    daemon.config.write_text("ram = 1\nrom = 2\n")
    turn = reloads()
    next(turn)
    daemon.ctl.refused("daemon.toml:2: ", "reload")
    said = next(turn)
    assert said.startswith("Configuration unchanged: ") and "daemon.toml:2: " in said, said
    assert manager.silent(), "it said more"
    daemon.stop()
    assert manager.told()["STOPPING"] == "1"
    assert ready(daemon)[0] == 2, "a daemon that has ended is ready"


@pytest.mark.swaptide(budget=112, allowance=8, swaps=False, native=False)
def test_service_drain(case):
    """A daemon that is drained takes no run, and waits for those that it has or lets them go on
    without it.
    """
    place = case.directory / "swap"
    place.mkdir()
    manager = Manager(case)
    daemon = Daemon(case, CONFIG.format(place=place), env=manager.env())
    manager.told()

    def drain(*words):
        return ask(case, "drain", *words, env=daemon.env)

    def run(*options):
        words = case.command("true", ram=None, options=options)
        return subprocess.run(words, env=daemon.env, capture_output=True, text=True)

    program, _ = daemon.program(60, "--group", "/a")
    status, _, errors = drain("--timeout", "0")
    assert status == 1 and f"are left: {program.pid}" in errors, f"{status}: {errors!r}"
    assert manager.told() == {"STATUS": "Draining: no run is taken"}
    status, said = ready(daemon)
    assert status == 1 and said.startswith("draining, 1 runs, "), f"{status}: {said!r}"
    assert ready(daemon, "--live")[0] == 0, "it is not alive"
    view = json.loads(ready(daemon, "--json")[1])
    check_shape("ctl ready", view, documented()["ctl ready"])
    assert (view["draining"], view["runs"]) == (True, [program.pid])
    refused = run()
    said = refused.stderr.splitlines()
    assert refused.returncode == 2 and len(said) == 1 and "--no-daemon" in said[0], f"{refused}"
    alone = run("--no-daemon", "--quiet")
    assert (alone.returncode, alone.stderr) == (0, ""), f"{alone}"
    elsewhere = dict(daemon.env, SWAPTIDE_DIRECTORY=str(case.directory / "none"))
    words = case.command("true", ram=None, options=["--need-daemon"])
    lost = subprocess.run(words, env=elsewhere, capture_output=True, text=True)
    assert lost.returncode == 2 and "start swaptide daemon" in lost.stderr, f"{lost}"
    daemon.ctl("reload")
    assert [manager.told().get(key) for key in ("RELOADING", "STATUS")] == [
        "1",
        "Draining: no run is taken",
    ]
    words = [case.swaptide, "ctl", "drain", "--timeout", "60"]
    waiting = subprocess.Popen(words, env=daemon.env, stdin=subprocess.DEVNULL)
    case.at_end(waiting.kill)
    time.sleep(0.3)
    assert waiting.poll() is None, "it did not wait"
    ended(case, program)
    assert waiting.wait(timeout=20) == 0, "nothing is left, and it says so not"

    assert drain("--cancel")[0] == 0 and ready(daemon)[0] == 0
    assert manager.told() == {"STATUS": "Draining: no run is taken"}
    assert manager.told() == {"STATUS": "Taking runs"}
    assert run("--quiet").returncode == 0, "it takes no run"
    program, inside = daemon.program(60, "--group", "/a")
    daemon.ctl("reclaim", "/a", "16M")
    status, said, errors = drain("--timeout", "0", "--detach", "--json")
    assert status == 0, f"{status}: {errors}"
    view = json.loads(said)
    check_shape("ctl drain", view, documented()["ctl drain"])
    assert view["draining"] and view["runs"] == [program.pid], f"{view}"
    # Nothing of it is on the areas any more, and it verifies its memory.
    until(case, "nothing on the areas", lambda: daemon.ctl.value("/", "swap.current") == 0)
    os.kill(inside, signal.SIGUSR1)
    wait_for_line(case, program, "USR1 number 1")
    ended(case, program)
    daemon.stop()


@pytest.mark.swaptide(budget=112, allowance=8, swaps=False, native=False)
def test_service_end(case):
    """A daemon that is told to end waits for its runs as long as its configuration says, and not
    longer; told again, it ends at once. What runs then goes on.
    """
    place = case.directory / "swap"
    place.mkdir()
    manager = Manager(case)
    config = CONFIG.format(place=place) + "drain = 60\n"
    daemon = Daemon(case, config, env=manager.env())
    manager.told()
    program, _ = daemon.program(60, "--group", "/a")
    daemon.process.terminate()
    told = manager.told()
    assert told["STOPPING"] == "1" and int(told["EXTEND_TIMEOUT_USEC"]) == 75_000_000, f"{told}"
    assert ready(daemon)[0] == 1, "it takes runs"
    # It is neither opened again nor reloaded, and says so to the manager by saying nothing.
    daemon.process.send_signal(signal.SIGHUP)
    for words in (("drain", "--cancel"), ("reload",)):
        status, _, errors = ask(case, *words, env=daemon.env)
        assert status == 2 and "the daemon is ending" in errors, f"{words}: {status}: {errors!r}"
    assert ready(daemon)[0] == 1, "it takes runs"
    daemon.process.terminate()
    assert daemon.process.wait(timeout=20) == 0
    assert manager.told()["STATUS"] == "Ending"
    daemon.start()
    assert listed(daemon) == [program.pid], "the run is not found again"
    daemon.process.terminate()
    until(case, "a daemon that ends", lambda: ready(daemon)[0] == 1)
    ended(case, program)
    assert daemon.process.wait(timeout=20) == 0
    daemon.config.write_text(config.replace("drain = 60", "drain = 1"))
    daemon.start()
    program, _ = daemon.program(60, "--group", "/a")
    began = time.monotonic()
    daemon.process.terminate()
    assert daemon.process.wait(timeout=20) == 0
    took = time.monotonic() - began
    assert 0.9 < took < 10, f"it waited {took} s"
    daemon.config.write_text(CONFIG.format(place=place))
    daemon.start()
    ended(case, program)
    until(case, "no run", lambda: listed(daemon) == [])
    daemon.stop()


@pytest.mark.full
@pytest.mark.swaptide(budget=112, needs=("systemd-analyze",), swaps=False, native=False)
def test_service_unit(case):
    """The unit is what systemd takes, without a warning."""
    unit = case.directory / "swaptide.service"
    text = (PACKAGING / "swaptide.service").read_text()
    unit.write_text(text.replace("/usr/bin/swaptide", shutil.which(case.swaptide)))
    words = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), f"{done}"
