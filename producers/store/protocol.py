"""The store's side of the protocol: one function a script, each giving the `Call` to send and reading its answer.

The preconditions and effects stand at the head of each `scripts/*.lua`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from producers.connection.script import Call, script, text
from producers.contract import keys
from producers.contract.record import Record

PACKAGE: Final = "producers.store"

#: A submit older than this is refused (ms): long before the sweeper looks, so that a retry cannot revive a swept task.
SUBMIT_WINDOW_MS: Final = 15_000
#: The sweeper re-sends a record that was `submitting` for this long (ms).
SWEEP_AGE_MS: Final = 30_000
#: A settled record and its stream are kept this long (s), unless the task says otherwise.
DEFAULT_TTL_S: Final = 24 * 3600
#: A task is given up when this many workers died on it with no new token, or STRETCH times as many in all.
MAX_DEATHS: Final = 3
#: `claim.lua` has it too.
STRETCH: Final = 4


def admit(task_id: str, nonce: str, asked_ms: int, record: Mapping[str, str | int]) -> Call:
    """Answers `new`, `mine` (this very request came before), `exists` or `late`."""
    pairs = [part for item in record.items() for part in item]
    return Call(
        script(PACKAGE, "admit"),
        (keys.task(task_id), keys.SUBMITTING, keys.DEADLINES),
        (task_id, nonce, asked_ms, SUBMIT_WINDOW_MS, *pairs),
    )


def queued(task_id: str) -> Call:
    """Answers the status after it, or `gone`."""
    return Call(script(PACKAGE, "queued"), (keys.task(task_id), keys.SUBMITTING), (task_id,))


def cancel(task_id: str) -> Call:
    """Answers `[accepted 0|1, status]`."""
    return Call(script(PACKAGE, "cancel"), (keys.task(task_id), keys.stream(task_id)), (task_id,))


def unread(task_id: str, over_ms: int) -> Call:
    """`over_ms`: when its reader lease ended, as LAPSED answered. Answers `[1, accepted 0|1, status]`, or `[0]`."""
    return Call(script(PACKAGE, "unread"), (keys.task(task_id), keys.stream(task_id), keys.READERS), (task_id, over_ms))


def expire(task_id: str) -> Call:
    """For a task whose deadline has passed and that nobody runs. Answers the status after it, or `gone`."""
    return Call(script(PACKAGE, "expire"), (keys.task(task_id), keys.stream(task_id), keys.DEADLINES), (task_id,))


@dataclass(frozen=True, slots=True)
class Claimed:
    """What CLAIM said: `lost`, `done`, `busy`, or `settle` and `go` with the record."""

    answer: str
    record: Record | None = None


def claim(
    task_id: str,
    claim_id: str,
    incarnation: str,
    *,
    plain: Mapping[str, str | int] | None = None,
    condemned: bool = False,
    max_deaths: int = MAX_DEATHS,
) -> Call:
    """`plain`: the record's fields, where the message came from plain Celery and may have no record yet."""
    pairs = [part for item in (plain or {}).items() for part in item]
    return Call(
        script(PACKAGE, "claim"),
        (keys.task(task_id), keys.stream(task_id)),
        (task_id, claim_id, incarnation, int(plain is not None), max_deaths, int(condemned), *pairs),
    )


def is_last_chance(record: Record, max_deaths: int) -> bool:
    """Whether the task is given up if the worker that has it now dies, too. Never where one death is enough."""
    left = min(max_deaths - record.stuck, STRETCH * max_deaths - record.deaths)
    return left <= 1 < max_deaths


def read_claim(task_id: str, answer: Sequence[Any]) -> Claimed:
    kind = text(answer[0])
    if len(answer) == 1:
        return Claimed(kind)
    return Claimed(kind, Record.parse(task_id, dict(zip(answer[2::2], answer[3::2], strict=True))))


