"""Public test suites, unmodified: every test that passes without swaptide passes with it."""

import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections import Counter

import pytest

from harness import Failure, param
from sources import debian_source

pytestmark = [pytest.mark.full]

# Tests that depend on time fail now and then on a busy machine, with and without swaptide: what
# fails is tried again, alone, this many times.
TRIES = 2


def outcomes(path):
    """What became of every test in a JUnit file: `ok`, `skipped` or the first line of what went
    wrong.
    """
    found = {}
    for test in xml.parse(path).iter("testcase"):
        name = f"{test.get('classname') or ''}.{test.get('name')}".lstrip(".")
        wrong = next((child for kind in ("failure", "error") for child in test.iter(kind)), None)
        if wrong is not None:
            found[name] = (
                (wrong.text or wrong.get("message") or "").strip().splitlines() or ["it failed"]
            )[-1]
        else:
            found[name] = "skipped" if test.find("skipped") is not None else "ok"
    return found


def interpreter(module):
    """A Python that has `module` of CPython's own tests: this one, or Debian's."""
    for python in (sys.executable, "/usr/bin/python3"):
        if (
            shutil.which(python)
            and subprocess.run(
                [python, "-c", f"import test.{module}"], capture_output=True
            ).returncode
            == 0
        ):
            return python
    raise Failure(
        f"no Python here has {module}; Debian's package libpython3.N-testsuite has it, N as in "
        f"python3 --version (./check --full installs it)"
    )


def run_cpython_tests(case, module, *which):
    """A module of CPython's own tests, or what `which` leaves of it (options of `-m test`)."""
    python = interpreter(module)

    def tests(native, names=()):
        only = [word for name in names for word in ("-m", name)]
        made = case.directory / "tests.xml"
        made.unlink(missing_ok=True)
        done = case.run(
            [python, "-m", "test", "--junit-xml", made, *which, *only, module],
            native=native,
            status=None,
        )
        assert made.exists(), (
            f"{module} wrote no results: status {done.status}, {done.errors()[-300:]!r}"
        )
        return outcomes(made)

    plain = tests(native=True)
    if not any(outcome == "ok" for outcome in plain.values()):
        raise Failure(f"no test of {module} passes without swaptide")
    swapped = tests(native=False)
    worse = {
        name: swapped.get(name, "it is not there")
        for name, outcome in plain.items()
        if outcome == "ok" and swapped.get(name) != "ok"
    }
    for _ in range(TRIES):
        if worse:
            again = tests(native=False, names=[name.rsplit(".", 1)[-1] for name in worse])
            worse = {
                name: again.get(name, why) for name, why in worse.items() if again.get(name) != "ok"
            }
    assert not worse, (
        f"{len(worse)} of {len(plain)} tests of {module} pass without swaptide alone: {worse}"
    )


# What Redis is made of that its tests start.
REDIS = ("redis-server", "redis-cli", "redis-benchmark", "redis-check-aof", "redis-check-rdb")


def passed_of_redis(text):
    """How often each test of Redis passed in this output, by its file and its name."""
    passed, unit = Counter(), ""
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        if found := re.fullmatch(r"Testing (\S+)", line):
            unit = found[1]
        elif found := re.fullmatch(r"\[ok\]: (.*?)( \(\d+ ms\))?", line):
            passed[unit, found[1]] += 1
    return passed


# These start interpreters that start interpreters: with less, half a dozen processes exchange a few
# pages each.
TREES = 48

# The tests of multiprocessing need 139 MiB without swaptide, and in a budget theirs and the
# engines' come to 320. test_many_processes forks a hundred interpreters at a moment (174 MiB, 840
# with their engines): below that they exchange their few megabytes with each other and get nowhere.
MULTIPROCESSING = 64

# 146 MiB without swaptide, 191 with engines. A server forks whenever it saves.
REDIS_UNITS = (
    "unit/protocol",
    "unit/keyspace",
    "unit/info",
    "unit/dump",
    "unit/other",
    "unit/multi",
    "unit/sort",
    "unit/expire",
    "unit/aofrw",
    "unit/scripting",
    "unit/functions",
    "unit/lazyfree",
    "unit/type/incr",
    "unit/type/list",
    "unit/type/set",
    "unit/type/zset",
    "unit/type/hash",
    "unit/type/stream",
    "integration/rdb",
)


@pytest.mark.swaptide(limit=1200, allowance=32, forks=True)
@pytest.mark.parametrize(
    "module",
    [
        param("mmap", budget=24),
        param("io", budget=24),
        param("threading", budget=TREES),
        param("subprocess", budget=TREES),
    ],
)
def test_full_cpython(case, module):
    run_cpython_tests(case, f"test_{module}")


@pytest.mark.swaptide(budget=MULTIPROCESSING, limit=1800, allowance=32, forks=True)
def test_full_cpython_multiprocessing(case):
    run_cpython_tests(case, "test_multiprocessing_fork", "-i", "test_many_processes")


@pytest.mark.swaptide(budget=64, limit=2400, needs=("tclsh", *REDIS), allowance=16, forks=True)
def test_full_redis_suite(case, units=REDIS_UNITS):
    """Redis's own tests, from Debian's source package, with Debian's server: the tests, their
    servers and what those fork are one tree.
    """
    source = debian_source("redis", case.directory / "source")
    for name in REDIS:
        (source / "src" / name).unlink(missing_ok=True)
        (source / "src" / name).symlink_to(shutil.which(name))

    def tests(native, units):
        files = [word for unit in units for word in ("--single", unit)]
        # One test at a time, and an error in one does not end the others.
        words = ["tclsh", "tests/test_helper.tcl", "--clients", "1", "--durable", *files]
        return passed_of_redis(case.run(words, native=native, status=None, cwd=source).text())

    plain = tests(True, units)
    without = set(units) - {unit for unit, _ in plain}
    if without:
        raise Failure(f"no test passes without swaptide in {', '.join(sorted(without))}")
    worse = plain - tests(False, units)
    for _ in range(TRIES):
        if worse:
            again = sorted({unit for unit, _ in worse})
            worse = Counter(
                {test: count for test, count in plain.items() if test in worse}
            ) - tests(False, again)
    assert not worse, (
        f"{len(worse)} of {len(plain)} tests pass without swaptide alone: {sorted(worse)}"
    )
