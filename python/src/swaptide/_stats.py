"""What `swaptide` says of a run, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


def _number(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    return int(value) if value is not None else 0


def _counters(values: object) -> Mapping[str, int]:
    pairs = values if isinstance(values, dict) else {}
    return MappingProxyType({str(key): int(value) for key, value in pairs.items()})


def human(count: float) -> str:
    """A size for people: `1.5G`."""
    units = ["", "K", "M", "G"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    unit = units[0]
    return f"{count:.1f}{unit}" if unit and count < 9.95 else f"{count:.0f}{unit}"


@dataclass(frozen=True, slots=True)
class ProcessStats:
    """One process under a budget."""

    pid: int
    group: str
    """The group that it is in: `/`, or `/NAME`."""
    state: str
    """`engaged`: its memory is managed. Others run as without swaptide, and count."""
    limit_bytes: int
    """Its part of the budget; 0 where it is not managed."""
    resident_bytes: int
    """Its memory that is in RAM."""
    pool_bytes: int
    """RAM that its compressed memory takes."""
    swapped_pool_bytes: int
    """Its memory that is compressed."""
    swapped_file_bytes: int
    """Its memory that is on swap areas."""

    @property
    def swapped_bytes(self) -> int:
        """Its memory that is out."""
        return self.swapped_pool_bytes + self.swapped_file_bytes

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ProcessStats":
        """From an entry of `processes` of `swaptide ctl stats --json`."""
        return cls(
            pid=_number(values, "pid"),
            group=str(values.get("group", "/")),
            state=str(values.get("state", "")),
            limit_bytes=_number(values, "limit_bytes"),
            resident_bytes=_number(values, "resident_bytes"),
            pool_bytes=_number(values, "pool_bytes"),
            swapped_pool_bytes=_number(values, "swapped_pool_bytes"),
            swapped_file_bytes=_number(values, "swapped_file_bytes"),
        )


@dataclass(frozen=True, slots=True)
class Stats:
    """The processes under a budget, all together."""

    pid: int
    """The number by which `swaptide ctl` knows the run."""
    program: str
    wall_s: float
    """Seconds since the run began."""
    budget_bytes: int
    resident_bytes: int
    """Memory that is in RAM; with compressed memory and swaptide's own."""
    peak_resident_bytes: int
    """The most that it was, since it was within the budget first."""
    peak_footprint_bytes: int
    """The most memory that the programs had, in RAM and out."""
    processes: tuple[ProcessStats, ...]
    counters: Mapping[str, int] = field(repr=False)
    """Pages in and out and more, by the kernel's names: `pswpin`, `zswpout`."""

    @property
    def swapped_bytes(self) -> int:
        """Memory that is out."""
        return sum(process.swapped_bytes for process in self.processes)

    @property
    def compressed_bytes(self) -> int:
        """Memory that is out and compressed in RAM."""
        return sum(process.swapped_pool_bytes for process in self.processes)

    @property
    def stall_s(self) -> float:
        """Seconds in which threads have waited for memory, all together."""
        return self.counters.get("stall_us", 0) / 1e6

    def __str__(self) -> str:
        many = len(self.processes)
        return (
            f"swaptide: {human(self.resident_bytes)} of {human(self.budget_bytes)} in use, "
            f"{human(self.swapped_bytes)} swapped out ({human(self.compressed_bytes)} of it "
            f"compressed), {many} process{'' if many == 1 else 'es'}, "
            f"waited {self.stall_s:.1f} s"
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Stats":
        """From what `swaptide ctl stats --json` prints."""
        return cls(
            pid=_number(values, "pid"),
            program=str(values.get("program", "")),
            wall_s=float(values.get("wall_s", 0.0)),
            budget_bytes=_number(values, "budget_bytes"),
            resident_bytes=_number(values, "resident_bytes"),
            peak_resident_bytes=_number(values, "peak_resident_bytes"),
            peak_footprint_bytes=_number(values, "peak_footprint_bytes"),
            processes=tuple(map(ProcessStats.from_json, values.get("processes", ()))),
            counters=_counters(values.get("stats")),
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What a run was, at its end."""

    exit_status: int
    wall_s: float
    budget_bytes: int
    peak_resident_bytes: int
    """The most memory that was in RAM."""
    peak_footprint_bytes: int
    """The most memory that the programs had, in RAM and out."""
    counters: Mapping[str, int] = field(repr=False)
    """Pages in and out and more, by the kernel's names."""
    errors: Mapping[str, int]
    """Counts of what must not be: pages lost, writes that failed, memory past the budget."""
    values: Mapping[str, Any] = field(repr=False)
    """All of it, as in the JSON file of `swaptide run --report`."""

    @property
    def pages_out(self) -> int:
        """Pages that were swapped out."""
        return self.counters.get("pswpout", 0) + self.counters.get("zswpout", 0)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Report":
        """From the JSON file of `swaptide run --report`."""
        return cls(
            exit_status=_number(values, "exit_status"),
            wall_s=float(values.get("wall_s", 0.0)),
            budget_bytes=_number(values, "budget_bytes"),
            peak_resident_bytes=_number(values, "peak_resident_bytes"),
            peak_footprint_bytes=_number(values, "peak_footprint_bytes"),
            counters=_counters(values.get("stats")),
            errors=_counters(values.get("errors")),
            values=MappingProxyType(dict(values)),
        )
