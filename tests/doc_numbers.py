#!/usr/bin/env python3
"""Checks that the documents agree with the source: numbers, names of files, links.

1. Each row of docs/tuning.md names a constant, its value and its file; the file defines it so.
2. A number in a document that is followed by a constant in parentheses, as in "15 s (`TIMEOUT`)",
   is that constant's value. Numbers up to twenty may be words; 1/32 may be a divisor's 32.
3. The phrases of PHRASES say what the source says.
4. README.md names the least versions and has 150 lines at most; docs/bench.svg shows its table.
5. Links between documents resolve, headings too, and a path like `fault/path.rs` names a file. A
   comment that names a document, "TITLE" names a heading of that file.
6. Each end-to-end case that a document names exists, and docs/semantics.md marks those that only
   `./check --full` runs (where pytest is installed). Cases are the names in the last column of the
   tables of docs/semantics.md and docs/kernel-references.md; names with a hyphen in those, in
   docs/testing.md, docs/security.md and docs/bench.md; and what follows the word "case" anywhere.
7. The words in the first column of docs/segment.md are fields of the segment.
8. A module or test file behind a crate's name, as in swaptide-store `file::tests`, exists.

Exit status 1, and a line for each error, where there is one.
"""

import ast
import fnmatch
import importlib.util
import operator
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONST = re.compile(
    r"^[ \t]*(?:pub(?:\([\w: ]+\))? )?const ([A-Z][A-Z0-9_]*): ([^=;]+?) =\s*([^;]+);", re.M
)
UNITS = {
    "ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "%": 1, "B": 1,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "K": 2**10, "M": 2**20, "G": 2**30,
}  # fmt: skip
TIMES = {"nanos": 1, "micros": 10**3, "millis": 10**6, "secs": 10**9}
WORDS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    *("nineteen", "twenty"),
]
NUMBER = rf"\d+(?:[.,]\d+)*(?:/\d+)?|{'|'.join(WORDS)}"
UNIT = "ns|us|ms|s|%|B|KiB|MiB|GiB|[KMG]"
# A number, at most a few words, and a constant in parentheses.
CITED = re.compile(rf"\b({NUMBER}) ?({UNIT})?\b[a-zA-Z \n-]{{0,40}}\(`([A-Z][A-Z0-9_]{{3,}})`\)")

