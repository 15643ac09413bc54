"""The recipes of docs/network.md: what is on a server survives its end and its start, the end of
what is behind it, its replacement by another, and goes over TLS.
"""

import json
import signal
import subprocess
import time

import pytest

from ctl import Daemon, ended, until, wait_for_line
from exports import KINDS, Memory, certificates
from harness import MIB, param, status_of_signal

pytestmark = [pytest.mark.network, pytest.mark.full]

# Fills memory with noise, verifies all of it again and again, and replaces an eighth of what it
# verified; until the time is over, and once at least.
HELD = r"""
import random, sys, time, zlib
megabytes, seconds, seed = map(int, sys.argv[1:4])
chance = random.Random(seed)
blocks = [chance.randbytes(1 << 18) for _ in range(4 * megabytes)]
sums = [zlib.crc32(block) for block in blocks]
print("filled", flush=True)
end, passes = time.monotonic() + seconds, 0
while passes < 1 or time.monotonic() < end:
    for number, block in enumerate(blocks):
        if zlib.crc32(block) != sums[number]:
            sys.exit("wrong data")
        if chance.randrange(8) == 0:
            blocks[number] = chance.randbytes(1 << 18)
            sums[number] = zlib.crc32(blocks[number])
    passes += 1
print("OK", passes)
"""

# S3's server is a hundred times as slow as the others.
MEGABYTES = {"s3": 22}


def kinds(*names):
    return pytest.mark.parametrize("kind", [param(name, needs=KINDS[name][1]) for name in names])


def export(case, kind, name="one", **how):
    return KINDS[kind][0](case, name, **how)


def start(case, kind, url, seconds=6, options=()):
    """A program that has filled its memory, of which most is on the server."""
    program = case.start(
        [case.python, "-c", HELD, MEGABYTES.get(kind, 64), seconds, case.seed],
        options=["--swap", "zram:2M", "--swap", url, *options],
    )
    wait_for_line(case, program, "filled")
    return program


def verified(program):
    """Ends with everything as it was, and most of it was on the server."""
    done = program.finish()
    assert done.text().splitlines()[-1].startswith("OK "), f"{done.text()[-300:]!r}"
    assert done.report["errors"]["pages_poisoned"] == 0, f"lost: {done.report['errors']}"
    used = max(d["peak_used_bytes"] for d in done.report["devices"] if d["type"] == "nbd")
    assert used > 4 * MIB, f"the export is hardly used: {done.report['devices']}"
    return done


@pytest.mark.swaptide(budget=16, limit=400, allowance=128, native=False)
@kinds("memory", "file", "ssh", "s3", "raw", "qcow2", "rbd")
def test_export(case, kind):
    """Its server is killed in the middle and started again. One that has forgotten everything needs
    a mirror.
    """
    server = export(case, kind)
    url = server.url()
    if not server.keeps:
        mirror = case.directory / "mirror"
        mirror.mkdir()
        url += f",mirror={mirror}"
    program = start(case, kind, url)
    server.kill()
    time.sleep(2)
    server.start()
    verified(program)


@pytest.mark.swaptide(budget=16, limit=120, allowance=128, native=False)
@kinds("memory", "qcow2-writeback")
def test_export_forgets(case, kind):
    """The same without a mirror, of a server that has forgotten what was written: SIGBUS, and no
    wrong page.
    """
    server = export(case, kind)
    program = start(case, kind, server.url())
    server.kill()
    server.start()
    done = program.finish(status=None)
    lost = done.report["errors"]["pages_poisoned"]
    said = f"status {done.status}, {lost} lost, {done.text()!r}, {done.errors()[-300:]!r}"
    assert lost > 0 and done.status == status_of_signal(signal.SIGBUS), said


@pytest.mark.swaptide(budget=16, limit=240, allowance=128, native=False)
@kinds("ssh", "s3", "rbd")
def test_export_behind(case, kind):
    """What is behind the server goes away and comes back, within the minute that pages wait."""
    server = export(case, kind)
    program = start(case, kind, server.url())
    if kind == "s3":
        # It keeps its objects in memory.
        server.behind.signal(signal.SIGSTOP)
        time.sleep(4)
        server.behind.signal(signal.SIGCONT)
    else:
        server.behind.kill()
        time.sleep(4)
        server.behind.start(*(("osd", "0") if kind == "rbd" else ()))
    verified(program)


def replace(case, old, new, mirror=None, megabytes=120):
    """A daemon's program goes on while its server is replaced; that of before is taken away."""
    url = old.url() + (f",mirror={mirror}" if mirror else "")
    daemon = Daemon(case, f'ram = "24M"\nswap = ["zram:2M", "{url}"]\n')
    program, _ = daemon.program(megabytes)

    def used():
        views = json.loads(daemon.ctl("devices", "--json"))
        return [view["used_bytes"] for view in views if view["type"] == "nbd"]

    until(case, "pages on the server", lambda: used()[0] > 8 * MIB, 60)
    if mirror:
        old.kill()
    daemon.ctl("swapon", new.url())
    began = time.monotonic()
    daemon.ctl("swapoff", old.url())
    case.note(f"swapoff took {time.monotonic() - began:.1f} s")
    assert len(used()) == 1 and used()[0] > 8 * MIB, f"not all has moved: {used()}"
    old.kill()
    # It verifies its memory.
    ended(case, program)
    daemon.stop(may_stall=True)


