"""A Redis server with its data, and requests for it: uniform, and as often as Zipf's law has it.

Prints what was found; the figures of the requests go to standard error, a line each:
`figure NAME VALUE`.
"""

import bisect
import itertools
import random
import socket
import subprocess
import sys
import tempfile
import time

KEYS, REQUESTS = int(sys.argv[1]), int(sys.argv[2])
draw = random.Random(7)


def value_of(key, version):
    # About 2:1, as texts are.
    return (f"{key}:{version}:" * 40)[:500].encode() + draw.randbytes(300)


class Client:
    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.file = self.socket.makefile("rb")

    def ask(self, *words):
        parts = [b"*%d\r\n" % len(words)]
        parts += [b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
        self.socket.sendall(b"".join(parts))
        line = self.file.readline()
        if line.startswith(b"$"):
            return self.file.read(int(line[1:]) + 2)[:-2]
        return line.strip()


def requests(client, kind, pick):
    times = []
    found = 0
    began = time.perf_counter()
    for _ in range(REQUESTS):
        key = b"key-%d" % pick()
        at = time.perf_counter_ns()
        if kind == "get":
            found += len(client.ask(b"GET", key))
        else:
            client.ask(b"SET", key, value_of(key, 2))
        times.append(time.perf_counter_ns() - at)
    rate = REQUESTS / (time.perf_counter() - began)
    times.sort()
    return found, rate, times


def main():
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(KEYS)))
    order = list(range(KEYS))
    draw.shuffle(order)
    picks = {
        "uniform": lambda: draw.randrange(KEYS),
        "zipfian": lambda: order[bisect.bisect(weights, draw.random() * weights[-1])],
    }
    with tempfile.TemporaryDirectory() as place:
        path = f"{place}/socket"
        words = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--dir", place]
        server = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        try:
            while True:
                try:
                    client = Client(path)
                    break
                except OSError:
                    time.sleep(0.01)
            for number in range(KEYS):
                key = b"key-%d" % number
                client.ask(b"SET", key, value_of(key, 1))
            found = []
            for kind, name in itertools.product(["get", "set"], picks):
                bytes_found, rate, times = requests(client, kind, picks[name])
                found.append(bytes_found)
                label = f"{kind}-{name}"
                print(f"figure {label}-per-s {rate:.0f}", file=sys.stderr)
                for percent in (50, 99, 99.9):
                    at = times[int(len(times) * percent / 100)] / 1000
                    print(f"figure {label}-p{percent}-us {at:.1f}", file=sys.stderr)
            print(*found, client.ask(b"DBSIZE").decode())
        finally:
            server.terminate()
            server.wait()


main()
