#!/usr/bin/env python3
"""Finds words that are wrong wherever they stand: in documents, comments and strings.

The list is short on purpose: words for which plain technical English has a better one in every
sentence, and private names of earlier versions that docs/glossary.md replaces. In sentences, words
in backquotes or braces are not looked at, nor are strings of one word.

Names that Rust and Python code declares are split into words, for which there is a list of its own:
words of the old vocabulary for which the kernel or the field has a term.

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
# Words that no declared name has, and what to write instead.
IN_NAMES = {
    "a thread, a process, the subject itself": "who whoever whom",
    "no, none, not": "nobody",
    "a thread, a process, each, all, any": "somebody everybody anybody",
    "again, new": "anew",
    "with, next to, alongside": "beside",
    "child, holder, successor": "heir heirs",
    "copy-on-write group": "family families",
    "child, first stop, start": "birth births born",
    "socket, channel, listener": "door doors",
    "remote": "far",
    "fault, injected fault": "mishap mishaps",
    "idle": "calm",
    "release": "bury buried",
    "MADV_DONTFORK": "shield shielded",
    "history, sequence": "trail trails",
    "eventfd, request": "gong gongs bell bells knock knocks",
    "trampoline, helper": "cradle patron patrons",
    "fix": "mend mends mended",
    "foreign, other": "stranger strangers",
    "clear": "forgive forgiven",
    "reclaim request, thrashing": "squeeze squeezes squeezed",
    "controller, housekeeping": "keeper keepers",
    "CPU state, connection": "lane lanes",
    "restore": "rescue rescued",
    "timeout, deadline": "patience",
    "complete": "vouch vouches",
}
BETTER = {word: better for better, words in IN_NAMES.items() for word in words.split()}
# Names with such a word that are right, by file: of sockets, of a key of 0.1, of a user.
NAMES_ALLOWED = {
    "crates/swaptide-host/src/swap/listeners.rs": {"rows_of_both_families_are_read"},
    "crates/swaptide-host/src/daemon/segment.rs": {"family"},
    "crates/swaptide-host/src/run/doctor.rs": {"mend"},
    "tests/e2e/unprivileged.py": {"become_nobody"},
}
DECLARED = re.compile(
    r"\b(?:fn|struct|enum|union|trait|type|mod|const|static|let|def|class)\s+(?:mut\s+|ref\s+)*"
    r"([A-Za-z_]\w*)|^\s*(?:pub(?:\([^)]*\))?\s+)?([a-z_]\w*):\s[\w&<(\[]",
    re.M,
)
WORDS_OF_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
FILES = ("*.md", "*.rs", "*.py", "*.c", "*.h", "*.toml", "check", "demo")
# This file, and history that is told as it was.
SKIPPED = ("tests/prose.py",)
PATTERN = re.compile(
    r"\b(?:" + "|".join(word.replace(" ", r"\s+") for word, _ in WORDS) + r")\b", re.I
)
NAMES = re.compile(r"`[^`\n]*`|\{[a-z_]+[^}\n]*\}")


def rust_or_c(text):
    """Comments and strings of Rust or C, each with the offset at which it begins. Lines of one
    comment are one part: a phrase may go over their end.
    """
    token = re.compile(
        r"//[^\n]*(?:\n[ \t]*//[^\n]*)*|"
        r"/\*.*?\*/|'(?:\\.|[^\\'\n])'|r(#+)\".*?\"\1|\"(?:\\.|[^\"\\])*\"",
        re.S,
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


def declared(path, text):
    """Words of declared names, each with the offset of its name."""
    if path.suffix not in (".rs", ".py"):
        return
    code = list(text)
    for start, part in parts(path, text):
        code[start : start + len(part)] = " " * len(part)
    allowed = NAMES_ALLOWED.get(str(path.relative_to(ROOT)), ())
    for match in DECLARED.finditer("".join(code)):
        name = match[1] or match[2]
        for word in WORDS_OF_NAME.findall(name.replace("so_far", "")):
            if word.lower() in BETTER and name not in allowed:
                better = BETTER[word.lower()]
                yield match.start(1 if match[1] else 2), f"{word} in {name}; better: {better}"


def found(path):
    text = path.read_text(errors="replace")
    for start, word in declared(path, text):
        yield text.count("\n", 0, start) + 1, word
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
        for better, words in IN_NAMES.items():
            print(f"in names: {words:35} {better}")
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
