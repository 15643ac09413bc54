"""Memory cgroups with a hard limit, version 1 or 2, and what was charged to them."""

import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path

MIB = 1 << 20
ROOT = Path("/sys/fs/cgroup")


class MemoryCgroup:
    """One cgroup; `enter` puts the calling process there. What is read of it is the same for both
    versions of the kernel's interface.
    """

    def __init__(self, place, is_old):
        self.place, self.is_old = place, is_old
        # Bytes of each kind, each at the moment when it had most.
        self.peaks = {"anon": 0, "kernel": 0, "file": 0}
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def enter(self):
        (self.place / "cgroup.procs").write_text(str(os.getpid()))

    def _words(self, name):
        return dict(line.split()[:2] for line in (self.place / name).read_text().splitlines())

    def _sample(self):
        while not self._over.wait(0.02):
            stat = self._words("memory.stat")
            if self.is_old:
                now = {
                    "anon": stat["rss"],
                    "file": stat["cache"],
                    "kernel": (self.place / "memory.kmem.usage_in_bytes").read_text(),
                }
            else:
                now = {"anon": stat["anon"], "file": stat["file"], "kernel": stat.get("kernel", 0)}
            for name, value in now.items():
                self.peaks[name] = max(self.peaks[name], int(value))

    def end_of_sampling(self):
        self._over.set()
        self._sampler.join()

    def killed(self):
        """Processes that the kernel ended for memory."""
        return int(
            self._words("memory.oom_control" if self.is_old else "memory.events")["oom_kill"]
        )

    def failed(self):
        """Times a charge met the limit: something was reclaimed (a page of a file, say), or
        a process was ended.
        """
        return (
            int((self.place / "memory.failcnt").read_text())
            if self.is_old
            else int(self._words("memory.events")["max"])
        )

    def peak(self):
        """The most that was charged at one time, pages of files included; at most the limit."""
        path = self.place / ("memory.max_usage_in_bytes" if self.is_old else "memory.peak")
        return int(path.read_text()) if path.exists() else 0


@contextmanager
def memory_cgroup(case, size):
    """A memory cgroup with a hard limit of `size` bytes, or None where none can be made."""
    old = ROOT / "memory"
    is_old = (old / "memory.limit_in_bytes").exists()
    place = (old if is_old else ROOT) / f"swaptide-{os.getpid()}-{case.name}"
    try:
        place.mkdir()
        (place / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(size))
        if not is_old and (place / "memory.swap.max").exists():
            (place / "memory.swap.max").write_text("0")
    except OSError:
        if place.exists():
            place.rmdir()
        yield None
        return
    group = MemoryCgroup(place, is_old)
    try:
        yield group
    finally:
        group.end_of_sampling()
        for _ in range(200):
            try:
                place.rmdir()
                break
            except OSError:
                time.sleep(0.05)
