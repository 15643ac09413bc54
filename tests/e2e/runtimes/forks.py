"""Threads over a large heap, and children forked by them that read and change all of it. Runs under
CPython and PyPy.
"""

import os
import sys
import threading

entries = int(sys.argv[1])


def value(worker, i, turn):
    return [worker, i, turn, str(i * 7919 + turn) * 3, (i * 2654435761 + turn) & 0xFFFFFFFF]


def child(data, worker, turn):
    """Reads what it got, changes a part, and says by its status whether all was right."""
    right = all(data[i] == value(worker, i, turn) for i in range(entries))
    for i in range(0, entries, 3):
        data[i] = value(worker, i, 99)
    right = right and all(
        data[i] == value(worker, i, 99 if i % 3 == 0 else turn) for i in range(entries)
    )
    os._exit(5 if right else 6)


def work(worker, results):
    data = {}
    for turn in range(2):
        for i in range(entries):
            data[i] = value(worker, i, turn)
        pid = os.fork()
        if pid == 0:
            child(data, worker, turn)
        status = os.waitpid(pid, 0)[1]
        right = all(data[i] == value(worker, i, turn) for i in range(entries))
        results.append((worker, turn, os.WEXITSTATUS(status), right))


results = []
threads = [threading.Thread(target=work, args=(worker, results)) for worker in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sorted(results))
