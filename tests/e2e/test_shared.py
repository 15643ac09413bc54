"""Memory that several processes share (`--shared`): one region for all."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cgroups import memory_cgroup
from harness import HERE, MIB, full, param
from processes import descendants, is_zombie


@pytest.mark.swaptide(budget=32, forks=True)
@pytest.mark.parametrize(
    "mode",
    [
        # What is read and written by several at once does not go out while a forked child is on its
        # way.
        param("hammer", allowance=4),
        full("chains", allowance=16),
        param("killed", allowance=24),
        param("changes", allowance=16),
        param("meetings", allowance=8),
        param("starts", allowance=16),
        param("both", allowance=16),
        param("removes", allowance=8),
        # What may be mapped while a process is stopped stays in: a quarter.
        param("stopped", allowance=16),
        param("wanted", allowance=8),
        # What the children have from their parent still goes out.
        param("maps", allowance=16),
        # A child past libc gets everything, and nothing of it goes out while that lives.
        param("raw", allowance=64),
    ],
)
def test_shared(case, mode):
    case.run_c("shared", mode, megabytes=64, options=["--shared"])


@pytest.mark.swaptide(budget=24, allowance=24)
@pytest.mark.parametrize("mode", ["writev", "words"])
def test_pastwrites(case, mode):
    """The kernel writes to shared memory without asking its pager, and nothing of it is lost."""
    case.run_c("pastwrites", mode, megabytes=80, seconds=6, options=["--shared"])


@pytest.mark.swaptide(budget=24, forks=True)
@pytest.mark.parametrize(
    "mode",
    [
        param("none", allowance=12),
        # Without a guard all comes back to the children, and stays.
        param("closed", allowance=64),
        param("unmaps", allowance=24),
        param("advised", allowance=8),
        param("stacks", allowance=12),
        param("mutexes", allowance=12),
    ],
)
def test_sharing(case, mode):
    """What is done next to shared memory, and to it by other calls."""
    case.run_c("sharing", mode, megabytes=64, seconds=5, options=["--shared"])


@pytest.mark.swaptide(budget=32, forks=True, allowance=4, native=False)
def test_shared_short(case):
    """The first 60 reads of a swap area fail in the supervisor for want of memory: no page is lost,
    and all come back.
    """
    areas = ["--swap", "zram:2M", "--swap", f"file:{case.directory}:1G"]
    done = case.run_c(
        "shared",
        "hammer",
        megabytes=64,
        seconds=2,
        options=["--shared", *areas],
        env={**os.environ, "SWAPTIDE_TEST_FAIL": "14"},
    )
    stats, errors = done.report["stats"], done.report["errors"]
    assert stats["pswpin"] > 100 and errors["pages_poisoned"] == 0, f"{stats}, {errors}"


@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_shared_fsize(case):
    """A run with a limit on file size, below the size of its shared memory: the supervisor raises
    its own. Where it cannot, --shared is refused.
    """
    if os.geteuid() != 0:
        pytest.skip("--shared needs CAP_SYS_PTRACE")
    report = case.directory / "report.json"
    words = case.command(
        *[case.binary("shared"), 64, 1, case.seed, "hammer"],
        options=["--quiet", "--shared", "--swap", "zram:1G", "--report", report],
    )

    def limited(how, *before):
        script = f'ulimit {how} 49152 && exec "$@"'
        return subprocess.run(
            [*before, "bash", "-c", script, "bash", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    done = limited("-Sf")
    said = f"status {done.returncode}, {done.stdout!r}, {done.stderr!r}"
    assert done.returncode == 0 and "OK shared hammer" in done.stdout, said
    stats = json.loads(report.read_text())["stats"]
    assert stats["zswpout"] > 1000, f"nothing of it went out: {stats}"
    done = limited("-f", "setpriv", "--bounding-set=-sys_resource")
    said = f"status {done.returncode}, {done.stdout!r}, {done.stderr!r}"
    assert done.returncode != 0 and "ulimit -Hf" in done.stderr, said


@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_shared_huge(case):
    """Advice to make huge pages of shared memory, whose parts could not go out, does nothing."""
    done = case.run([case.python, HERE / "py" / "shared_huge.py"], options=["--shared"])
    assert done.text() == "OK\n"


FILLS = """
import mmap, time
region = mmap.mmap(-1, 44 << 20)
for at in range(0, len(region), 4096):
    region[at:at + 8] = at.to_bytes(8, "little")
time.sleep(2)
for at in range(0, len(region), 4096):
    assert region[at:at + 8] == at.to_bytes(8, "little"), at
print("OK")
"""


@pytest.mark.swaptide(budget=96, swaps=False, native=False)
def test_shared_in_cgroup(case):
    """In a cgroup of the budget's size shared memory counts once: what fits stays in."""
    with memory_cgroup(case, 96 * MIB) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        words = [case.python, "-c", FILLS]
        done = case.start(words, options=["--shared"], preexec=group.enter).finish()
        group.end_of_sampling()
    assert done.text() == "OK\n"
    stats = {name: int(done.report["stats"][name]) for name in ("zswpout", "swpout_zero")}
    assert set(stats.values()) == {0}, f"{stats}: {group.peaks}"


@pytest.mark.swaptide(budget=32, allowance=64, swaps=False, forks=True, native=False)
def test_shared_run_killed(case):
    """The supervisor is killed while it holds pages of shared memory: processes that need them
    stop and say why.
    """
    program = case.start(
        [case.binary("shared"), 64, 60, case.seed, "hammer"],
        options=["--shared", "--swap", "zram:1G"],
    )
    supervisor, workers = None, []
    while len(workers) < 5:
        assert program.process.poll() is None, "it ended by itself"
        if case.hung is not None:
            return
        tree = descendants(program.pid)
        workers = [pid for pid in tree if Path(f"/proc/{pid}/comm").read_text().strip() == "shared"]
        supervisor = next((pid for pid in tree if pid not in workers), None)
        time.sleep(0.05)
    time.sleep(1)
    os.kill(supervisor, signal.SIGKILL)
    code = program.process.wait()
    said = (program.directory / "stderr").read_text()
    # The first process ends as the others do, or says that one of them has ended so.
    text = (program.directory / "stdout").read_text()
    is_last = code == 134 or code == 3 and "signal 6" in text
    assert is_last and "stopped rather than given wrong data" in said, (
        f"status {code}, {said!r}, {text!r}"
    )
    while case.hung is None and any(
        os.path.exists(f"/proc/{pid}/comm") and not is_zombie(pid) for pid in workers
    ):
        time.sleep(0.05)
    wrong = [
        line
        for line in (program.directory / "stdout").read_text().splitlines()
        if "FAILED" in line and "signal 6" not in line
    ]
    assert not wrong, f"a process saw wrong data: {wrong!r}"
