"""What the suite knows about running processes: the tree below it, their state, their memory, and
how to end them.

Only fields that the kernel answers without taking a process's memory lock are read. The command
line, the environment and smaps need that lock, or the memory itself, and a process that hangs in a
fault holds both: reading them would hang the suite with it.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time

PAGE = os.sysconf("SC_PAGE_SIZE")
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans():
    """Processes whose parent exits become children of the suite, so that none escapes its tree."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def children(pid):
    """The children of every thread of `pid`."""
    found = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        found += [int(child) for child in _read(f"/proc/{pid}/task/{thread}/children").split()]
    return found


def descendants(pid):
    """Every process below `pid`, parents before their children."""
    found = []
    queue = children(pid)
    while queue:
        child = queue.pop(0)
        found.append(child)
        queue += children(child)
    return found


def comm(pid):
    """The name of a process; empty when it is gone."""
    return _read(f"/proc/{pid}/comm").strip()


def open_files(pid):
    """Each open file of a process: its path in /proc, and what it is."""
    for fd in sorted(os.listdir(f"/proc/{pid}/fd"), key=int):
        path = f"/proc/{pid}/fd/{fd}"
        # It may be closed by now.
        with contextlib.suppress(OSError):
            yield path, os.readlink(path)


def status_fields(process):
    """/proc/PROCESS/status as a dictionary of strings; a thread is named PID/task/TID."""
    fields = {}
    for line in _read(f"/proc/{process}/status").splitlines():
        key, _, value = line.partition(":")
        fields[key] = value.strip()
    return fields


def is_zombie(pid):
    return status_fields(pid).get("State", "").startswith("Z")


def describe_tree(pid, most=60):
    """A list like ps: one line per thread below `pid` with its state and the kernel function it
    waits in.
    """
    lines = ["    pid   tid  ppid S wchan                    RSS      name"]
    for process in descendants(pid):
        process_fields = status_fields(process)
        rss = process_fields.get("VmRSS", "-")
        try:
            threads = sorted(os.listdir(f"/proc/{process}/task"), key=int)
        except OSError:
            continue
        for thread in threads:
            base = f"/proc/{process}/task/{thread}"
            fields = status_fields(f"{process}/task/{thread}")
            wchan = _read(f"{base}/wchan") or "-"
            lines.append(
                f"{process:>7} {thread:>5} {process_fields.get('PPid', '?'):>5} "
                f"{fields.get('State', '?')[:1]} "
                f"{wchan:<24} {rss:<8} {fields.get('Name', '?')}"
            )
    if len(lines) > most:
        lines = lines[:most] + [f"    ... and {len(lines) - most} more threads"]
    return "\n".join(lines)


def kill_tree(pid):
    """Kills every process below `pid`, by its id; they are stopped first, so that none forks its
    way out.
    """
    for _ in range(20):
        alive = [process for process in descendants(pid) if not is_zombie(process)]
        if not alive:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
        time.sleep(0.05)


def reap_orphans(but=()):
    """Collects the zombies that became children of the suite, except those in `but`, which are
    waited for.
    """
    for child in children(os.getpid()):
        if child not in but and is_zombie(child):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


class Sampler:
    """Measures the memory of a tree from outside, to compare with the report.

    Anonymous memory is added up over the processes of the tree; of shared memory, which several
    processes may map, only the largest one counts. Pages that a parent and its child share after a
    fork are counted twice: cases that fork say so and are judged by the report alone. A process
    that has not executed its program yet shares all with its parent, for a moment: only what two
    samples in a row have counts.
    """

    def __init__(self, pid, interval=0.025):
        self.peak = 0
        self._pid = pid
        self._interval = interval
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _loop(self):
        before = 0
        while not self._done.wait(self._interval):
            private = 0
            shared = 0
            for process in {self._pid, *descendants(self._pid)}:
                fields = status_fields(process)
                private += _kilobytes(fields.get("RssAnon"))
                shared = max(shared, _kilobytes(fields.get("RssShmem")))
            sampled = (private + shared) * 1024
            self.peak = max(self.peak, min(before, sampled))
            before = sampled

    def stop(self):
        self._done.set()
        self._thread.join()
        return self.peak


def _kilobytes(text):
    return int(text.split()[0]) if text else 0
