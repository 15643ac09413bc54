"""What every case runs in: starting a program under swaptide, judging its report, its peak and its
end.

A case is a test function that uses the fixture `case`. It calls `Case.run` or
`Case.compare` and asserts what else must be true. One watchdog per case kills whatever is left
when the case's time is up, so no case needs time limits of its own.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

import contained
import unprivileged
from processes import Sampler, descendants, describe_tree, is_zombie, kill_tree, reap_orphans

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
NATIVE = "native"
BUDGET = object()
"""As `ram`: that of the case."""


class Failure(AssertionError):
    """What a case found wrong, in words; reported without a traceback."""


class PeakTooHigh(Failure):
    """Only the peak was too high. How far a program gets before its engine is at work is a race
    with everything else on the machine, so such a case has a second try."""


@dataclass
class Options:
    """The arguments of the marker `swaptide`. Markers nearer to the case win, one by one."""

    budget: int
    """MiB given to `swaptide run --ram`."""
    limit: int = 120
    """Seconds after which the case is killed and fails."""
    needs: tuple = ()
    """Programs that the case cannot do without."""
    allowance: int = 0
    """MiB over the budget that are allowed: memory that cannot be paged in this program (stacks,
    code made at run time)."""
    swaps: bool = True
    """The data is larger than the budget: the report must show pages going out."""
    forks: bool = False
    """Processes share memory by copy-on-write, so that the sum of their sizes says nothing: the
    report alone is judged."""
    native: bool = True
    """The case says something without swaptide, too: it is skipped there otherwise."""
    complaint: str = ""
    """What swaptide must say on standard error, where it must say something."""


def param(*values, id=None, marks=(), **options):
    """Values of a parametrized case, with options of the marker `swaptide` for this one alone. The
    words among them are its id."""
    if id is None:
        id = "-".join(
            word
            for value in values
            for word in (value if isinstance(value, tuple) else (value,))
            if isinstance(word, str)
        )
    marks = [*marks, pytest.mark.swaptide(**options)] if options else marks
    return pytest.param(*values, id=id, marks=marks)


def full(*values, **options):
    """The same, for values that run with --full only, or when the case is asked for by its name."""
    return param(*values, marks=[pytest.mark.full], **options)


@dataclass
class Suite:
    """What all cases of a session have in common."""

    swaptide: str
    """Path of the binary, or NATIVE."""
    root: Path
    """Directory of all cases' directories and of the compiled programs (`bin`)."""
    seed: int = 1
    limit: int | None = None
    """Seconds for every case, instead of its own limit."""
    keep: bool = False
    """Keep the files of cases that passed."""
    stretch: float = 1
    """How many times their time the long cases take."""


@dataclass
class Finished:
    """A program that came to its end."""

    status: int
    stdout: Path
    stderr: Path
    wall: float
    directory: Path
    report: dict = field(default_factory=dict)

    def text(self):
        return self.stdout.read_text(errors="replace")

    def errors(self):
        return self.stderr.read_text(errors="replace")


class Program:
    """A program that has been started; `finish` waits for it and judges what swaptide says about
    it.
    """

    def __init__(self, case, process, directory, report_path, native):
        self.process = process
        self.pid = process.pid
        self.directory = directory
        self._context = case
        self.report_path = report_path
        self._native = native
        self._started = time.monotonic()
        self._sampler = Sampler(process.pid)

    def finish(self, status=0):
        """Waits for the end; checks the exit status (None: any), the error stream, the report and
        the peak.
        """
        case = self._context
        try:
            code = self.process.wait(timeout=case.remaining() + 30)
        except subprocess.TimeoutExpired:
            raise Failure(f"it could not be killed:\n{describe_tree(os.getpid())}") from None
        wall = time.monotonic() - self._started
        sampled = self._sampler.stop()
        if self.process.stdin is not None:
            self.process.stdin.close()
        code = 128 - code if code < 0 else code
        done = Finished(
            code, self.directory / "stdout", self.directory / "stderr", wall, self.directory
        )
        if case.hung is None:
            case.judge(done, status, self._native, self.report_path, sampled)
        return done


