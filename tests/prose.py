#!/usr/bin/env python3
"""Finds words that are wrong wherever they stand: in documents, comments and strings.

The list is short on purpose: words for which plain technical English has a better one in every
sentence, and private names of earlier versions that docs/glossary.md replaces. Names in code are
not looked at, nor are words in backquotes or braces, or strings of one word.

Usage: prose.py [--list] [PATH...]      --list prints the words and what to write instead.
Exit status 1, and a line for each place, where there is one.
"""

import argparse
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A pattern, and what to write instead.
WORDS = [
    (r"mend(?:s|ed|ing)?", "fix"),
    (r"so many(?:th)?", "this many, the number itself, Nth, too many"),
    (r"anew", "again, new"),
    (r"beside", "next to, compared with, besides"),
    (r"by far", "much"),
    (r"whoever", "the thread or process that"),
    (r"nobody knows", "is unknown"),
    (r"(?:some|any|every)body", "a thread, a process, all of them"),
    (r"nobody(?='s| (?:asked|does|had|has|holds|needs|said|wants|will|wrote))", "no thread"),
    (r"(?:stand(?:s|ing)?|stood) still", "is stopped, is quiesced, makes no progress"),
    (r"hears? of", "learns of, is told of"),
    (r"gongs?", "eventfd, signal"),
    (r"cradle", "trampoline"),
    (r"patrons?", "helper"),
    (r"knock(?:s|ed|ing)?", "request"),
    (r"(?:a|the|its|rings?|ringing) bells?|bells", "request to the handler"),
    (r"the trash", "the discard area"),
    (r"goes the same way|a known way", "repeats a fault sequence"),
    (r"tells? nobody", "does not report"),
]
FILES = ("*.md", "*.rs", "*.py", "*.c", "*.h", "*.toml", "check", "demo")
# This file, and history that is told as it was.
SKIPPED = ("tests/prose.py",)
PATTERN = re.compile(
    r"\b(?:" + "|".join(word.replace(" ", r"\s+") for word, _ in WORDS) + r")\b", re.I
)
NAMES = re.compile(r"`[^`\n]*`|\{[a-z_]+[^}\n]*\}")


def rust_or_c(text):
    """Comments and strings of Rust or C, each with the offset at which it begins."""
    token = re.compile(
        r"//[^\n]*|/\*.*?\*/|'(?:\\.|[^\\'\n])'|r(#+)\".*?\"\1|\"(?:\\.|[^\"\\])*\"", re.S
    )
    for match in token.finditer(text):
        if not match[0].startswith("'"):
            yield match.start(), match[0]


def python(text):
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for found in tokenize.generate_tokens(io.StringIO(text).readline):
        if found.type in kinds:
            yield lines[found.start[0] - 1] + found.start[1], found.string


def parts(path, text):
    if path.suffix in (".rs", ".c", ".h"):
        return rust_or_c(text)
    if path.suffix == ".py":
        return python(text)
    return [(0, text)]


def found(path):
    text = path.read_text(errors="replace")
    for start, part in parts(path, text):
        # Words in backquotes and braces are names, and so is a string of one word; a line break
        # within a phrase is a blank.
        if part.startswith('"') and not re.search(r"\s", part):
            continue
        plain = NAMES.sub(lambda name: " " * len(name[0]), part)
        plain = re.sub(r"\n(\s*)(//[/!]?|\*|#)", lambda m: " " * len(m[0]), plain)
        for match in PATTERN.finditer(plain):
            yield text.count("\n", 0, start + match.start()) + 1, " ".join(match[0].split())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("paths", nargs="*", metavar="PATH")
    options = parser.parse_args()
    if options.list:
        for word, better in WORDS:
            print(f"{word:45} {better}")
        return 0
    listed = ["git", "-C", str(ROOT), "ls-files", "--", *(options.paths or FILES)]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\n")
    count = 0
    for name in filter(None, names):
        path = ROOT / name
        if name in SKIPPED or not path.is_file():
            continue
        for line, word in found(path):
            count += 1
            print(f"{name}:{line}: {word!r}")
    if count == 0:
        print("prose: none of the listed words")
    return count > 0


if __name__ == "__main__":
    sys.exit(main())
