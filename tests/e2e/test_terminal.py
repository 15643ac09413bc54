"""The command at a terminal and for scripts: manual, completions, colors, JSON, progress, top."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from ctl import PRESSURE, ended, started, until
from harness import full, param

ROOT = Path(__file__).resolve().parents[2]


def words_of(case, *words, status=0, **options):
    """What `swaptide WORDS` prints, with nothing on standard error."""
    done = subprocess.run(
        [case.swaptide, *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        **options,
    )
    assert status in (done.returncode, None) and done.stderr == "", f"{words}: {done}"
    return done.stdout


@pytest.mark.swaptide(budget=32, swaps=False, native=False, needs=("man",))
def test_manual(case):
    """A page for each command, none of which `man` finds fault with; the overview names them."""
    directory = case.directory / "man"
    assert words_of(case, "man", "--dir", directory) == ""
    pages = sorted(directory.iterdir())
    names = [page.stem for page in pages]
    assert {"swaptide", "swaptide-run", "swaptide-ctl-swapoff", "swaptide-top"} <= set(names)
    assert not [name for name in names if "work" in name or "job" in name], f"hidden: {names}"
    shown = {}
    for page in pages:
        done = subprocess.run(
            ["man", "--warnings", "-l", page],
            env=os.environ | {"MANWIDTH": "80", "MAN_KEEP_FORMATTING": "", "LC_ALL": "C.UTF-8"},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0 and done.stderr == "", f"{page.name}: {done}"
        shown[page.stem] = done.stdout
        for part in ("NAME", "SYNOPSIS", "EXIT STATUS", "SEE ALSO"):
            assert part in done.stdout, f"{page.name} has no {part}: {done.stdout}"
    for part in ("FILES", "ENVIRONMENT", "NO_COLOR", "swaptide-ctl(1)"):
        assert part in shown["swaptide"], f"no {part} in the overview: {shown['swaptide']}"
    refused = subprocess.run(
        [case.swaptide, "man", "--dir", pages[0] / "below"], capture_output=True, text=True
    )
    assert refused.returncode == 2 and "--dir" in refused.stderr, f"{refused}"


BASH = """
. "$1"
COMP_WORDS=(swaptide ctl swap) COMP_CWORD=2
_swaptide swaptide swap ctl
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = 'source $argv[1]; complete -C "swaptide ctl swap"'


