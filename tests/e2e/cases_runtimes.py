"""Languages' runtimes at about half of their memory, with threads and children: each must print
what it prints without swaptide.

The programs are in runtimes/. Each checks its own data as well, and prints sums of all of it.
"""

import os
import shutil
import subprocess

from harness import HERE, Failure
from legacy import Case

RUNTIMES = HERE / "runtimes"


def runs(*words):
    """`words` as they are; a word that ends in .x with x a program's suffix is one of runtimes/."""
    argv = [RUNTIMES / word if (RUNTIMES / str(word)).is_file() else word for word in words]
    return lambda context: context.compare(argv)


def made(context, command, source, **how):
    """The program that `command` makes of `source`; `{}` in it is the program's path."""
    path = context.directory / source.split(".")[0]
    words = [str(word).format(path) for word in command]
    done = subprocess.run(
        [*words, str(RUNTIMES / source)],
        capture_output=True,
        text=True,
        cwd=context.directory,
        **how,
    )
    if done.returncode != 0:
        raise Failure(f"{source} cannot be compiled: {done.stderr.strip()[-600:]}")
    return path


def compiled(command, source, *arguments):
    def run(context):
        context.compare([made(context, command, source), *arguments])

    return run


def go(context):
    """Go with cgo, so that it is a dynamic program; what Go links statically is refused."""
    tool = shutil.which("go") or "/usr/local/go/bin/go"
    if not os.access(tool, os.X_OK):
        raise Failure("Go is not installed (Debian package golang-go)")
    home = str(context.directory / "go")
    env = {
        **os.environ,
        "CGO_ENABLED": "1",
        "GOCACHE": home,
        "GOPATH": home,
        "GOFLAGS": "-modcacherw",
    }
    program = made(context, [tool, "build", "-o", "{}"], "walk.go", env=env)
    context.compare([program, 60000])


def erlang(context):
    """Compiled first: the virtual machine alone is under swaptide."""
    done = subprocess.run(
        ["erlc", RUNTIMES / "processes.erl"], capture_output=True, text=True, cwd=context.directory
    )
    if done.returncode != 0:
        raise Failure(f"processes.erl cannot be compiled: {done.stdout}")
    start = 'processes:main(["1500"]), halt().'
    context.compare(["erl", "-noshell", "-pa", context.directory, "-eval", start])


def java(collector):
    options = ["-Xmx256m", f"-XX:+Use{collector}GC", "-XX:-UsePerfData"]
    return runs("java", *options, "Workers.java", 15000)


CASES = [
    # These need nothing but what ./check installs anyway.
    Case(
        "runtime-cxx",
        compiled(["c++", "-O1", "-pthread", "-o", "{}"], "stacks.cpp", 22000),
        32,
        allowance=8,
    ),
    Case(
        "runtime-rust", compiled(["rustc", "-O", "-o", "{}"], "stacks.rs", 15000), 32, allowance=8
    ),
    Case(
        "runtime-perl",
        runs("perl", "forks.pl", 40000),
        48,
        needs=("perl",),
        allowance=24,
        forks=True,
    ),
    Case("runtime-cpython", runs("python3", "forks.py", 30000), 56, allowance=24, forks=True),
    Case(
        "runtime-pypy",
        runs("pypy3", "forks.py", 40000),
        128,
        full=True,
        needs=("pypy3",),
        limit=240,
        allowance=64,
        forks=True,
    ),
    Case(
        "runtime-ruby",
        runs("ruby", "forks.rb", 30000),
        64,
        full=True,
        needs=("ruby",),
        limit=240,
        allowance=32,
        forks=True,
    ),
    Case(
        "runtime-r",
        runs("Rscript", "--vanilla", "forks.R", 400000),
        64,
        full=True,
        needs=("Rscript",),
        limit=240,
        allowance=64,
        forks=True,
    ),
    Case("runtime-go", go, 64, full=True, limit=240, allowance=16, forks=True),
    Case(
        "runtime-erlang",
        erlang,
        64,
        full=True,
        needs=("erl", "erlc"),
        limit=240,
        allowance=16,
        forks=True,
    ),
    # Its heap is executable, so it stays in memory: that alone exceeds the budget.
    Case(
        "runtime-sbcl",
        runs("sbcl", "--script", "heap.lisp", 40000),
        64,
        full=True,
        needs=("sbcl",),
        limit=240,
        swaps=False,
        allowance=64,
    ),
    Case(
        "runtime-node",
        runs("node", "workers.js", 30000),
        144,
        full=True,
        needs=("node",),
        limit=240,
        allowance=48,
        forks=True,
    ),
    *[
        Case(
            f"runtime-java-{name.lower()}",
            java(name),
            96,
            full=True,
            needs=("java",),
            limit=240,
            allowance=48,
            forks=True,
        )
        for name in ("Serial", "Parallel", "G1")
    ],
    # Its heap is a memory file, which is shared memory and stays (docs/semantics.md).
    Case(
        "runtime-java-z",
        java("Z"),
        96,
        full=True,
        needs=("java",),
        limit=240,
        swaps=False,
        allowance=400,
        forks=True,
    ),
]
