"""The examples of the documents: each block of lines that a reader may copy is run, here or by what
BLOCKS names for it. A block that BLOCKS does not know fails, and so does one that is gone.
"""

import dataclasses
import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from ctl import PRESSURE, ended, started
from documents import DOCUMENTS, ROOT, block, blocks, commands
from harness import MIB

NO_COMMANDS = "a drawing, or a pattern"
NOT_RUN = "not run, as the document says"

BLOCKS = {
    "README.md": {
        "pip install swaptide-*.whl": ("packaging/prove wheel", "document-first-lines"),
        "your program": NO_COMMANDS,
        "swaptide: python3: 266M of memory": ("document-first-lines",),
    },
    "CONTRIBUTING.md": {
        "cargo build --release": ("./check", "document-cargo", "document-pytest"),
        "@pytest.mark.swaptide(": ("document-new-case",),
        "for turn in 1 2 3": ("document-bench",),
        "area: Imperative summary": NO_COMMANDS,
    },
    "ARCHITECTURE.md": {"swaptide run ── launcher": NO_COMMANDS},
    "docs/containers.md": {
        "sudo install -D": ("document-install", "oci-podman"),
        "scrape_configs:": ("document-scrape",),
        "sudo groupadd -f swaptide": ("packaging/prove deb",),
        "--device": NOT_RUN,
        "resources:": NOT_RUN,
        "cargo rustc --release": ("bare-container",),
    },
    "docs/linux-swap.md": {"free --allocate--> cached": NO_COMMANDS},
    "docs/network.md": {
        'key="-newkey ec': ("export-tls-file", "export-tls-qcow2"),
        "--swap 'nbds://storage/swap?": ("export-tls-file", "export-tls-qcow2"),
        "swaptide ctl swapon nbd://new/swap": ("export-replaced-file-qcow2",),
    },
    "docs/python.md": {"%load_ext swaptide": ("full-python-notebook",)},
    "docs/reports.md": {"swaptide run --ram 256M --report": ("document-reports",)},
    "docs/testing.md": {
        "./check": ("./check",),
        "cargo build --release --workspace  ": ("./check", "document-pytest"),
        "cargo test -p swaptide-core": ("document-cargo",),
        "tests/sanitize": ("./check",),
        "swaptide bench seq --peer all": ("document-bench",),
        "cargo build --release --workspace --features": ("document-serial-part",),
        "SWAPTIDE_AGENT_LOG=": ("document-report-of-a-bug",),
        "for t in /proc/PID": ("document-report-of-a-bug",),
    },
    "packaging/README.md": {
        "python3 -m venv venv": ("packaging/prove wheel",),
        "tar -xzf swaptide-": ("packaging/prove tarball",),
    },
    "python/README.md": {
        "import swaptide": ("document-python",),
        'pip install "$(ls': ("full-python-notebook",),
        "pip install -e": ("full-python-package",),
    },
    "python/examples/README.md": {
        "python3 multiprocessing_pool.py": ("python-examples-multiprocessing_pool",),
    },
    "fuzz/README.md": {"fuzz/run": ("./check",)},
}
"""By the document, and how the block begins: the cases and commands that run it."""

LESS_WORK = {
    "SWAPTIDE_STRESS_SECONDS=60": "SWAPTIDE_STRESS_SECONDS=2",
    "PROPTEST_CASES=5000": "PROPTEST_CASES=50",
    "--bench codec": "--bench codec -- --test",
    "--bench nbd": "--bench nbd -- --test",
    "--runs 5": "--runs 1",
    "--runs 3": "--runs 1",
    "--data 1G": "--data 128M",
}
"""What is as long as a reader has time, and how long it is here."""


