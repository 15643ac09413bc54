#!/usr/bin/env python3
"""Checks that imports inside each crate go one way: no cycle between modules, none between folders.

A module imports another where its code, tests apart, names it by a path from the crate's root or
from its parent (`crate::`, `super::`). A module and the modules below it, in its own folder, count
as one where the parent is a file of code: a child may use its parent's items. The children of one
parent are looked at among themselves. `mod.rs` and `lib.rs` declare modules and hold what their
folder shares; they are modules like others.

Usage: imports.py [--list] [CRATE...]      --list prints each module with what it imports.
Exit status 1, and each cycle on a line, where there is one that is not in KNOWN. A known cycle may
lose members, and is to be shortened there when it does.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = re.compile(r"#\[cfg\((?:all\()?test\b[^\]]*\]\s*(?:pub(?:\(\w+\))? )?mod \w+ \{.*", re.S)
COMMENT = re.compile(r"^\s*//.*$", re.M)

# Cycles that are still to be cut.
KNOWN = {}


def modules(source):
    """Each module of a crate by its path, as a tuple of names, with the text of its code."""
    found = {}
    for path in sorted(source.rglob("*.rs")):
        parts = path.relative_to(source).with_suffix("").parts
        if "tests" in parts or parts[-1].endswith(("_tests", "testing")):
            continue
        if parts[-1] in ("mod", "lib", "main"):
            parts = parts[:-1]
        text = COMMENT.sub("", path.read_text())
        found[parts] = TESTS.sub("", text)
    return found


def expanded(text):
    """The paths that begin with crate or super, groups in braces taken apart."""
    paths = []
    for match in re.finditer(r"\b(crate|super)((?:::\w+)*)(::\{)?", text):
        head = (match[1], *filter(None, match[2].split("::")))
        if match[3] is None:
            paths.append(head)
            continue
        depth, name, stack = 1, "", [head]
        for at in range(match.end(), len(text)):
            sign = text[at]
            if sign == "{":
                stack.append((*stack[-1], *filter(None, name.strip().split("::"))))
                name, depth = "", depth + 1
            elif sign in ",}":
                if name.strip():
                    words = name.strip().split(" as ")[0]
                    paths.append((*stack[-1], *filter(None, words.split("::"))))
                name = ""
                if sign == "}":
                    stack.pop()
                    depth -= 1
                    if depth == 0:
                        break
            else:
                name += sign
    return paths


def imports(found):
    """What each module imports: the longest known module that a path begins with."""
    graph = {name: set() for name in found}
    for name, text in found.items():
        for path in expanded(text):
            if path[0] == "crate":
                whole = path[1:]
            else:
                base, rest = name, path
                while rest and rest[0] == "super":
                    base, rest = base[:-1], rest[1:]
                whole = base + rest
            known = whole
            while known and known not in found:
                known = known[:-1]
            graph[name].add(known)
        graph[name].discard(name)
    return graph


def cycles(graph):
    """The strongly connected components with more than one member (Tarjan)."""
    index, low, stack, on, out = {}, {}, [], set(), []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        on.add(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in on:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            part = []
            while True:
                other = stack.pop()
                on.discard(other)
                part.append(other)
                if other == node:
                    break
            if len(part) > 1:
                out.append(sorted(part))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return out


def merged(graph, group):
    """The graph between the groups of its nodes; nodes without a group are left out."""
    result = {}
    for node, others in graph.items():
        mine = group(node)
        if mine is None:
            continue
        into = result.setdefault(mine, set())
        into.update(group(other) for other in others)
        into.difference_update({mine, None})
    for others in list(result.values()):
        for other in others:
            result.setdefault(other, set())
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("crates", nargs="*", metavar="CRATE")
    options = parser.parse_args()
    count = 0
    for crate in sorted((ROOT / "crates").iterdir()):
        if options.crates and crate.name not in options.crates:
            continue
        found = modules(crate / "src")
        graph = imports(found)
        # The root shares small things with all; what it declares is no import.
        graph.pop((), None)
        for others in graph.values():
            others.discard(())
        # A parent that is a file of code and its children are one module.
        code = {name for name in graph if any(o[:-1] == name for o in graph if o != name)}
        own = {n for n in code if not (crate / "src" / Path(*n) / "mod.rs").exists()}

        def module(node, own=own):
            return next((node[:k] for k in range(1, len(node)) if node[:k] in own), node)

        single = merged(graph, module)
        if options.list:
            for node, others in sorted(single.items()):
                print(crate.name, "::".join(node), "->", *("::".join(o) for o in sorted(others)))
        folders = merged(single, lambda node: node[:1])
        below = {node: others - own for node, others in graph.items() if node not in own}
        for kind, part in (("modules", single), ("folders", folders), ("files", below)):
            known = set(KNOWN.get((crate.name, kind), "").split())
            members = set()
            for cycle in cycles(part):
                names = {"::".join(name) for name in cycle}
                members |= names
                is_new = not names <= known
                count += is_new
                note = "" if is_new else " (known)"
                print(f"{crate.name}: cycle of {kind}{note}: {' '.join(sorted(names))}")
            if known - members:
                count += 1
                print(f"{crate.name}: no longer in a cycle: {' '.join(sorted(known - members))}")
    if count == 0:
        print("imports: one way, but for what is known")
    return count > 0


if __name__ == "__main__":
    sys.exit(main())
