#!/usr/bin/env python3
"""Gives a wheel that has the command and the agent in it the tags of the systems it runs on.

The command is linked statically. The agent is loaded by programs of glibc, and needs the version
whose symbols it names: that is the number in the tag. Programs of musl are given the agent, which
then needs nothing of theirs, so the same wheel serves both.

Usage: wheel.py WHEEL DIRECTORY      the wheel with its tags is written to the directory.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

# What was run: packaging/README.md.
MUSL = "musllinux_1_2_x86_64"


def readelf(option, path):
    return subprocess.run(
        ["readelf", "-W", option, path], capture_output=True, text=True, check=True
    ).stdout


def newest_glibc(path):
    """The newest version of glibc whose symbols the file names, as numbers."""
    found = re.findall(r"\bGLIBC_(\d+)\.(\d+)", readelf("--dyn-syms", path))
    return max(((int(major), int(minor)) for major, minor in found), default=None)


def tags(package):
    command, agent = package / "bin" / "swaptide", package / "bin" / "libswaptide_agent.so"
    if "(NEEDED)" in readelf("-d", command) or "INTERP" in readelf("-l", command):
        sys.exit(f"wheel: {command} is not linked statically")
    version = newest_glibc(agent)
    if version is None:
        sys.exit(f"wheel: {agent} names no symbol of glibc")
    return ["manylinux_{}_{}_x86_64".format(*version), MUSL]


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    wheel, out = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        tool = [sys.executable, "-m", "wheel"]
        subprocess.run([*tool, "unpack", "--dest", directory, wheel], check=True)
        (top,) = Path(directory).iterdir()
        for program in (top / "swaptide" / "bin").iterdir():
            program.chmod(0o755)
        (about,) = top.glob("*.dist-info/WHEEL")
        lines = [
            line
            for line in about.read_text().splitlines()
            if line and not line.startswith(("Tag:", "Root-Is-Purelib:"))
        ]
        lines.append("Root-Is-Purelib: false")
        lines += [f"Tag: py3-none-{tag}" for tag in tags(top / "swaptide")]
        about.write_text("\n".join(lines) + "\n")
        subprocess.run([*tool, "pack", "--dest-dir", out, top], check=True)


if __name__ == "__main__":
    main()
