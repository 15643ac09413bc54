"""Servers of network block devices that a case starts and ends."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time

from harness import HERE


class Server:
    """An NBD server that keeps its export in a file, so that it can be killed and started again."""

    def __init__(self, case, name="nbd", filters=(), parameters=()):
        self.filters, self.parameters = filters, parameters
        self.socket, self.image = (
            case.directory / f"{name}.socket",
            case.directory / f"{name}.export",
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


class Misbehaving:
    """A server process with an export of its own; `counts` are there after `end`."""

    def __init__(self, case, name, seed, faults, size=1 << 30):
        self.socket, image = (
            case.directory / f"{name}.socket",
            case.directory / f"{name}.export",
        )
        with open(image, "wb") as file:
            file.truncate(size)
        self.counts = None
        words = [
            sys.executable,
            HERE / "nbd_server.py",
            self.socket,
            image,
            seed,
            *[f"{key}={value}" for key, value in faults.items()],
        ]
        self.process = subprocess.Popen(
            [str(word) for word in words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        while not self.socket.exists():
            assert self.process.poll() is None, "the server did not start"
            time.sleep(0.01)

    def url(self):
        return f"nbd+unix:///?socket={self.socket}"

    def end(self):
        if self.counts is None:
            self.process.terminate()
            self.counts = json.loads(self.process.communicate()[0] or "{}")
        return self.counts


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    except OSError:
        return False


def forward(listener, place):
    """Passes on what comes over TCP to a Unix socket: only this process is seen."""

    def pump(one, other):
        try:
            while data := one.recv(1 << 16):
                other.sendall(data)
        except OSError:
            pass
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        there = socket.socket(socket.AF_UNIX)
        there.connect(str(place))
        for ends in ((client, there), (there, client)):
            threading.Thread(target=pump, args=ends, daemon=True).start()
