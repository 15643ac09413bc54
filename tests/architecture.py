#!/usr/bin/env python3
"""Checks that ARCHITECTURE.md tells the truth: each row that names a file and a function names a
function which that file defines (of a type with an impl block there), and each path in backquotes
exists.

Exit status 1, and a line for each error, where there is one.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\|.*\| `(\w+)/(src/[\w/.]+)` \| `(?:(\w+)::)?(\w+)` \|$")


def errors(text, root):
    found, functions = [], 0
    for number, line in enumerate(text.splitlines(), 1):
        if row := ROW.match(line):
            crate, path, of_type, name = row.groups()
            source = root / "crates" / f"swaptide-{crate}" / path
            functions += 1
            if not source.is_file():
                found.append(f"line {number}: there is no file {source.relative_to(root)}")
            elif not re.search(rf"\bfn {name}\b", source.read_text()):
                found.append(f"line {number}: {crate}/{path} defines no function {name}")
            elif of_type and not re.search(rf"(?m)^impl\b.*\b{of_type}\b", source.read_text()):
                found.append(f"line {number}: {crate}/{path} has no impl block of {of_type}")
        elif line.startswith("|") and ".rs` |" in line and "`crates/" not in line:
            found.append(f"line {number}: this row names a file without a function")
        for path in re.findall(r"`((?:crates|tests|fuzz|docs)/[\w/.-]+)`", line):
            if not (root / path).exists():
                found.append(f"line {number}: {path} does not exist")
        for path in re.findall(r"\]\(([\w/.-]+)\)", line):
            if not (root / path).exists():
                found.append(f"line {number}: {path} does not exist")
    if functions < 20:
        found.append(f"only {functions} rows name a file and a function")
    if len(text.splitlines()) > 150:
        found.append("it is longer than 150 lines")
    return found


def main():
    found = errors((ROOT / "ARCHITECTURE.md").read_text(), ROOT)
    for error in found:
        print(f"ARCHITECTURE.md: {error}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
