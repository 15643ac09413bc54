"""Swap areas: files, block devices, areas that come and go or run out."""

import json
import os
import subprocess
import time

import pytest

from ctl import PRESSURE, ask


@pytest.mark.swaptide(budget=32, allowance=128, forks=True, native=False)
def test_areas(case):
    """Swap areas come and go while programs, and the children they fork, use them; what cannot go
    stays, and says why.
    """
    place = case.directory
    for name in "abc":
        (place / name).mkdir()

    def devices(pid):
        until = time.monotonic() + 10
        while True:
            status, text, errors = ask(case, "devices", "--pid", pid, "--json")
            if status == 0:
                return {view["name"]: view for view in json.loads(text)}
            # The run may not have begun yet.
            assert time.monotonic() < until, f"ctl devices: status {status}: {errors}"
            time.sleep(0.02)

    def asked(status, *words):
        said = ask(case, *words)
        assert said[0] == status and len(said[2].splitlines()) == (status != 0), f"{words}: {said}"
        return said[2]

    for program, mode in (("torture", "single"), ("forks", "nested")):
        argv = [case.binary(program), 96, 5, case.seed, mode]
        first, second, third = (f"file:{place}/{name}" for name in "abc")
        started = case.start(argv, options=["--swap", "zram:4M", "--swap", f"{first}:1G,prio=5"])
        pid = str(started.pid)
        until = time.monotonic() + 20
        while not (seen := devices(pid)) or seen[first]["used_bytes"] < 16 << 20:
            assert time.monotonic() < until, f"nothing goes to the swap area: {seen}"
            time.sleep(0.05)
        assert "do not fit" in asked(2, "swapoff", first, "--pid", pid), "the only one is in use"
        asked(2, "swapoff", "nonsense", "--pid", pid)
        asked(2, "swapon", f"file:{place}/no/such/place", "--pid", pid)
        asked(2, "swapon", "zram:4M", "--pid", pid)
        assert list(devices(pid)) == [first], "nothing has changed"
        for before, after, priority in ((first, second, 3), (second, third, 9), (third, first, 1)):
            asked(0, "swapon", f"{after}:1G,prio={priority}", "--pid", pid)
            asked(0, "swapoff", before, "--pid", pid)
            seen = devices(pid)
            assert list(seen) == [after] and seen[after]["used_bytes"] > 0, (
                f"{before} has not gone to {after}: {seen}"
            )
        done = started.finish()
        assert f"OK {program} {mode}" in done.text(), (
            f"it did not end with OK: {done.text()[-300:]!r}"
        )


@pytest.mark.full
@pytest.mark.swaptide(budget=32, needs=("losetup", "mkswap"), allowance=64)
def test_block_device(case):
    """A block device is swap space when it is formatted as such, whole and not in use; it keeps
    its header.
    """
    image = case.directory / "image"
    if case.native:
        return
    if os.geteuid() != 0:
        pytest.skip("only root can make a loop device")
    with open(image, "wb") as file:
        file.truncate(512 << 20)
    made = subprocess.run(["losetup", "-f", "--show", str(image)], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no loop device can be made here: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        argv = [case.binary("torture"), 96, 4, case.seed, "single"]
        refused = subprocess.run(
            case.command("true", ram=None, options=["--swap", device]),
            capture_output=True,
            text=True,
        )
        assert refused.returncode == 2 and f"mkswap {device}" in refused.stderr, (
            f"it is not marked: {refused}"
        )
        subprocess.run(["mkswap", device], check=True, capture_output=True)
        for _ in range(2):
            started = case.start(argv, options=["--swap", "zram:4M", "--swap", device])
            done = started.finish()
            assert "OK torture single" in done.text(), (
                f"it did not end with OK: {done.text()[-300:]!r}"
            )
            seen = json.loads(started.report_path.read_text())["devices"][1]
            assert seen["type"] == "block" and seen["peak_used_bytes"] > 16 << 20, (
                f"hardly used: {seen}"
            )
        link = case.directory / "link"
        link.symlink_to(device)
        twice = subprocess.run(
            case.command("true", options=["--swap", device, "--swap", link]),
            capture_output=True,
            text=True,
        )
        assert twice.returncode == 2 and "in use" in twice.stderr, f"twice in one run: {twice}"
    finally:
        subprocess.run(["losetup", "-d", device], check=True)


@pytest.mark.full
@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_swap_full(case):
    """Swap space that is too small: the program keeps its memory and goes past the budget, and with
    --strict it is killed.
    """
    for number, device in enumerate(("zram:4M", f"file:{case.directory}:16M")):
        for strict in (False, True):
            report = case.directory / f"report-{number}-{strict}.json"
            words = [
                case.swaptide,
                "run",
                "--ram",
                f"{case.budget}M",
                "--swap",
                device,
                "--report",
                report,
            ]
            words += ["--strict"] if strict else []
            words += ["--", case.python, PRESSURE, "150", "closefds"]
            done = subprocess.run(
                [str(word) for word in words],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
            )
            said = f"{device}, strict {strict}: status {done.returncode}, "
            said += f"{done.stdout!r}, {done.stderr!r}"
            assert done.returncode == (137 if strict else 0), said
            assert (done.stdout == "OK closefds\n") != strict, said
            assert "swap space ran out" in done.stderr, said
            errors = json.loads(report.read_text())["errors"]
            assert errors["swap_full"] > 0 and errors["pages_poisoned"] == 0, f"{said}: {errors}"


@pytest.mark.swaptide(budget=32, allowance=8, forks=True, swaps=False, native=False)
def test_swap_kept(case):
    """Copies on a swap area of what is back in memory go when the area is full: it has room for all
    data of two processes, not for their copies as well.
    """
    done = case.run_c("kept", megabytes=36, options=["--swap", f"file:{case.directory}:72M"])
    stats, errors = done.report["stats"], done.report["errors"]
    assert stats["pswpin"] > 5000, f"hardly anything came back: {stats}"
    assert errors["swap_full"] < 50, f"{errors}, {done.report['devices']}"


@pytest.mark.swaptide(budget=32, allowance=24, native=False)
def test_pool_ends(case):
    """Compressed memory meets the end of its addresses: pages go to the swap area instead."""
    done = case.run_c(
        "torture",
        "single",
        megabytes=96,
        seconds=2,
        options=["--swap", f"file:{case.directory}:1G"],
        env={**os.environ, "SWAPTIDE_TEST_FAIL": "16"},
    )
    stats, errors = done.report["stats"], done.report["errors"]
    assert stats["reject_pool_full"] > 100 and stats["pswpout"] > 100, f"{stats}"
    assert errors["swap_full"] == 0, f"{errors}"


@pytest.mark.swaptide(budget=32, allowance=160, swaps=False, native=False)
def test_pool_ends_alone(case):
    """The same where there is no swap area: the program keeps its memory, past the budget."""
    argv = [case.binary("torture"), 96, 2, case.seed, "single"]
    env = {**os.environ, "SWAPTIDE_TEST_FAIL": "16"}
    done = case.run(argv, options=["--swap", "zram:1G"], env=env)
    assert "OK torture single" in done.text(), done.text()[-300:]
    errors = done.report["errors"]
    assert errors["swap_full"] > 0 and errors["past_budget_bytes"] > 0, f"{errors}"
