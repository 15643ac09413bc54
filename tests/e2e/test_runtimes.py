"""Languages' runtimes at about half of their memory, with threads and children: each must print
what it prints without swaptide.

The programs are in runtimes/. Each checks its own data as well, and prints sums of all of it."""

import os
import shutil
import subprocess

import pytest

from harness import HERE, Failure, param

RUNTIMES = HERE / "runtimes"


def build(case, command, source, **how):
    """The program that `command` makes of `source`; `{}` in it is the program's path."""
    path = case.directory / source.split(".")[0]
    words = [str(word).format(path) for word in command]
    done = subprocess.run(
        [*words, str(RUNTIMES / source)],
        capture_output=True,
        text=True,
        cwd=case.directory,
        **how,
    )
    if done.returncode != 0:
        raise Failure(f"{source} cannot be compiled: {done.stderr.strip()[-600:]}")
    return path


@pytest.mark.swaptide(budget=32, allowance=8)
def test_runtime_cxx(case):
    program = build(case, ["c++", "-O1", "-pthread", "-o", "{}"], "stacks.cpp")
    case.compare([program, 22000])


@pytest.mark.swaptide(budget=32, allowance=8)
def test_runtime_rust(case):
    program = build(case, ["rustc", "-O", "-o", "{}"], "stacks.rs")
    case.compare([program, 15000])


def long(*words, id, **options):
    return param(words, id=id, marks=[pytest.mark.full], needs=words[:1], limit=240, **options)


@pytest.mark.swaptide(forks=True)
@pytest.mark.parametrize(
    "words",
    [
        param(("python3", "forks.py", 30000), id="cpython", budget=56, allowance=24),
        param(
            ("perl", "forks.pl", 40000),
            id="perl",
            budget=48,
            needs=("perl",),
            allowance=24,
            marks=[pytest.mark.full],
        ),
        long("pypy3", "forks.py", 40000, id="pypy", budget=128, allowance=64),
        long("ruby", "forks.rb", 30000, id="ruby", budget=64, allowance=32),
        long("Rscript", "--vanilla", "forks.R", 400000, id="r", budget=64, allowance=64),
        # Its heap is executable, so it stays in memory: that alone exceeds the budget.
        long(
            "sbcl",
            "--script",
            "heap.lisp",
            40000,
            id="sbcl",
            budget=64,
            swaps=False,
            allowance=64,
            forks=False,
        ),
        long("node", "workers.js", 30000, id="node", budget=144, allowance=48),
    ],
)
def test_runtime(case, words):
    """The words as they are, but for a file of runtimes/."""
    files = {word: RUNTIMES / str(word) for word in words}
    case.compare([files[word] if files[word].is_file() else word for word in words])


@pytest.mark.full
@pytest.mark.swaptide(budget=64, limit=240, allowance=16, forks=True)
def test_runtime_go(case):
    """Go with cgo, so that it is a dynamic program; static ones are in test_foreign.py."""
    tool = shutil.which("go") or "/usr/local/go/bin/go"
    if not os.access(tool, os.X_OK):
        raise Failure("Go is not installed (Debian package golang-go)")
    home = str(case.directory / "go")
    env = {
        **os.environ,
        "CGO_ENABLED": "1",
        "GOCACHE": home,
        "GOPATH": home,
        "GOFLAGS": "-modcacherw",
    }
    program = build(case, [tool, "build", "-o", "{}"], "walk.go", env=env)
    case.compare([program, 60000])


@pytest.mark.full
@pytest.mark.swaptide(budget=64, limit=240, needs=("erl", "erlc"), allowance=16, forks=True)
def test_runtime_erlang(case):
    """Compiled first: the virtual machine alone is under swaptide."""
    done = subprocess.run(
        ["erlc", RUNTIMES / "processes.erl"], capture_output=True, text=True, cwd=case.directory
    )
    if done.returncode != 0:
        raise Failure(f"processes.erl cannot be compiled: {done.stdout}")
    start = 'processes:main(["1500"]), halt().'
    case.compare(["erl", "-noshell", "-pa", case.directory, "-eval", start])


@pytest.mark.full
@pytest.mark.swaptide(budget=96, limit=240, needs=("java",), allowance=48, forks=True)
@pytest.mark.parametrize(
    "collector",
    [
        param("Serial", id="serial"),
        param("Parallel", id="parallel"),
        param("G1", id="g1"),
        # Its heap is a memory file, which is shared memory and stays (docs/semantics.md).
        param("Z", id="z", swaps=False, allowance=400),
    ],
)
def test_runtime_java(case, collector):
    options = ["-Xmx256m", f"-XX:+Use{collector}GC", "-XX:-UsePerfData"]
    case.compare(["java", *options, RUNTIMES / "Workers.java", 15000])
