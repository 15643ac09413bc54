"""The budget of the process: who sets it, and what it is before, within and after a block."""

import os
from collections.abc import Callable

import pytest

import swaptide
from conftest import StandIn
from swaptide import NotLimitedError, RefusedError, SwaptideError, _limit, _prctl

ATTACH = ["attach", "--background", "--quiet", "--ram"]


def test_a_first_limit_attaches_and_the_next_one_changes_it(stand_in: StandIn, own: str) -> None:
    swaptide.limit("2G")
    assert stand_in.asked() == [[*ATTACH, "2G", own]]
    swaptide.limit(300)
    assert stand_in.asked() == [["ctl", "budget", "--pid", "4711", "300"]]
    assert swaptide.stats().budget_bytes == 300


def test_options(stand_in: StandIn, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swaptide.limit("2G", swap=["zram:1G", "file:/tmp"], report="report.json")
    report = os.path.abspath("report.json")
    words = ["--swap", "zram:1G", "--swap", "file:/tmp", "--report", report]
    assert stand_in.asked() == [[*ATTACH, "2G", *words, own]]
    with pytest.raises(SwaptideError, match="swapon"):
        swaptide.limit("3G", swap=["zram:1G"])
    assert stand_in.asked() == []


def test_under_a_run_its_budget_changes_and_is_not_let_go(stand_in: StandIn) -> None:
    stand_in.tell(run=12, budget=7)
    swaptide.limit("3G")
    assert stand_in.asked() == [["ctl", "budget", "--pid", "12", "3G"]]
    with pytest.raises(SwaptideError, match="run 12, which this process has not started"):
        swaptide.release()
    assert stand_in.asked() == []


def test_a_run_that_has_not_seen_the_process_yet(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.tell(refuses={"attach": "process 1 is under swaptide already, or was started by it"})
    monkeypatch.setattr(_limit, "_LOOK_SECONDS", 0)
    look, looks = _limit._look, []

    def seen_late() -> swaptide.Stats | None:
        looks.append(1)
        if len(looks) == 3:
            stand_in.tell(run=12, budget=7)
        return look()

    monkeypatch.setattr(_limit, "_look", seen_late)
    with pytest.raises(RefusedError, match="under swaptide already"):
        swaptide.limit("3G")
    assert len(looks) == 1, "nothing says that it is part of a run"
    monkeypatch.setenv("LD_PRELOAD", "/nonexistent/libswaptide_agent.so")
    swaptide.limit("3G")
    assert (stand_in.budget, len(looks)) == (3, 3)
    stand_in.tell(run=None)
    monkeypatch.setattr(_limit, "_JOIN_SECONDS", 0.1)
    with pytest.raises(RefusedError, match="under swaptide already"):
        swaptide.limit("3G")


def test_a_run_that_is_over_is_not_waited_for(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_limit._ENV_RUN, "12")
    monkeypatch.setattr(_limit, "_JOIN_SECONDS", 0)
    with pytest.raises(NotLimitedError):
        swaptide.stats()
    assert stand_in.asked() == [["ctl", "budget", "--pid", "12"]]


def test_what_is_refused_is_told_and_changes_nothing(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int | None] = []
    monkeypatch.setattr(_prctl, "allow_tracer", told.append)
    stand_in.tell(refuses={"attach": "process 1 is traced by process 2; end that first"})
    with pytest.raises(RefusedError, match="^process 1 is traced by process 2; end that first$"):
        swaptide.limit("2G")
    assert told == [None, 0], "no other process may trace it any more"
    with pytest.raises(NotLimitedError, match="under no budget"):
        swaptide.stats()


def test_only_the_run_may_trace_it(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int | None] = []
    monkeypatch.setattr(_prctl, "allow_tracer", told.append)
    swaptide.limit("2G")
    assert told == [None, 4711]
    # What is started meanwhile, and uses the package, names the run, too.
    _limit.name_inherited_run()
    assert told == [None, 4711, 4711]
    swaptide.release()
    _limit.name_inherited_run()
    assert told == [None, 4711, 4711, 0]


def test_the_first_process_of_a_container(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_prctl, "is_init", lambda: True)
    with pytest.raises(RefusedError, match="--init"):
        swaptide.limit("2G")
    assert stand_in.asked() == []


def test_release(stand_in: StandIn) -> None:
    swaptide.release()
    assert stand_in.asked() == []
    swaptide.limit("2G")
    stand_in.asked()
    swaptide.release()
    assert stand_in.asked() == [["ctl", "detach", "4711"]]
    assert stand_in.budget is None


def test_a_process_that_cannot_be_managed(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_limit, "_LOOK_SECONDS", 0)
    asked, looks = _limit._asked, []

    def ends() -> swaptide.Stats:
        looks.append(1)
        if len(looks) == 3:
            stand_in.tell(run=None)
        return asked()

    stand_in.tell(**{"as": "unmanaged"})
    monkeypatch.setattr(_limit, "_asked", ends)
    with pytest.raises(RefusedError, match="nothing is limited"):
        swaptide.limit("2G")


def test_a_run_that_does_not_let_go(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_limit, "_REFUSED_SECONDS", 0)
    swaptide.limit("2G")
    stand_in.tell(refuses={"detach": "detach: memory ran short", "run-after": 4711})
    with pytest.raises(RefusedError, match="^detach: memory ran short$"):
        swaptide.release()
    assert stand_in.budget == 2
    # One that ends before it has answered has let go.
    stand_in.tell(refuses={"detach": "the supervisor is shutting down"})
    swaptide.release()
    assert stand_in.budget is None


def test_a_forked_child_does_not_release(stand_in: StandIn) -> None:
    swaptide.limit("2G")
    pid = os.fork()
    if pid == 0:
        try:
            swaptide.release()
        except SwaptideError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert stand_in.budget == 2


def in_a_fork(check: Callable[[], bool]) -> int:
    """The status of a forked child: 0 if the check holds there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if check() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_that_leaves_a_block(stand_in: StandIn) -> None:
    block = swaptide.budget("5M")

    def leaves() -> bool:
        block.__exit__(None, None, None)
        return stand_in.budget == 5

    def has_its_own() -> bool:
        with swaptide.budget("3M"):
            is_set = stand_in.budget == 3
        return is_set and stand_in.budget == 5

    with block:
        stand_in.asked()
        assert in_a_fork(leaves) == 0
        assert stand_in.asked() == []
        assert in_a_fork(has_its_own) == 0
        assert stand_in.budget == 5
    assert stand_in.budget == 100


def test_a_forked_child_names_the_tracer(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int | None] = []
    monkeypatch.setattr(_prctl, "allow_tracer", told.append)
    swaptide.limit("2G")
    told.clear()
    assert in_a_fork(lambda: told == [4711]) == 0
    assert told == []


def test_a_release_within_a_block(stand_in: StandIn) -> None:
    with swaptide.budget("5M"), swaptide.budget("3M"):
        swaptide.release()
        assert stand_in.budget is None
        stand_in.asked()
    assert stand_in.asked() == [], "nothing begins again at the end of a block"
    with swaptide.budget("5M"):
        swaptide.release()
        swaptide.limit("8")
    assert stand_in.budget == 8


def test_a_release_that_is_refused_leaves_the_block(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_limit, "_REFUSED_SECONDS", 0)
    with swaptide.budget("5M"):
        stand_in.tell(refuses={"detach": "detach: memory ran short", "run-after": 4711})
        with pytest.raises(RefusedError, match="memory ran short"):
            swaptide.release()
        assert stand_in.budget == 5
    assert stand_in.budget == 100


def test_a_run_that_does_not_answer_is_a_run(stand_in: StandIn) -> None:
    line = "the run 12 does not answer: timed out; is it stopped? see swaptide ctl list"
    stand_in.tell(run=12, budget=7, refuses={"ctl": line})
    with pytest.raises(RefusedError, match="^the run 12 does not answer"):
        swaptide.limit("3G")
    with pytest.raises(RefusedError, match="^the run 12 does not answer"):
        swaptide.stats()
    assert stand_in.asked() == [], "no second run is begun"


def test_what_was_attached_can_be_released(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.tell(**{"run-refuses": {"ctl": "the run 4711 does not answer: timed out"}})
    with pytest.raises(SwaptideError, match="^the budget is in force, but its run cannot be asked"):
        swaptide.limit("2G")
    stand_in.tell(refuses={}, **{"run-refuses": {}})
    assert stand_in.budget == 2
    swaptide.release()
    assert stand_in.budget is None


def test_a_process_that_is_not_managed_warns(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_limit, "_JOIN_SECONDS", 0.1)
    stand_in.tell(**{"as": "unmanaged"})
    with pytest.warns(RuntimeWarning, match="is not managed so far.*--pid 4711") as warned:
        swaptide.limit("2G")
    assert warned[0].filename == __file__
    swaptide.release()
    with (
        pytest.warns(RuntimeWarning, match="is not managed so far") as warned,
        swaptide.budget("5M"),
    ):
        assert stand_in.budget == 5
    assert warned[0].filename == __file__


def test_a_block_without_a_budget_outside(stand_in: StandIn) -> None:
    with swaptide.budget("5M"):
        assert stand_in.budget == 5
        with swaptide.budget("3M"):
            assert stand_in.budget == 3
        assert stand_in.budget == 5
    assert stand_in.asked()[-2:] == [
        ["ctl", "budget", "--pid", "4711", "100%"],
        ["ctl", "preload", "--pid", "4711", "/"],
    ]
    swaptide.release()
    assert stand_in.budget is None


def test_a_block_within_a_budget(stand_in: StandIn) -> None:
    swaptide.limit("9")
    with pytest.raises(KeyError), swaptide.budget("5M"):
        assert stand_in.budget == 5
        raise KeyError
    assert stand_in.budget == 9


def test_a_limit_within_a_block_stays(stand_in: StandIn) -> None:
    with swaptide.budget("5M"):
        swaptide.limit("8")
        assert stand_in.budget == 8
    assert stand_in.budget == 8


def test_blocks_that_overlap(stand_in: StandIn) -> None:
    first, second = swaptide.budget("5M"), swaptide.budget("3M")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert stand_in.budget == 3
    second.__exit__(None, None, None)
    assert stand_in.budget == 100


def test_a_decorator(stand_in: StandIn) -> None:
    @swaptide.budget("5M")
    def depth(left: int) -> int | None:
        return depth(left - 1) if left else stand_in.budget

    assert depth(2) == 5
    assert stand_in.budget == 100


def test_a_block_that_is_refused_leaves_nothing(stand_in: StandIn) -> None:
    stand_in.tell(refuses={"attach": "no"})
    with pytest.raises(RefusedError), swaptide.budget("5M"):
        pytest.fail("the block must not begin")
    stand_in.tell(refuses={})
    with swaptide.budget("6M"):
        assert stand_in.budget == 6
    assert stand_in.budget == 100


def test_orphans_leave_a_subreaper() -> None:
    import ctypes

    libc = ctypes.CDLL(None)

    def is_subreaper() -> bool:
        word = ctypes.c_int(0)
        assert libc.prctl(37, ctypes.byref(word), 0, 0, 0) == 0
        return word.value != 0

    with _prctl.orphans_leave():
        pass
    assert not is_subreaper()
    libc.prctl(36, 1, 0, 0, 0)
    try:
        with _prctl.orphans_leave():
            assert not is_subreaper()
        assert is_subreaper()
    finally:
        libc.prctl(36, 0, 0, 0, 0)