# What documents say in words: file, pattern, and the constant that its first group is.
# `2 ** 21 * MAX_EXTENTS` and the like are evaluated.
PHRASES = [
    ("README.md", r"(\d+) processes, \d+ GiB of swap areas", "MAX_PROCS"),
    ("README.md", r"processes, (\d+ GiB) of swap areas", "MAX_EXTENTS * EXTENT_BYTES"),
    ("README.md", r"smallest budget is (\d+M)", "MIN_BUDGET_BYTES"),
    ("docs/semantics.md", r"\| (\d+) processes at a time", "MAX_PROCS"),
    ("docs/semantics.md", r"\| (\d+ GiB) of swap areas;", "MAX_EXTENTS * EXTENT_BYTES"),
    ("docs/semantics.md", r"compressed memory a process; (\d+) areas", "MAX_AREAS"),
    ("docs/semantics.md", r"smallest budget is (\d+M)", "MIN_BUDGET_BYTES"),
    ("docs/semantics.md", r"pushed below (\d+) to \d+ MiB", "CROWDED_FLOOR_BYTES // 2**20"),
    ("docs/semantics.md", r"pushed below \d+ to (\d+) MiB", "FLOOR_BYTES // 2**20"),
    ("docs/semantics.md", r"fewer than (\d+) open files", "MIN_OPEN_FILES"),
    ("docs/semantics.md", r"every look of (\d+ s)", "MAX_EXCESS_TIME"),
    ("docs/semantics.md", r"mappings below (\d+ KiB)", "MIN_BYTES"),
    ("docs/semantics.md", r"shared mappings of (\d+ MiB) and more", "MIN_REGION_BYTES"),
    ("docs/semantics.md", r"fails (\w+) times is emptied", "MAX_FAILED_TRANSFERS"),
    ("docs/semantics.md", r"leases nothing of that area for (\d+ s)", "FILE_SIZE_LIMIT_BACKOFF"),
    ("docs/segment.md", r"## Areas \((\d+)\)", "MAX_AREAS"),
    ("docs/segment.md", r"## Slots \((\d+)\)", "MAX_PROCS"),
    ("docs/segment.md", r"## Groups \((\d+)\)", "MAX_GROUPS"),
    ("docs/glossary.md", r"lease a swap area \| (\d+ MiB)", "EXTENT_BYTES"),
    ("docs/glossary.md", r"lock and one swap table \| (\d+) slots", "SLOTS_PER_CLUSTER"),
    ("docs/glossary.md", r"one set of masks \| (\d+) pages", "PAGES_PER_CHUNK"),
    ("docs/design/areas-and-nbd.md", r"tried every (\d+ s)", "RECONNECT_INTERVAL"),
    ("docs/design/areas-and-nbd.md", r"extents of (\d+ MiB)", "EXTENT_BYTES"),
    ("docs/design/fork.md", r"with (\d+ MiB) in compressed memory", "MIN_SHARED_POOL_BYTES"),
    ("docs/security.md", r"at most (\d+) KiB \(`ctl`\)", "MAX_REQUEST_BYTES // 1024"),
    ("docs/security.md", r"(\d+) of\s+`ctl`'s", "MAX_CLIENTS"),
    ("docs/security.md", r"and (\d+) of programs' are waited", "MAX_WAITING_CLIENTS"),
]


class Source:
    """The constants of the workspace: by name, each definition as (path, type, expression)."""

    def __init__(self, root):
        self.found = {}
        for path in sorted((root / "crates").rglob("src/**/*.rs")):
            if "tests" not in path.relative_to(root).parts and path.stem != "tests":
                text = re.sub(r"#\[cfg\(loom\)\]\n.*\n", "", path.read_text())
                for name, kind, value in CONST.findall(text):
                    entry = (path, kind.strip(), re.sub(r"\s+", " ", value))
                    self.found.setdefault(name, []).append(entry)

    def values(self, name, path=None):
        """What a name may stand for: definitions in `path`, or everywhere."""
        places = [entry for entry in self.found.get(name, ()) if path in (None, entry[0])]
        values = [self.value(*entry) for entry in places]
        return [value for value in values if value is not None]

    def value(self, path, kind, text):
        """The value of an expression in a file; times in nanoseconds; None if it is no number."""
        text = re.sub(r"Duration::from_(\w+)\(([\w ]+)\)", self._time, text)
        text = re.sub(r" as \w+|(?<=\d)_(?=\d)|(?<=\d)(?:u|i)(?:8|16|32|64|size)\b", "", text)
        text = re.sub(r"\bsize_of::<u64>\(\)", "8", text)
        text = re.sub(r"\b\w+::(?=[A-Z])", "", text).replace("/", "//")
        try:
            return self._evaluate(ast.parse(text, mode="eval").body, path)
        except (SyntaxError, ValueError):
            return None

    @staticmethod
    def _time(match):
        return f"({match[2]} * {TIMES[match[1]]})" if match[1] in TIMES else match[0]

    def _evaluate(self, node, path):
        operators = {
            ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
            ast.FloorDiv: operator.floordiv, ast.LShift: operator.lshift, ast.Pow: operator.pow,
        }  # fmt: skip
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in operators:
            left, right = self._evaluate(node.left, path), self._evaluate(node.right, path)
            return operators[type(node.op)](left, right)
        if isinstance(node, ast.Name):
            own = self.values(node.id, path) or self.values(node.id)
            if own:
                return own[0]
        raise ValueError(ast.dump(node))


