"""`swaptide attach` to programs of a gigabyte: they come down to a quarter of it within seconds."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ctl import until, wait_for_line
from harness import HERE, MIB, Failure
from redis_client import Redis
from test_attach import Attached, assert_clean, pressure, told
from test_foreign import go_program

pytestmark = [pytest.mark.full]

SIZE = 1024
"""MiB that each program has."""
SECONDS = 10
"""In which it must be within its budget."""

GO = r"""
package main

import ("bufio"; "fmt"; "os"; "strconv")

func main() {
    megabytes, _ := strconv.Atoi(os.Args[1])
    words := make([]uint64, megabytes << 20 / 8)
    for i := range words { words[i] = uint64(i) * 0x9e3779b97f4a7c15 >> 24 }
    fmt.Println("ready", os.Getpid())
    bufio.NewReader(os.Stdin).ReadString('\n')
    for i := range words {
        if words[i] != uint64(i) * 0x9e3779b97f4a7c15 >> 24 {
            fmt.Println("word", i, "differs")
            os.Exit(3)
        }
    }
    fmt.Println("OK")
}
"""


def resident(pid):
    """Bytes of anonymous memory that a process has resident."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise Failure(f"process {pid} is gone")


def bring_down(case, pid):
    """Attaches to a process, and waits until it is within its budget."""
    assert resident(pid) > 0.85 * SIZE * MIB, f"it has {resident(pid) >> 20} MiB"
    began = time.monotonic()
    attached = Attached(case, pid)
    is_within = lambda: resident(pid) <= case.budget * MIB * 1.05  # noqa: E731
    until(case, "it is within its budget", is_within, 60)
    seconds = time.monotonic() - began
    case.note(f"{seconds:.1f} s")
    assert seconds <= SECONDS, f"it took {seconds:.1f} s"
    return attached


@pytest.mark.swaptide(budget=256, native=False, limit=300)
def test_full_attach_large_python(case):
    started, pid = pressure(case, SIZE)
    attached = bring_down(case, pid)
    os.kill(pid, signal.SIGTERM)
    started.finish(7)
    attached.ends()


def hold(case, words):
    """A program that verifies its memory when it is told to."""
    started = case.start(words, native=True, stdin=subprocess.PIPE)
    attached = bring_down(case, int(wait_for_line(case, started, "ready").split()[1]))
    told(started)
    done = started.finish()
    assert done.text().splitlines()[-1] == "OK", done.text()
    attached.ends()
    assert json.loads(attached.report.read_text())["stats"]["zswpout"] > 0


@pytest.mark.swaptide(budget=256, native=False, limit=300, needs=("java",))
def test_full_attach_large_java(case):
    hold(case, ["java", "-Xms1400m", "-Xmx1400m", HERE / "java" / "Holds.java", SIZE, case.seed])


@pytest.mark.swaptide(budget=256, native=False, limit=300, needs=("go",))
def test_full_attach_large_go(case):
    """Linked statically."""
    hold(case, [go_program(case, GO, "0"), SIZE])


@pytest.mark.swaptide(
    budget=256, native=False, limit=600, needs=("redis-server", "redis-benchmark")
)
def test_full_attach_large_redis(case):
    """Under redis-benchmark; its digest is the same before, meanwhile and when it is let go."""
    socket = case.directory / "socket"
    words = ["redis-server", "--port", 0, "--unixsocket", socket, "--save", ""]
    words += ["--dir", case.directory, "--enable-debug-command", "yes"]
    started = case.start(words, native=True)
    pid = started.pid
    redis = Redis(socket, lambda: started.process.poll() is None, 60)
    redis.one("DEBUG", "POPULATE", 800_000, "key", 1100)
    digest = redis.one("DEBUG", "DIGEST")
    # A database of its own.
    load = ["redis-benchmark", "-s", socket, "--dbnum", 1, "-n", 100_000_000, "-r", 1000]
    load += ["-t", "set,get", "-q"]
    bench = subprocess.Popen(
        [str(word) for word in load], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(1)
        attached = bring_down(case, pid)
    finally:
        bench.kill()
        bench.wait()
    redis.one("SELECT", 1)
    redis.one("FLUSHDB")
    assert redis.one("DEBUG", "DIGEST") == digest, "the data is another one"
    attached.lets_go()
    assert_clean(pid)
    assert redis.one("DEBUG", "DIGEST") == digest, "the data is another one"
    redis.shutdown()
    started.finish()
