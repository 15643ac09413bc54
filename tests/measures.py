#!/usr/bin/env python3
"""Measures the structure of each crate, and with --check fails where a type has grown too large.

A type may have 15 fields, and inherent `impl` blocks in two files. Code of tests does not count.
For each crate: its longest files, its longest functions, the modules that import most others, and
its types by fields and by files with an `impl` block.

Usage: measures.py [--check] [--all] [CRATE...]
--all prints every type; without it only those past half of a limit. With --check nothing but errors
is printed, and the exit status is 1, where a type is past a limit and is not in KNOWN, or where an
entry of KNOWN is no longer needed.
"""

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import imports  # noqa: E402

ROOT = imports.ROOT
MAX_FIELDS = 15
MAX_IMPL_FILES = 2
# From here on a function is printed; one past the second number fails the check.
MAX_FUNCTION_LINES = 80
MOST_FUNCTION_LINES = 100
# Experiments are read from top to bottom.
ANY_LENGTH = ("swaptide-lab",)
# How many of the longest files and widest modules are printed.
SHOWN = 3

# Types that stay past a limit, by crate and name, with the record in docs/adr that says why.
KNOWN = {
    "swaptide-ipc::Segment": "0012",
}

# Comments, strings and characters; a lifetime (`'a`) is none of them.
BLANKS = re.compile(
    r"""//[^\n]* | /\* | \b[bc]?r(?P<hashes>\#*)" | (?P<quote>(?:\b[bc])?")
    | b?'(?:\\[^\n]+?|[^\\'\n])'""",
    re.X,
)
BLOCK_EDGE = re.compile(r"/\*|\*/")
STRING_REST = re.compile(r'(?:[^"\\]|\\.)*"', re.S)
ATTRIBUTE = re.compile(r"#!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]")
TEST = re.compile(r"#\[cfg\((?:all\()?test\b[^\]]*\]")
BRACKET = re.compile(r"[(\[{)\]}]")


class Type(NamedTuple):
    """A struct, union or enum; the fields of an enum's variants are not counted."""

    module: tuple
    name: str
    fields: int


class Function(NamedTuple):
    lines: int
    name: str
    first_line: int


class Source(NamedTuple):
    """What one file holds."""

    path: Path
    lines: int
    types: list
    impls: set
    functions: list


def blank(text):
    return re.sub(r"[^\n]", " ", text)


def code_of(text):
    """The text with comments, strings, characters and attributes made blanks, in their places."""
    out, at = [], 0
    while match := BLANKS.search(text, at):
        out.append(text[at : match.start()])
        end = match.end()
        if match[0] == "/*":
            depth = 1
            while depth:
                edge = BLOCK_EDGE.search(text, end)
                depth += 1 if edge[0] == "/*" else -1
                end = edge.end()
        elif match["hashes"] is not None:
            close = '"' + match["hashes"]
            end = text.index(close, end) + len(close)
        elif match["quote"] is not None:
            end = STRING_REST.match(text, end).end()
        out.append(blank(text[match.start() : end]))
        at = end
    return "".join(out) + text[at:]


def closing(code, at):
    """The offset of the bracket that closes the one at `at`."""
    depth = 0
    for match in BRACKET.finditer(code, at):
        depth += 1 if match[0] in "([{" else -1
        if depth == 0:
            return match.start()
    raise ValueError("a bracket is not closed")


def without_tests(code):
    """The code without items that are compiled for tests alone, and how many lines those have."""
    lines = 0
    while match := TEST.search(code):
        end = re.compile(r"[;{]").search(code, match.end()).start()
        end = closing(code, end) + 1 if code[end] == "{" else end + 1
        lines += code.count("\n", match.start(), end) + 1
        code = code[: match.start()] + blank(code[match.start() : end]) + code[end:]
    return code, lines


def parts(text):
    """How many parts the text has that commas outside of all brackets divide."""
    depth, count, is_empty, previous = 0, 0, True, ""
    for sign in text:
        if sign in "([{<":
            depth += 1
        elif sign in ")]}" or (sign == ">" and previous not in "-="):
            depth -= 1
        if sign == "," and depth == 0:
            count, is_empty = count + (not is_empty), True
        elif not sign.isspace():
            is_empty = False
        previous = sign
    return count + (not is_empty)


def head_end(code, at):
    """The offset of the `{` or `;` that ends the head of an item."""
    depth, previous = 0, ""
    for offset in range(at, len(code)):
        sign = code[offset]
        if depth == 0 and sign in "{;":
            return offset
        if sign in "([<":
            depth += 1
        elif sign in ")]" or (sign == ">" and previous not in "-="):
            depth -= 1
        previous = sign
    return len(code) - 1


def after_generics(head):
    """The head of an item without the generic parameters that it begins with."""
    if not head.startswith("<"):
        return head
    depth = 0
    for offset, sign in enumerate(head):
        depth += (sign == "<") - (sign == ">" and head[offset - 1] not in "-=")
        if depth == 0:
            return head[offset + 1 :]
    return ""


def fields_of(code, kind, start):
    """The fields of the type whose name ends at `start`."""
    end = head_end(code, start)
    if kind == "enum":
        return 0
    if code[end] == "{":
        return parts(code[end + 1 : closing(code, end)])
    rest = after_generics(code[start:end].lstrip()).lstrip()
    tuple_start = end - len(rest)
    if rest.startswith("("):
        return parts(code[tuple_start + 1 : closing(code, tuple_start)])
    return 0