def number(text, unit):
    """What a document writes, in base units; a fraction stays one."""
    if text in WORDS:
        value = Fraction(WORDS.index(text))
    elif "/" in text:
        above, below = text.split("/")
        value = Fraction(int(above), int(below))
    else:
        value = Fraction(text.replace(",", ""))
    return value * UNITS.get(unit, 1)


def agree(name, written, is_time, value):
    """Whether a written number is the constant's, by the unit that its name tells."""
    choices = {Fraction(value)}
    for suffix, scale in (("_NS", 1), ("_US", 10**3), ("_MS", 10**6), ("_S", 10**9)):
        if is_time and name.endswith(suffix):
            choices = {Fraction(value * scale)}
    if written.denominator > 1:
        # A part: 1/1024 of something, a divisor, a part of a page.
        choices = {Fraction(value, 1024), Fraction(value, 4096)}
        if value:
            choices.add(Fraction(1, value))
    return written in choices


def split(text):
    found = re.match(rf"^({NUMBER}) ?({UNIT})?\b", text) or re.match(r"^(\d+) ?(%)", text)
    return (found[1], found[2]) if found else (None, None)


def tuning(source):
    """Rows of docs/tuning.md."""
    rows = 0
    for line in (ROOT / "docs/tuning.md").read_text().splitlines():
        row = re.match(r"^\| `([A-Z][A-Z0-9_]*)` \| ([^|]+) \| `([\w/.-]+)` \|", line)
        if not row:
            if line.startswith("| `"):
                yield f"docs/tuning.md: not a row of name, value and file: {line[:60]}"
            continue
        rows += 1
        name, written, place = row.groups()
        path = ROOT / "crates" / f"swaptide-{place}"
        values = source.values(name, path)
        text, unit = split(written)
        if not values:
            now = [str(p).partition("/crates/swaptide-")[2] for p, *_ in source.found.get(name, ())]
            yield f"docs/tuning.md: {place} defines no number {name}; see {' '.join(now) or '-'}"
        elif text is None:
            yield f"docs/tuning.md: {name}: {written!r} is no number"
        elif not any(agree(name, number(text, unit), unit in TIME_UNITS, v) for v in values):
            yield f"docs/tuning.md: {name} is {values[0]} in {place}, not {written}"
    if rows < 40:
        yield f"docs/tuning.md: only {rows} constants"


KERNEL = re.compile(r"^(UFFD|MADV_|E[A-Z]+$|RLIMIT_|PTRACE_|SO_|MAP_|PR_|SECCOMP_|CLONE_)")
TIME_UNITS = ("ns", "us", "ms", "s")


def documents():
    names = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    return [ROOT / name for name in names] + sorted((ROOT / "docs").rglob("*.md"))


def cited(source):
    """Numbers that a constant follows in parentheses."""
    for path in documents():
        for text, unit, name in CITED.findall(path.read_text()):
            if KERNEL.match(name):
                continue
            values = source.values(name)
            if not values:
                yield f"{path.relative_to(ROOT)}: no constant {name} in the source"
            elif not any(agree(name, number(text, unit), unit in TIME_UNITS, v) for v in values):
                yield f"{path.relative_to(ROOT)}: {text} {unit} is not {name} ({values[0]})"


def phrases(source):
    for name, pattern, expression in PHRASES:
        found = re.search(pattern, (ROOT / name).read_text())
        if not found:
            yield f"{name}: nothing is like {pattern!r}; change PHRASES with the text"
            continue
        value = source.value(None, "", expression.replace("//", "/"))
        text, unit = split(found[1])
        if value is None:
            yield f"{name}: {expression} is no number in the source"
        elif number(text, unit) != value:
            yield f"{name}: {found[1]!r} is not {expression} ({value})"


