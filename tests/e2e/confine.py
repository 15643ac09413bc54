"""Runs a command under a seccomp profile in the format of container engines:
`confine.py PROFILE [--without NAME] COMMAND...`.

Reads of the profile what it has: a default action, and names that are allowed. Calls that are not
allowed fail with EPERM, as they do in a container. Numbers of system calls come from the C
compiler's headers.
"""

import ctypes
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

PROFILE = Path(__file__).resolve().parents[2] / "packaging" / "seccomp.json"
"""What container engines are to be given for swaptide."""


def run_confined(case, confine, words, report, env=None):
    """Runs a program under swaptide with the case's budget, by a command of this file
    (`confine`).
    """
    run = [case.swaptide, "run", "--ram", f"{case.budget}M", "--quiet", "--report", report, "--"]
    return subprocess.run(
        [str(word) for word in (*confine, *run, *words)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=env,
    )


ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, GREATER, RETURN = 0x20, 0x15, 0x35, 0x06
ARCH_X86_64 = 0xC000003E


def numbers():
    source = "#include <sys/syscall.h>\n"
    macros = subprocess.run(
        ["cc", "-E", "-dM", "-x", "c", "-"],
        input=source,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", macros)}


def program(profile, without):
    known = numbers()
    allowed = {
        name
        for rule in profile["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW"
        for name in rule["names"]
    } - set(without)
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, ARCH_X86_64), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for number in sorted(known[name] for name in allowed if name in known):
        code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    return code + [(RETURN, 0, 0, ERRNO | profile.get("defaultErrnoRet", 1))]


def main():
    words = sys.argv[1:]
    profile = json.loads(Path(words.pop(0)).read_text())
    without = []
    while words[0] == "--without":
        without += [words[1]]
        words = words[2:]
    code = b"".join(struct.pack("=HBBI", *line) for line in program(profile, without))
    buffer = ctypes.create_string_buffer(code)

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    filter_of = Program(len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    PR_SET_SECCOMP, MODE_FILTER = 22, 2
    # As root no other privilege is needed, and none is given up, as in a container.
    if libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(filter_of), 0, 0) != 0:
        sys.exit(f"confine.py: {os.strerror(ctypes.get_errno())}")
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
