"""Holds MB megabytes of data, waits or works as MODE says, verifies the data. Used by the cases
about signals and terminals.

pressure.py MB wait      says `ready`, counts SIGUSR1, ends on SIGTERM with status 7 after verifying
everything pressure.py MB terminal  says which of its streams are terminals, ends on SIGINT with
status 8 after verifying everything pressure.py MB closefds  closes every descriptor from 3 on, then
works on pressure.py MB spawn     starts children with close_fds, which do the same
"""

import os
import random
import signal
import subprocess
import sys
import time
import zlib

BLOCK = 1 << 16


def block(number):
    """64 KiB that follow from their number: a random part and a repeated part, about 3 to 1."""
    head = random.Random(number).randbytes(BLOCK // 3)
    return head + (b"%016d" % number) * ((BLOCK - len(head)) // 16 + 1)


def build(megabytes):
    return {number: block(number) for number in range(megabytes * 16)}


def verify(data):
    for number, content in data.items():
        if zlib.crc32(content) != zlib.crc32(block(number)):
            print(f"block {number} differs", flush=True)
            sys.exit(3)


def say(text):
    print(text, flush=True)


def main():
    megabytes, mode = int(sys.argv[1]), sys.argv[2]
    counts = {signal.SIGUSR1: 0}
    ended = []

    def counted(number, _frame):
        counts[number] += 1
        # Not by print, which the signal may have interrupted.
        os.write(1, b"USR1 number %d\n" % counts[number])

    signal.signal(signal.SIGUSR1, counted)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: ended.append(number))
    data = build(megabytes)
    if mode == "wait":
        say(f"ready {os.getpid()}")
        while not ended:
            time.sleep(0.02)
        verify(data)
        say(f"USR1 {counts[signal.SIGUSR1]} then {signal.Signals(ended[0]).name} {len(ended)}")
        sys.exit(7)
    if mode == "terminal":
        say("terminals " + " ".join(str(os.isatty(fd)) for fd in (0, 1, 2)))
        say("line " + sys.stdin.readline().strip())
        while not ended:
            time.sleep(0.02)
        time.sleep(0.3)
        verify(data)
        say(f"{signal.Signals(ended[0]).name} {len(ended)}")
        sys.exit(8)
    if mode == "closefds":
        os.closerange(3, 65536)
        verify(data)
        more = {number: block(number) for number in range(10**6, 10**6 + megabytes * 4)}
        verify(more)
        verify(data)
        say("OK closefds")
        return
    if mode == "spawn":
        for _ in range(4):
            subprocess.run(
                [sys.executable, __file__, str(megabytes // 4), "closefds"],
                close_fds=True,
                check=True,
                stdout=subprocess.DEVNULL,
            )
            verify(data)
        say("OK spawn")
        return
    sys.exit(f"unknown mode {mode}")


main()