def readme():
    """What README.md says of versions, its size, and the picture of its table."""
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    rust = re.search(r'^rust-version = "([\d.]+)"', (ROOT / "Cargo.toml").read_text(), re.M)
    if f"Rust {rust[1]}" not in text:
        yield f"README.md: the least Rust is {rust[1]} in Cargo.toml"
    doctor = next((ROOT / "crates/swaptide-host/src").rglob("doctor.rs")).read_text()
    least = re.search(r"version >= \((\d+), (\d+)\)", doctor)
    if f"Linux {least[1]}.{least[2]} or newer" not in text:
        yield f"README.md: the least Linux is {least[1]}.{least[2]} in doctor.rs"
    if len(lines) > 150 or max(map(len, lines)) > 100:
        yield "README.md: more than 150 lines, or a line wider than 100 columns"
    draw = [sys.executable, str(ROOT / "tests/chart.py"), "--check"]
    if subprocess.run(draw, check=False).returncode != 0:
        yield "docs/bench.svg is out of date"


def anchor(title):
    """GitHub's name for a heading."""
    title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title.replace("`", ""))
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def headings(path):
    return re.findall(r"^#+ (.*)$", path.read_text(), re.M)


def links():
    for path in documents():
        text = path.read_text()
        shown = path.relative_to(ROOT)
        for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
            name, _, part = target.partition("#")
            to = path if not name else (path.parent / name)
            if not to.exists():
                yield f"{shown}: {target} does not exist"
            elif part and part not in map(anchor, headings(to)):
                yield f"{shown}: {target}: no such heading"
        if "CHANGELOG" in path.name:
            continue
        for words in re.findall(r"`([\w/.{},*-]+\.rs|swaptide-[\w-]+/[\w/.*-]+)`", text):
            for name in braces(words):
                if not is_source(name):
                    yield f"{shown}: there is no file {name}"
    files = [*ROOT.glob("crates/*/src/**/*.rs"), *ROOT.glob("tests/**/*.[pch]*")]
    for path in files:
        if path.suffix not in (".rs", ".py", ".c", ".h"):
            continue
        text = re.sub(r"\n\s*(?://[/!]?|\*|#)\s*", " ", path.read_text())
        for name, title in re.findall(r"\b(docs/[\w/.-]+\.md)(?:,? \(?\"([^\"]+)\")?", text):
            to = ROOT / name
            if not to.exists():
                yield f"{path.relative_to(ROOT)}: {name} does not exist"
            elif title and title not in headings(to):
                yield f"{path.relative_to(ROOT)}: {name} has no heading {title!r}"


def braces(words):
    """The names that `a{b,c}d` stands for."""
    match = re.search(r"\{([^{}]*)\}", words)
    if match is None:
        return [words]
    parts = [words[: match.start()] + part + words[match.end() :] for part in match[1].split(",")]
    return [name for part in parts for name in braces(part)]


def is_source(name):
    """Whether a path as documents write it is one: CRATE/src/FILE, a folder or pattern that begins
    with a crate's name, or the end of a file's path."""
    if name.startswith("swaptide-") and any((ROOT / "crates").glob(name)):
        return True
    name = name.removeprefix("crates/").removeprefix("swaptide-")
    crate, _, rest = name.partition("/")
    ends = (f"/{name}", f"swaptide-{name}", f"swaptide-{crate}/src/{rest}")
    return any(str(path).endswith(ends) for path in FILES)


FILES = [*(ROOT / "crates").glob("*/**/*.rs"), *(ROOT / "fuzz").glob("**/*.rs")]


def segment():
    """The words of docs/segment.md are fields of swaptide-ipc's structures."""
    field = re.compile(r"^ +(?:pub(?:\([\w: ]+\))? )?([a-z]\w*): ", re.M)
    sources = (ROOT / "crates/swaptide-ipc/src").rglob("*.rs")
    known = {name for path in sources for name in field.findall(path.read_text())}
    for line in (ROOT / "docs/segment.md").read_text().splitlines():
        for word in re.findall(r"`([a-z_.]+)`", line.split("|")[1] if line[:1] == "|" else ""):
            if not known.issuperset(word.split(".")):
                yield f"docs/segment.md: there is no word {word} in the segment"


