"""Swap areas that a process of the same run serves: refused where that is seen, and no run that
cannot be ended where it is not."""

import json
import os
import signal
import socket
import subprocess
import threading
import time

import pytest

from ctl import Daemon, listed
from harness import HERE, MIB
from servers import forward

# The first process is the server; its child fills the memory when it is told to, and ends with it.
FORWARDED = r"""
import ctypes, os, signal, sys
if os.fork():
    os.execv(sys.argv[2], sys.argv[2:])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
sys.stdin.readline()
held = bytearray(b"x" * 4096) * (int(sys.argv[1]) << 8)
while True:
    for at in range(0, len(held), 4096):
        held[at] ^= 1
"""


def swapon(case, pid, area):
    words = [case.swaptide, "ctl", "swapon", area, "--pid", pid]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def started(case, script, *words):
    run = case.command(case.python, "-c", script, *words, options=["--swap", "zram:4M"])
    return subprocess.Popen(
        [str(word) for word in run],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def nbdkit(case, name):
    """The words of an NBD server that many use, and its socket."""
    place = case.directory / f"{name}.sock"
    return place, ["nbdkit", "-f", "-U", place, "memory", "512M"]


def server(case, name):
    """The words of an NBD server, and its socket."""
    place, image = case.directory / f"{name}.sock", case.directory / f"{name}.img"
    with open(image, "wb") as file:
        file.truncate(512 * MIB)
    return place, [case.python, HERE / "nbd_server.py", place, image]


def wait_until(case, true, what):
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until, f"never seen: {what}"
        time.sleep(0.05)


@pytest.mark.network
@pytest.mark.swaptide(budget=24, needs=("nbdkit",), swaps=False, native=False)
def test_circular_refused(case):
    """The server is a process of the run; the same server outside is taken."""
    place, words = nbdkit(case, "inside")
    run = started(case, "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", *words)
    outside, words = nbdkit(case, "outside")
    other = subprocess.Popen(
        [str(word) for word in words], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    try:
        wait_until(case, lambda: place.exists() and outside.exists(), "both servers")
        status, said = swapon(case, run.pid, f"nbd+unix:///?socket={place}")
        assert status == 2 and "of this run serves it" in said and len(said.splitlines()) == 1, (
            f"{status}: {said!r}"
        )
        status, said = swapon(case, run.pid, f"nbd+unix:///?socket={outside}")
        assert status == 0, f"the one outside: {status}, {said!r}"
    finally:
        run.terminate()
        other.terminate()
        run.communicate()
        other.wait()


@pytest.mark.network
@pytest.mark.daemon
@pytest.mark.swaptide(budget=112, needs=("nbdkit",), swaps=False, native=False)
def test_circular_reload(case):
    """The same for a device that a daemon's configuration gets while the daemon runs: the daemon
    continues with the old list, and the next reload is taken.
    """
    config = 'ram = "112M"\nswap = ["zram:32M"{more}]\n'
    daemon = Daemon(case, config.format(more=""))
    place, words = nbdkit(case, "inside")
    run = subprocess.Popen(
        [str(word) for word in case.command(*words, ram=None)],
        env=daemon.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    outside, words = nbdkit(case, "outside")
    other = subprocess.Popen(
        [str(word) for word in words], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    try:
        wait_until(case, lambda: place.exists() and outside.exists(), "both servers")
        wait_until(case, lambda: listed(daemon) == [run.pid], "the run")
        url = f', "nbd+unix:///?socket={place}"'
        daemon.config.write_text(config.format(more=url))
        daemon.ctl.refused("of this run serves it", "reload")
        assert json.loads(daemon.ctl("devices", "--json")) == [], "nothing was added"
        daemon.config.write_text(config.format(more=url.replace(str(place), str(outside))))
        daemon.ctl("reload")
        assert len(json.loads(daemon.ctl("devices", "--json"))) == 1, "the one outside was added"
    finally:
        run.terminate()
        run.communicate()
        other.terminate()
        other.wait()
    daemon.stop()


FUSE = r"""
import ctypes, os, sys
fd = os.open("/dev/fuse", os.O_RDWR)
words = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"circular", os.fsencode(sys.argv[1]), b"fuse", 0, words) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))
print("mounted", flush=True)
sys.stdin.read()
libc.umount2(os.fsencode(sys.argv[1]), 2)
"""


@pytest.mark.swaptide(budget=24, swaps=False, native=False)
def test_circular_fuse(case):
    """A process of the run serves the file system that the area's file would be on. It answers
    nothing, and is not asked.
    """
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("only root can mount, where there is a /dev/fuse")
    place = case.directory / "mounted"
    place.mkdir()
    run = started(case, FUSE, place)
    try:
        assert run.stdout.readline() == "mounted\n", "it did not mount"
        status, said = swapon(case, run.pid, f"file:{place}/swap:64M")
        assert status == 2 and "of this run serves it" in said and len(said.splitlines()) == 1, (
            f"{status}: {said!r}"
        )
    finally:
        out, errors = run.communicate()
    assert run.returncode == 0, f"{run.returncode}: {out!r} {errors!r}"


# It ends by SIGTERM without the check, too: what it shows is that a circular wait is no hang for
# good.
@pytest.mark.network
@pytest.mark.full
@pytest.mark.swaptide(budget=24, swaps=False, native=False)
def test_circular_ends(case):
    """A forwarder hides that the server is inside. The server waits for its own pages; SIGTERM ends
    the run all the same.
    """
    place, words = server(case, "hidden")
    run = started(case, FORWARDED, case.budget * 3, *words, case.seed)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=forward, args=(listener, place), daemon=True).start()
    try:
        wait_until(case, place.exists, "the server")
        status, said = swapon(case, run.pid, f"nbd://127.0.0.1:{listener.getsockname()[1]}")
        assert status == 0, f"{status}, {said!r}"
        run.stdin.write("\n")
        run.stdin.flush()
        time.sleep(5)
        began = time.monotonic()
        run.send_signal(signal.SIGTERM)
        # A read from a server is given up after 60 s, a connection to it after 10.
        _, said = run.communicate(timeout=120)
        took = time.monotonic() - began
        # The server handles the signal (0) where it gets to it. If a thread that waits for a page
        # has the interpreter's lock, that is after the read was given up.
        assert took < 100 and run.returncode in (0, 135, 137, 143), (
            f"{took:.1f} s, status {run.returncode}, {said!r}"
        )
        if run.returncode == 137:
            assert "swap space ran out" in said or "wait inside swaptide; killed" in said, (
                f"{took:.1f} s, {said!r}"
            )
    finally:
        listener.close()
        if run.poll() is None:
            run.kill()