class Case:
    """What a case works with: its directory, its budget, the way to start programs."""

    def __init__(self, name, options, suite, is_unprivileged=False):
        self.name = name
        self.options = options
        self.suite = suite
        self.is_unprivileged = is_unprivileged
        """Runs as an ordinary user with access to /dev/userfaultfd and without any capability."""
        self.profile = None
        """Runs under a container engine's filter of system calls, by its name in filters/."""
        self.engine = None
        """Runs in a container: gives the words that start one, for a run's directory and
        environment."""
        self.swaptide = suite.swaptide
        self.native = suite.swaptide == NATIVE
        self.seed = suite.seed
        self.budget = options.budget
        self.limit = suite.limit or options.limit * max(1, suite.stretch)
        self.python = sys.executable
        self.wall = 0.0
        self.notes = []
        self.first_try = None
        """What the first try failed by, where there was a second."""
        self._begin()

    def _begin(self):
        """What every try has of its own."""
        self.directory = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=self.suite.root))
        self.hung = None
        self.peak = 0
        self.enter = None
        """What each process that is started under swaptide does before anything else, where the
        case does not say."""
        self._deadline = time.monotonic() + self.limit
        self._runs = 0
        self._started = []
        self._at_end = []

    # The whole case

    def perform(self, function):
        """Calls the case's function and judges it; a second time if only its peak was too high."""
        try:
            self._try(function)
        except PeakTooHigh as failure:
            self.first_try = str(failure)
            self._begin()
            self._try(function)

    def _try(self, function):
        watchdog = threading.Timer(self.limit, self._time_is_up)
        watchdog.daemon = True
        started = time.monotonic()
        is_right = False
        try:
            watchdog.start()
            try:
                function()
            finally:
                while self._at_end:
                    self._at_end.pop()()
            self.check_leftovers()
            is_right = self.hung is None
        except KeyboardInterrupt:
            raise
        except BaseException:
            # What fails because everything was killed is not the reason.
            if self.hung is None:
                raise
        finally:
            watchdog.cancel()
            watchdog.join()
            kill_tree(os.getpid())
            self._close()
            reap_orphans()
            self.wall = time.monotonic() - started
            if is_right and not self.suite.keep:
                shutil.rmtree(self.directory, ignore_errors=True)
        if self.hung is not None:
            raise Failure(self.hung)

    def _time_is_up(self):
        self.hung = f"no end after {self.limit} s; what was running:\n{describe_tree(os.getpid())}"
        kill_tree(os.getpid())

    def at_end(self, call):
        """Has `call` called when the case's function has ended, before anything is looked for that
        was left running."""
        self._at_end.append(call)

    def note(self, text):
        """Adds a line to what is shown of the case, whether it passes or fails."""
        self.notes.append(text)

    # Starting programs

    def start(
        self,
        argv,
        *,
        native=False,
        budget=None,
        stdin=subprocess.DEVNULL,
        stdout=None,
        stderr=None,
        env=None,
        cwd=None,
        options=(),
        preexec=None,
        quiet=True,
    ):
        """Starts `argv` under swaptide (or as it is, with `native`). `stdin` may be a path."""
        self._runs += 1
        directory = self.directory / f"run{self._runs}"
        directory.mkdir()
        native = native or self.native
        report = directory / "report.json"
        argv = [str(word) for word in argv]
        swaptide = self.swaptide
        if (self.is_unprivileged or self.profile) and not native:
            if not unprivileged.is_possible():
                pytest.skip("only root can set it up, where there is a /dev/userfaultfd")
            scratch = None
            if self.is_unprivileged:
                swaptide = unprivileged.copy_of(swaptide, self.directory)
                scratch = directory / "device"
                scratch.mkdir()
                os.chown(directory, unprivileged.NOBODY, unprivileged.NOBODY)
            preexec = partial(unprivileged.become_nobody, scratch)
            if self.profile:
                preexec = partial(contained.enter, contained.code_of(self.profile), scratch)
        if not native:
            prefix = [
                swaptide,
                "run",
                "--ram",
                f"{budget or self.budget}M",
                "--report",
                str(report),
                *options,
            ]
            argv = prefix + (["--quiet"] if quiet else []) + ["--"] + argv
            if self.engine:
                argv = [str(word) for word in self.engine(cwd or directory, env)] + argv
        opened = []

        def target(given, name):
            if given is None:
                opened.append((directory / name).open("wb"))
                return opened[-1]
            return given

        if isinstance(stdin, (str, Path)):
            opened.append(Path(stdin).open("rb"))  # noqa: SIM115
            stdin = opened[-1]
        try:
            process = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=target(stdout, "stdout"),
                stderr=target(stderr, "stderr"),
                env=env,
                cwd=cwd or directory,
                preexec_fn=preexec or (None if native else self.enter),
            )
        finally:
            for file in opened:
                file.close()
        program = Program(self, process, directory, report, native)
        self._started.append(program)
        return program

    def command(self, *words, ram=BUDGET, options=()):
        """The words of `swaptide run` with the case's budget, to be started by other means."""
        memory = [] if ram is None else ["--ram", f"{self.budget}M" if ram is BUDGET else ram]
        return [str(word) for word in (self.swaptide, "run", *memory, *options, "--", *words)]

    def run(self, argv, *, status=0, **how):
        """Runs `argv` to its end and judges it."""
        return self.start(argv, **how).finish(status)

    def compare(self, argv, *, files=(), **how):
        """Runs `argv` without and with swaptide; it must succeed, and its output and the `files` it
        writes must be the same. Something must be there to compare."""
        plain = self.run(argv, native=True, **how)
        swapped = self.run(argv, **how)
        sizes = [(plain.directory / name).stat().st_size for name in ("stdout", *files)]
        assert any(sizes) and all(sizes[1:]), (
            f"nothing to compare in stdout, {', '.join(files)}: {sizes}"
        )
        for name in ("stdout", *files):
            left, right = digest(plain.directory / name), digest(swapped.directory / name)
            assert left == right, (
                f"{name} differs: sha256 {left} without swaptide, {right} with it"
                + first_difference(plain.directory / name, swapped.directory / name)
            )
        return plain, swapped

    def run_c(self, name, *arguments, seconds=1, megabytes=128, last=None, **how):
        """Runs the C program `name` MB SECONDS SEED ...; its last line must be the one that says
        all was verified.
        """
        argv = [self.binary(name), megabytes, seconds, self.seed, *arguments]
        done = self.run(argv, **how)
        lines = done.text().splitlines()
        expected = last or " ".join(["OK", name, *[str(word) for word in arguments[:1]]])
        assert lines and lines[-1] == expected, (
            f"its last line is {lines[-1] if lines else None!r}, expected {expected!r}"
        )
        return done

    def stretched(self, amount):
        """An amount of work (seconds, turns) of a long case, times `--stretch`; 1 at least."""
        return max(1, round(amount * self.suite.stretch))

    def binary(self, name):
        """The path of the C program `name`, compiled on first use."""
        return compiled(name, self.suite.root / "bin")

    # Judging

    def expect(self, true, message):
        if self.hung is None and not true:
            raise Failure(message)

    def remaining(self):
        return max(1.0, self._deadline - time.monotonic())

    def judge(self, done, status, native, report_path, sampled):
        errors = done.errors() if done.stderr.exists() else ""
        tail = ("; stderr ends: " + " | ".join(errors.splitlines()[-5:])) if errors.strip() else ""
        if done.stdout.exists() and status is not None and done.status != status:
            output = done.text().splitlines()[-3:]
            tail += (
                ("; stdout ends: " + " | ".join(line[:200] for line in output)) if output else ""
            )
        assert status is None or done.status == status, (
            f"exit status {done.status} instead of {status}{tail}"
        )
        if native:
            if self.native:
                self.peak = max(self.peak, sampled)
            return
        complaints = [line for line in errors.splitlines() if line.startswith("swaptide")]
        expected = self.options.complaint
        assert not expected or any(expected in line for line in complaints), (
            f"swaptide does not say {expected!r}"
        )
        complaints = [line for line in complaints if not expected or expected not in line]
        assert not complaints, f"swaptide complained: {' | '.join(complaints[:3])}"
        assert report_path.exists(), f"it wrote no report{tail}"
        try:
            done.report = json.loads(report_path.read_text())
            reported = int(done.report["peak_resident_bytes"])
            stats = done.report["stats"]
            said = int(done.report["exit_status"])
        except (ValueError, KeyError, TypeError) as error:
            raise Failure(
                f"the report is not what it must be: {error!r}: {report_path.read_text()[:300]}"
            ) from None
        assert said == done.status, f"the report says exit status {said}, it was {done.status}"
        most = self.budget * MIB * 1.05 + (2 + self.options.allowance) * MIB
        # On a loaded machine a program that fills memory at full speed gets further before its
        # engine is at work, and behind a fork two processes hold pages that neither can give up
        # alone. Without a budget these programs take 100 to 250 MiB.
        most += (16 if self.options.forks else 12) * MIB
        self.peak = max(self.peak, reported)
        if self.hung is None and reported > most:
            raise PeakTooHigh(
                f"peak {reported / MIB:.1f} MiB in the report, allowed {most / MIB:.1f}"
            )
        # Measured from outside, the supervisor's own megabytes count too, and the processes are not
        # read at one instant.
        slack = most + 4 * MIB
        assert self.options.forks or sampled <= slack, (
            f"peak {sampled / MIB:.1f} MiB measured from outside, allowed {slack / MIB:.1f}; "
            f"the report says {reported / MIB:.1f}"
        )
        out = sum(int(stats.get(name, 0)) for name in ("pswpout", "zswpout"))
        assert out > 0 or not self.options.swaps, (
            "nothing was swapped out (pswpout and zswpout are 0)"
        )

    def check_leftovers(self):
        """Nothing of the case may keep running after it."""
        for _ in range(300):
            reap_orphans()
            left = [pid for pid in descendants(os.getpid()) if not is_zombie(pid)]
            if not left:
                return
            time.sleep(0.05)
        raise AssertionError(f"it left processes behind:\n{describe_tree(os.getpid())}")

    def _close(self):
        for program in self._started:
            if program.process.stdin is not None:
                with contextlib.suppress(OSError):
                    program.process.stdin.close()
            program._sampler.stop()
            program.process.poll()


