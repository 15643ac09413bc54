"""System calls with their memory out, or on its way, and their table, docs/system-calls.md."""

import re
import subprocess
from pathlib import Path

import pytest

from harness import HERE, full

PROGRAMS = ("calls_files", "calls_ipc", "calls_process")

TABLE = HERE.parent.parent / "docs" / "system-calls.md"

# What x86-64 has in Linux 6.18 and the headers of Debian 12 do not know yet.
NEWER = {
    335: "uretprobe",
    336: "uprobe",
    451: "cachestat",
    452: "fchmodat2",
    453: "map_shadow_stack",
    454: "futex_wake",
    455: "futex_wait",
    456: "futex_requeue",
    457: "statmount",
    458: "listmount",
    459: "lsm_get_self_attr",
    460: "lsm_set_self_attr",
    461: "lsm_list_modules",
    462: "mseal",
    463: "setxattrat",
    464: "getxattrat",
    465: "listxattrat",
    466: "removexattrat",
    467: "open_tree_attr",
    468: "file_getattr",
    469: "file_setattr",
}


# Calls that programs make by another name of libc's.
MADE_BY = {
    "brk": "sbrk",
    "exit_group": "_exit",
    "pread64": "pread",
    "pwrite64": "pwrite",
    # A handler's return.
    "rt_sigreturn": "sigaltstack",
}


@pytest.mark.swaptide(budget=32, allowance=64, forks=True)
@pytest.mark.parametrize(
    "name", [full("files") if name == "calls_files" else name[6:] for name in PROGRAMS]
)
def test_calls(case, name):
    """All calls of a program answer as without swaptide, with their memory out and with memory
    that moves during the call."""
    name = f"calls_{name}"
    for mode in ("out", "moving"):
        argv = [case.binary(name), 64, 4, case.seed, mode]
        _, done = case.compare(argv)
        assert done.text().endswith(f"OK {name} {mode}\n"), (
            f"its last line is {done.text()[-200:]!r}"
        )
        if mode == "out" and not case.native:
            found = re.search(r"^(\d+) of (\d+) pages were out$", done.errors(), re.MULTILINE)
            assert found is not None, (
                f"it did not say how many pages were out: {done.errors()[-200:]!r}"
            )
            were_out, asked = int(found[1]), int(found[2])
            assert were_out * 10 >= asked * 9, (
                f"only {were_out} of {asked} pages were out when they were used"
            )


def header_numbers():
    """The system calls and the advice that the C compiler's headers know."""
    source = "#include <asm/unistd_64.h>\n#include <linux/mman.h>\n"
    done = subprocess.run(
        ["cc", "-E", "-dM", "-x", "c", "-"],
        input=source,
        capture_output=True,
        text=True,
        check=True,
    )
    numbers = {
        int(number): name
        for name, number in re.findall(r"#define __NR_(\w+) (\d+)$", done.stdout, re.MULTILINE)
    }
    advice = {
        int(number): name
        for name, number in re.findall(r"#define MADV_(\w+)\s+(\d+)$", done.stdout, re.MULTILINE)
    }
    return numbers, advice


def source_of(test):
    """The source of the C program of a test, without comments and names of tests."""
    program = test.partition(":")[0] if ":" in test else re.split("[-*]", test)[0]
    files = [*(HERE / "c").glob(f"{program}.c"), *(HERE / "c").glob(f"{program}_*.h")]
    text = re.sub(r"/\*.*?\*/", "", "\n".join(map(Path.read_text, files)), flags=re.DOTALL)
    return re.sub(r"^TEST\(.*|^ *T\(.*", "", text, flags=re.MULTILINE)


def calls_without_test(row):
    """The system calls of a row of the table that no program of its tests makes."""
    first, *_, tests = row.split("|")[1:-1]
    source = "".join(map(source_of, re.findall(r"`([a-z_\d:*-]+)`", tests)))
    for number, name in re.findall(r"\b(\d+) ([a-z_]\w*)", first):
        made = MADE_BY.get(name, name)
        if not re.search(rf"SYS_{name}\b|\b{made}\s*\(|\(\s*{number}\s*[,)]", source):
            yield name


@pytest.mark.swaptide(budget=32, swaps=False)
def test_calls_table(case, all_names):
    """docs/system-calls.md names each system call and each advice once, by number and name. Each
    test that it names exists, and its program makes the call."""
    numbers, advice = header_numbers()
    assert len(numbers) > 300 and len(advice) > 15, (
        f"the headers have {len(numbers)} calls and {len(advice)} kinds of advice"
    )
    text = TABLE.read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    first = [line.split("|")[1] for line in rows]
    seen = [
        (int(number), name)
        for cell in first
        for number, name in re.findall(r"\b(\d+) ([a-z_]\w*)", cell)
    ]
    expected = {**NEWER, **numbers}
    counted = [number for number, _ in seen]
    twice = sorted({number for number in counted if counted.count(number) > 1})
    assert not twice, f"more than once in the table: {twice}"
    missing = sorted(set(expected) - set(counted))
    assert not missing, f"not in the table: {[(number, expected[number]) for number in missing]}"
    wrong = [(number, name) for number, name in seen if expected.get(number) != name]
    assert not wrong, f"other names in the headers: {wrong}"
    known = {
        int(number): name
        for cell in first
        for name, number in re.findall(r"`MADV_(\w+)` \((\d+)\)", cell)
    }
    assert all(known.get(number) == name for number, name in advice.items()), (
        f"advice: {sorted(set(advice.items()) - set(known.items()))}"
    )
    # Tests: a case of this suite, or a test of one of the programs.
    names = all_names
    tests = {
        f"{name}:{test}"
        for name in PROGRAMS
        for test in re.findall(
            r"^TEST\((\w+)\)", (HERE / "c" / f"{name}.c").read_text(), re.MULTILINE
        )
    }
    named = {name for line in rows for name in re.findall(r"`([a-z_\d:*-]+)`", line.split("|")[-2])}
    unknown = [
        name
        for name in named
        if name not in names | tests
        and not (name.endswith("*") and any(n.startswith(name[:-1]) for n in names))
    ]
    assert len(named) > 30 and not unknown, (
        f"{len(named)} tests are named; unknown: {sorted(unknown)}"
    )
    about_memory = [row for row in rows[2:] if not re.search(r"\| (none|-+|memory) *\|", row)]
    empty = [row for row in about_memory if not row.split("|")[-2].strip()]
    assert len(about_memory) > 60 and not empty, f"rows without a test: {empty}"
    untested = [
        name
        for row in about_memory
        if "none: " not in row.split("|")[-2]
        for name in calls_without_test(row)
    ]
    assert not untested, f"the programs of their tests do not make these calls: {untested}"
    unnamed = sorted(test for test in tests if test not in named)
    assert not unnamed, f"tests of the programs that the table does not name: {unnamed}"
