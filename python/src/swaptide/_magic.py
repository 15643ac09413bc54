"""`%load_ext swaptide`: the budget of a notebook or of IPython, and a line that shows it.

In a notebook the line stays in the cell that asked for it, and shows how it goes: it is written
again after each cell and, from a thread, each second while a cell runs. The thread asks `swaptide`
and publishes; it touches nothing of the user's.
"""

import html
import threading
from typing import Any

from swaptide._errors import NotLimitedError, SwaptideError
from swaptide._limit import limit, release, stats

_NAME = "swaptide"
_LIVE_SECONDS = 1.0


def _line() -> str:
    try:
        return str(stats())
    except NotLimitedError:
        return "swaptide: no budget; %swaptide 2G sets one"
    # The thread that follows a cell goes on: the next line may be a good one.
    except (SwaptideError, OSError, ValueError) as error:
        return f"swaptide: {error}"


def _shown(line: str) -> dict[str, str]:
    return {"text/plain": line, "text/html": f"<pre>{html.escape(line)}</pre>"}


class LiveLine:
    """The line, and the thread that keeps it true while a cell runs."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._handle: Any = None
        self._last = ""
        self._lock = threading.Lock()
        self._is_running = threading.Event()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self) -> None:
        """Shows the line here; where it was shown before it stays as it is."""
        line = _line()
        if not hasattr(self._shell, "kernel"):
            # A terminal cannot show anything a second time.
            print(line)
            return
        from IPython.display import display

        with self._lock:
            self._last = line
            self._handle = display(_shown(line), raw=True, display_id=True)
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name=_NAME, daemon=True)
            self._thread.start()

    def update(self) -> None:
        """Writes the line again, if it is another one."""
        line = _line()
        with self._lock:
            if self._handle is not None and line != self._last:
                self._last = line
                self._handle.update(_shown(line), raw=True)

    def _follow(self) -> None:
        while not self._is_over.is_set():
            self._is_running.wait()
            self._is_over.wait(_LIVE_SECONDS)
            if self._is_running.is_set() and not self._is_over.is_set():
                self.update()

    def before_cell(self, _info: Any = None) -> None:
        self._is_running.set()

    def after_cell(self, _result: Any = None) -> None:
        self._is_running.clear()
        if self._handle is not None:
            self.update()

    def end(self) -> None:
        """No line is written any more."""
        self._is_over.set()
        self._is_running.set()
        if self._thread is not None:
            self._thread.join()


class _Extension:
    def __init__(self, shell: Any) -> None:
        self.line = LiveLine(shell)

    def magic(self, text: str) -> None:
        """`%swaptide` shows the budget and what is swapped out. `%swaptide 2G` puts this process
        and what it starts under a budget, or changes it. `%swaptide off` ends it."""
        from IPython.core.error import UsageError

        words = text.split()
        try:
            if len(words) > 1:
                raise UsageError("%swaptide takes a size, off, or nothing")
            if words == ["off"]:
                release()
            elif words:
                limit(words[0])
        except SwaptideError as error:
            raise UsageError(f"swaptide: {error}") from None
        self.line.show()


_extensions: dict[int, _Extension] = {}


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext swaptide`."""
    extension = _extensions[id(shell)] = _Extension(shell)
    shell.register_magic_function(extension.magic, "line", _NAME)
    shell.events.register("pre_run_cell", extension.line.before_cell)
    shell.events.register("post_run_cell", extension.line.after_cell)


def unload_ipython_extension(shell: Any) -> None:
    """Called by `%unload_ext swaptide`. The budget stays."""
    extension = _extensions.pop(id(shell), None)
    if extension is None:
        return
    shell.events.unregister("pre_run_cell", extension.line.before_cell)
    shell.events.unregister("post_run_cell", extension.line.after_cell)
    del shell.magics_manager.magics["line"][_NAME]
    extension.line.end()
