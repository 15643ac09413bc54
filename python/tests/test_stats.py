"""Values of what swaptide says."""

import dataclasses
from pathlib import Path

import pytest

import swaptide
from conftest import StandIn
from swaptide import Report, Stats
from swaptide._stats import human


def test_what_is_asked_becomes_values(stand_in: StandIn, own: str) -> None:
    stand_in.tell(run=12, budget=8 << 20)
    now = swaptide.stats()
    # The process that asked is left out.
    assert [process.pid for process in now.processes] == [int(own)]
    assert (now.pid, now.budget_bytes, now.wall_s) == (12, 8 << 20, 1.5)
    assert (now.swapped_bytes, now.compressed_bytes, now.stall_s) == (3 << 20, 1 << 20, 1.5)
    assert str(now) == (
        "swaptide: 5.0M of 8.0M in use, 3.0M swapped out (1.0M of it compressed), 1 process, "
        "waited 1.5 s"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        now.pid = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        now.counters["pswpout"] = 3  # type: ignore[index]


def test_other_versions_may_say_more_or_less() -> None:
    now = Stats.from_json({"pid": 3, "processes": [{"pid": 4, "other": []}], "more": {}})
    assert (now.pid, now.processes[0].pid, now.swapped_bytes) == (3, 4, 0)
    report = Report.from_json({"stats": {"zswpout": 2}, "advice": None})
    assert (report.pages_out, report.exit_status, report.values["advice"]) == (2, 0, None)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (1023, "1023"), (1024, "1.0K"), (10 << 20, "10M"), (5 << 40, "5120G")],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert human(count) == text


def test_the_version_is_that_of_the_workspace() -> None:
    manifest = Path(__file__).resolve().parents[2] / "Cargo.toml"
    if not manifest.exists():
        pytest.skip("not in the repository")
    assert f'\nversion = "{swaptide.__version__}"\n' in manifest.read_text()
