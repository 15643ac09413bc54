"""Programs under way and what is asked of them: `swaptide ctl`, and a daemon of the case."""

import json
import os
import signal
import subprocess
import time

from harness import HERE, Failure

PRESSURE = HERE / "py" / "pressure.py"
"""Fills its memory, verifies it and counts signals, in several modes."""


def ask(case, *words, env=None):
    """`swaptide ctl` with these words: its exit status and what it printed."""
    words = [case.swaptide, "ctl", *words]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env)
    return done.returncode, done.stdout, done.stderr


def wait_for_line(case, program, start):
    """Waits until the program's output has a whole line that begins with `start`; the line."""
    path = program.directory / "stdout"
    while case.hung is None:
        # A program that does not buffer its output writes a line in parts.
        for line in path.read_text().splitlines(keepends=True):
            if line.startswith(start) and line.endswith("\n"):
                return line.rstrip("\n")
        if program.process.poll() is not None:
            program.finish(status=None)
            raise Failure(
                f"it ended with status {program.process.returncode} before it said {start!r}"
            )
        time.sleep(0.02)
    raise Failure(f"it never said {start!r}")


def process_of(case, pid):
    """What a run says of all its processes together, and of one of them."""
    status, text, errors = ask(case, "stats", "--pid", str(pid), "--json")
    assert status == 0, f"ctl stats: status {status}: {errors}"
    view = json.loads(text)
    return view["stats"], next(process for process in view["processes"] if process["pid"] == pid)


def until(case, what, true, seconds=20):
    """Waits until `true` answers with something that is true, and gives that."""
    end = time.monotonic() + seconds
    while True:
        answer = true()
        if answer:
            return answer
        assert time.monotonic() < end, f"{what} did not come true in {seconds} s"
        if time.monotonic() >= end:
            return None
        time.sleep(0.05)


class Ctl:
    """`swaptide ctl` for one run (or, without a process, for the daemon)."""

    def __init__(self, case, pid=None, env=None):
        self.case = case
        self.env = env
        self.pid = ["--pid", str(pid)] if pid else []

    def __call__(self, *words):
        status, text, errors = ask(self.case, words[0], *self.pid, *words[1:], env=self.env)
        assert status == 0 and errors == "", f"ctl {words}: status {status}: {errors}"
        return text

    def refused(self, named, *words):
        status, text, errors = ask(self.case, words[0], *self.pid, *words[1:], env=self.env)
        lines = errors.splitlines()
        said = f"ctl {words}: status {status}, {text!r}, {errors!r}"
        assert status == 2 and len(lines) == 1 and named in lines[0], (
            f"{said}; expected one line that names {named}"
        )

    def value(self, group, key):
        text = self("group", group, key).strip()
        return int(text) if text.isdigit() else text

    def event(self, group, kind, name):
        words = self("group", group, f"{kind}.events").split()
        return int(words[words.index(name) + 1])

    def stalled(self, group):
        """Seconds in which a thread of the group has waited for memory."""
        return int(self("group", group, "ram.pressure").split("total=")[1]) / 1e6


def started(case, argv, options, line="ready"):
    """A program that is under way, the number of its process, and its ctl."""
    program = case.start(argv, options=options)
    inside = int(wait_for_line(case, program, line).split()[1])
    return program, inside, Ctl(case, program.pid)


def ended(case, program, status=7):
    os.kill(program.pid, signal.SIGTERM)
    return program.finish(status)


class Daemon:
    """A daemon in a directory of the case, and what is asked of it."""

    def __init__(self, case, config, preexec=None, env=()):
        """`preexec` is done by the daemon's process and those of its programs before all else;
        `env` is added to their environment."""
        self.case = case
        self.preexec = preexec
        self.env = {**os.environ, "SWAPTIDE_DIRECTORY": str(case.directory / "sockets")}
        self.env.update(env)
        self.config = case.directory / "daemon.toml"
        self.config.write_text(config)
        self.errors = case.directory / "daemon.errors"
        self.ctl = Ctl(case, env=self.env)
        self.process = None
        self.start()

    def launch(self):
        words = [self.case.swaptide, "daemon", "--config", str(self.config)]
        with open(self.errors, "ab") as errors:
            self.process = subprocess.Popen(
                words,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stderr=errors,
                preexec_fn=self.preexec,
            )

    def start(self):
        self.launch()
        until(
            self.case,
            "a daemon that answers",
            lambda: ask(self.case, "tiers", env=self.env)[0] == 0,
        )

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self, may_stall=False):
        """With `may_stall` it may have reported programs that make almost no progress."""
        self.process.terminate()
        status = self.process.wait(timeout=20)
        assert status == 0, f"the daemon ends with status {status}"
        said = self.errors.read_text().splitlines()
        if may_stall:
            said = [line for line in said if "makes almost no progress" not in line]
        assert said == [], f"the daemon complained: {said}"

    def program(self, megabytes, *options):
        """A program that is kept by it; the number of the case's run, and of the process."""
        return self.started([self.case.python, PRESSURE, megabytes, "wait"], *options)

    def started(self, argv, *options):
        """The same of a program that says `ready` and its number."""
        program = self.case.start(argv, options=options, env=self.env, preexec=self.preexec)
        return program, int(wait_for_line(self.case, program, "ready").split()[1])


CONFIG = """ram = "112M"
swap = ["zram:32M", "file:{place}:1G"]
tiers = "+FAST:100 +SLOW:-1"

[groups."/a"]
ram.low = "8M"

[groups."/b"]
ram.max = "64M"

[daemon]
metrics = "{place}/metrics"
"""


def listed(daemon):
    return [int(line.split()[0]) for line in daemon.ctl("list").splitlines()]
