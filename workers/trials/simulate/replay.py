"""Replay of kept decisions: each is computed again from what is kept with it, by the same `decide`.

Takes what `penstock scale explain --history N --json` prints: a JSON object a line, with a list of decisions under
`history`. A line may also be one decision. See `producers.store.fleet.scaling` for the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.autoscaler.policy import Memory, Rules, Signals, decide, restored


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that comes out otherwise."""

    pool: str
    at: float
    kept: int
    computed: int
    why: str


@dataclass(frozen=True, slots=True)
class Replay:
    """`ended`: decisions that were not the policy's, since another version had replaced the pool's, or an operator had
    pinned its number."""

    decisions: int
    ended: int
    differences: list[Difference]


def replay(path: Path) -> Replay:
    """Raises OSError, or ValueError, which names the bad line."""
    count, ended, differences = 0, 0, []
    for number, pool, kept in _kept(path):
        try:
            target, reason, memory = _again(kept)
            was = int(kept["wanted"])
            after = restored(Memory, kept["memory"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: no decision that can be computed again: {error!r}") from error
        count += 1
        if str(kept["reason"]).startswith("0: another version") or kept.get("pin"):
            ended += 1
        elif target != was or memory != after:
            difference = f"{reason}; kept was: {kept['reason']}" if target != was else "what it remembers differs"
            differences.append(Difference(pool, float(kept["at"]), was, target, difference))
    if not count:
        raise ValueError(f"{path} has no decision")
    return Replay(count, ended, differences)


def _kept(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} is no JSON object")
        for decision in record.get("history", [record]):
            yield number, str(record.get("pool", record.get("model", ""))), decision


def _again(kept: dict[str, Any]) -> tuple[int, str, Memory]:
    signals = None if kept["signals"] is None else restored(Signals, kept["signals"])
    rules = {"cheap_start": 0.0, **kept["rules"]}  # of a release without it
    decision, memory = decide(Rules(**rules), signals, restored(Memory, kept["before"]))
    return decision.target, decision.reason, memory
