"""Programs as in a container with an engine's own filter of system calls (filters/), its default
capabilities and `/dev/userfaultfd`, and nothing else.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import contained
from harness import HERE, compiled_as, full, param
from test_foreign import GO, INJECT, UNTIL_MANAGED, go_program
from workloads import STEADY, gcc, java, redis, sort

PROFILES = contained.PROFILES


def of_each_profile(first, **options):
    """One profile in every run, and the others where all cases run."""
    return pytest.mark.parametrize(
        "profile",
        [(param if name == first else full)(name, id=name, **options) for name in PROFILES],
    )


@pytest.mark.swaptide(budget=32, allowance=128, forks=True)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("user", ["root", "user"])
def test_container(case, profile, user):
    """Threads, mappings and forks, every page verified, by both kinds of user."""
    case.profile, case.is_unprivileged = profile, user == "user"
    done = case.run_c("torture", "threads", megabytes=96, seconds=1)
    stats = done.report["stats"]
    assert stats["zswpout"] + stats["pswpout"] > 1000, f"nothing went out: {stats}"
    assert stats["forks"] > 0, f"no fork was followed: {stats}"
    case.run_c("forks", "tree", megabytes=48)


@pytest.mark.swaptide(budget=56, allowance=24, forks=True)
@of_each_profile("docker")
def test_container_python(case, profile):
    case.profile = profile
    case.compare([case.python, HERE / "runtimes" / "forks.py", 20000], env=STEADY)


@pytest.mark.swaptide(budget=32, limit=180, needs=("redis-server",), allowance=8, forks=True)
@of_each_profile("containerd")
def test_container_redis(case, profile):
    case.profile = profile
    redis(case, 40000)


@pytest.mark.swaptide(budget=64, limit=180, needs=("gcc",), allowance=8, forks=True)
@of_each_profile("podman")
def test_container_gcc(case, profile):
    case.profile = profile
    gcc(case, 2, 30)


@pytest.mark.swaptide(budget=32, limit=180, needs=("sort",), allowance=4)
@of_each_profile("docker")
def test_container_sort(case, profile):
    case.profile = profile
    sort(case, 24, 48)


@pytest.mark.swaptide(budget=96, limit=180, needs=("java",), allowance=48)
@of_each_profile("containerd")
def test_container_java(case, profile):
    case.profile = profile
    java(case, "G1", 150000)


@pytest.mark.swaptide(budget=32, allowance=160, forks=True)
@of_each_profile("docker")
def test_container_foreign(case, profile):
    """Programs that load no library, and what they fork."""
    case.profile = profile
    for kind in ("static", "musl"):
        program = compiled_as(kind, "torture", case.suite.root / "bin")
        done = case.run([program, 96, 1, case.seed, "threads"], options=INJECT)
        assert done.text() == "OK torture threads\n", done.text()
    program = compiled_as("static", "foreign", case.suite.root / "bin")
    done = case.run([program, 96, 1, case.seed, "children"], options=INJECT)
    assert done.text() == "OK foreign children\n", done.text()


# In real containers.

ENGINES = pytest.mark.parametrize(
    "engine", [full(name, id=name, needs=needs) for name, needs in contained.NEEDS.items()]
)


@pytest.mark.swaptide(budget=32, allowance=128, forks=True)
@pytest.mark.parametrize("user", [None, 1000], ids=["root", "user"])
@ENGINES
def test_real_container(case, engine, user):
    if engine == "rootless" and user:
        pytest.skip("it has a single id")
    contained.by_engine(case, engine, user)
    case.run_c("torture", "threads", megabytes=96, seconds=5)
    case.run_c("forks", "tree", megabytes=48)


@pytest.mark.swaptide(budget=56, allowance=24, forks=True)
@ENGINES
def test_real_container_python(case, engine):
    contained.by_engine(case, engine)
    case.compare([case.python, HERE / "runtimes" / "forks.py", 30000], env=STEADY)


@pytest.mark.swaptide(budget=32, limit=180, allowance=8, forks=True)
@ENGINES
def test_real_container_redis(case, engine):
    contained.by_engine(case, engine)
    redis(case, 60000)


@pytest.mark.swaptide(budget=64, limit=180, allowance=8, forks=True)
@ENGINES
def test_real_container_gcc(case, engine):
    contained.by_engine(case, engine)
    gcc(case, 2, 50)


@pytest.mark.swaptide(budget=32, limit=300, allowance=4)
@ENGINES
def test_real_container_sort(case, engine):
    contained.by_engine(case, engine)
    sort(case, 24, 48)


@pytest.mark.swaptide(budget=96, limit=180, allowance=48)
@ENGINES
def test_real_container_java(case, engine):
    contained.by_engine(case, engine)
    java(case, "G1", 220000)


@pytest.mark.swaptide(budget=32, allowance=UNTIL_MANAGED, forks=True)
@pytest.mark.parametrize("kind", ["static", "musl-static"])
@ENGINES
def test_real_container_foreign(case, engine, kind):
    contained.by_engine(case, engine)
    binary = compiled_as(kind, "foreign", case.suite.root / "bin")
    done = case.run([binary, 96, 1, case.seed, "all"])
    assert "OK foreign all" in done.text(), done.text()[-300:]


@pytest.mark.full
@pytest.mark.swaptide(budget=32, needs=contained.NEEDS["podman"], native=False)
def test_real_container_doctor(case):
    """Without the device it says what each engine is to be told, and that does."""
    command, root = contained.podman(case)
    words = [*command, "run", "--rm", "--network", "none"]

    def doctor(*options):
        run = [*words, *options, *root, case.swaptide, "doctor"]
        return subprocess.run(run, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    done = doctor()
    assert done.returncode == 1 and "NO  userfaultfd" in done.stdout, done
    line = re.search(r"podman run (--device \S+) \.\.\.", done.stdout)
    assert line is not None and "kubernetes:" in done.stdout, done.stdout
    done = doctor(*line[1].split())
    assert done.returncode == 0 and "NO" not in done.stdout, done
    done = doctor(*line[1].split(), "--user", "1000")
    assert done.returncode == 1 and "--group-add" in done.stdout, done


def static_command(case):
    """The command linked statically, as docs/containers.md has it: the one that is tested, if it
    is."""
    with open(case.swaptide, "rb") as file:
        if b"/ld-linux-x86-64.so.2\0" not in file.read(8192):
            return Path(case.swaptide)
    directory = HERE.parents[1] / "target" / "static"
    env = {
        **os.environ,
        "CARGO_TARGET_DIR": str(directory),
        "CARGO_PROFILE_RELEASE_LTO": "off",
        "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "16",
    }
    words = ["cargo", "rustc", "--locked", "--release", "-p", "swaptide", "--bin", "swaptide"]
    words += ["--", "-C", "target-feature=+crt-static"]
    subprocess.run(words, cwd=HERE, env=env, check=True, capture_output=True)
    return directory / "release" / "swaptide"


@pytest.mark.full
@pytest.mark.swaptide(
    budget=128,
    limit=900,
    needs=(*contained.NEEDS["podman"], "go", "musl-gcc", "busybox"),
    native=False,
)
def test_bare_container(case):
    """In a root with nothing but the command, its library and a program of Go's; then with busybox
    and a program of musl's besides."""
    root = case.directory / "root"
    for name in ("proc", "dev", "sys", "tmp", "var/tmp", "run", "etc", "lib", "bin"):
        (root / name).mkdir(parents=True)
    shutil.copy(static_command(case), root / "swaptide")
    filler = go_program(case, GO, "0")
    for file in (Path(case.swaptide).parent / "libswaptide_agent.so", filler):
        shutil.copy(file, root / file.name)
    command, (*limits, _, _) = contained.podman(case)
    words = [*command, "run", "--rm", "--network", "none", "--device", "/dev/userfaultfd"]
    words += [*limits, "--memory", "400m", "--rootfs", root]

    def run(ram, *program):
        inside = ["/swaptide", "run", "--ram", ram, "--", *program]
        done = subprocess.run([*words, *inside], capture_output=True, text=True)
        assert done.returncode == 0, done
        assert re.search(r" [0-9]+k pages out", done.stderr), done.stderr
        return done.stdout

    assert run("128M", f"/{filler.name}", "512") == "OK\n"
    shutil.copy("/lib/ld-musl-x86_64.so.1", root / "lib")
    shutil.copy(compiled_as("musl", "torture", case.suite.root / "bin"), root / "torture")
    shutil.copy(shutil.which("busybox"), root / "bin" / "busybox")
    (root / "bin" / "sh").symlink_to("busybox")
    script = f"/torture 96 3 {case.seed} threads && busybox seq 1 900000 | busybox sort -r | "
    shell = run("32M", "/bin/sh", "-c", script + "busybox md5sum")
    assert shell == "OK torture threads\nbc9d3ffb78f0747441fea7950fa9a0c2  -\n", shell
