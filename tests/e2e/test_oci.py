"""Containers that run under a budget by an annotation alone: `swaptide oci-runtime` in front of
runc, and `swaptide oci-hook` under podman. Their images know nothing of swaptide.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import contained
import unprivileged
from ctl import PRESSURE, Daemon, listed, until
from harness import MIB, compiled_as
from test_containers import static_command
from test_daemon import metrics_of

pytestmark = [pytest.mark.full]
PLACE = "/run/.swaptide"
EXAMPLES = Path(__file__).resolve().parents[2] / "packaging" / "examples"
BARE = (*contained.NEEDS["podman"], "musl-gcc", "busybox", "tini-static")


def installed(case):
    """A directory with the command, linked statically, and the agent, as a host has it."""
    place = case.directory / "lib"
    place.mkdir()
    shutil.copy(static_command(case), place / "swaptide")
    shutil.copy(Path(case.swaptide).parent / "libswaptide_agent.so", place)
    return place


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def runtime(case, *options):
    """What an engine is given for a runtime, as packaging/swaptide-oci."""
    command = installed(case) / "swaptide"
    sockets = case.directory / "sockets"
    return script(
        case.directory / "swaptide-oci",
        f"export SWAPTIDE_DIRECTORY={sockets}\n"
        f'exec {command} oci-runtime {" ".join(options)} -- "$@"',
    )


def bare_root(case):
    """A root with busybox and the torture program, neither of which loads glibc."""
    root = case.directory / "root"
    for name in ("proc", "dev", "sys", "tmp", "var/tmp", "run", "etc", "lib", "bin", "work"):
        (root / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    shutil.copy("/lib/ld-musl-x86_64.so.1", root / "lib")
    shutil.copy(compiled_as("musl", "torture", case.suite.root / "bin"), root / "work" / "torture")
    shutil.copy(shutil.which("busybox"), root / "bin" / "busybox")
    for name in ("sh", "sleep", "cat", "ls"):
        (root / "bin" / name).symlink_to("busybox")
    return root


def run(words, status=0):
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert status is None or done.returncode == status, done
    return done


def podman(*runtime_options):
    """The words of `podman run`, without a root, and with the limits that this machine can give."""
    words = ["podman", *runtime_options, "--cgroup-manager", "cgroupfs"]
    return words, [*contained.limits(), "--network", "none"]


def swapped(done):
    return re.search(r"swaptide: \S+: .* [0-9]+k pages out", done.stderr) is not None


@pytest.mark.swaptide(budget=32, limit=900, needs=BARE, native=False)
def test_oci_podman(case):
    """An unmodified image with the annotation swaps, whatever its options; without, nothing of
    swaptide is there; a mistake creates no container."""
    words, limits = podman("--runtime", runtime(case))
    root = bare_root(case)
    words += ["run", "--rm", *limits, "--memory", "200m"]
    asks = ["--annotation", "swaptide.ram=32Mi"]
    torture = ["/work/torture", "96", "1", case.seed, "threads"]
    for options, program in (
        ([], torture),
        # A relative path, and a name that PATH finds, are looked up in the container.
        (["--workdir", "/work"], ["./torture", *torture[1:]]),
        (["--env", "PATH=/work:/bin"], ["torture", *torture[1:]]),
        (["--user", "1000:1000"], torture),
        (["--privileged"], torture),
        (["--init", "--init-path", shutil.which("tini-static")], torture),
    ):
        done = run([*words, *asks, *options, "--rootfs", root, *program])
        assert done.stdout == "OK torture threads\n" and swapped(done), (options, done)
    # Without a place for a swap file there is compressed memory.
    read_only = [*words, *asks, "--read-only", "--read-only-tmpfs=false", "--rootfs", root]
    lines = "busybox seq 1 900000 | busybox sort -r | busybox md5sum"
    done = run([*read_only, "sh", "-c", lines])
    assert done.stdout == "bc9d3ffb78f0747441fea7950fa9a0c2  -\n" and swapped(done), done
    # In a user namespace the device is the host's, whose owner decides.
    for path in (case.directory, case.directory.parent):
        path.chmod(0o755)
    if os.stat(unprivileged.DEVICE).st_mode & 0o006 != 0o006:
        mapped = ["--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536"]
        done = run([*words, *asks, *mapped, "--rootfs", root, *torture], status=2)
        assert len(done.stderr.splitlines()) == 1 and "EACCES" in done.stderr, done
    # Its memory limit is the container's, and the budget is not.
    seen = run([*words, *asks, "--rootfs", root, "cat", "/proc/self/cgroup"])
    assert "pages out" not in seen.stderr and "libpod" in seen.stdout, seen
    mounts = ["--rootfs", root, "sh", "-c", f"ls {PLACE}; cat /proc/mounts"]
    seen = run([*words, *asks, *mounts])
    assert re.search(rf"{PLACE}/swaptide \S+ ro,", seen.stdout), seen.stdout
    shutil.rmtree(root / "run" / ".swaptide")
    seen = run([*words, *mounts])
    assert PLACE not in seen.stdout and "swaptide" not in seen.stdout, seen.stdout
    for value, part in (("lots", '"lots" is not a size'), ("1Gi", "memory limit"), ("5Mi", "16M")):
        done = run([*words, "--annotation", f"swaptide.ram={value}", *mounts], status=None)
        assert done.returncode != 0 and done.stdout == "", done
        assert part in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    done = run([*words, *asks, "--annotation", "swaptide.group=/a", *mounts], status=None)
    assert done.returncode != 0 and "--groups" in done.stderr, done
    done = run([*words, *asks, "--rootfs", root, "/no/such/program"], status=2)
    assert "/no/such/program" in done.stderr, done


@pytest.mark.swaptide(budget=32, limit=900, needs=BARE, native=False)
def test_oci_sessions(case):
    """A session (`podman exec`) is not managed and counts against the memory limit alone; a
    container that is killed leaves nothing behind."""
    words, limits = podman("--runtime", runtime(case))
    root = bare_root(case)
    name = f"swaptide-{os.getpid()}"
    case.at_end(lambda: run([*words, "rm", "--force", "--ignore", name], status=None))
    loop = "while /work/torture 96 1 1 threads >/dev/null; do :; done"
    asks = ["--annotation", "swaptide.ram=32Mi", "--memory", "200m"]
    start = [*words, "run", "--detach", "--name", name, *limits, *asks]
    run([*start, "--rootfs", root, "sh", "-c", loop])

    def inside(*program):
        return run([*words, "exec", name, *program]).stdout

    until(case, "a run", lambda: "torture" in inside("busybox", "ps"), 60)
    session = inside("cat", "/proc/self/environ")
    assert "LD_PRELOAD" not in session and "PATH=" in session, session
    stats = until(
        case, "pages out", lambda: pages_out(inside(f"{PLACE}/swaptide", "ctl", "stats")), 60
    )
    assert stats > 100, stats
    pid = run([*words, "inspect", "--format", "{{.State.Pid}}", name]).stdout.strip()
    cgroup = Path(f"/proc/{pid}/cgroup").read_text()
    members = members_of(cgroup)
    assert int(pid) in members and len(members) >= 3, members
    run([*words, "kill", "--signal", "KILL", name])
    until(case, "no process", lambda: not any(Path(f"/proc/{pid}").exists() for pid in members))
    left = [str(path) for path in (root / "var/tmp").iterdir()] + list((root / "tmp").iterdir())
    assert left == [], left
    run([*words, "rm", name])

    # A signal reaches the program, and its status is the container's.
    loop = "trap 'exit 5' TERM; while :; do sleep 0.1; done"
    run([*start, "--rootfs", root, "sh", "-c", loop])
    until(case, "a run", lambda: "sleep" in inside("busybox", "ps"), 60)
    run([*words, "stop", "--time", "60", name])
    code = run([*words, "inspect", "--format", "{{.State.ExitCode}}", name]).stdout.strip()
    assert code == "5", code
    run([*words, "rm", name])


def pages_out(text):
    return sum(int(number) for number in re.findall(r"(?:zswpout|pswpout)\D+(\d+)", text))


def members_of(cgroup):
    """The processes of a container, by what its first one's /proc/PID/cgroup says."""
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory", "pids") and path != "/":
            place = Path("/sys/fs/cgroup", controllers, path[1:], "cgroup.procs")
            if place.exists():
                return [int(pid) for pid in place.read_text().split()]
    raise AssertionError(cgroup)


