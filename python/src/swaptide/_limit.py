"""The budget of this process and of what it starts.

One lock covers what is known of the budget: of two threads that change it one waits for the other.
"""

import json
import os
import threading
import time
import warnings
from collections.abc import Iterable
from contextlib import ContextDecorator
from types import TracebackType

from swaptide import _prctl
from swaptide._binary import ask, asked, size
from swaptide._errors import NotLimitedError, RefusedError, SwaptideError
from swaptide._stats import Stats

_LEAVE_SECONDS = 30.0
"""How long a run that was told to let go may take to end."""
_REFUSED_SECONDS = 1.0
"""The same of one that has not said that it does."""
_JOIN_SECONDS = 2.0
"""How long a process may be part of a run before the run has seen it."""
_UNMANAGED = "unmanaged"
_WHOLE = "100%"
"""The budget that limits nothing but what the machine or the container does itself."""
_AGENT = "libswaptide_agent.so"
"""What `swaptide run` has its programs load."""
_LOOK_SECONDS = 0.05
_NO_RUN = "neither a run of this user nor a process in one"
"""What `swaptide ctl` says of a process that is in no run."""

_ENV_RUN = "SWAPTIDE_LIMITED_BY"
"""Names the run to what this process starts, in the environment."""


class _State:
    """What this process knows of its budget."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.owner = 0
        """The process that attached a run to itself; another one after a fork."""
        self.run = 0
        """The number of that run; 0 where it is not known."""
        self.base: int | None = None
        """The budget outside of all blocks; `None`: there is none."""
        self.blocks: list[tuple[object, str]] = []
        """The blocks under way, the one that counts last."""

    def after_fork(self) -> None:
        self.lock = threading.RLock()
        # They are the parent's, whose budget does not change when the child leaves them.
        self.blocks = []
        self.base = None


_state = _State()


def name_inherited_run() -> None:
    """Lets the run of the process that has started this one trace this one, too."""
    named = os.environ.get(_ENV_RUN, "")
    if named.isascii() and named.isdigit():
        _prctl.allow_tracer(int(named))


def _after_fork() -> None:
    _state.after_fork()
    # The kernel does not hand the name of the tracer to a child.
    name_inherited_run()


os.register_at_fork(after_in_child=_after_fork)


def _find() -> Stats | None:
    """The run that this process is part of.

    A run sees what begins in it some 100 ms later: a process that its parent has left signs of a
    run waits for that.
    """
    found = _look()
    end = time.monotonic() + _JOIN_SECONDS
    while found is None and _is_started_by_run() and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
        found = _look()
    return found


def _is_started_by_run() -> bool:
    """Whether this process descends from one under a budget that is in force."""
    if _state.owner == os.getpid():
        return False
    if _AGENT in os.environ.get("LD_PRELOAD", ""):
        return True
    named = os.environ.get(_ENV_RUN, "")
    try:
        return bool(named) and bool(ask("ctl", "budget", "--pid", named))
    except RefusedError:
        return False


def _look() -> Stats | None:
    """The run that has this process; `None`: there is none. `RefusedError` where that is not to be
    learned."""
    try:
        return _asked()
    except RefusedError as error:
        if _NO_RUN in str(error):
            return None
        raise


def _is_gone() -> bool:
    """Whether this process is in no run any more; a run that ends may give any answer."""
    try:
        return _look() is None
    except RefusedError:
        return False


def _asked() -> Stats:
    asker, text = asked("ctl", "stats", "--pid", str(os.getpid()), "--json")
    values = json.loads(text)
    # The process that asks is one of the run's, and is over.
    values["processes"] = [one for one in values["processes"] if one["pid"] != asker]
    return Stats.from_json(values)


def stats() -> Stats:
    """The budget of this process and what is swapped out, all processes under it together.

    Raises `NotLimitedError` without a budget.
    """
    found = _find()
    if found is not None:
        return found
    try:
        return _asked()
    except RefusedError as error:
        if _NO_RUN not in str(error):
            raise
        raise NotLimitedError(
            f"process {os.getpid()} is under no budget; call swaptide.limit('2G'), or start it by "
            f"swaptide run ({error})"
        ) from None


def _taken() -> Stats:
    """The run that was attached."""
    try:
        return _asked()
    except RefusedError as error:
        if _NO_RUN in str(error):
            raise _ended() from None
        raise SwaptideError(
            f"the budget is in force, but its run cannot be asked: {error}"
        ) from None


def _ended() -> RefusedError:
    _forget()
    return RefusedError(
        "the run has ended at once, and nothing is limited: this process cannot be managed; "
        "without CAP_SYS_ADMIN a process that was released cannot be limited again"
    )


def _forget() -> None:
    """This process has no run of its own any more."""
    _state.owner = _state.run = 0
    os.environ.pop(_ENV_RUN, None)


def _is_managed(found: Stats) -> bool:
    """Whether this process is managed, or seen to stay as it is."""
    end = time.monotonic() + _JOIN_SECONDS
    while True:
        own = [process for process in found.processes if process.pid == os.getpid()]
        if own and own[0].state != _UNMANAGED:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)
        try:
            found = _asked()
        except RefusedError as error:
            if _NO_RUN in str(error):
                raise _ended() from None


def _attach(ram: str, options: Iterable[str]) -> None:
    own = os.getpid()
    if _prctl.is_init():
        raise RefusedError(
            "the first process of a container cannot limit itself; start it by swaptide run, or "
            "the container with an init (docker run --init)"
        )
    _state.owner = _state.run = 0
    _prctl.allow_tracer(None)
    try:
        with _prctl.orphans_leave():
            ask("attach", "--background", "--quiet", "--ram", ram, *options, str(own))
        # What follows may fail, and `release` ends the run then, too.
        _state.owner, _state.run = own, 0
        found = _taken()
        _state.run = found.pid
        os.environ[_ENV_RUN] = str(found.pid)
        is_managed = _is_managed(found)
    finally:
        _prctl.allow_tracer(_state.run if _state.owner == own else 0)
    if not is_managed:
        warnings.warn(
            f"process {own} counts in its budget and is not managed so far: none of its memory "
            f"goes out; see swaptide ctl stats --pid {found.pid}",
            RuntimeWarning,
            stacklevel=4,
        )


def _set(ram: str, options: Iterable[str] = ()) -> None:
    """Has the budget be `ram`, by a run that this process is in already, or one of its own."""
    found = _find()
    if found is None:
        return _attach(ram, options)
    if tuple(options):
        raise SwaptideError(
            f"this process is in the run {found.pid} already, whose swap areas are chosen; "
            "swaptide ctl swapon adds one"
        )
    ask("ctl", "budget", "--pid", str(found.pid), ram)
    return None


def limit(ram: str | int, *, swap: Iterable[str] = (), report: str | os.PathLike[str] = "") -> None:
    """Puts this process, and what it starts, under a budget of `ram`: `"2G"`, `"50%"` of the
    machine's or container's memory, or a number of bytes. What does not fit is swapped out.

    Called again, it changes the budget. In a process that was started by `swaptide run`, or by a
    process with a budget, it changes the budget of all of that run.

    `swap`: swap areas, as for `swaptide run --swap`; without any, compressed memory and then an
    unlinked file. `report`: a file for a JSON report, written when the process ends or is let go.
    Both only where the process has no budget yet.

    Raises `RefusedError` with swaptide's line where that cannot be; nothing has changed then. Warns
    where the budget is in force and this process is not managed within 2 s.
    """
    words = [word for area in swap for word in ("--swap", area)]
    if os.fspath(report):
        words += ["--report", os.path.abspath(os.fspath(report))]
    with _state.lock:
        _set(size(ram), words)
        if _state.blocks:
            _state.base = stats().budget_bytes


def release() -> None:
    """Ends the budget that this process has given itself by `limit`: everything comes back into
    memory and stays. Without such a budget it does nothing. Blocks of `budget` that are under way
    change nothing any more when they end.

    Raises `RefusedError` where what is out does not fit into memory; the budget stays then. In a
    process that was started under a budget: `SwaptideError`.
    """
    with _state.lock:
        found = _find()
        if found is None:
            _state.blocks, _state.base = [], None
            return
        if _state.owner != os.getpid() or _state.run not in (0, found.pid):
            raise SwaptideError(
                f"the budget is that of the run {found.pid}, which this process has not started; "
                f"swaptide ctl detach {os.getpid()} lets this process go for good"
            )
        try:
            ask("ctl", "detach", str(found.pid))
            refusal, seconds = None, _LEAVE_SECONDS
        except RefusedError as error:
            # It may have ended before it has answered.
            refusal, seconds = error, _REFUSED_SECONDS
        end = time.monotonic() + seconds
        while not _is_gone():
            if time.monotonic() > end:
                raise refusal or SwaptideError(
                    f"the run {found.pid} does not end; see swaptide ctl list"
                )
            time.sleep(_LOOK_SECONDS)
        _forget()
        _state.blocks, _state.base = [], None
        _prctl.allow_tracer(0)


class budget(ContextDecorator):  # noqa: N801
    """A budget for a block, or as a decorator for a function: `with swaptide.budget("512M"):`.

    At the end of the block the budget is what it was. If there was none, it is all memory of the
    machine or container: what is out comes back, most of it at once and the rest when it is
    touched. `release` ends that, too. The budget is one of the process, not of a thread: of blocks
    that overlap the one that began last counts.
    """

    def __init__(self, ram: str | int) -> None:
        self._ram = size(ram)
        self._tokens: list[object] = []

    def __enter__(self) -> None:
        with _state.lock:
            if not _state.blocks:
                found = _find()
                _state.base = None if found is None else found.budget_bytes
            _set(self._ram)
            token = object()
            self._tokens.append(token)
            _state.blocks.append((token, self._ram))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _state.lock:
            token = self._tokens.pop()
            tokens = [block[0] for block in _state.blocks]
            # In a child that was forked within the block, and after `release`, it is none of them.
            if token not in tokens:
                return
            _state.blocks = [block for block in _state.blocks if block[0] is not token]
            if token is not tokens[-1]:
                return
            if _state.blocks:
                _set(_state.blocks[-1][1])
            elif _state.base is not None:
                _set(str(_state.base))
            else:
                # Not `release`: the next block would have to attach again.
                _set(_WHOLE)
                ask("ctl", "preload", "--pid", str(stats().pid), "/")
