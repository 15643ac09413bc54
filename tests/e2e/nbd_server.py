#!/usr/bin/env python3
"""An NBD server on a Unix socket that misbehaves:

    nbd_server.py SOCKET IMAGE SEED [FAULT=N]... [away=SECONDS] [hangs=SECONDS] [latest=SECONDS]
                  [slow=SECONDS] [private=N] [structured=1]

`FAULT=N` has that fault happen to every Nth request it can happen to, at random by SEED:

    refused     the request is answered EIO, and nothing of it is done
    full        a write is answered ENOSPC
    torn        half of a write is done, then it is answered EIO
    cut         the connection ends without an answer
    short       a read's answer ends in the middle, and so does the connection
    late        the answer comes 20 ms and more later, others before it
    noise       bytes come that belong to nothing
    stranger    an answer comes to a request that was not made
    shutdown    the server says that it shuts down, and hangs up
    flipped     a read's answer has wrong bits; the next one is right
    lost        a write is answered, and not done
    damaged     a write is done with wrong bits
    ghost       the connection ends without an answer to a write or a trim, which is done later
    withheld    no answer comes to a write or a trim, which is done later

With `away` it is gone every other second or so, socket and all connections, for up to that many
seconds; with `hangs` it answers no request for as long. Late answers are at most `latest` seconds
late (0.4). What is "done later" is done at the worst moment: right after something else was written
there (`haunted`). With `slow` every write and trim takes so long; if its client has hung up by
then, it is done later, too (`orphan`). With `private`, the server does
not say that several connections see the same, and what connections write that are made after that
many writes, no other sees. What a trimmed range held is overwritten with noise. With
`structured=1` it answers in chunks, in any order. Nothing goes wrong before the second write. On
SIGTERM it prints how often each fault happened, as JSON, and ends.
"""

import contextlib
import json
import mmap
import os
import random
import select
import signal
import socket
import struct
import sys
import threading
import time

READ, WRITE, DISC, FLUSH, TRIM = range(5)
EXPORT_NAME, ABORT, GO, STRUCTURED = 1, 2, 7, 8
EIO, ENOSPC, SHUTDOWN = 5, 28, 108
# There are flags; flush, write through, trim; several connections see the same.
FLAGS = 1 | 4 | 8 | 32 | 256
# What can happen to which request.
OF_ANY = ("refused", "cut", "late", "noise", "stranger", "shutdown")
OF_READS = OF_ANY + ("short", "flipped")
OF_TRIMS = OF_ANY + ("ghost", "withheld")
OF_WRITES = OF_TRIMS + ("full", "torn", "lost", "damaged")


class Gone(Exception):
    """The connection is over."""


class Server:
    """The export, its socket, and what is to go wrong."""

    def __init__(self, path, image, seed, settings):
        self.path, self.seed, self.settings = path, seed, settings
        self.size = os.stat(image).st_size
        with open(image, "r+b") as file:
            self.data = mmap.mmap(file.fileno(), self.size)
        self.counts = {}
        # What is done later.
        self.ghosts = []
        self.lock = threading.Lock()
        self.connections = set()
        self.number = 0
        # Clear while it answers no request.
        self.answers = threading.Event()
        self.answers.set()
        self.listener = None

    def count(self, what):
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def open(self):
        listener = socket.socket(socket.AF_UNIX)
        # A client that finds the path finds a server that listens.
        listener.bind(self.path + ".new")
        listener.listen(64)
        os.rename(self.path + ".new", self.path)
        self.listener = listener
        threading.Thread(target=self.accept, args=(listener,), daemon=True).start()

    def close(self):
        os.unlink(self.path)
        # Only this wakes a thread in accept.
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        with self.lock:
            for connection in self.connections:
                connection.end()

    def accept(self, listener):
        while True:
            try:
                peer = listener.accept()[0]
            except OSError:
                return
            with self.lock:
                self.number += 1
                connection = Connection(self, peer, self.number)
                self.connections.add(connection)
            threading.Thread(target=connection.serve, daemon=True).start()

    def is_private(self):
        return self.counts.get("writes", 0) >= int(self.settings.get("private", 1 << 60))

    def trim(self, offset, size):
        self.data[offset : offset + size] = b"\xa5" * size

    def do_later(self, command, offset, size, payload):
        """Keeps a write or a trim that its client will not learn of."""
        with self.lock:
            self.ghosts.append((offset, b"\xa5" * size if command == TRIM else payload))

    def write(self, offset, payload):
        """Carries out a write, and then what was kept of there."""
        end = offset + len(payload)
        self.data[offset:end] = payload
        with self.lock:
            # The same once more is the client's next try.
            due = [
                (at, data)
                for at, data in self.ghosts
                if at < end and offset < at + len(data) and (at, data) != (offset, payload)
            ]
            for at, data in due:
                self.data[at : at + len(data)] = data
                self.ghosts.remove((at, data))
        for _ in due:
            self.count("haunted")

    def misbehave(self):
        """Is gone and back, or silent, again and again."""
        chance = random.Random(f"{self.seed} as a whole")
        kinds = [kind for kind in ("away", "hangs") if kind in self.settings]
        while kinds:
            time.sleep(chance.uniform(0.4, 1.6))
            if self.counts.get("writes", 0) < 2:
                continue
            kind = chance.choice(kinds)
            seconds = chance.uniform(0.05, float(self.settings[kind]))
            self.count(kind)
            if kind == "away":
                self.close()
                time.sleep(seconds)
                self.open()
            else:
                self.answers.clear()
                time.sleep(seconds)
                self.answers.set()


