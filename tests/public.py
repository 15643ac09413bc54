#!/usr/bin/env python3
"""Finds items that more code can see than uses them, and type names that stand for two things.

1. An item that is `pub` is named outside of its crate: by a crate that depends on it, or by the
   crate's own tests, benches and examples.
2. An item that is `pub`, `pub(crate)` or `pub(super)` is named outside of its module. The module is
   its file, with the files below it.
3. No name stands for two structs, enums, unions, traits or type aliases, tests apart.

It goes by names: one that another item shares with it counts as named. A type also counts as used
where the signature of a visible item has it: the field, parameter or result of which it is. Items
of traits, fields, variants and what macros define are not looked at; nor is a name that a macro of
another crate might have written.

Usage: public.py [--fix]      --fix narrows the items that it finds, in their files.
Exit status 1, and a line for each error, where there is one.
"""

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import measures  # noqa: E402

ROOT = measures.ROOT

# Names of two things, with the reason.
ALLOWED = {}

# Items that nothing uses, with the reason: "crate::name".
KEPT = {
    "swaptide-shared::set_limit": "for virtual machine monitors, which no crate of these is",
    "swaptide-core::MAX_TIERS": "documents of the interface name it",
    "swaptide-core::MAX_TIER_NAME": "documents of the interface name it",
    "swaptide-ipc::FIRST_ORDER": "documents of the interface name it",
}

VISIBLE = r"pub(?:\((?:crate|super|self|in [\w:]+)\))?"
ITEM = re.compile(
    rf"^(?P<indent>[ \t]*)(?P<seen>{VISIBLE}) (?:(?:const|unsafe|async|default) |extern ? )*"
    r"(?P<kind>fn|struct|enum|union|trait|type|const|static|mod)(?: mut)? (?P<name>[A-Za-z_]\w*)",
    re.M,
)
TYPE = re.compile(
    rf"^(?P<indent>[ \t]*)(?:{VISIBLE} )?(?:unsafe )?(struct|enum|union|trait|type) ([A-Za-z_]\w*)",
    re.M,
)
USE = re.compile(rf"^(?P<indent>[ \t]*)(?P<seen>{VISIBLE}) use (?P<names>[^;]+);", re.M)
WORD = re.compile(r"\b[A-Za-z_]\w*\b")


class Item(NamedTuple):
    path: Path
    offset: int
    seen: str
    kind: str
    name: str


class File:
    """One file of a crate: its code, the words in it, and what it lets others see."""

    def __init__(self, path, crate):
        self.path, self.crate = path, crate
        self.code = measures.code_of(path.read_text())
        self.words = defaultdict(int)
        for word in WORD.findall(self.code):
            self.words[word] += 1
        inside = path.relative_to(crate)
        stem = (
            inside.parts[:-1]
            if inside.stem in ("mod", "lib", "main")
            else inside.with_suffix("").parts
        )
        self.module = stem
        self.is_source = inside.parts[0] == "src" and inside.name != "main.rs"
        self.is_test = "tests" in inside.parts or inside.stem.endswith(("tests", "testing"))
        self.items, self.types, self.signatures = [], [], defaultdict(set)
        self.exports = {}
        if self.is_source and not self.is_test:
            plain = measures.ATTRIBUTE.sub(measures.keep_tests, self.code)
            self.plain, _ = measures.without_tests(plain)
            self.find()

    def find(self):
        # A method of a trait's `impl` has no visibility; in a trait's own body there is none.
        for match in ITEM.finditer(self.plain):
            self.items.append(
                Item(self.path, match.start("seen"), match["seen"], match["kind"], match["name"])
            )
        bodies = [
            (match.start(), measures.closing(self.plain, end))
            for match in re.finditer(
                r"^[ \t]*(?:unsafe )?(?:impl|trait|pub trait)\b", self.plain, re.M
            )
            if self.plain[end := measures.head_end(self.plain, match.end())] == "{"
        ]
        self.inline = [
            (match.start(), measures.closing(self.plain, match.end() - 1))
            for match in re.finditer(r"\bmod \w+ \{", self.plain)
        ]
        for match in TYPE.finditer(self.plain):
            if match[2] != "type" or not any(a < match.start() < b for a, b in bodies):
                self.types.append((match[3], match[2]))
        self.signatures_of_items()

    def signatures_of_items(self):
        """What visible signatures name, and what is exported by another name of its module."""
        code = self.plain
        for item in self.items:
            end = measures.head_end(code, item.offset)
            text = code[item.offset : end]
            if item.kind in ("struct", "union") and code[end] == "{":
                body = code[end + 1 : measures.closing(code, end)]
                text += " ".join(re.findall(rf"^[ \t]*{VISIBLE} \w+:[^\n]*", body, re.M))
            elif item.kind in ("enum", "trait") and code[end] == "{":
                text += code[end : measures.closing(code, end)]
            for word in set(WORD.findall(text)) - {item.name}:
                self.signatures[word].add(item.seen)
        # What an `impl` of a trait says of its types: `type Item = Entry;`, `impl From<A> for B`.
        texts = [match[1] for match in re.finditer(r"^[ \t]+type \w+[^=;]*= ([^;]+);", code, re.M)]
        for match in re.finditer(r"^[ \t]*(?:unsafe )?impl\b", code, re.M):
            head = code[match.end() : measures.head_end(code, match.end())]
            texts.append(head.partition(" for ")[0])
        for word in WORD.findall(" ".join(texts)):
            self.signatures[word].add("pub")
        # A macro's names stand where it is used.
        for match in re.finditer(r"\bmacro_rules! \w+ \{", code):
            for word in WORD.findall(code, match.end(), measures.closing(code, match.end() - 1)):
                self.exports.setdefault(word, None)
        for match in USE.finditer(code):
            for name in re.findall(r"(\w+)(?=\s*[,}]|\s*$)", match["names"]):
                self.exports[name] = Item(
                    self.path, match.start("seen"), match["seen"], "use", name
                )


