"""Programs under a budget of their own."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from swaptide._binary import binary, last_line, size
from swaptide._errors import RefusedError, SwaptideError
from swaptide._stats import Report

_BAD_INPUT = 2
_END_SECONDS = 5.0
"""How long a program may take to end by itself when its time is up."""
_LOOK_SECONDS = 0.2


class CompletedProcess(subprocess.CompletedProcess[Any]):
    """What `subprocess.run` gives, and the report of the run."""

    _report: Report | None = None

    @property
    def report(self) -> Report:
        """The report of the run. Raises `SwaptideError` where the run has ended without one."""
        if self._report is None:
            raise SwaptideError(
                f"the run has ended without a report, with status {self.returncode}: swaptide was "
                "killed, or could not write it; what it said is on standard error"
            )
        return self._report


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:
            continue
    return found


def _below(pid: int) -> list[int]:
    """A process's descendants, the last ones first."""
    return [one for child in _children(pid) for one in (*_below(child), child)]


def _end(process: "subprocess.Popen[Any]") -> tuple[Any, Any]:
    """Ends a run: its program by SIGTERM, which swaptide passes on, then all of it by SIGKILL.

    The launcher has one child, the supervisor, whose descendants all processes of the run are. It
    ends by itself when they have.
    """
    supervisors = _children(process.pid)
    process.terminate()
    wait = _END_SECONDS
    while True:
        try:
            return process.communicate(timeout=wait)
        except subprocess.TimeoutExpired:
            wait = _LOOK_SECONDS
        for pid in (pid for supervisor in supervisors for pid in _below(supervisor)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def run(
    args: Sequence[str | os.PathLike[str]],
    *,
    ram: str | int,
    swap: Iterable[str] = (),
    options: Iterable[str] = (),
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **popen: Any,
) -> CompletedProcess:
    """Runs a program under a budget of `ram` and waits for it: `subprocess.run` with `swaptide run`
    in front. The result has the run's `report`.

    `swap`: swap areas, as for `swaptide run --swap`. `options`: more of its options, as words. All
    else is as for `subprocess.run`, but for `shell` and `executable`, which are not taken. When the
    time is up, the program gets SIGTERM, and SIGKILL after 5 s.

    Raises `RefusedError` where the run does not begin.
    """
    for name in ("shell", "executable"):
        if name in popen:
            raise TypeError(f"run() takes no {name}; name the program in args")
    if capture_output:
        if popen.get("stdout") is not None or popen.get("stderr") is not None:
            raise ValueError("run() takes capture_output, or stdout and stderr, not both")
        popen["stdout"] = popen["stderr"] = subprocess.PIPE
    if input is not None:
        if popen.get("stdin") is not None:
            raise ValueError("run() takes input or stdin, not both")
        popen["stdin"] = subprocess.PIPE
    words = [os.fspath(word) for word in args]
    with tempfile.TemporaryDirectory(prefix="swaptide-") as directory:
        path = Path(directory) / "report.json"
        command = [str(binary()), "run", "--quiet", "--ram", size(ram), "--report", str(path)]
        command += [word for area in swap for word in ("--swap", area)]
        command += [*options, "--", *words]
        with subprocess.Popen(command, **popen) as process:
            try:
                output, errors = process.communicate(input, timeout=timeout)
            except subprocess.TimeoutExpired as expired:
                output, errors = _end(process)
                expired.cmd, expired.output, expired.stderr = words, output, errors
                raise
            except BaseException:
                _end(process)
                raise
        text = path.read_text() if path.exists() else ""
    if not text and process.returncode == _BAD_INPUT:
        said = errors.decode(errors="replace") if isinstance(errors, bytes) else errors or ""
        line = last_line(said) or "swaptide run has refused it; its line is on standard error"
        raise RefusedError(line)
    if check and process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, words, output, errors)
    done = CompletedProcess(words, process.returncode, output, errors)
    # One that was killed may have written half of it.
    with contextlib.suppress(ValueError):
        done._report = Report.from_json(json.loads(text))
    return done
