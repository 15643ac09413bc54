"""Source packages of Debian: their test suites are in no binary package."""

import re
import subprocess
from pathlib import Path

import pytest


def debian_source(package, directory):
    """Unpacks the source of `package` as its authors gave it out into `directory`, and gives its
    path there. Apt is asked with settings and a state of its own, so that nothing of the machine's
    changes and it takes no root. The case is skipped where it is not to be had."""
    for name in ("sources", "lists/partial", "cache/archives/partial"):
        (directory / name).mkdir(parents=True)
    parts = directory / "sources"
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        if path.suffix == ".sources":
            (parts / path.name).write_text(
                re.sub(r"(?m)^Types:.*$", "Types: deb-src", path.read_text())
            )
        elif path.suffix == ".list" and path.exists():
            (parts / path.name).write_text(re.sub(r"(?m)^deb\s", "deb-src ", path.read_text()))
    options = [
        "Dir::Etc::SourceList=/dev/null",
        f"Dir::Etc::SourceParts={parts}/",
        f"Dir::State::Lists={directory}/lists/",
        f"Dir::Cache={directory}/cache/",
        "APT::Sandbox::User=",
        "Acquire::Languages=none",
    ]
    for words in (["update"], ["source", "--download-only", package]):
        try:
            done = subprocess.run(
                [
                    "apt-get",
                    "-qq",
                    *[word for option in options for word in ("-o", option)],
                    *words,
                ],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
            )
            said = done.stderr.strip().splitlines()
            why = [line for line in said if line.startswith("E:")] + said if done.returncode else []
        except (OSError, subprocess.TimeoutExpired) as error:
            why = [str(error)]
        if why:
            pytest.skip(f"the source package {package} is not to be had: {why[0]}")
    archives = sorted(directory.glob(f"{package}_*.orig.tar.*"))
    archives = [path for path in archives if path.suffix != ".asc"]
    if not archives:
        pytest.skip(f"the source package {package} has no archive of its authors")
    subprocess.run(["tar", "xf", archives[-1]], cwd=directory, check=True, stdin=subprocess.DEVNULL)
    return next(path for path in directory.glob(f"{package}-*") if path.is_dir())
