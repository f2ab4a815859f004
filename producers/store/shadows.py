"""Shadow traffic: a part of a model's new tasks is copied to another version, and the outputs are compared.

    ADMIT of a task that is a sample ─▶ list of samples ─▶ the leading sweeper: ADMIT of its copy ─▶ any task's way
    copy and task have ended ─▶ PAIR: a row ─▶ DELETE of the copy

Which tasks: `Routing.shadow` says how many percent, drawn by the task's id, of those that generate and were routed to
another version; no adapters' tasks, no lines of batches, no plain Celery messages. A copy has the id `shadow:<id>`, the
tenant TENANT, the tier `batch`, and the task's fields but for its metadata, webhook and order key. It is charged to no
account, counts to no bound, and stands in no list; its row in the ledger has the tenant TENANT.

Copies never keep live work waiting: `producers.sweeper.shadows` makes none while tasks wait for their version, and
deletes those that are open once tasks wait for longer than a sweep. What is dropped is counted by its reason.

`penstock:shadows:pairs:<model>` is a stream with the last KEPT rows (JSON):

| field | what it holds |
| --- | --- |
| `task` | the task's id |
| `version`, `shadow` | the version that ran it, and that of the copy |
| `statuses` | how task and copy ended |
| `tokens` | tokens of each, of all choices |
| `same` | the share of tokens before the first difference, 0 to 1, of the longer output, over all choices; null \
unless both have completed |
| `reasons` | finish reasons of each, by choice |
| `ms` | of each: from its start to its end |
| `refused` | of each: whether its first choice begins as a refusal (`producers.rollouts.refusals`) |
| `engine_seconds` | of each: the engine's time for it; null where no worker noted it |

While a rollout to that version compares likelihoods, a part of the tasks' outputs is scored, as prompts with
`prompt_logprobs`: by the version that made it, and by the copy's, each in a task like a copy (SCORES). The row of such
a score has `task`, `version`, `shadow`, `scored` (tokens), and `scores`: the mean log probability (nats) of a token
under each version. Readers of pairs pass it over.

    dies after                     what remains                          who repairs it
    a sample is taken              a task without a copy                 nobody: copies are best effort
    ADMIT of the copy, its send    as of any task                        the sweeper sends it, or deletes it as late
    PAIR                           the copy, marked as compared          the next sweep deletes it
    ADMIT of one score             one that has no other                 the next sweep deletes it
    DELETE of the task             nothing: it took the copy along
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import mean, median
from typing import Any, Final, Self

from producers.connection.script import Call, parsed, script, text
from producers.contract import keys
from producers.contract.record import Record
from producers.contract.stream import Result
from producers.store.fleet.routing import Shadow
from producers.store.protocol import PACKAGE

#: The tenant of all copies.
TENANT: Final = "~shadow"
#: Fields of a copy's record, beside `shadow_of`.
COPY: Final[dict[str, str | int]] = {"origin": "shadow"}
PREFIX: Final = "shadow:"
#: How the ids of the two tasks begin that score an output: under the version that made it, and under the copy's.
SCORES: Final = (f"{PREFIX}score:0:", f"{PREFIX}score:1:")
#: Longest id of a task that is copied: with each prefix it is a task's id, too.
MAX_ID: Final = 128 - len(SCORES[0])
#: Rows of a model that are kept.
KEPT: Final = 1000
#: Time (s) for which rows, and counts of what was dropped, are kept after the last one.
KEPT_S: Final = 30 * 24 * 3600


def is_sampled(shadow: Shadow, fields: Mapping[str, str | int], task_id: str) -> bool:
    """Whether a task is to be copied. `fields`: of its record."""
    if fields["version"] == shadow.to or fields.get("origin") in ("shadow", "chunk") or len(task_id) > MAX_ID:
        return False
    if any(name in fields for name in ("adapter", "result_bytes", "chunks")):
        return False
    digits = hashlib.sha1(f"{task_id}\0shadow".encode(), usedforsecurity=False).hexdigest()[:13]
    return int(digits, 16) < 16**13 * shadow.percent / 100


def copy_id(task_id: str) -> str:
    """The id of a task's copy."""
    return PREFIX + task_id


def pair(model: str, copy: str, row: Pair | Score) -> Call:
    """PAIR: write the row of a copy, or of a score, once. Answers 1; 0 for a copy without a record."""
    return Call(script(PACKAGE, "pair"), (keys.task(copy), keys.shadow_pairs(model)), (row.to_json(), KEPT, KEPT_S))


