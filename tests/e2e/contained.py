"""How a process becomes what it is in a container with an engine's own profile: its filter of
system calls (filters/), and its default capabilities as root, or none as an ordinary user.

What a container engine separates besides (its root, its processes, its network) is not separated.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import filtercode
import unprivileged

DEFAULT = {
    "docker": (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31),
    "containerd": (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31),
    "podman": (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31),
}
"""The numbers of the capabilities that root has in a container."""
PROFILES = tuple(DEFAULT)
PR_SET_SECCOMP, MODE_FILTER = 22, 2


class FilterCode(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def code_of(profile):
    """The filter as code, and the capabilities."""
    return filtercode.program(profile), DEFAULT[profile]


def enter(profile, scratch):
    """For `preexec_fn`, as root. `profile`: as `code_of` gives it. With a directory of this
    process's alone for the device, it becomes an ordinary user's."""
    code, capabilities = profile
    buffer = ctypes.create_string_buffer(code, len(code))
    given = FilterCode(len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if scratch is not None:
        unprivileged.open_device(scratch)
    # As an engine does it: while the process has CAP_SYS_ADMIN, so that set-uid programs work.
    if libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(given), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "entering a container's filter")
    if scratch is not None:
        unprivileged.give_up_root()
        return
    for capability in range(64):
        if capability not in capabilities:
            libc.prctl(unprivileged.PR_CAPBSET_DROP, capability, 0, 0, 0)


# Real engines

NEEDS = {
    "podman": ("podman", "runc"),
    "rootless": ("podman", "runc", "setpriv"),
    "docker": ("dockerd", "docker"),
}
"""The programs that an engine is; `rootless` is podman as an ordinary user."""

HERE = Path(__file__).resolve().parent


def by_engine(case, engine, user=None):
    """Has a case run in containers of an engine's with the device and 256 MiB, and what this
    machine and the case's files need besides. Their programs are this machine's. `user`: of the
    container; without one it is root there."""
    place, device = case.directory, unprivileged.DEVICE.decode()
    is_open = user is not None or engine == "rootless"
    if is_open:
        # A user's needs permission, which the machine's own device does not give.
        device = place / "device"
        os.mknod(device, 0o020666, os.stat(unprivileged.DEVICE).st_rdev)
        os.chmod(device, 0o666)
        for path in (place, place.parent):
            path.chmod(0o777)
    command, root = {"podman": podman, "rootless": rootless, "docker": docker}[engine](case)
    words = [
        *command,
        *("run", "--rm", "--network", "none", "--volume", f"{place.parent}:{place.parent}"),
        *("--device", f"{device}:{unprivileged.DEVICE.decode()}"),
        *(("--user", str(user)) if user else ()),
    ]
    if engine != "rootless":
        # Where cgroups are of version 1 an ordinary user has none.
        words += ["--memory", "256m"]

    def start(directory, env):
        if is_open:
            for path in (place, directory, *(entry for entry in place.iterdir() if entry.is_dir())):
                if path not in apart:
                    path.chmod(0o777)
        given = [f"--env={name}={value}" for name, value in (env or {}).items()]
        return [*words, "--workdir", directory, *given, *root]

    # What the engine has for itself.
    apart = {entry for entry in place.iterdir() if entry.is_dir()}
    case.engine = start


def limits():
    """An engine's own limits may be more than this machine lets it give."""
    words = []
    for name, number in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
        most = min(4096, resource.getrlimit(number)[1])
        words += ["--ulimit", f"{name}={most}:{most}"]
    return words


def volumes():
    """This machine's directories, as volumes."""
    apart = ("proc", "sys", "dev", "run", "tmp", "var", "boot", "root", "lost+found")
    words = []
    for path in [*sorted(Path("/").iterdir()), HERE.parents[1]]:
        if path.name not in apart and path.is_dir():
            words += ["--volume", f"{path}:{path}:ro"]
    return words


def podman(_case):
    """The command, and the root: this machine's, with what is written kept apart."""
    return ("podman", "--runtime", "runc"), [*limits(), "--rootfs", "/:O"]


def rootless(case):
    """The same as an ordinary user, who has a single id in the container, and an empty root with
    this machine's directories."""
    case.swaptide = unprivileged.copy_of(case.swaptide, case.directory)
    # Of the suite an ordinary user may not see.
    case.python = "/usr/bin/python3"
    owned = [case.directory / name for name in ("home", "run", "root")]
    for path in owned:
        path.mkdir()
        os.chown(path, unprivileged.NOBODY, unprivileged.NOBODY)
    home, run, root = owned

    def end_pause():
        """podman leaves a process that keeps the user's namespace."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((run / "libpod" / "tmp" / "pause.pid").read_text()), signal.SIGKILL)

    case.at_end(end_pause)
    nobody = str(unprivileged.NOBODY)
    command = ("setpriv", "--reuid", nobody, "--regid", nobody, "--clear-groups")
    command += ("env", f"HOME={home}", f"XDG_RUNTIME_DIR={run}")
    command += ("podman", "--log-level", "error", "--runtime", "runc")
    temporary = ["--tmpfs", "/tmp", "--tmpfs", "/var/tmp"]
    return (
        (*command, "--cgroup-manager", "cgroupfs"),
        [*limits(), *temporary, *volumes(), "--rootfs", str(root)],
    )


def docker(case, runtime=None):
    """The command, for a daemon of the case's own (with that runtime besides, called swaptide), and
    an image: empty, with this machine's directories."""
    # That of the suite may be below /root, which is no volume.
    case.python = "/usr/bin/python3"
    # Paths of sockets are short.
    place = Path(tempfile.mkdtemp(prefix="swaptide-"))
    command = ("docker", "--host", f"unix://{place}/socket")
    with open(place / "log", "wb") as log:
        daemon = subprocess.Popen(
            [
                *("dockerd", "--data-root", place / "data", "--exec-root", place / "exec"),
                *("--host", f"unix://{place}/socket", "--pidfile", place / "pid"),
                *("--bridge=none", "--iptables=false", "--ip6tables=false"),
                *(("--add-runtime", f"swaptide={runtime}") if runtime else ()),
            ],
            stdout=log,
            stderr=log,
        )

    def stop():
        daemon.terminate()
        daemon.wait()
        shutil.rmtree(place)

    case.at_end(stop)
    until = time.monotonic() + 30
    while subprocess.run([*command, "info"], capture_output=True).returncode != 0:
        assert daemon.poll() is None and time.monotonic() < until, (place / "log").read_text()[
            -400:
        ]
        time.sleep(0.1)
    empty = place / "empty.tar"
    with tarfile.open(empty, "w") as tar:
        tmp = tarfile.TarInfo("tmp")
        tmp.type, tmp.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(tmp)
    subprocess.run([*command, "import", empty, "empty"], check=True, capture_output=True)
    return command, [*volumes(), "--tmpfs", "/var/tmp", "empty"]