@pytest.mark.swaptide(budget=32, swaps=False, native=False)
@pytest.mark.parametrize(
    ("shell", "script"),
    [
        pytest.param(["bash", "--norc", "-c", BASH, "sh"], True, id="bash"),
        full(["fish", "--no-config", "-c", FISH], True, id="fish", needs=("fish",)),
        full(["zsh", "-f", "-n"], False, id="zsh", needs=("zsh",)),
    ],
)
def test_completions(case, shell, script):
    """A shell reads its file, and (bash, fish) completes the beginning of a command."""
    file = case.directory / "completions"
    file.write_text(words_of(case, "completions", shell[0]))
    assert "bench-work" not in file.read_text(), "a hidden command is offered"
    done = subprocess.run([*shell, file], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and done.stderr == "", f"{done}"
    if script:
        found = {line.split()[0] for line in done.stdout.splitlines() if line}
        assert found == {"swapon", "swapoff"}, f"{done.stdout}"


def documented():
    """The keys of each command in docs/json.md, by the words behind `swaptide`."""
    keys, of = {}, None
    for line in (ROOT / "docs" / "json.md").read_text().splitlines():
        if heading := re.fullmatch(r"## `swaptide (.*) --json`", line):
            of = heading[1]
            keys[of] = {}
        elif of and line.startswith("| `"):
            first, meaning = line.split("|")[1:3]
            keys[of] |= dict.fromkeys(re.findall(r"`([^`]+)`", first), meaning.strip())
    return keys


def paths(value, at=""):
    """Where each value lies that is neither an object nor an array, or is an empty one."""
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from paths(below, f"{at}.{name}" if at else name)
    elif isinstance(value, list):
        for below in value:
            yield from paths(below, at + "[]")
        if not value:
            yield at + "[]"
    else:
        yield at


def check_shape(words, value, keys):
    """All that is there is documented, and all that is documented is there."""

    def matches(key, path):
        pattern = re.escape(key).replace("NAME", r"[^.\[\]]+").replace("ANY", ".+")
        return re.fullmatch(pattern, path) is not None

    def is_below(key, path):
        """What is null or empty has nothing below it."""
        return key.startswith(path + ".") or path.endswith("[]") and key.startswith(path)

    found = set(paths(value))
    for path in found:
        assert any(matches(key, path) or is_below(key, path) for key in keys), (
            f"{words}: {path} is not in docs/json.md"
        )
    for key, meaning in keys.items():
        there = any(matches(key, path) or is_below(key, path) for path in found)
        assert there or meaning.startswith("only "), f"{words}: there is no {key} in {found}"


@pytest.mark.swaptide(budget=48, allowance=64, native=False)
def test_json_shapes(case):
    """`--json` of each command has the keys that docs/json.md lists, and no others.

    In the end all of the program comes back: what it has then is not limited.
    """
    known = documented()
    options = ["--swap", "zram:8M", "--swap", f"file:{case.directory}:512M,prio=7"]
    options += ["--group", "/web", "--tiers", "+SSD:-1"]
    program, _, _ = started(case, [case.python, PRESSURE, 96, "wait"], options)
    pid = ["--pid", str(program.pid)]
    more = f"file:{case.directory}/more"
    seen = set()

    def shape(name, *words, status=0):
        """The command of a heading, with the words given in place of its NAME."""
        seen.add(name)
        called = name.removesuffix(" NAME").split()
        value = json.loads(words_of(case, *called, *words, "--json", status=status))
        check_shape(name, value, known[name])
        return value

    shape("version")
    shape("doctor", status=None)
    shape("ctl stats", *pid)
    runs = json.loads(words_of(case, "ctl", "list", "--json"))
    assert program.pid in [run["pid"] for run in runs], f"{runs}"
    budget = shape("ctl budget", *pid)["budget_bytes"]
    assert shape("ctl budget", str(budget), *pid)["budget_bytes"] == budget
    shape("ctl tiers", *pid)
    shape("ctl tiers", "+FAST:100", *pid)
    shape("ctl swapon", f"{more}:64M,prio=3", *pid)
    shape("ctl devices", *pid)
    shape("ctl swapoff", more, *pid)
    assert shape("ctl group", "/web", "swap.max=900M", *pid)[0]["path"] == "/web"
    read = words_of(case, "ctl", "group", "/web", "swap.max", *pid, "--json")
    assert json.loads(read) == {"swap.max": str(900 << 20)}
    words_of(case, "ctl", "group", "/other", "ram.low=1M", *pid)
    shape("ctl group --remove", "/other", *pid)
    shape("ctl readahead", *pid)
    assert shape("ctl readahead", "page-cluster=3", *pid)["page-cluster"] == "3"
    assert shape("ctl reclaim", "/web", "1M", *pid)["enough"]
    shape("ctl freeze", "/web", *pid)
    shape("ctl preload", "/web", *pid)
    shape("top", *pid)
    shape("ctl detach", pid[1])
    ended(case, program)
    shape("bench NAME", "startup", "--runs", "1")
    shape("lab NAME", "scaling", "--quick")
    # The cases of daemons have these.
    others = {"ctl reload", "ctl ready", "ctl drain"}
    assert set(known) - seen == others, "not all commands were asked"


@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_colors(case):
    """Plain in a pipe, colored on demand; on a terminal unless NO_COLOR is set."""
    plain = {name: text for name, text in os.environ.items() if name != "NO_COLOR"}
    plain |= {"TERM": "xterm-256color"}
    assert "\x1b" not in words_of(case, "doctor", status=None, env=plain)
    colored = words_of(case, "doctor", "--color=always", status=None, env=plain)
    assert re.search(r"^\x1b\[\S*m(ok|NO)\x1b\[0m  kernel: ", colored, re.M), f"{colored!r}"
    value = words_of(case, "--color", "always", "version", "--json", env=plain)
    assert json.loads(value)["name"] == "swaptide", "JSON has colors"
    for words, env, expected in [
        ((), plain, True),
        ((), plain | {"NO_COLOR": "1"}, False),
        (("--color", "never"), plain, False),
        (("--color", "always"), plain | {"NO_COLOR": "1"}, True),
    ]:
        for command in ("doctor", "--help", "run --nonsense"):
            status, shown = on_terminal(case, [*words, *command.split()], env)
            assert ("\x1b[" in shown) == expected, f"{words} {command} {status}: {shown!r}"
    # What a program is told is its own.
    echo = words_of(case, "run", "--quiet", "echo", "--color=always", env=plain)
    assert echo == "--color=always\n", f"{echo!r}"


def on_terminal(case, words, env):
    """Exit status, and what is shown, of a command whose streams are a pseudo-terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        [case.swaptide, *words], stdin=slave, stdout=slave, stderr=slave, env=env
    )
    os.close(slave)
    shown = b""
    # The last of it closes the terminal: an error on Linux.
    with contextlib.suppress(OSError):
        while more := os.read(master, 65536):
            shown += more
    os.close(master)
    return process.wait(), shown.decode()


@pytest.mark.swaptide(budget=48, allowance=8, native=False)
def test_top_process(case):
    """`swaptide top` in a terminal: sparklines, sorting, the view of one process and back."""
    options = ["--group", "/web", "--swap", "zram:8M", "--swap", f"file:{case.directory}:512M"]
    program, inside, _ = started(case, [case.python, PRESSURE, 96, "wait"], options)
    words = [case.swaptide, "top", "--pid", str(program.pid)]
    one = words_of(case, *words[1:], "--once", "--process", str(inside), "--sort", "faults")
    for part in (f"process {inside} of", "LIMIT", "TIERS", "FAULTS", "p99", "STALL", "PAGES IN"):
        assert part in one, f"no {part} in the view of one process: {one}"
    refused = subprocess.run([*words, "--process", "1"], capture_output=True, text=True)
    assert refused.returncode == 2 and "--process 1:" in refused.stderr, f"{refused}"

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    live = subprocess.Popen(
        [*words, "--interval", "0.2", "--color", "never"], stdin=slave, stdout=slave, stderr=slave
    )
    seen = ""

    def shows(*parts):
        """What was drawn since the last key has all of these."""
        nonlocal seen
        while select.select([master], [], [], 0.05)[0]:
            seen += os.read(master, 65536).decode(errors="replace")
        return all(part in seen for part in parts)

    def press(key):
        nonlocal seen
        shows()
        seen = ""
        os.write(master, key)

    until(case, "sparklines", lambda: shows("PROCS", "█", "Enter"))
    assert "\x1b[32m" not in seen and "38;5" not in seen, f"colors: {seen!r}"
    press(b"r")
    press(b"\r")
    until(case, "one process", lambda: shows("TIERS", "STALL", "█"))
    press(b"\x1b")
    until(case, "all processes", lambda: shows("PROCS"))
    assert live.poll() is None, "Escape ended it instead of going back"
    press(b"q")
    until(case, "its end", lambda: (shows(), live.poll() is not None)[1])
    assert live.returncode == 0, f"top ends with {live.returncode}: {seen[-300:]}"
    os.close(master)
    os.close(slave)
    ended(case, program)


@pytest.mark.swaptide(budget=48, allowance=64, native=False)
def test_progress(case):
    """On a terminal: which step of how many, and what is left; nothing of it elsewhere."""
    env = os.environ | {"TERM": "xterm-256color"}
    status, shown = on_terminal(case, ["bench", "startup", "--runs", "1"], env)
    assert status == 0 and "step 1 of 20: " in shown and "so far" in shown, f"{shown!r}"
    assert re.search(r"step \d+ of 20: .* so far, about \d+s left", shown), f"{shown!r}"
    options = ["--group", "/web", "--swap", "zram:8M", "--swap", f"file:{case.directory}:512M"]
    program, _, ctl = started(case, [case.python, PRESSURE, 96, "wait"], options)
    pid = ["--pid", str(program.pid)]
    ctl("freeze", "/web")
    # Room for all of it.
    ctl("group", "/", "ram.max=max")
    status, shown = on_terminal(case, ["ctl", "preload", "/web", *pid], env)
    assert status == 0 and "came back" in shown, f"{status}: {shown!r}"
    assert re.search(r"/web: \S+ of \S+ left, \d+s so far", shown), f"{shown!r}"
    ended(case, program)


@pytest.mark.swaptide(budget=32, swaps=False, native=False)
@pytest.mark.parametrize(
    ("name", "number"),
    [
        param("tiers", signal.SIGINT, id="tiers"),
        full("preload", signal.SIGTERM, id="preload", needs=("nbdkit", "python3")),
        full("zswapin", signal.SIGTERM, id="zswapin"),
    ],
)
def test_lab_interrupted(case, name, number):
    """A lab that a signal ends leaves neither processes nor files."""
    place = case.directory / "place"
    place.mkdir()
    mark = f"SWAPTIDE_TEST_MARK={place}".encode()

    def marked():
        """The processes of the lab, by their environment."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (directory / "environ").read_bytes().split(b"\0"):
                    found.append((directory / "cmdline").read_bytes().replace(b"\0", b" "))
        return found

    env = os.environ | {"TMPDIR": str(place), "SWAPTIDE_TEST_MARK": str(place)}
    words = {"tiers": "--only=usemem", "preload": "--only=python", "zswapin": "--only=seq64_full"}
    lab = subprocess.Popen(
        [case.swaptide, "lab", name, words[name]],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    makes_files = name != "zswapin"
    # The lab, a run of it, and the program.
    until(
        case, "programs", lambda: len(marked()) >= 4 and (list(place.iterdir()) or not makes_files)
    )
    lab.send_signal(number)
    output, errors = lab.communicate()
    assert lab.returncode == 128 + number, f"{lab.returncode}: {output} {errors}"
    assert (output, errors) == (b"", b""), f"{output} {errors}"
    # A killed process takes a moment to go.
    until(case, "no processes", lambda: not marked(), 10)
    assert not list(place.iterdir()), f"left: {list(place.iterdir())}"