@dataclass(frozen=True, slots=True)
class Pair:
    """A task and its copy, compared. The module describes the fields; of two, the task's is the first."""

    task: str
    version: str
    shadow: str
    statuses: tuple[str, str]
    tokens: tuple[int, int]
    same: float | None
    reasons: tuple[tuple[str | None, ...], tuple[str | None, ...]]
    ms: tuple[int | None, int | None]
    engine_seconds: tuple[float | None, float | None]
    refused: tuple[bool, bool] = (False, False)

    @classmethod
    def of(cls, records: tuple[Record, Record], results: tuple[Result, Result], refused: tuple[bool, bool]) -> Self:
        """Compare a task with its copy."""
        choices = [tuple(choice.token_ids for choice in result.choices) for result in results]
        both = all(result.status == "completed" for result in results)
        return cls(
            task=records[0].id,
            version=records[0].fields.get("version", ""),
            shadow=records[1].fields.get("version", ""),
            statuses=(results[0].status, results[1].status),
            tokens=(sum(map(len, choices[0])), sum(map(len, choices[1]))),
            same=same_share(*choices) if both else None,
            reasons=(_reasons(results[0]), _reasons(results[1])),
            ms=(_ms(records[0]), _ms(records[1])),
            engine_seconds=(records[0].engine_seconds, records[1].engine_seconds),
            refused=refused,
        )

    @classmethod
    def parse(cls, raw: str | bytes | None) -> Self | None:
        """A stored row; None for one that cannot be read."""
        fields = parsed(raw)
        try:
            two = {name: tuple(fields[name]) for name in ("statuses", "tokens", "ms", "engine_seconds")}
            reasons = tuple(map(tuple, fields["reasons"]))
            names = {name: fields[name] for name in ("task", "version", "shadow", "same")}
            refused = tuple(fields.get("refused", (False, False)))
            return cls(**names, **two, reasons=reasons, refused=refused)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError):
            return None

    def to_json(self) -> str:
        """The row as it is stored."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Score:
    """A task's output under two versions. The module describes the fields."""

    task: str
    version: str
    shadow: str
    scored: int
    scores: tuple[float, float]

    @classmethod
    def of(cls, records: tuple[Record, Record], results: tuple[Result, Result]) -> Self:
        """From the two tasks that scored it. Raises ValueError without log probabilities of the output."""
        count = int(records[0].fields.get("scored", 0))
        rows = [(result.prompt_logprobs or ())[-count:] for result in results]
        numbers = [[row[0] for row in of_version if row is not None] for of_version in rows]
        if not count or any(len(of_version) != count for of_version in numbers):
            raise ValueError(f"of {count} tokens {' and '.join(map(str, map(len, numbers)))} have log probabilities")
        scores = mean(numbers[0]), mean(numbers[1])
        if not all(map(isfinite, scores)):
            raise ValueError(f"the scores are {scores}")
        version, shadow = (record.fields.get("version", "") for record in records)
        return cls(records[0].fields["shadow_of"], version, shadow, count, scores)

    @classmethod
    def parse(cls, raw: str | bytes | None) -> Self | None:
        """A stored row; None for a pair's, and for one that cannot be read."""
        fields = parsed(raw)
        try:
            first, second = map(float, fields["scores"])
            names = {name: fields[name] for name in ("task", "version", "shadow", "scored")}
            return cls(**names, scores=(first, second))
        except (KeyError, TypeError, ValueError):
            return None

    def to_json(self) -> str:
        """The row as it is stored."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Summary:
    """The pairs of two versions. `completed`: pairs of which both have completed, over which the rest is taken; `same`:
    the mean share of tokens before the first difference; `equal`: the share of pairs with the same tokens;
    `same_reason`: with the same finish reasons; `length`: tokens of the copies by those of the tasks; `time`: the
    median of the times from start to end, by the task's. None where no pair says."""

    version: str
    shadow: str
    pairs: int
    completed: int
    same: float | None
    equal: float | None
    same_reason: float | None
    length: float | None
    time: float | None


def summaries(pairs: Sequence[Pair]) -> list[Summary]:
    """A summary of each two versions, in the order in which they come."""
    by_versions: dict[tuple[str, str], list[Pair]] = {}
    for row in pairs:
        by_versions.setdefault((row.version, row.shadow), []).append(row)
    return [_summary(*versions, rows) for versions, rows in by_versions.items()]


def pairs_read(model: str, limit: int) -> tuple[tuple[Any, ...], ...]:
    """Commands whose answers `report` takes. `limit`: of the latest pairs."""
    return (
        ("XREVRANGE", keys.shadow_pairs(model), "+", "-", "COUNT", limit),
        ("HGETALL", keys.shadow_drops(model)),
    )


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a model's shadow traffic. `pairs`: the latest first; `drops`: reason -> how many tasks were not
    copied, or copies not compared, for it."""

    pairs: tuple[Pair, ...]
    drops: Mapping[str, int]

    @classmethod
    def of(cls, entries: Any, drops: Mapping[Any, Any]) -> Self:
        """From the answers to `pairs_read`."""
        rows = (Pair.parse(value) for _, fields in entries for value in _values(fields))
        counts = {text(name): int(count) for name, count in sorted(drops.items())}
        return cls(tuple(row for row in rows if row is not None), counts)


def _values(fields: Any) -> list[Any]:
    """The values of an entry, as a client with or without callbacks for its answers gives it."""
    return list(fields.values()) if isinstance(fields, Mapping) else list(fields)[1::2]


def _summary(version: str, shadow: str, rows: Sequence[Pair]) -> Summary:
    both = [row for row in rows if row.same is not None]
    baseline_tokens = sum(row.tokens[0] for row in both)
    times = [row.ms[1] / row.ms[0] for row in both if row.ms[0] and row.ms[1] is not None]
    return Summary(
        version,
        shadow,
        pairs=len(rows),
        completed=len(both),
        same=mean(row.same or 0.0 for row in both) if both else None,
        equal=mean(row.same == 1.0 for row in both) if both else None,
        same_reason=mean(row.reasons[0] == row.reasons[1] for row in both) if both else None,
        length=sum(row.tokens[1] for row in both) / baseline_tokens if baseline_tokens else None,
        time=median(times) if times else None,
    )


def same_share(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> float:
    """The share of tokens before the first difference, of the longer output, over all choices; 1 for empty ones."""
    same = longer = 0
    for tokens, other_tokens in zip(first, second, strict=False):
        pairs = zip(tokens, other_tokens, strict=False)
        same += next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(other_tokens)))
        longer += max(len(tokens), len(other_tokens))
    return same / longer if longer else 1.0


def _reasons(result: Result) -> tuple[str | None, ...]:
    return tuple(choice.finish_reason for choice in result.choices)


def _ms(record: Record) -> int | None:
    started, finished = record.time("started"), record.time("finished")
    return None if started is None or finished is None else max(0, finished - started)
