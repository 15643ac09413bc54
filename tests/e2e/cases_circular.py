"""Swap areas that are served by a process of the same run: refused where that is seen, and no run
that cannot be ended where it is not.
"""

import os
import signal
import socket
import subprocess
import threading
import time

from harness import HERE, MIB
from legacy import Case, Skip

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


def swapon(context, pid, area):
    words = [context.swaptide, "ctl", "swapon", area, "--pid", pid]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def started(context, script, *words):
    run = [
        context.swaptide,
        "run",
        "--ram",
        f"{context.budget}M",
        "--swap",
        "zram:4M",
        "--",
        context.python,
        "-c",
        script,
        *words,
    ]
    return subprocess.Popen(
        [str(word) for word in run],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def nbdkit(context, name):
    """The words of an NBD server that many use, and its socket."""
    place = context.directory / f"{name}.sock"
    return place, ["nbdkit", "-f", "-U", place, "memory", "512M"]


def server(context, name):
    """The words of an NBD server, and its socket."""
    place, image = context.directory / f"{name}.sock", context.directory / f"{name}.img"
    with open(image, "wb") as file:
        file.truncate(512 * MIB)
    return place, [context.python, HERE / "nbd_server.py", place, image]


def wait_until(context, true, what):
    until = time.monotonic() + 60
    while not true():
        context.expect(time.monotonic() < until, f"never seen: {what}")
        time.sleep(0.05)


def refused(context):
    """The server is a process of the run; the same server outside is taken."""
    if context.native:
        return
    place, words = nbdkit(context, "inside")
    run = started(context, "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", *words)
    outside, words = nbdkit(context, "outside")
    other = subprocess.Popen(
        [str(word) for word in words], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    try:
        wait_until(context, lambda: place.exists() and outside.exists(), "both servers")
        status, said = swapon(context, run.pid, f"nbd+unix:///?socket={place}")
        context.expect(
            status == 2 and "of this run serves it" in said and len(said.splitlines()) == 1,
            f"{status}: {said!r}",
        )
        status, said = swapon(context, run.pid, f"nbd+unix:///?socket={outside}")
        context.expect(status == 0, f"the one outside: {status}, {said!r}")
    finally:
        run.terminate()
        other.terminate()
        run.communicate()
        other.wait()


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


def refused_fuse(context):
    """A process of the run serves the file system that the area's file would be on. It answers
    nothing, and is not asked.
    """
    if context.native:
        return
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        raise Skip("only root can mount, where there is a /dev/fuse")
    place = context.directory / "mounted"
    place.mkdir()
    run = started(context, FUSE, place)
    try:
        context.expect(run.stdout.readline() == "mounted\n", "it did not mount")
        status, said = swapon(context, run.pid, f"file:{place}/swap:64M")
        context.expect(
            status == 2 and "of this run serves it" in said and len(said.splitlines()) == 1,
            f"{status}: {said!r}",
        )
    finally:
        out, errors = run.communicate()
    context.expect(run.returncode == 0, f"{run.returncode}: {out!r} {errors!r}")


def forward(listener, place):
    """Passes on what comes over TCP to a Unix socket: the check sees only this process."""

    def pump(one, other):
        try:
            while data := one.recv(1 << 16):
                other.sendall(data)
        except OSError:
            pass
        for end in (one, other):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        there = socket.socket(socket.AF_UNIX)
        there.connect(str(place))
        for ends in ((client, there), (there, client)):
            threading.Thread(target=pump, args=ends, daemon=True).start()


def ends(context):
    """A forwarder hides that the server is inside. The server waits for its own pages; SIGTERM ends
    the run all the same.
    """
    if context.native:
        return
    place, words = server(context, "hidden")
    run = started(context, FORWARDED, context.budget * 3, *words, context.seed)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=forward, args=(listener, place), daemon=True).start()
    try:
        wait_until(context, place.exists, "the server")
        status, said = swapon(context, run.pid, f"nbd://127.0.0.1:{listener.getsockname()[1]}")
        context.expect(status == 0, f"{status}, {said!r}")
        run.stdin.write("\n")
        run.stdin.flush()
        time.sleep(5)
        began = time.monotonic()
        run.send_signal(signal.SIGTERM)
        _, said = run.communicate(timeout=60)
        took = time.monotonic() - began
        # The server handles the signal (0) where it gets to it; the run says what went wrong.
        context.expect(
            took < 40 and run.returncode in (0, 137, 143),
            f"{took:.1f} s, status {run.returncode}, {said!r}",
        )
        context.expect(
            "swap space ran out" in said or "wait inside swaptide; killed" in said,
            f"{took:.1f} s, {said!r}",
        )
    finally:
        listener.close()
        if run.poll() is None:
            run.kill()


CASES = [
    Case("circular-refused", refused, 24, swaps=False, needs=("nbdkit",)),
    Case("circular-fuse", refused_fuse, 24, swaps=False),
    # It ends by SIGTERM without the check, too: what it shows is that a circular wait is no hang
    # for good.
    Case("circular-ends", ends, 24, full=True, swaps=False),
]
