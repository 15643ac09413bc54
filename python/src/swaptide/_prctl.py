"""Properties of this process that decide who may attach to it."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_SET_PTRACER = 0x59616D61
_ANY_TRACER = ctypes.c_ulong(-1).value
_SET_SUBREAPER = 36
_GET_SUBREAPER = 37


def _prctl(option: int, argument: object) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(ctypes.c_int(option), argument, 0, 0, 0) == 0)


def allow_tracer(pid: int | None) -> None:
    """Names the process that may trace this one, with its descendants; `None`: any of this user's;
    0: none but ancestors.

    Kernels without Yama, or with its `ptrace_scope` of 0, need no name, and some have no such call.
    """
    _prctl(_SET_PTRACER, ctypes.c_ulong(_ANY_TRACER if pid is None else pid))


@contextmanager
def orphans_leave() -> Iterator[None]:
    """Within, orphans become children of some ancestor of this process, not of this process: a run
    in its own tree would be refused."""
    word = ctypes.c_int(0)
    is_set = _prctl(_GET_SUBREAPER, ctypes.byref(word)) and word.value != 0
    if is_set:
        _prctl(_SET_SUBREAPER, ctypes.c_ulong(0))
    try:
        yield
    finally:
        if is_set:
            _prctl(_SET_SUBREAPER, ctypes.c_ulong(1))


def is_init() -> bool:
    """Whether this is the first process of its pid namespace, which all orphans come to."""
    return os.getpid() == 1
