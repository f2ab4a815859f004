"""Traces: the tasks that arrive, and when. A recorded one is a CSV file.

Its first line names the columns: `time` (seconds, or ISO 8601), `tier`, `prompt_tokens`, `output_tokens`. Their order
is free, and others are ignored. Lines may be in any order. Times count from the earliest.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Final, NamedTuple

from producers.contract import keys

COLUMNS: Final = ("time", "tier", "prompt_tokens", "output_tokens")
RANKS: Final = {tier: rank for tier, (rank, _) in keys.TIERS.items()}
TIERS: Final = tuple(sorted(RANKS, key=RANKS.__getitem__))
#: Most tokens of a prompt or an output.
MOST: Final = 10_000_000
#: Longest time (s) between two arrivals. A longer one is a mistake, and would take for ever.
LONGEST: Final = 366 * 86_400.0


class Arrival(NamedTuple):
    """One task. `at`: seconds since the trace's start. `rank`: of its tier, 0 goes first."""

    at: float
    rank: int
    prompt: int
    output: int


def read(path: Path) -> list[Arrival]:
    """A recorded trace, in order of time. Raises OSError, or ValueError naming the line that makes no sense."""
    with path.open(encoding="utf-8", newline="") as file:
        try:
            return parse(file, str(path))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} is no CSV file in UTF-8: {error}") from error


def parse(lines: Iterable[str], name: str) -> list[Arrival]:
    """The same from lines. Raises ValueError."""
    rows = csv.DictReader(lines, skipinitialspace=True)
    missing = [column for column in COLUMNS if column not in (rows.fieldnames or ())]
    if missing:
        raise ValueError(f"{name}, line 1: no column {', '.join(missing)}; the columns are {', '.join(COLUMNS)}")
    found, clocks = [], set()
    for row in rows:
        try:
            at, clock = _time(row["time"])
            clocks.add(clock)
            found.append(Arrival(at, _rank(row["tier"]), *(_tokens(row, column) for column in COLUMNS[2:])))
            if len(clocks) > 1:
                raise ValueError("time is in seconds on some lines and a date on others")
        except ValueError as error:
            raise ValueError(f"{name}, line {rows.line_num}: {error}") from None
    if not found:
        raise ValueError(f"{name} has no task")
    start, end = min(one.at for one in found), max(one.at for one in found)
    if end - start > LONGEST:
        raise ValueError(f"{name}: {(end - start) / 86_400:,.0f} days from the first task to the last; at most 366")
    return sorted(one._replace(at=one.at - start) for one in found)


def _time(said: str | None) -> tuple[float, str]:
    """Seconds, and which kind of time it was."""
    try:
        at = float(said or "")
        if isfinite(at):
            return at, "seconds"
    except ValueError:
        pass
    try:
        date = datetime.fromisoformat(said or "")
    except ValueError:
        raise ValueError(f"time is {said!r}; it must be seconds, or a date as 2026-11-23T09:30:00.5Z") from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp(), "date"


def _rank(said: str | None) -> int:
    if said not in RANKS:
        raise ValueError(f"tier is {said!r}; it must be {', '.join(RANKS)}")
    return RANKS[said]


def _tokens(row: dict[str, str | None], column: str) -> int:
    try:
        tokens = int(row[column] or "")
    except (TypeError, ValueError):
        tokens = -1
    if not 0 <= tokens <= MOST:
        told = "missing" if row[column] is None else repr(row[column])
        raise ValueError(f"{column} is {told}; it must be a whole number from 0 to {MOST:,}")
    return tokens


def write(path: Path, arrivals: Iterable[Arrival]) -> None:
    """Write a trace as it is read. Raises OSError."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        rows.writerows((round(one.at, 3), TIERS[one.rank], one.prompt, one.output) for one in arrivals)