def read(path, module):
    """What the file holds, tests apart."""
    text = path.read_text()
    code, test_lines = without_tests(ATTRIBUTE.sub(keep_tests, code_of(text)))
    types = [
        Type(module, match[2], fields_of(code, match[1], match.end()))
        for match in re.finditer(r"\b(struct|union|enum)\s+([A-Za-z_]\w*)", code)
    ]
    impls = set()
    for match in re.finditer(r"^[ \t]*(?:unsafe )?impl\b", code, re.M):
        head = after_generics(code[match.end() : head_end(code, match.end())].strip())
        named = re.match(r"\s*(?:\w+::)*(\w+)", head)
        if named and not re.search(r"\bfor\b", re.split(r"\bwhere\b", head)[0]):
            impls.add(named[1])
    functions = []
    for match in re.finditer(r"\bfn\s+(\w+)", code):
        end = head_end(code, match.end())
        if code[end] == "{":
            lines = code.count("\n", match.start(), closing(code, end)) + 1
            functions.append(Function(lines, match[1], code.count("\n", 0, match.start()) + 1))
    return Source(path, text.count("\n") - test_lines, types, impls, functions)


def keep_tests(match):
    return match[0] if TEST.match(match[0]) else blank(match[0])


def sources(crate):
    """The files of a crate that are not tests."""
    found = []
    for path in sorted((crate / "src").rglob("*.rs")):
        module = path.relative_to(crate / "src").with_suffix("").parts
        if "tests" in module or module[-1].endswith(("_tests", "testing")):
            continue
        found.append(read(path, module))
    return found


def sizes(files):
    """Each type of a crate: fields, and the files with an inherent impl block of it.

    Where a name stands for several types, a block belongs to the type of its own file, and else to
    the one whose module is nearest.
    """
    types = defaultdict(list)
    for file in files:
        for found in file.types:
            types[found.name].append(found)
    blocks = defaultdict(set)
    for file in files:
        module = file.path.with_suffix("").parts

        def common(found, module=module):
            name = found.module[:-1] if found.module[-1] in ("mod", "lib") else found.module
            here = module[-len(name) :] if name else ()
            return (found.module == module[-len(found.module) :], name == here[: len(name)])

        for name in file.impls:
            if name in types:
                blocks[max(types[name], key=common)].add(file.path)
    return {found: blocks[found] for all_of in types.values() for found in all_of}


def label(found, names):
    """The name of a type within its crate; with its module where another one has the name, too."""
    if names[found.name] == 1:
        return found.name
    return "::".join((*(part for part in found.module if part not in ("mod", "lib")), found.name))


def check(crate, measured):
    """The errors of the types of one crate."""
    errors = []
    for name, (fields, blocks) in sorted(measured.items()):
        key = f"{crate}::{name}"
        size = f"{fields} fields, impl blocks in {blocks} files"
        is_large = fields > MAX_FIELDS or blocks > MAX_IMPL_FILES
        if is_large and key not in KNOWN:
            errors.append(
                f"{key}: {size}; at most {MAX_FIELDS} and {MAX_IMPL_FILES}: split it, or write an "
                f"ADR and name it in KNOWN"
            )
        elif not is_large and key in KNOWN:
            errors.append(f"{key} is within the limits: take its entry out of tests/measures.py")
    for key in KNOWN:
        if key.startswith(f"{crate}::") and key.partition("::")[2] not in measured:
            errors.append(f"{key} does not exist: take its entry out of tests/measures.py")
    return errors


def show(crate, files, measured, is_all):
    print(f"{crate.name}: {sum(file.lines for file in files)} lines in {len(files)} files")
    for file in sorted(files, key=lambda file: -file.lines)[:SHOWN]:
        print(f"  {file.lines:5} lines     {file.path.relative_to(crate / 'src')}")
    long = [
        (function, file.path.relative_to(crate / "src"))
        for file in files
        for function in file.functions
        if function.lines > MAX_FUNCTION_LINES
    ]
    for function, path in sorted(long, key=lambda entry: -entry[0].lines):
        print(f"  {function.lines:5} lines     fn {function.name}, {path}:{function.first_line}")
    graph = imports.imports(imports.modules(crate / "src"))
    graph.pop((), None)
    for module, others in sorted(graph.items(), key=lambda entry: -len(entry[1]))[:SHOWN]:
        print(f"  {len(others - {()}):5} imports   {'::'.join(module)}")
    by_size = sorted(measured.items(), key=lambda entry: entry[1], reverse=True)
    for name, (fields, blocks) in by_size:
        if is_all or fields > MAX_FIELDS // 2 or blocks >= MAX_IMPL_FILES:
            print(f"  {fields:5} fields    {blocks} impl files  {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("crates", nargs="*", metavar="CRATE")
    options = parser.parse_args()
    errors, count = [], 0
    for crate in sorted((ROOT / "crates").iterdir()):
        if options.crates and crate.name not in options.crates:
            continue
        files = sources(crate)
        by_type = sizes(files)
        names = defaultdict(int)
        for found in by_type:
            names[found.name] += 1
        measured = {label(found, names): (found.fields, len(by_type[found])) for found in by_type}
        count += len(measured)
        if options.check:
            errors += check(crate.name, measured)
            errors += [
                f"{file.path.relative_to(ROOT)}:{function.first_line}: fn {function.name} has "
                f"{function.lines} lines, at most {MOST_FUNCTION_LINES}: split it"
                for file in files
                for function in file.functions
                if function.lines > MOST_FUNCTION_LINES and crate.name not in ANY_LENGTH
            ]
        else:
            show(crate, files, measured, options.all)
    for error in errors:
        print(error)
    if options.check and not errors:
        print(f"measures: {count} types, none past a limit but for what is known")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
