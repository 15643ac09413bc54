"""The budget of this process and of what it starts.

One lock covers what is known of the budget: of two threads that change it one waits for the other.
"""

import json
import os
import threading
import time
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


_ENV_RUN = "SWAPTIDE_LIMITED_BY"
"""Names the run to what this process starts, in the environment."""


class _State:
    """What this process knows of its budget."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.owner = 0
        """The process that attached a run to itself; another one after a fork."""
        self.run = 0
        """The number of that run."""
        self.base: int | None = None
        """The budget outside of all blocks; `None`: there is none."""
        self.blocks: list[tuple[object, str]] = []
        """The blocks under way, the one that counts last."""

    def after_fork(self) -> None:
        self.lock = threading.RLock()


_state = _State()
os.register_at_fork(after_in_child=_state.after_fork)


def name_inherited_run() -> None:
    """Lets the run of the process that has started this one trace this one, too."""
    named = os.environ.get(_ENV_RUN, "")
    if named.isascii() and named.isdigit():
        _prctl.allow_tracer(int(named))


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
    try:
        return _asked()
    except RefusedError:
        return None


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
        raise NotLimitedError(
            f"process {os.getpid()} is under no budget; call swaptide.limit('2G'), or start it by "
            f"swaptide run ({error})"
        ) from None


def _taken() -> Stats:
    """The run that was attached, once this process is managed or seen to stay as it is."""
    end = time.monotonic() + _JOIN_SECONDS
    try:
        found = _asked()
    except RefusedError as error:
        raise SwaptideError(
            f"the budget is in force, but its run cannot be asked: {error}"
        ) from None
    while time.monotonic() < end:
        own = [process for process in found.processes if process.pid == os.getpid()]
        if own and own[0].state != _UNMANAGED:
            break
        time.sleep(_LOOK_SECONDS)
        try:
            found = _asked()
        except RefusedError:
            raise RefusedError(
                "the run has ended at once, and nothing is limited: this process cannot be "
                "managed; without CAP_SYS_ADMIN a process that was released cannot be limited again"
            ) from None
    return found


def _attach(ram: str, options: Iterable[str]) -> None:
    own = os.getpid()
    if _prctl.is_init():
        raise RefusedError(
            "the first process of a container cannot limit itself; start it by swaptide run, or "
            "the container with an init (docker run --init)"
        )
    _prctl.allow_tracer(None)
    tracer = 0
    try:
        with _prctl.orphans_leave():
            ask("attach", "--background", "--quiet", "--ram", ram, *options, str(own))
        found = _taken()
        _state.owner, _state.run = own, found.pid
        tracer = found.pid
        os.environ[_ENV_RUN] = str(tracer)
    finally:
        _prctl.allow_tracer(tracer)


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

    Raises `RefusedError` with swaptide's line where that cannot be; nothing has changed then.
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
    memory and stays. Without such a budget it does nothing.

    Raises `RefusedError` where what is out does not fit into memory; the budget stays then. In a
    process that was started under a budget: `SwaptideError`.
    """
    with _state.lock:
        found = _find()
        if found is None:
            return
        if (_state.owner, _state.run) != (os.getpid(), found.pid):
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
        while _look() is not None:
            if time.monotonic() > end:
                raise refusal or SwaptideError(
                    f"the run {found.pid} does not end; see swaptide ctl list"
                )
            time.sleep(_LOOK_SECONDS)
        _state.owner = _state.run = 0
        os.environ.pop(_ENV_RUN, None)
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
            counted = _state.blocks[-1][0]
            _state.blocks = [block for block in _state.blocks if block[0] is not token]
            if token is not counted:
                return
            if _state.blocks:
                _set(_state.blocks[-1][1])
            elif _state.base is not None:
                _set(str(_state.base))
            else:
                # Not `release`: the next block would have to attach again.
                _set(_WHOLE)
                ask("ctl", "preload", "--pid", str(stats().pid), "/")