def modules():
    """Modules and test files that documents name behind a crate."""
    named = re.compile(r"(swaptide-[a-z]+) ((?:`(?:[a-z_]+::[a-z_:]+|tests/[a-z_]+)`(?:, )?)+)")
    for path in documents():
        for crate, names in named.findall(path.read_text()):
            for name in re.findall(r"`([^`]+)`", names):
                root = ROOT / "crates" / crate
                at = root / ("" if name.startswith("tests/") else "src") / name.replace("::", "/")
                parent = [at.parent.with_suffix(".rs"), at.parent / "mod.rs"]
                in_file = any(f.exists() and f"mod {at.name}" in f.read_text() for f in parent)
                if not (at.with_suffix(".rs").exists() or at.is_dir() or in_file):
                    yield f"{path.relative_to(ROOT)}: {crate} has no {name}"


def cases():
    """End-to-end cases that documents name."""
    if importlib.util.find_spec("pytest") is None:
        print("cases: left out, there is no pytest")
        return
    run = [sys.executable, str(ROOT / "tests/e2e/run.py"), "--list"]
    out = subprocess.run(run, capture_output=True, text=True, check=False).stdout
    listed = [line.split() for line in out.splitlines() if "::" in line]
    is_full = {words[0]: words[-1] == "full" for words in listed}
    if len(is_full) < 200:
        yield f"tests/e2e/run.py --list named only {len(is_full)} cases"
        return
    for path in documents():
        shown = str(path.relative_to(ROOT))
        for name, is_marked in named_cases(shown, path.read_text()):
            matched = [full for case, full in is_full.items() if fnmatch.fnmatch(case, name)]
            if not matched:
                yield f"{shown}: there is no case {name}"
            elif shown == "docs/semantics.md" and all(matched) and not is_marked:
                yield f"{shown}: {name} is not marked *full*, but only `./check --full` runs it"


# Documents with names of cases, and whether the last column of their tables has nothing else.
NAMING = {
    "docs/semantics.md": True,
    "docs/kernel-references.md": True,
    "docs/testing.md": False,
    "docs/security.md": False,
    "docs/bench.md": False,
}
# What looks like a case in these documents.
NOT_CASES = ("bgsave", "growth-move", "kernel-build")


def named_cases(shown, text):
    """Names of end-to-end cases, or patterns of them, that a document has; each with whether it
    stands behind `*full*:`, or before `(*full*)`, or outside of a table."""
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        last = len(line)
        if line.startswith("|") and NAMING.get(shown):
            last = line.rstrip("| ").rfind("|")
        before = ""
        for match in re.finditer(r"(?<![^\s(])`(-?[a-z0-9][a-z0-9-]+\*?)`", line):
            name, head, rest = match[1], line[: match.start()], line[match.end() :]
            if re.match("-..", name):
                # `references-tee`, `-splice`: the same first word.
                name = before.partition("-")[0] + name if "-" in before else ""
            before = name
            # In the last column a word before it says what else it is: `swaptide-store` `file`.
            is_alone = match.start() > last and not re.search(r"[\w/-] $", head)
            is_case = is_alone or "-" in name and shown in NAMING or re.search(r"\bcases? $", head)
            if is_case and not name.startswith("swaptide") and name not in NOT_CASES:
                is_marked = "*full*:" in head or rest.startswith(" (*full*)")
                yield name, is_marked or not is_alone


def main():
    source = Source(ROOT)
    errors = [*tuning(source), *cited(source), *phrases(source), *readme(), *links()]
    errors += [*segment(), *modules(), *cases()]
    for error in errors:
        print(error)
    if not errors:
        print("documents: numbers, names and links agree with the source")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
