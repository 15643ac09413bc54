#!/usr/bin/env python3
"""Runs cases of the suite by their names, or lists them. All other options are pytest's.

run.py --swaptide PATH [--full] [--list] [NAME...]        NAME: the start of cases' names
"""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


class Chosen:
    """Keeps the cases whose names begin as one of `names` does."""

    def __init__(self, names, is_list):
        self.names, self.is_list = names, is_list

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        if self.names:
            items[:] = [item for item in items if item.case_name.startswith(self.names)]
        for item in items:
            # A full name also chooses a case that is left out by default.
            item.is_named = item.case_name in self.names

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session):
        for item in session.items if self.is_list else ():
            full = ["full"] if item.get_closest_marker("full") else []
            print(item.case_name, item.nodeid, *full)


def main():
    words = sys.argv[1:]
    with_value = ("--swaptide", "--limit", "--begin-within", "--seed", "--stretch")
    names, options = [], []
    while words:
        word = words.pop(0)
        if word in with_value and words:
            options += [word, words.pop(0)]
        elif word in ("--full", "--keep") or word.startswith(tuple(f"{o}=" for o in with_value)):
            options.append(word)
        elif word == "--stop":
            options.append("-x")
        elif word == "--list":
            options += ["--collect-only", "--full", "-qq", "--no-summary"]
        elif word.startswith("-"):
            sys.exit(f"{__doc__}\nOther options are pytest's: python3 -m pytest {HERE} --help")
        else:
            names.append(word)
    chosen = Chosen(tuple(names), "--collect-only" in options)
    verbose = [] if chosen.is_list else ["-v"]
    return pytest.main([str(HERE), *verbose, *options], plugins=[chosen])


if __name__ == "__main__":
    sys.exit(main())