@pytest.mark.swaptide(budget=32, limit=600, needs=BARE, native=False)
def test_oci_hook(case):
    """podman with packaging/oci-hook.json, and its usual runtime."""
    hooks = case.directory / "hooks"
    hooks.mkdir()
    hook = json.loads((Path(__file__).parents[2] / "packaging" / "oci-hook.json").read_text())
    assert hook["hook"]["args"] == ["swaptide", "oci-hook"], hook
    hook["hook"]["path"] = str(installed(case) / "swaptide")
    (hooks / "swaptide.json").write_text(json.dumps(hook))
    words, limits = podman("--runtime", "runc", "--hooks-dir", hooks)
    root = bare_root(case)
    words += ["run", "--rm", *limits, "--memory", "200m"]
    torture = ["--rootfs", root, "/work/torture", "96", "1", case.seed, "threads"]
    done = run([*words, "--annotation", "swaptide.ram=32Mi", *torture])
    assert done.stdout == "OK torture threads\n" and swapped(done), done
    done = run([*words, *torture])
    assert done.stdout == "OK torture threads\n" and "swaptide" not in done.stderr, done
    # podman tells no more than that the hook failed.
    done = run([*words, "--annotation", "swaptide.ram=lots", *torture], status=None)
    assert done.returncode != 0 and "swaptide oci-hook" in done.stderr, done
    mistake = json.dumps({"annotations": {"swaptide.ram": "lots"}})
    done = subprocess.run(
        [hook["hook"]["path"], "oci-hook"], input=mistake, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == "", done
    assert len(done.stderr.splitlines()) == 1 and '"lots" is not a size' in done.stderr, done


@pytest.mark.swaptide(
    budget=32, limit=600, needs=(*contained.NEEDS["docker"], "musl-gcc", "busybox"), native=False
)
def test_oci_docker(case):
    """Docker's daemon, by a variable: its version 20.10 passes no annotation on."""
    root = bare_root(case)
    command, (*volumes, _, _, empty) = contained.docker(case, runtime(case, "--environment"))
    image = case.directory / "image.tar"
    subprocess.run(["tar", "-C", root, "-cf", image, "."], check=True)
    run([*command, "import", image, "bare"])
    words = [*command, "run", "--rm", "--network", "none", "--memory", "200m"]
    asks = ["--runtime", "swaptide", "--env", "SWAPTIDE_RAM=32Mi"]
    program = case.binary("torture")
    volumes += ["--volume", f"{program.parent}:/programs:ro"]
    torture = ["torture", "96", "1", case.seed, "threads"]
    for options in ([], ["--user", "1000"], ["--workdir", "/programs"]):
        program = f"{'.' if '--workdir' in options else '/programs'}/torture"
        done = run([*words, *asks, *options, *volumes, empty, program, *torture[1:]])
        assert done.stdout == "OK torture threads\n" and swapped(done), (options, done)
    torture = ["bare", "/work/torture", *torture[1:]]
    # What loads no library is given the agent by ptrace, for which old profiles want this.
    for options in ([], ["--init"]):
        done = run([*words, *asks, "--cap-add", "SYS_PTRACE", *options, *torture])
        assert done.stdout == "OK torture threads\n" and swapped(done), (options, done)
    done = run([*words, "--runtime", "swaptide", *torture])
    assert done.stdout == "OK torture threads\n" and "swaptide" not in done.stderr, done
    done = run([*words, "--runtime", "swaptide", "--env", "SWAPTIDE_RAM=lots", *torture], None)
    assert done.returncode != 0 and '"lots" is not a size' in done.stderr, done


@pytest.mark.swaptide(budget=112, limit=600, needs=contained.NEEDS["podman"], native=False)
def test_oci_daemon(case):
    """Two containers share the host's daemon: groups, limits and metrics are each one's; one that
    is killed leaves nothing."""
    words, limits = podman("--runtime", runtime(case, "--groups"))
    place = case.directory / "swap"
    place.mkdir()
    daemon = Daemon(
        case,
        f'ram = "112M"\nswap = ["zram:32M", "file:{place}:1G"]\n'
        f'[groups."/b"]\nram.max = "40M"\n[daemon]\nmetrics = "{place}/metrics"\n'
        "follow_forks = true\n",
    )
    names = [f"swaptide-{group}-{os.getpid()}" for group in "ab"]
    for name, group, ram in zip(names, ("/a", "/b"), ("64Mi", "96Mi")):
        case.at_end(lambda name=name: run([*words, "rm", "--force", "--ignore", name], None))
        asks = ["--annotation", f"swaptide.ram={ram}", "--annotation", f"swaptide.group={group}"]
        run(
            [
                *(*words, "run", "--detach", "--name", name, "--hostname", name, *limits),
                *(*asks, "--pid", "host", "--rootfs", "/:O"),
                *(case.python, PRESSURE, "90", "wait"),
            ]
        )

    def of(name, metric):
        found = re.search(rf'^{metric}{{container="{name}"[^}}]*}} (\d+)$', metrics_of(place), re.M)
        return int(found[1]) if found else 0

    for name, group, most in zip(names, ("/a", "/b"), (64, 40)):
        until(
            case, f"pages of {group} out", lambda: of(name, "container_memory_swap") > 16 * MIB, 60
        )
        until(
            case,
            f"{most}M for {group}",
            lambda: 8 * MIB < of(name, "container_memory_working_set_bytes") < most * 1.1 * MIB,
            60,
        )
        current = daemon.ctl.value(group, "ram.current")
        assert current < most * 1.1 * MIB, (group, current)
    limit = "container_spec_memory_limit_bytes"
    assert [of(name, limit) for name in names] == [64 * MIB, 40 * MIB], metrics_of(place)
    assert of(names[0], "container_memory_failures_total") >= 0

    # A container that dies takes along what it had.
    run([*words, "kill", "--signal", "KILL", names[1]])
    until(case, "nothing of /b", lambda: daemon.ctl.value("/b", "processes") == 0)
    until(case, "no charge of /b", lambda: daemon.ctl.value("/b", "swap.current") == 0)
    until(case, "no series of /b", lambda: names[1] not in metrics_of(place))
    assert of(names[0], limit) == 64 * MIB, "the other one stays"
    done = run([*words, "stop", "--time", "60", names[0]])
    code = run([*words, "inspect", "--format", "{{.State.ExitCode}}", names[0]]).stdout.strip()
    assert code == "7", f"its memory was verified: {code}: {done}"
    until(case, "no charge", lambda: daemon.ctl.value("/", "swap.current") == 0)
    for name in names:
        run([*words, "rm", name])
    # With a run that it still knows of, it would leave its file to the next one.
    until(case, "no run", lambda: listed(daemon) == [])
    daemon.stop()
    left = [path.name for path in place.iterdir() if path.name != "metrics"]
    assert left == [], left


@pytest.mark.swaptide(budget=256, limit=600, needs=BARE, native=False)
def test_oci_dockerfile(case):
    """The image of packaging/examples/Dockerfile: with the device alone its program has a
    budget."""
    words, limits = podman("--runtime", "runc")
    root, context = bare_root(case), installed(case)
    (root / "bin" / "python3").write_text("#!/bin/sh\nexec /work/torture 384 1 1 threads\n")
    (root / "bin" / "python3").chmod(0o755)
    base, built = (f"localhost/swaptide-{name}-{os.getpid()}" for name in ("base", "built"))
    case.at_end(lambda: run([*words, "rmi", "--force", base, built], status=None))
    image = case.directory / "image.tar"
    subprocess.run(["tar", "-C", root, "-cf", image, "."], check=True)
    run([*words, "import", image, base])
    shutil.copy(EXAMPLES / "Dockerfile", context)
    build = ["build", "--network", "none", "--build-arg", f"IMAGE={base}", "--tag", built]
    run([*words, *build, context])
    start = ["run", "--rm", *limits, "--memory", "400m", "--device", "/dev/userfaultfd"]
    done = run([*words, *start, built])
    assert done.stdout == "OK torture threads\n" and swapped(done), done