def in_place(case, script, *, env=None, cwd=None, status=0):
    """Runs a script in a directory of its own, where `swaptide` is the one that is tested; what it
    printed, and what it printed on standard error."""
    place = case.directory / "bin"
    place.mkdir(exist_ok=True)
    if not (place / "swaptide").exists():
        (place / "swaptide").symlink_to(case.swaptide)
    done = subprocess.run(
        ["sh", "-euc", script],
        cwd=cwd or case.directory,
        env={**os.environ, **(env or {}), "PATH": f"{place}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    case.expect(done.returncode == status, f"{script}: {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout, done.stderr


def test_document_blocks(all_names):
    """Every block is known, and what runs it is there."""
    for document in DOCUMENTS:
        name = str(document.relative_to(ROOT))
        known = BLOCKS.get(name, {})
        for text in blocks(name):
            starts = [start for start in known if text.startswith(start)]
            assert len(starts) == 1, f"{name}: nothing is named that runs {text!r}"
        for start, ways in known.items():
            assert [text for text in blocks(name) if text.startswith(start)], f"{name}: {start}"
            if ways in (NO_COMMANDS, NOT_RUN):
                continue
            for way in ways:
                program = ROOT / way.split()[0]
                assert way in all_names or os.access(program, os.X_OK), f"{name}: {start}: {way}"
    assert set(BLOCKS) <= {str(document.relative_to(ROOT)) for document in DOCUMENTS}


@pytest.mark.swaptide(budget=64, native=False)
def test_document_first_lines(case):
    """Those of README.md but for pip's, and the line that a run ends with."""
    pip, *lines = commands("README.md", "pip install")
    assert pip.startswith("pip install") and len(lines) == 2
    out, said = in_place(case, "\n".join(lines))
    assert out.splitlines()[-1] == "268435456", out
    shown = block("README.md", "swaptide: python3: ").strip().removesuffix(", ...")
    shape = re.escape(shown)
    for number in ("266", "65", "95"):
        shape = shape.replace(number, r"\d+", 1)
    assert re.match(shape, said.splitlines()[-1]), f"{shown!r} is shown, {said!r} was said"


@pytest.mark.swaptide(budget=256, native=False)
def test_document_reports(case):
    """docs/reports.md, with words of our own, and two more reports of the same program."""
    lines = "".join(f"{(n * 7919) % 1000003} is a word of many\n" for n in range(10**6))
    (case.directory / "words").write_text(lines)
    for ram in ("128M", "256M"):
        in_place(case, f"swaptide run --ram {ram} --report {ram}.json -- sort words -o {ram}")
    in_place(case, "\n".join(commands("docs/reports.md", "swaptide run")))
    assert (case.directory / "sorted").read_text() == (case.directory / "128M").read_text()
    for name in ("sort.html", "both.svg"):
        assert (case.directory / name).stat().st_size > 5000, name


@pytest.mark.swaptide(budget=64, native=False)
def test_document_python(case):
    """python/README.md; the word `...` is Python's own."""
    (case.directory / "words").write_text("two\none\n")
    (case.directory / "piece.py").write_text(block("python/README.md", "import swaptide"))
    env = {"PYTHONPATH": str(ROOT / "python" / "src"), "SWAPTIDE": str(case.swaptide)}
    out, _ = in_place(case, f"{shlex.quote(sys.executable)} piece.py", env=env)
    assert out.startswith("one\ntwo\n") and "2.0G" in out, out


@functools.cache
def help_of(swaptide, *words):
    done = subprocess.run([swaptide, *words, "--help"], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


@pytest.mark.swaptide(budget=32, native=False)
def test_document_options(case):
    """What documents say in passing, as `swaptide bench NAME --json`: commands and options exist.
    Those of the Python package have no help here."""
    seen = 0
    for document in DOCUMENTS:
        text = document.read_text()
        for span in re.findall(r"`swaptide ([^`]+)`", re.sub(r"\n *", " ", text)):
            words = re.split(r"[][|\s]+", span.partition(" -- ")[0])
            known = []
            while words and re.fullmatch("[a-z-]+", words[0]) and not words[0].startswith("-"):
                if help_of(case.swaptide, *known, words[0]) is None:
                    break
                known.append(words.pop(0))
            if words and words[0] == "kernelspec":
                continue
            shown = help_of(case.swaptide, *known)
            assert known or words[0].startswith("--"), f"{document.name}: swaptide {span}"
            for word in words:
                option = re.match("--[a-z-]+", word)
                if option and option[0] != "--":
                    assert re.search(rf"{option[0]}\b", shown), f"{document.name}: swaptide {span}"
                    seen += 1
    assert seen > 20, f"{seen} options: the documents are read wrongly"


@pytest.mark.full
@pytest.mark.swaptide(budget=32, native=False)
def test_document_pytest(case):
    """The lines that begin with pytest: they find cases."""
    lines = commands("docs/testing.md", "cargo build --release --workspace  ")
    lines += commands("CONTRIBUTING.md", "cargo build --release")
    lines = [line for line in lines if line.startswith("pytest")]
    assert len(lines) == 8
    python = shlex.quote(sys.executable)
    for line in lines:
        words = "--collect-only -qq -p no:cacheprovider"
        out, _ = in_place(case, f"{python} -m {line} {words}", cwd=ROOT)
        assert re.search(r"test_\w+\.py", out), f"{line}: {out}"


def test_document_new_case():
    """The example of a case in CONTRIBUTING.md, but for running it: its program is invented."""
    names = {"pytest": pytest, "param": harness.param}
    exec(block("CONTRIBUTING.md", "@pytest.mark.swaptide("), names)
    modes, options = sorted(names["test_growth"].pytestmark, key=lambda mark: mark.name)
    known = {field.name for field in dataclasses.fields(harness.Options)}
    assert set(options.kwargs) <= known and modes.args[0] == "mode"
    assert modes.args[1][1].id == "stay"


@pytest.mark.swaptide(budget=32, native=False)
def test_document_install(case):
    """The files that an OCI runtime needs, below another directory than /usr/local, with the
    command that is tested in place of one that is linked statically."""
    for path in (case.swaptide, Path(case.swaptide).parent / "libswaptide_agent.so"):
        (case.directory / Path(path).name).symlink_to(path)
    (case.directory / "packaging").symlink_to(ROOT / "packaging")
    local = case.directory / "local"
    (local / "bin").mkdir(parents=True)
    script = block("docs/containers.md", "sudo install -D").replace("sudo ", "")
    in_place(case, script.replace("/usr/local", str(local)))
    called = [word for word in (local / "bin" / "swaptide-oci").read_text().split() if "/" in word]
    command = next(word for word in called if word.endswith("/swaptide"))
    for path in (command, f"{Path(command).parent}/libswaptide_agent.so"):
        there = Path(path.replace("/usr/local", str(local)))
        assert os.access(there, os.X_OK) and not there.is_symlink(), f"{path} is not installed"


@pytest.mark.full
@pytest.mark.swaptide(budget=32, native=False, needs=("promtool",))
def test_document_scrape(case):
    """promtool takes what docs/containers.md has for Prometheus' configuration."""
    config = case.directory / "prometheus.yml"
    config.write_text(block("docs/containers.md", "scrape_configs:"))
    out, _ = in_place(case, f"promtool check config {config}")
    assert "SUCCESS" in out, out


@pytest.mark.swaptide(budget=32, native=False)
def test_document_report_of_a_bug(case):
    """The agents' log, and the threads of a process."""
    script = block("docs/testing.md", "SWAPTIDE_AGENT_LOG=")
    script = script.replace("/var/tmp", str(case.directory))
    fills = f"{shlex.quote(sys.executable)} -c 'print(len(bytearray(range(256)) * 2**18))'"
    script = script.replace("512M", "32M").replace("PROGRAM ...", fills)
    out, _ = in_place(case, script)
    assert out == f"{64 * MIB}\n", out
    for name in ("agent.log", "report.json"):
        assert (case.directory / name).stat().st_size > 50, f"{name} is empty"
    program, inside, _ = started(case, [case.python, PRESSURE, 96, "wait"], [])
    script = block("docs/testing.md", "for t in /proc/PID").replace("PID", str(inside))
    threads, _ = in_place(case, script)
    ended(case, program)
    engine = [line for line in threads.splitlines() if line.split()[1].startswith("swaptide")]
    assert engine and len(engine) < len(threads.splitlines()), threads


def shorter(line):
    for long, short in LESS_WORK.items():
        line = line.replace(long, short)
    return line


def with_cargo(case, lines):
    """Runs lines for the repository with a directory of their own for what cargo builds."""
    env = {
        "CARGO_TARGET_DIR": str(case.suite.root / "target"),
        "CARGO_PROFILE_RELEASE_LTO": "off",
        "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "16",
    }
    for line in lines:
        in_place(case, shorter(line), env=env, cwd=ROOT)
    return case.suite.root / "target" / "release"


@pytest.mark.full
@pytest.mark.swaptide(budget=32, native=False, limit=3600, needs=("cargo",))
def test_document_cargo(case):
    """One crate, one file, more cases: names and options exist, and all passes."""
    lines = commands("docs/testing.md", "cargo test -p swaptide-core")
    lines += commands("CONTRIBUTING.md", "cargo build --release")
    lines = [line for line in lines if " test " in line or " bench " in line]
    assert len(lines) == 8
    with_cargo(case, lines)


@pytest.mark.full
@pytest.mark.swaptide(budget=32, native=False, limit=3600, needs=("cargo",))
def test_document_serial_part(case):
    """An agent that counts its locks is built, and `bench threads` prints what they took."""
    build, bench = commands("docs/testing.md", "cargo build --release --workspace --features")
    built = with_cargo(case, [build])
    bench = bench.replace("swaptide", str(built / "swaptide"), 1).replace("512M", "64M")
    out, _ = in_place(case, f"{bench} --runs 1 --data 128M --threads 2")
    assert "serial part" in out, out


@pytest.mark.full
@pytest.mark.swaptide(budget=32, native=False, limit=3600, needs=("redis-server",))
def test_document_bench(case):
    """The lines of docs/testing.md that measure, and the loop of CONTRIBUTING.md, with less data:
    what they write is there. As root alone: they use the kernel's swap."""
    if os.geteuid() != 0:
        pytest.skip("the kernel's swap is root's")
    for line in commands("docs/testing.md", "swaptide bench seq --peer all"):
        for one in shorter(line).split("; "):
            data = "16M" if "within" in one else "128M"
            for option, value in (("--ram", "32M"), ("--data", data), ("--runs", "1")):
                # The budgets of a sweep are of another option.
                if option not in one and not (option == "--ram" and "sweep" in one):
                    one += f" {option} {value}"
            if "sweep" in one and "--budgets" not in one:
                one += " --budgets 64M --ratio 4"
            out, _ = in_place(case, one)
            assert "swaptide" in out, f"{one}: {out}"
    for place in ("old", "target/release"):
        (case.directory / place).mkdir(parents=True)
        (case.directory / place / "swaptide").symlink_to(case.swaptide)
    loop = block("CONTRIBUTING.md", "for turn in 1 2 3")
    in_place(case, loop.replace("--runs 1", "--runs 1 --data 64M --ram 32M"))
    written = {path.name for path in case.directory.glob("*.[js][sv]*")}
    expected = {"seq.json", "sweep.svg", "sweep.json"}
    expected |= {f"{which}-{turn}.json" for which in ("old", "new") for turn in range(1, 6)}
    assert expected <= written, f"{expected - written} are missing"