def dependencies():
    """For each crate's folder, those of the crates it may name, through others too."""
    crates = [*sorted((ROOT / "crates").iterdir()), ROOT / "fuzz"]
    direct = {
        crate: set(re.findall(r"^(swaptide[\w-]*)\b", (crate / "Cargo.toml").read_text(), re.M))
        for crate in crates
    }
    every = {}
    for crate in crates:
        names, left = set(), list(direct[crate])
        while left:
            name = left.pop()
            if name not in names:
                names.add(name)
                left += direct[ROOT / "crates" / name]
        every[crate] = names
    return every


def files():
    for crate in (*sorted((ROOT / "crates").iterdir()), ROOT / "fuzz"):
        for path in sorted(crate.rglob("*.rs")):
            if "target" not in path.relative_to(crate).parts:
                yield File(path, crate)


def is_below(file, other):
    return file.module[: len(other.module)] == other.module


def narrowed(everything):
    """Each item that may be narrowed, with what it may be."""
    depends = dependencies()
    outside, inside = defaultdict(set), defaultdict(list)
    for file in everything:
        inside[file.crate].append(file)
        for crate in depends[file.crate]:
            outside[crate].update(file.words)
        if not file.is_source:
            outside[file.crate.name].update(file.words)
    for crate, own in inside.items():
        is_program = not (crate / "src/lib.rs").exists()
        signatures, exports = defaultdict(set), defaultdict(set)
        holders = defaultdict(list)
        for file in own:
            for word, seen in file.signatures.items():
                signatures[word] |= seen
            for name, item in file.exports.items():
                exports[name].add(item.seen if item else "pub(crate)")
            for word in file.words:
                holders[word].append(file)

        def levels(item, signatures=signatures, exports=exports):
            """As what visible code of the crate shows the item."""
            is_type = item.kind in ("struct", "enum", "union", "trait", "type", "use")
            shown = signatures[item.name] if is_type else set()
            return shown if item.kind == "use" else shown | exports[item.name]

        for file in own:
            for item in (*file.items, *filter(None, file.exports.values())):
                if f"{crate.name}::{item.name}" in KEPT or item.name in ("main", "self"):
                    continue
                used_outside = not is_program and item.name in outside[crate.name]
                others = [other for other in holders[item.name] if not is_below(other, file)]
                if item.seen == "pub" and (used_outside or "pub" in levels(item)):
                    continue
                if others or levels(item):
                    if item.seen == "pub":
                        yield file, item, "pub(crate)"
                elif sum(other.words[item.name] for other in holders[item.name]) == 1:
                    yield file, item, "nothing"
                elif not any(start < item.offset < end for start, end in file.inline):
                    yield file, item, "private"


def twice(everything):
    places = defaultdict(set)
    for file in everything:
        if not file.is_source or file.is_test or file.crate.name == "fuzz":
            continue
        for name, _ in file.types:
            places[name].add(file.path)
    for name, paths in sorted(places.items()):
        if len(paths) > 1 and name not in ALLOWED:
            shown = ", ".join(str(path.relative_to(ROOT)) for path in sorted(paths))
            yield f"{name} is {len(paths)} types: {shown}"
    for name in ALLOWED:
        if len(places[name]) < 2:
            yield f"{name} is one type: take it out of ALLOWED"


def fix(found):
    by_path = defaultdict(list)
    for _, item, to in found:
        by_path[item.path].append((item, to))
    for path, items in by_path.items():
        text = path.read_text()
        for item, to in sorted(items, key=lambda entry: -entry[0].offset):
            if item.kind == "use":
                continue
            new = "pub(crate) " if to == "pub(crate)" else ""
            end = item.offset + len(item.seen) + 1
            text = text[: item.offset] + new + text[end:]
        path.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true")
    options = parser.parse_args()
    everything = list(files())
    found = list(narrowed(everything))
    errors = []
    for file, item, to in found:
        line = file.code.count("\n", 0, item.offset) + 1
        place = f"{item.path.relative_to(ROOT)}:{line}"
        what = "nothing uses it" if to == "nothing" else f"can be {to}"
        errors.append(f"{place}: {item.seen} {item.kind} {item.name}: {what}")
    if options.fix:
        fix(found)
    errors += twice(everything)
    for error in errors:
        print(error)
    if not errors:
        count = sum(len(file.items) for file in everything)
        print(f"public: {count} visible items, each used where it can be seen")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
