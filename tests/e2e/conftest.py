"""The suite as pytest sees it: options, markers, the fixture `case`, and how a case is judged.

The name of a case is that of its function with its parameters: `test_forks[many]` is `forks-many`.
It is what documents call it, and what `-k` finds.
"""

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from harness import HERE, MIB, NATIVE, Case, Failure, Options, Suite
from processes import adopt_orphans, kill_tree

pytest.register_assert_rewrite("ctl", "server_faults", "servers", "workloads")

BINARY = HERE.parent.parent / "target" / "release" / "swaptide"
SUITE = pytest.StashKey[Suite]()
NAMES = pytest.StashKey[set[str]]()


class Progress:
    """Counts the cases, begins none too late, and shows at once what one has to say: a run that is
    ended from outside has no summary."""

    def __init__(self, config):
        self.config = config
        within = config.option.begin_within
        self.latest = None if within is None else time.monotonic() + within
        """When no further case begins."""
        self.passed = self.failed = 0
        self.left_out = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        if self.latest is None or time.monotonic() <= self.latest:
            return None
        self.left_out.append(item.case_name)
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        self.passed += report.when == "call" and report.passed
        self.failed += report.failed
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if is_worker(self.config) or terminal is None or self.config.option.verbose < 1:
            return
        lines = report.longreprtext.splitlines()[-6:] if report.failed else []
        if report.when == "call":
            lines += dict(report.user_properties).get("notes", "").splitlines()
        if lines:
            terminal.write_line("\n".join("    " + line[:300] for line in lines))

    def pytest_sessionfinish(self, session, exitstatus):
        kill_tree(os.getpid())
        # Whatever else ends a session early (a signal, a file that cannot be read) is a failure.
        self.failed += exitstatus not in (
            pytest.ExitCode.OK,
            pytest.ExitCode.TESTS_FAILED,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        )
        suite = self.config.stash[SUITE]
        if self.failed == 0 and not suite.keep and not is_worker(self.config):
            shutil.rmtree(suite.root, ignore_errors=True)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self):
        """The last lines; `./check` reads the very last one."""
        if is_worker(self.config):
            return
        if self.left_out:
            names = " ".join(self.left_out)
            print(f"LEFT OUT for want of time, {len(self.left_out)} cases: {names}")
        print(f"{self.passed} passed, {self.failed} failed", flush=True)


def pytest_addoption(parser):
    group = parser.getgroup("swaptide")
    group.addoption(
        "--swaptide",
        metavar="PATH",
        default=str(BINARY),
        help="the binary (default: target/release/swaptide); `native`: all without swaptide",
    )
    group.addoption("--full", action="store_true", help="also the cases that are marked `full`")
    group.addoption(
        "--seed", type=int, default=1, metavar="N", help="seed of all generated data (default 1)"
    )
    group.addoption(
        "--stretch",
        type=float,
        default=1,
        metavar="N",
        help="the long cases take N times their time (10: the longest work for ten minutes)",
    )
    group.addoption(
        "--limit",
        type=int,
        metavar="SECONDS",
        help="give every case this long instead of its own limit",
    )
    group.addoption(
        "--begin-within",
        type=float,
        metavar="SECONDS",
        help="begin no case after this time: those left are named, and count neither as passed "
        "nor as failed",
    )
    group.addoption("--keep", action="store_true", help="keep the files of cases that passed, too")


def is_worker(config):
    """Whether this is one of several processes of pytest-xdist."""
    return hasattr(config, "workerinput")


def interrupted(_number, _frame):
    """A TERM (of a caller's time limit, say) ends the suite like ctrl-C: nothing is left."""
    raise KeyboardInterrupt


def pytest_configure(config):
    if config.option.collectonly or config.option.help:
        return
    swaptide = config.option.swaptide
    if swaptide != NATIVE:
        swaptide = str(Path(swaptide).resolve())
        if not os.access(swaptide, os.X_OK):
            raise pytest.UsageError(
                f"--swaptide {swaptide}: no such program; build it with "
                "`cargo build --release --workspace`, or give `--swaptide native`"
            )
    if is_worker(config):
        root = Path(config.workerinput["swaptide_root"])
    else:
        root = Path(tempfile.mkdtemp(prefix="swaptide-test-"))
    config.stash[SUITE] = Suite(
        swaptide,
        root,
        config.option.seed,
        config.option.limit,
        config.option.keep,
        config.option.stretch,
    )
    config.pluginmanager.register(Progress(config), "swaptide-progress")
    adopt_orphans()
    signal.signal(signal.SIGTERM, interrupted)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """pytest-xdist: all processes use one directory, so that each program is compiled once."""
    node.workerinput["swaptide_root"] = str(node.config.stash[SUITE].root)


# Collection


def pytest_itemcollected(item):
    name = item.originalname.removeprefix("test_").replace("_", "-")
    if hasattr(item, "callspec"):
        name = f"{name}-{item.callspec.id}"
    item.case_name = name
    item.extra_keyword_matches.add(name)


def is_asked_for(item, config):
    """Whether a `full` case runs: because of an option, or because it was named."""
    option = config.option
    return (
        option.full
        or bool(option.markexpr)
        or option.keyword.strip() == item.case_name
        or getattr(item, "is_named", False)
        or any("::" in argument and argument.endswith(item.name) for argument in config.args)
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    config.stash[NAMES] = {item.case_name for item in items}
    left = [
        item for item in items if item.get_closest_marker("full") and not is_asked_for(item, config)
    ]
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)


# Running


def options_of(item):
    """The options of the case: those of its markers, of which the nearest wins."""
    options = {}
    for node in item.listchain():
        for mark in node.own_markers:
            if mark.name == "swaptide":
                options.update(mark.kwargs)
    return Options(**options)


@pytest.fixture
def case(request):
    """What a case works with; see `harness.Case`."""
    item = request.node
    options = options_of(item)
    missing = [program for program in options.needs if shutil.which(program) is None]
    if missing:
        why = f"not installed: {', '.join(missing)} (./check installs it)"
        if os.environ.get("SWAPTIDE_TEST_ALL") == "1":
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    is_unprivileged = item.get_closest_marker("unprivileged") is not None
    suite = request.config.stash[SUITE]
    if suite.swaptide == NATIVE and not options.native:
        pytest.skip("says nothing without swaptide")
    return Case(item.case_name, options, suite, is_unprivileged)


@pytest.fixture
def all_names(request):
    """The names of all cases, whether or not they run."""
    return request.config.stash[NAMES]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    case = pyfuncitem.funcargs.get("case")
    if case is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    why = None
    try:
        case.perform(lambda: pyfuncitem.obj(**arguments))
    except Failure as failure:
        why = str(failure)
    finally:
        said = f"{case.wall:.1f} s, peak {case.peak / MIB:.1f} MiB of {case.budget}"
        if case.first_try:
            said += f" (at the second try; the first: {case.first_try})"
        pyfuncitem.user_properties.append(("summary", said))
        if case.directory.exists():
            case.note(f"files: {case.directory}")
        pyfuncitem.user_properties.append(("notes", "\n".join(case.notes)))
    if why is not None:
        pytest.fail(why, pytrace=False)
    return True


def pytest_report_teststatus(report):
    summary = dict(getattr(report, "user_properties", ())).get("summary")
    if report.when == "call" and report.passed and summary:
        return "passed", ".", f"PASSED {summary}"
    return None
