"""The cases of cases_*.py, until each file is ported."""

import pytest
from harness import param
from legacy import all_cases

# Neither long nor run by default.
SLOW = "begins advice forks-many processes-namespaces processes-plain filter-systemd "
SLOW += "fork-locks-excludes fork-locks-naps python-structures sort sqlite java node stress-ng "
SLOW += "runtime-perl"


def marked(case):
    marks = [pytest.mark.long] if case.full else []
    if not case.full and case.name.startswith(tuple(SLOW.split())):
        marks.append(pytest.mark.full)
    if case.unprivileged:
        marks.append(pytest.mark.unprivileged)
    options = dict(case.__dict__)
    for name in ("name", "run", "full", "unprivileged"):
        del options[name]
    return param(case, id=case.name, marks=marks, **options)


@pytest.mark.parametrize("case", map(marked, all_cases()))
def test(context, case):
    context.case = case
    case.run(context)
