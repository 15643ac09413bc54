"""The cases of cases_*.py, until each file is ported."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

Skip = pytest.skip.Exception


@dataclass
class Case:
    name: str
    run: Callable
    budget: int
    full: bool = False
    limit: int = 120
    needs: tuple = ()
    allowance: int = 0
    swaps: bool = True
    unprivileged: bool = False
    complaint: str = ""
    forks: bool = False


def all_cases():
    for path in sorted(Path(__file__).resolve().parent.glob("cases_*.py")):
        yield from importlib.import_module(path.stem).CASES
