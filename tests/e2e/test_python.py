"""The Python package (`python/`): budgets of interpreters, of their workers and of notebooks."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unprivileged
from cgroups import memory_cgroup
from harness import HERE, MIB, Failure, full

ROOT = HERE.parent.parent
PACKAGE = ROOT / "python"
LIMITED = HERE / "py" / "limited.py"
NOTEBOOK = HERE / "py" / "notebook.py"
KERNEL = HERE / "py" / "kernel.py"


def environment(case, source=PACKAGE / "src", **more):
    """That of a Python which has the package."""
    return {**os.environ, "PYTHONPATH": str(source), "SWAPTIDE": str(case.swaptide), **more}


def limited(case, mode, megabytes, **how):
    """A program that limits itself: without `swaptide run`."""
    how = {"native": True, "env": environment(case), **how}
    words = [case.python, LIMITED, mode, f"{case.budget}M", megabytes]
    done = case.run(words, **how)
    assert done.text().splitlines()[-1] == f"OK {mode}", done.text()
    return done


@pytest.mark.swaptide(budget=32, native=False)
@pytest.mark.parametrize("mode", ["limit", "budget", "refused", full("runs"), full("forks")])
def test_python(case, mode):
    """What `limited.py` does with the package; `python/tests` has the rest."""
    limited(case, mode, 64)


@pytest.mark.swaptide(budget=96, native=False, swaps=True)
def test_python_inside(case):
    """Under `swaptide run` the budget of the run changes."""
    words = [case.python, LIMITED, "inside", "24M", 64]
    done = case.run(words, env=environment(case))
    assert done.text() == "OK inside\n", done.text()
    assert done.report["budget_bytes"] == 96 * MIB, "the report has the largest budget"


@pytest.mark.swaptide(budget=32, native=False, needs=("/usr/bin/python3",))
def test_python_unprivileged(case):
    """An ordinary user, with the device alone."""
    if not unprivileged.is_possible():
        pytest.skip("only root can set it up, where there is a /dev/userfaultfd")
    case.suite.root.chmod(0o755)
    swaptide = unprivileged.copy_of(case.swaptide, case.directory)
    source = case.directory / "package"
    shutil.copytree(PACKAGE / "src", source)
    program = shutil.copy(LIMITED, case.directory)
    scratch = case.directory / "device"
    scratch.mkdir()
    how = {"SWAPTIDE": str(swaptide), "SWAPTIDE_DIRECTORY": str(case.directory / "sockets")}
    (case.directory / "sockets").mkdir(mode=0o700)
    os.chown(case.directory / "sockets", unprivileged.NOBODY, unprivileged.NOBODY)
    done = case.run(
        ["/usr/bin/python3", program, "budget", f"{case.budget}M", 64],
        native=True,
        env=environment(case, source, **how),
        preexec=lambda: unprivileged.become_nobody(scratch),
    )
    assert done.text().splitlines()[-1] == "OK budget", done.text()


def blocks(kind):
    """The pieces of one kind of docs/python.md."""
    text = (ROOT / "docs" / "python.md").read_text()
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.swaptide(budget=32, native=False)
def test_python_document(case):
    """The lines of docs/python.md, each piece as a program of its own."""
    pieces = blocks("python")
    assert len(pieces) > 3
    for number, piece in enumerate(pieces):
        program = case.directory / f"piece{number}.py"
        program.write_text(piece)
        case.run([case.python, program], native=True, env=environment(case))


@pytest.mark.swaptide(budget=48, native=False)
@pytest.mark.parametrize("name", [full("multiprocessing_pool"), full("futures")])
def test_python_examples(case, name):
    """Those of python/examples that need nothing else."""
    program = PACKAGE / "examples" / f"{name}.py"
    words = [case.python, program, f"{case.budget}M", 96]
    done = case.run(words, native=True, env=environment(case))
    assert done.text().startswith("OK "), done.text()


def installed(case):
    """The directory of an environment with the package, as pip installs it, and what the cases here
    need of PyPI. One for a session, or one that was prepared so."""
    if prepared := os.environ.get("SWAPTIDE_TEST_VENV"):
        return Path(prepared)
    place = case.suite.root / "python"
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (place / "complete").exists():
            return place
        steps = (
            [sys.executable, "-m", "venv", "--clear", place],
            [
                *(place / "bin" / "python", "-m", "pip", "install", "--quiet"),
                *("--disable-pip-version-check", f"{PACKAGE}[jupyter]"),
                *("-r", PACKAGE / "examples" / "requirements.txt"),
            ],
        )
        for words in steps:
            done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
            if done.returncode == 0:
                continue
            why = f"{' '.join(map(str, words[:5]))}: {done.stderr.strip()[-300:]}"
            if os.environ.get("SWAPTIDE_TEST_ALL") == "1":
                raise Failure(why)
            pytest.skip(why)
        (place / "complete").touch()
        return place


@pytest.mark.full
@pytest.mark.swaptide(budget=160, native=False, limit=600)
@pytest.mark.parametrize("name", ["joblib_workers", "dask_workers", "pandas_frame"])
def test_full_python_examples(case, name):
    """Those that need a package."""
    place = installed(case)
    env = {**os.environ, "SWAPTIDE": str(case.swaptide)}
    words = [place / "bin" / "python", PACKAGE / "examples" / f"{name}.py"]
    done = case.run([*words, f"{case.budget}M", 384], native=True, env=env)
    assert "OK " in done.text(), done.text()


@pytest.mark.full
@pytest.mark.swaptide(budget=192, native=False, limit=900)
def test_full_python_notebook(case):
    """A notebook that needs twice its memory cgroup runs to its end with the kernel that
    `swaptide kernelspec install` has installed, and without it is killed. That kernel is
    interrupted and restarted as any."""
    place = installed(case)
    env = {
        **os.environ,
        "SWAPTIDE": str(case.swaptide),
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "IPYTHONDIR": str(case.directory / "ipython"),
        "JUPYTER_DATA_DIR": str(case.directory / "jupyter"),
    }
    for words in map(str.split, "".join(blocks("sh")).splitlines()):
        if words[:3] == ["swaptide", "kernelspec", "install"]:
            words[words.index("--ram") + 1] = f"{case.budget}M"
            case.run(words, native=True, env=env)
    done = case.run([place / "bin" / "python", KERNEL, "swaptide-python3"], native=True, env=env)
    assert done.text() == "OK kernel\n", done.text()
    limit = case.budget * 5 // 4 * MIB
    needs = 2 * limit // MIB
    for kernel, last in (("swaptide-python3", "OK notebook"), ("python3", "DEAD")):
        with memory_cgroup(case, limit) as group:
            if group is None:
                pytest.skip("no memory cgroup can be made here")
            words = [place / "bin" / "python", NOTEBOOK, kernel, group.place, needs]
            done = case.run(words, native=True, env=env)
            group.end_of_sampling()
            case.note(f"{kernel}: {done.text().strip().splitlines()[-1]}, {group.peaks}")
            assert done.text().splitlines()[-1] == last, done.text() + done.errors()[-2000:]
            assert (group.killed() > 0) == (last == "DEAD"), group.killed()


@pytest.mark.full
@pytest.mark.swaptide(budget=32, native=False, limit=900)
def test_full_python_package(case):
    """What pip has installed: types, licences, the console script; and the package's own tests."""
    place = installed(case)
    (site,) = (place / "lib").glob("python3*/site-packages")
    assert (site / "swaptide" / "py.typed").exists()
    (about,) = site.glob("swaptide-*.dist-info")
    names = {path.name for path in about.rglob("LICENSE-*")}
    assert names == {"LICENSE-APACHE", "LICENSE-MIT"}, names
    env = {**os.environ, "SWAPTIDE": str(case.swaptide)}
    script = place / "bin" / "swaptide"
    version = case.run([script, "--version"], native=True, env=env).text()
    assert version == f"swaptide {about.name.split('-')[1].removesuffix('.dist')}\n", version
    done = case.run(
        [script, "run", "--quiet", "--", "sh", "-c", "exit 5"], native=True, env=env, status=5
    )
    assert done.text() == ""
    tests = case.directory / "package"
    shutil.copytree(PACKAGE, tests, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    for words in (["pytest", "-q", "-p", "no:cacheprovider"], ["mypy", "--cache-dir=/dev/null"]):
        case.run([place / "bin" / "python", "-m", *words], native=True, env=env, cwd=tests)


def test_python_documents_name_the_examples():
    """Each example is run by a case, and its README names it."""
    names = {path.stem for path in (PACKAGE / "examples").glob("*.py")}
    text = Path(__file__).read_text()
    readme = (PACKAGE / "examples" / "README.md").read_text()
    assert names
    for name in names:
        assert f'"{name}"' in text, f"no case runs {name}"
        assert f"`{name}.py`" in readme, f"README.md does not name {name}"