@dataclass(slots=True)
class Append:
    """One sequence's news: `entries` are stream entries (JSON), the first of them the choice's token `index`."""

    task_id: str
    claim_id: str
    choice: int
    index: int
    entries: list[str] = field(default_factory=list)
    scored: bool = False
    """The prompt's entries were published before: without them nothing is appended."""
    discarded: int = 0
    """Tokens of candidates of best_of that are not published."""
    prompt_tokens: int = 0
    """The prompt's length, of a text that the record does not count yet; 0 where there is nothing to say."""


def append(batch: Sequence[Append]) -> Call:
    """One call for a whole engine step; `read_append` gives an (answer, next) for each."""
    names: list[str] = []
    args: list[str | int] = []
    for a in batch:
        names += (keys.task(a.task_id), keys.stream(a.task_id))
        args += (a.task_id, a.claim_id, a.choice, a.index, int(a.scored), a.discarded, a.prompt_tokens, len(a.entries))
        args += a.entries
    return Call(script(PACKAGE, "append"), names, args)


def read_append(answer: Sequence[Any]) -> list[tuple[str, int]]:
    return [(text(kind), int(n)) for kind, n in zip(answer[::2], answer[1::2], strict=True)]


def prompt(task_id: str, claim_id: str, entries: Sequence[str]) -> Call:
    """`entries`: see `producers.contract.events.encode_prompt`. Answers `ok`, `other` or `cancel`."""
    return Call(script(PACKAGE, "prompt"), (keys.task(task_id), keys.stream(task_id)), (task_id, claim_id, *entries))


def finish(
    task_id: str,
    claim_id: str,
    status: str,
    *,
    reasons: str,
    nexts: Sequence[int],
    error: str = "null",
    prompt_tokens: int = 0,
    cached_tokens: int = 0,
    scored: bool = False,
) -> Call:
    """`reasons`: JSON array, a finish reason a choice; `error`: JSON; `scored`: the prompt's entries were published.
    Answers `[won, status]`, `[other]` or `[resend, next ...]`."""
    return Call(
        script(PACKAGE, "finish"),
        (keys.task(task_id), keys.stream(task_id)),
        (task_id, claim_id, status, reasons, error, prompt_tokens, cached_tokens, int(scored), *nexts),
    )


def settle(task_id: str, default_ttl_s: int = DEFAULT_TTL_S) -> Call:
    """Answers 1, or 0 where the record is not final."""
    return Call(script(PACKAGE, "settle"), (keys.task(task_id), keys.stream(task_id)), (task_id, default_ttl_s))


def orphan(task_id: str, *, gone: bool = False, default_ttl_s: int = DEFAULT_TTL_S) -> Call:
    """Answers `settled`, `owned`, `message` (it needs its own, and that is not seen to be `gone`), `gone` or `open`."""
    return Call(
        script(PACKAGE, "orphan"),
        (keys.task(task_id), keys.stream(task_id), keys.UNSETTLED),
        (task_id, default_ttl_s, int(gone)),
    )


def compact(task_id: str, settled_ms: int, entries: int, blocks: Sequence[bytes]) -> Call:
    """`settled_ms`: as the record says; `blocks`: see `producers.contract.blocks`. Answers `done`, `gone`, `unsettled`
    or `changed`."""
    return Call(
        script(PACKAGE, "compact"),
        (keys.task(task_id), keys.stream(task_id), keys.result(task_id), keys.SETTLED),
        (task_id, settled_ms, entries, *blocks),
    )


def release(task_id: str, claim_id: str) -> Call:
    """Answers 1, or 0 where another holds the claim."""
    return Call(script(PACKAGE, "release"), (keys.task(task_id),), (claim_id,))


def lease(incarnation: str, about: str, ttl_ms: int, *, take: bool) -> Call:
    """Take or renew a worker's lease here; `about`: what it says of itself. Answers 1, or 0 where it is gone."""
    return Call(script(PACKAGE, "lease"), (keys.lease(incarnation),), (about, ttl_ms, int(take)))