@pytest.mark.parametrize(
    "pair",
    [
        param(pair, needs=KINDS[pair[0]][1] + KINDS[pair[1]][1])
        for pair in (("file", "qcow2"), ("raw", "ssh"), ("ssh", "s3"), ("rbd", "file"))
    ],
)
@pytest.mark.swaptide(budget=24, limit=300, allowance=64, swaps=False, native=False)
def test_export_replaced(case, pair):
    """Under a running daemon, by `swapon` and `swapoff`."""
    old, new = (export(case, kind, kind) for kind in pair)
    # S3 has below 1 MB/s here.
    replace(case, old, new, megabytes=48 if "s3" in pair else 120)


@pytest.mark.swaptide(
    budget=24, limit=120, allowance=64, needs=("nbdkit",), swaps=False, native=False
)
def test_export_dead(case):
    """The same of a server that is gone for good, and had a mirror."""
    mirror = case.directory / "mirror"
    mirror.mkdir()
    replace(case, Memory(case, "one"), export(case, "file", "two"), mirror)


@pytest.mark.swaptide(budget=16, limit=180, allowance=128, native=False)
@kinds("file", "qcow2", "rbd")
def test_export_tls(case, kind):
    """Over TLS, with certificates on both sides; the server is killed and started again. Who has no
    certificate is refused, and so is a server of another authority.
    """
    tls = certificates(case.directory / "tls")
    other = certificates(case.directory / "other")
    server = export(case, kind, tls=tls)
    for url in (
        server.url(identity=False),
        server.url(ca=other / "ca-cert.pem"),
        server.url().replace("nbds:", "nbd:").partition("?")[0],
    ):
        words = case.command("true", options=["--swap", url])
        refused = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        said = refused.stderr.splitlines()
        assert refused.returncode == 2 and len(said) == 1 and "--swap" in said[0], f"{refused}"
    program = start(case, kind, server.url())
    server.kill()
    time.sleep(2)
    server.start()
    verified(program)


# Noise in private memory: how fast it goes out, pages at random and in order come back. In MB/s,
# and microseconds.
SPEED = r"""
import mmap, os, random, sys, time
megabytes, touches, seed = map(int, sys.argv[1:4])
size = megabytes << 20
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
noise = [os.urandom(1 << 20) for _ in range(4)]
began = time.monotonic()
for at in range(0, size, 1 << 20):
    memory[at:at + (1 << 20)] = noise[(at >> 20) % 4]
out = megabytes * 1.048576 / (time.monotonic() - began)
pages = random.Random(seed).sample(range(size // 8192), touches)
began = time.monotonic()
for page in pages:
    memory[page * 4096]
one = (time.monotonic() - began) / touches * 1e6
began = time.monotonic()
for at in range(size // 2, size, 4096):
    memory[at]
print("OK", round(out), round(one), round(size / 2e6 / (time.monotonic() - began)))
"""


@pytest.mark.parametrize(
    "kind, delay, megabytes",
    [
        param("memory", None, 192, id="memory", needs=KINDS["memory"][1]),
        param("memory", "1ms", 192, id="memory-1ms", needs=KINDS["memory"][1]),
        *(param(kind, None, 192, id=kind, needs=KINDS[kind][1]) for kind in ("file", "ssh")),
        param("s3", None, 32, id="s3", needs=KINDS["s3"][1]),
        *(param(kind, None, 192, id=kind, needs=KINDS[kind][1]) for kind in ("raw", "qcow2")),
        param("rbd", None, 96, id="rbd", needs=KINDS["rbd"][1]),
    ],
)
@pytest.mark.swaptide(budget=16, limit=240, allowance=128, native=False)
def test_export_speed(case, kind, delay, megabytes):
    """The figures of docs/network.md: what is delayed by the server takes that long at least."""
    server = export(case, kind, **({"delay": delay} if delay else {}))
    touches = 100 if kind == "s3" else 2000
    done = case.run(
        [case.python, "-c", SPEED, megabytes, touches, case.seed],
        options=["--swap", "zram:2M", "--swap", server.url()],
    )
    out, one, back = map(int, done.text().split()[1:])
    case.note(f"out {out} MB/s, one page {one} us, in order {back} MB/s")
    # nbdkit 1.32 delays by whole milliseconds.
    least = 1000 if delay == "1ms" else 0
    assert one > least * 0.8, f"a page of the server took {one} us on average"
