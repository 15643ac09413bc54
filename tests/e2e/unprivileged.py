"""How a process becomes that of an ordinary user with access to /dev/userfaultfd and without any
capability.

Only root can: the device is one of this process's own, in a mount namespace of its own, so that
nothing changes for the machine.
"""

import ctypes
import os
import re
import shutil
from pathlib import Path

NOBODY = 65534
CLONE_NEWNS = 0x00020000
MS_PRIVATE, MS_REC, MS_BIND = 1 << 18, 1 << 14, 1 << 12
PR_CAPBSET_DROP = 24
DEVICE = b"/dev/userfaultfd"


def is_possible():
    return os.geteuid() == 0 and Path(os.fsdecode(DEVICE)).exists()


def copy_of(swaptide, directory):
    """The command and its library where an ordinary user can get at them."""
    for path in (directory, directory.parent):
        path.chmod(0o755)
    place = directory / "bin"
    if not place.exists():
        place.mkdir(mode=0o755)
        for file in (Path(swaptide), Path(swaptide).parent / "libswaptide_agent.so"):
            shutil.copy(file, place / file.name)
            (place / file.name).chmod(0o755)
    return place / Path(swaptide).name


def become_nobody(scratch):
    """For `preexec_fn`. `scratch` is a directory of this process's alone, for the device."""
    open_device(scratch)
    give_up_root()


def open_device(scratch):
    """Gives all users the device, as this process sees it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def must(result):
        if result != 0:
            raise OSError(ctypes.get_errno(), "becoming an ordinary user")

    minor = int(
        re.search(r"^\s*(\d+) userfaultfd$", Path("/proc/misc").read_text(), re.MULTILINE)[1]
    )
    node = scratch / "userfaultfd"
    must(libc.unshare(CLONE_NEWNS))
    must(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    must(libc.mount(b"none", os.fsencode(scratch), b"tmpfs", 0, b"mode=755"))
    os.mknod(node, 0o020666, os.makedev(10, minor))
    os.chmod(node, 0o666)
    must(libc.mount(os.fsencode(node), DEVICE, None, MS_BIND, None))


def give_up_root():
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