class Connection:
    """One client's connection, from the first word on."""

    def __init__(self, server, peer, number):
        self.server, self.peer = server, peer
        self.chance = random.Random(f"{server.seed} connection {number}")
        self.structured = False
        # What this connection alone has written, by page.
        self.own = {} if server.is_private() else None
        self.may_structure = "structured" in server.settings
        # Late answers come from other threads.
        self.sending = threading.Lock()

    def end(self):
        with contextlib.suppress(OSError):
            self.peer.shutdown(socket.SHUT_RDWR)

    def receive(self, size):
        parts = []
        while size:
            part = self.peer.recv(min(size, 1 << 20))
            if not part:
                raise Gone
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def send(self, *parts):
        with self.sending:
            self.peer.sendall(b"".join(parts))

    def serve(self):
        try:
            self.negotiate()
            while True:
                self.request()
        except (Gone, OSError):
            pass
        finally:
            self.end()
            with self.server.lock:
                self.server.connections.discard(self)
            self.peer.close()

    def negotiate(self):
        self.send(b"NBDMAGICIHAVEOPT", struct.pack(">H", 3))
        flags = FLAGS & ~256 if "private" in self.server.settings else FLAGS
        zeroes = b"" if struct.unpack(">I", self.receive(4))[0] & 2 else bytes(124)
        while True:
            magic, option, size = struct.unpack(">8sII", self.receive(16))
            self.receive(size)
            if magic != b"IHAVEOPT" or option == ABORT:
                raise Gone

            def answer(kind, data=b""):
                return self.send(
                    struct.pack(">QIII", 0x3E889045565A9, option, kind, len(data)), data
                )

            if option == EXPORT_NAME:
                self.send(struct.pack(">QH", self.server.size, flags), zeroes)
                return
            if option == STRUCTURED and self.may_structure:
                self.structured = True
                answer(1)
            elif option == GO:
                answer(3, struct.pack(">HQH", 0, self.server.size, flags))
                answer(1)
                return
            else:
                answer(1 << 31 | 1)

    def fault(self, kinds):
        """What goes wrong with a request, if anything does. Nothing before the second write: a
        client that looks whether the export is empty is told so, and reads what the first wrote.
        """
        if self.server.counts.get("writes", 0) < 2:
            return None
        for kind in kinds:
            every = int(self.server.settings.get(kind, 0))
            if every and self.chance.randrange(every) == 0:
                self.server.count(kind)
                return kind
        return None

    def request(self):
        magic, _, command, cookie, offset, size = struct.unpack(">IHHQQI", self.receive(28))
        if magic != 0x25609513 or command == DISC:
            raise Gone
        payload = self.receive(size) if command == WRITE else b""
        if command in (READ, WRITE, TRIM) and offset + size > self.server.size:
            raise Gone
        kinds = {READ: OF_READS, WRITE: OF_WRITES, TRIM: OF_TRIMS}
        fault = self.fault(kinds.get(command, OF_ANY))
        changes = command in (WRITE, TRIM)
        if changes and self.server.settings.get("slow"):
            time.sleep(float(self.server.settings["slow"]))
            if fault is None and self.is_orphaned():
                fault = "orphan"
                self.server.count(fault)
        if fault in ("ghost", "withheld", "orphan"):
            self.server.do_later(command, offset, size, payload)
            if fault == "ghost":
                raise Gone
            return
        self.server.count(("reads", "writes", "", "flushes", "trims")[command])
        # Sometimes it is done, and no answer says so.
        done = fault not in ("refused", "full", "shutdown", "lost") and not (
            fault == "cut" and self.chance.random() < 0.5
        )
        if done and command == WRITE:
            if fault == "torn":
                payload = payload[: size // 2]
            if fault == "damaged":
                payload = self.flip(payload)
            if self.own is None:
                self.server.write(offset, payload)
            else:
                for at in range(0, size, 4096):
                    self.own[offset + at] = payload[at : at + 4096]
        if done and command == TRIM:
            self.server.trim(offset, size)
        data = self.server.data[offset : offset + size] if command == READ else None
        if data and self.own:
            pages = range(offset, offset + size, 4096)
            data = b"".join(
                self.own.get(at, data[at - offset : at - offset + 4096]) for at in pages
            )
        self.server.answers.wait()
        if fault == "flipped":
            data = self.flip(data)
        if fault == "cut":
            raise Gone
        if fault in ("noise", "stranger"):
            self.send(
                self.chance.randbytes(24)
                if fault == "noise"
                else self.reply(cookie ^ 1 << 40, None, 0, 0)
            )
        if fault == "short":
            whole = self.reply(cookie, data, offset, 0)
            self.send(whole[: self.chance.randrange(1, len(whole))])
            raise Gone
        error = {"refused": EIO, "torn": EIO, "full": ENOSPC, "shutdown": SHUTDOWN}.get(fault, 0)
        reply = self.reply(cookie, data, offset, error)
        if fault == "late":
            timer = threading.Timer(
                self.chance.uniform(0.02, float(self.server.settings.get("latest", 0.4))),
                self.send_late,
                [reply],
            )
            timer.daemon = True
            timer.start()
            return
        self.send(reply)
        if fault == "shutdown":
            raise Gone

    def is_orphaned(self):
        """Whether the client has hung up."""
        poll = select.poll()
        poll.register(self.peer, select.POLLRDHUP)
        return bool(poll.poll(0))

    def send_late(self, reply):
        with contextlib.suppress(OSError):
            self.send(reply)

    def flip(self, data):
        data = bytearray(data)
        for _ in range(3):
            data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
        return bytes(data)

    def reply(self, cookie, data, offset, error):
        if not self.structured:
            return struct.pack(">IIQ", 0x67446698, error, cookie) + (
                data if data and not error else b""
            )

        def chunk(kind, last, payload):
            return struct.pack(">IHHQI", 0x668E33EF, last, kind, cookie, len(payload)) + payload

        if error:
            return chunk(1 << 15 | 1, 1, struct.pack(">IH", error, 4) + b"oops")
        if not data:
            return chunk(0, 1, b"")
        # In pieces, and in any order.
        cuts = sorted(
            {
                0,
                len(data),
                *(self.chance.randrange(len(data)) for _ in range(self.chance.randrange(4))),
            }
        )
        pieces = list(zip(cuts, cuts[1:]))
        self.chance.shuffle(pieces)
        return b"".join(
            chunk(1, int(n + 1 == len(pieces)), struct.pack(">Q", offset + start) + data[start:end])
            for n, (start, end) in enumerate(pieces)
        )


def main():
    path, image, seed, *rest = sys.argv[1:]
    settings = dict(word.split("=") for word in rest)
    others = {"away", "hangs", "latest", "private", "slow", "structured"}
    unknown = set(settings) - {*OF_READS, *OF_WRITES, *others}
    if unknown:
        sys.exit(f"nbd_server.py: there is no fault called {', '.join(sorted(unknown))}")
    server = Server(path, image, seed, settings)

    def ends(_number, _frame):
        # Not print: the signal may have come in the middle of one. Daemon threads end with the
        # process.
        os.write(1, json.dumps(server.counts).encode() + b"\n")
        os._exit(0)

    signal.signal(signal.SIGTERM, ends)
    server.open()
    server.misbehave()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
