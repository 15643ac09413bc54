"""Public test suites, unmodified, under swaptide: every test that passes without it passes with it."""

import xml.etree.ElementTree as xml

from harness import Case, Failure

#: Tests that depend on time fail now and then on a busy machine, with and without swaptide: what fails is tried again, alone, so many times.
TRIES = 2


def outcomes(path):
    """What became of every test in a JUnit file: `ok`, `skipped` or the first line of what went wrong."""
    found = {}
    for case in xml.parse(path).iter("testcase"):
        name = f"{case.get('classname') or ''}.{case.get('name')}".lstrip(".")
        wrong = next((child for kind in ("failure", "error") for child in case.iter(kind)), None)
        if wrong is not None:
            found[name] = ((wrong.text or wrong.get("message") or "").strip().splitlines() or ["it failed"])[-1]
        else:
            found[name] = "skipped" if case.find("skipped") is not None else "ok"
    return found


def cpython(module):
    """A module of CPython's own tests."""
    def run(context):
        def tests(native, names=()):
            only = [word for name in names for word in ("-m", name)]
            made = context.directory / "tests.xml"
            made.unlink(missing_ok=True)
            done = context.run([context.python, "-m", "test", "--junit-xml", made, *only, module], native=native, status=None)
            context.expect(made.exists(), f"{module} wrote no results: status {done.status}, {done.errors()[-300:]!r}")
            return outcomes(made)

        plain = tests(native=True)
        if not any(outcome == "ok" for outcome in plain.values()):
            raise Failure(f"no test of {module} passes without swaptide; the package libpython3-testsuite has them")
        swapped = tests(native=False)
        worse = {name: swapped.get(name, "it is not there") for name, outcome in plain.items()
                 if outcome == "ok" and swapped.get(name) != "ok"}
        for _ in range(TRIES):
            if worse:
                again = tests(native=False, names=[name.rsplit(".", 1)[-1] for name in worse])
                worse = {name: again.get(name, why) for name, why in worse.items() if again.get(name) != "ok"}
        context.expect(not worse, f"{len(worse)} of {len(plain)} tests of {module} pass without swaptide alone: {worse}")
    return run


# These start interpreters that start interpreters: with less, half a dozen processes exchange a few pages each.
TREES = 48

CASES = [
    Case(f"full-cpython-{module}", cpython(f"test_{module}"), budget, full=True, limit=1200, allowance=32, forks=True)
    for module, budget in (("mmap", 24), ("io", 24), ("threading", TREES), ("subprocess", TREES))
]