# Of `filtered`: a program at a fixed address has nearly all others above it.
FLAGS = {"filtered": ["-no-pie"], "openmp": ["-fopenmp"]}


# Kinds of programs into which the agent is put: their compiler, and how it links.
FOREIGN = {
    "dynamic": ("cc",),
    "static": ("cc", "-static"),
    "pie": ("cc", "-static-pie"),
    "musl": ("musl-gcc",),
    "musl-static": ("musl-gcc", "-static"),
}


def compiled(name, directory):
    """The path of the C program `name`, compiled if no process of this session has done so."""
    return compile_once(name, directory / name, "cc", FLAGS.get(name, []))


def visit(words, end, stopped):
    """Has a debugger come to a process and leave it; what it said. `end` is the signal that ends
    it. One that has stopped the pager may wait for a thread that waits for the pager: it is killed
    then. It may have left the program stopped, and the run with it: `stopped` continue."""
    words = ["timeout", "-s", end, "-k", "3", "3", *map(str, words)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    return done.stderr


def compiled_as(kind, name, directory):
    """The same as a program that loads no library."""
    compiler, *flags = FOREIGN[kind]
    return compile_once(name, directory / f"{name}-{kind}", compiler, [*flags, "-DPAST_LIBC"])


def compile_once(name, path, compiler, more):
    path.parent.mkdir(exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path
        found = shutil.which(compiler) or (shutil.which("gcc") if compiler == "cc" else None)
        if found is None:
            raise Failure(f"no C compiler ({compiler}) is installed")
        source = HERE / "c" / f"{name}.c"
        flags = ["-O2", "-g", "-Wall", "-Wextra", "-pthread", *more]
        result = subprocess.run(
            [found, *flags, "-o", str(path), str(source)], capture_output=True, text=True
        )
        if result.returncode != 0:
            path.unlink(missing_ok=True)
            raise Failure(f"{name}.c does not compile: {result.stderr.strip()[:600]}")
        return path


def digest(path):
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def first_difference(left, right):
    """Where two files begin to differ, as the end of a sentence."""
    offset = 0
    with open(left, "rb") as one, open(right, "rb") as two:
        while True:
            a, b = one.read(1 << 16), two.read(1 << 16)
            if a != b:
                at = next(
                    (i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]),
                    min(len(a), len(b)),
                )
                return f"; first at byte {offset + at}: {a[at : at + 40]!r} and {b[at : at + 40]!r}"
            if not a:
                return ""
            offset += len(a)


def status_of_signal(number):
    """The exit status that says: ended by this signal."""
    return 128 + int(signal.Signals(number))
