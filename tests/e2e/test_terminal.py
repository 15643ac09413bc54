"""The command at a terminal and for scripts: manual, completions, colors, JSON, progress, top."""

import os
import subprocess

import pytest

from harness import full


def words_of(case, *words, status=0, **options):
    """What `swaptide WORDS` prints, with nothing on standard error."""
    done = subprocess.run(
        [case.swaptide, *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        **options,
    )
    assert done.returncode == status and done.stderr == "", f"{words}: {done}"
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
