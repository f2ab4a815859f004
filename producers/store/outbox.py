"""The outbox: events that wait to be delivered to webhooks, or as replies, one row for each event and destination.

    final end (`scripts/_outbox.lua`) ─▶ due ─▶ TAKE ─▶ HTTP ─▶ DELIVERED ─▶ delivered ─▶ trimmed
                                          ▲       ├──▶ RETRY, later ─▶ due
                                          │       └──▶ DEAD ─▶ dead ─▶ trimmed
                                          └── REPLAY ◀── delivered, dead

A reply whose source nobody runs is dead in the end, too (UNTAKEN).

A row is named `<webhook id>.<endpoint id>`, or `<webhook id>.own` for the webhook that a task brings along, or
`<webhook id>.reply` for the reply to the message that made the task (`producers.sources.messages.replies`). The webhook
id is `evt_` and a SHA-1 of object id, its time of creation and event type: all destinations of an event, all tries and
all replays have the same. The row is the hash `penstock:webhooks:row:<name>`:

| field | what it holds |
| --- | --- |
| `webhook_id`, `type`, `object`, `at` | the event: `evt_...`, `response.completed`, `data.id`, server time (s) |
| `url` | where it goes; of an endpoint as it was then: its current one counts |
| `endpoint` | the endpoint's id; absent for a task's own webhook |
| `secret` | of a task's own webhook (`producers.contract.sealing`); absent: the endpoint's, or the tenant's |
| `tenant`, `model` | of the task, where it has them |
| `restored` | 1: it, or its task or batch, is from a backup, so it may have been delivered before |
| `source`, `reply` | of a reply: the source that sends it, and what the record's `reply` says |
| `state` | due, delivered, dead |
| `holder` | the TAKE that leased it |
| `tries`, `attempts` | finished tries since the event, or its replay; the last of all tries (JSON, see `Attempt`) |

A row does not depend on its task's record, whose time to live may end first. The zsets `penstock:webhooks:due`,
`:delivered` and `:dead` have the names of all rows by server time (ms); replies that are due are in
`penstock:replies:<source>` instead, and the set `penstock:replies` has their sources. `penstock:webhooks:wake` is
published when a row becomes due at once, with the source of a reply, else empty; rows that wait for a later try become
due silently, see `LeasedRows.next_ms`.

Endpoints are fields of `penstock:webhooks:endpoints`, as JSON; sets have the ids of each tenant's. The scripts
read `id`, `url`, `event_types`, `tenant` (null: all tenants), `enabled`, and `celery` (plain Celery tasks, too). A
record's `webhook` is JSON, too: `url` and `events`; without `events` it gets every final event.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, cast

from redis.asyncio import Redis

from producers.connection.script import Call, aexecute_many, script, seconds, text
from producers.contract import keys
from producers.store.protocol import PACKAGE

State = Literal["due", "delivered", "dead"]
STATES: Final[dict[State, str]] = {
    "due": keys.WEBHOOKS_DUE,
    "delivered": keys.WEBHOOKS_DELIVERED,
    "dead": keys.WEBHOOKS_DEAD,
}

#: Tries that a row remembers: one whole schedule.
ATTEMPTS_KEPT: Final = 10
#: Rows that a listing reads at a time.
PAGE: Final = 200


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try. `status`: of the HTTP answer, if there was one; `answer`: its first KB; `error`: why there was none."""

    at: int
    """Server time (s)."""
    latency_ms: int
    status: int | None = None
    answer: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One delivery of an event, as the table above says. `url` of an endpoint is the one that it had then."""

    name: str
    webhook_id: str
    type: str
    object: str
    at: int
    url: str
    state: State
    endpoint: str | None = None
    secret: str | None = None
    tenant: str | None = None
    model: str | None = None
    source: str | None = None
    reply: str | None = None
    restored: bool = False
    tries: int = 0
    attempts: tuple[Attempt, ...] = ()

    @classmethod
    def parse(cls, name: str, raw: Sequence[Any]) -> Row:
        """`raw`: field, value, ... as HGETALL answers a script.

        A row that is broken, or of another version, is read as far as it goes: it must not hold up those taken with it.
        """
        values = {text(k): text(v) for k, v in zip(raw[::2], raw[1::2], strict=True)}
        columns: dict[str, Any] = {field: values.get(field, "") for field in ("webhook_id", "type", "object", "url")}
        columns |= {field: values.get(field) for field in ("endpoint", "secret", "tenant", "model", "source", "reply")}
        columns |= {field: int(values.get(field, 0)) for field in ("at", "tries")}
        columns["restored"] = "restored" in values
        return cls(
            name,
            **columns,
            state=cast(State, values.get("state", "due")),
            attempts=_attempts(values.get("attempts", "[]")),
        )

    @property
    def due(self) -> str:
        """The key of the rows that are due like it."""
        return due_at(self.source)

    @property
    def destination(self) -> str:
        """Its destination: an endpoint's id, `own` or `reply`."""
        return self.endpoint or ("own" if self.source is None else "reply")

    def _with(self, attempt: Attempt) -> str:
        """All attempts that are kept, with this one (JSON)."""
        return json.dumps([asdict(entry) for entry in (*self.attempts, attempt)[-ATTEMPTS_KEPT:]])


def due_at(source: str | None) -> str:
    """The key of due rows: of a source's replies, or of webhooks."""
    return keys.WEBHOOKS_DUE if source is None else keys.replies(source)


def put(name: str, fields: Mapping[str, str]) -> Call:
    """PUT: a row that no script writes, due now. Answers 1, or 0 if there is such a row."""
    source = fields.get("source")
    pairs = [part for item in fields.items() for part in item]
    return Call(script(PACKAGE, "outbox_put"), (keys.webhook_row(name), due_at(source)), (name, source or "", *pairs))


def _attempts(raw: str) -> tuple[Attempt, ...]:
    names = [entry.name for entry in fields(Attempt)]
    try:
        return tuple(Attempt(**{name: entry[name] for name in names if name in entry}) for entry in json.loads(raw))
    except (ValueError, TypeError):
        return ()


def take(holder: str, n: int, lease_ms: int, source: str | None = None) -> Call:
    """TAKE: lease the `n` oldest rows that are due, webhooks or a source's replies; `read_take` reads the answer.

    `holder`: a fresh id for each call, so that a late call for an earlier lease changes nothing. `lease_ms`: longer
    than any try lasts. If the reply is lost, the rows are due again when the lease ends.
    """
    return Call(script(PACKAGE, "outbox_take"), (due_at(source),), (holder, lease_ms, n))


@dataclass(frozen=True, slots=True)
class LeasedRows:
    """Rows that are leased now, and the time (ms) until the next row is due; None if no other row waits."""

    rows: list[Row]
    next_ms: int | None


def read_take(answer: Sequence[Any]) -> LeasedRows:
    rows = [Row.parse(text(name), raw) for name, raw in zip(answer[1::2], answer[2::2], strict=True)]
    return LeasedRows(rows, None if int(answer[0]) < 0 else int(answer[0]))


def delivered(row: Row, holder: str, attempt: Attempt) -> Call:
    """DELIVERED: the receiver has the event. Answers 1, or 0 if another holder has the row."""
    return _end(row, holder, "delivered", attempt)


def dead(row: Row, holder: str, attempt: Attempt) -> Call:
    """DEAD: give the row up, until it is replayed. Answers 1, or 0 if another holder has the row."""
    return _end(row, holder, "dead", attempt)


def _end(row: Row, holder: str, state: State, attempt: Attempt) -> Call:
    names = (keys.webhook_row(row.name), row.due, STATES[state])
    return Call(script(PACKAGE, "outbox_end"), names, (row.name, holder, state, row._with(attempt)))


def retry(row: Row, holder: str, delay_ms: int, attempt: Attempt | None = None) -> Call:
    """RETRY: try the row again in `delay_ms`; without an attempt it is given back untried, and counts none.

    Answers 1, or 0 if another holder has the row, or it was done before.
    """
    names = (keys.webhook_row(row.name), row.due)
    attempts = row._with(attempt) if attempt else ""
    return Call(script(PACKAGE, "outbox_retry"), names, (row.name, holder, delay_ms, attempts))


def replay(name: str) -> Call:
    """REPLAY: deliver a row again, now, with the webhook id that it had. Answers `replayed`, `held` (a process tries it
    at this moment) or `gone`."""
    return Call(script(PACKAGE, "outbox_replay"), (keys.webhook_row(name), *STATES.values()), (name,))


def trim(state: State, age_s: float, max_rows: int, limit: int = 500) -> Call:
    """TRIM: remove rows that were delivered, or dead, for `age_s`, and the oldest beyond `max_rows`. Answers their
    number; call it again while that is `limit`."""
    return Call(script(PACKAGE, "outbox_trim"), (STATES[state],), (int(age_s * 1000), max_rows, limit))


def untaken(source: str, age_s: float, limit: int = 500) -> Call:
    """UNTAKEN: replies of a source that were due for `age_s`, and nobody took them, are dead. Answers how many; it may
    be called again while that is `limit`."""
    names = (due_at(source), keys.WEBHOOKS_DEAD, keys.REPLIES)
    return Call(script(PACKAGE, "outbox_untaken"), names, (source, int(age_s * 1000), limit))


@dataclass(frozen=True, slots=True)
class Due:
    """Webhooks that are due, or a source's replies; for how long (s) the oldest has been that nobody took, or 0."""

    rows: int = 0
    oldest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """Numbers of rows by state. `due`: what is due, of webhooks (None), and of each source with replies."""

    rows: dict[State, int]
    due: dict[str | None, Due]

    @property
    def oldest_due_s(self) -> float:
        return max((due.oldest_s for due in self.due.values()), default=0.0)


async def backlog(store: Redis) -> Backlog:
    """Read it in two round trips. Raises redis.exceptions.RedisError or OSError."""
    sources = await _sources(store)
    async with store.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.zcard(keys.WEBHOOKS_DELIVERED)
        pipe.zcard(keys.WEBHOOKS_DEAD)
        for source in sources:
            pipe.zcard(due_at(source))
            pipe.zrange(due_at(source), 0, 0, withscores=True)
        now, delivered, dead, *answers = await pipe.execute()
    waited = [max(0.0, seconds(now) - first[0][1] / 1000) if first else 0.0 for first in answers[1::2]]
    due = {source: Due(*values) for source, *values in zip(sources, answers[::2], waited, strict=True)}
    return Backlog({"due": sum(answers[::2]), "delivered": delivered, "dead": dead}, due)


async def _sources(store: Redis) -> list[str | None]:
    """Sources with due rows (`due_at`): None for webhooks, and each source with replies."""
    (sources,) = await aexecute_many(store, [("SMEMBERS", keys.REPLIES)])
    return [None, *sorted(text(source) for source in sources)]


async def get(store: Redis, name: str) -> Row | None:
    """A row; None if it does not exist. Raises redis.exceptions.RedisError or OSError."""
    return (await _read(store, [name]))[0]


async def rows(
    store: Redis, state: State, *, endpoint: str | None = None, since: int | None = None, until: int | None = None
) -> AsyncGenerator[Row]:
    """Rows of a state, the last to enter it first.

    `endpoint`: of this one alone (`own`: tasks' own webhooks; `reply`: replies). `since`, `until`: of events at these
    times (server time, s; both included). A row that changes its state meanwhile may be missing. Raises
    redis.exceptions.RedisError or OSError.
    """
    async for page in _names(store, state, since):
        for row in await _read(store, page):
            if row is None or row.state != state or endpoint not in (None, row.destination):
                continue
            if (since is None or row.at >= since) and (until is None or row.at <= until):
                yield row


async def _names(store: Redis, state: State, since: int | None) -> AsyncIterator[list[str]]:
    """Pages of names. A row enters no state before its event, so older entries need not be read."""
    first, yielded = "+inf", set[str]()
    min_score = "-inf" if since is None else since * 1000
    indexes = [due_at(source) for source in await _sources(store)] if state == "due" else [STATES[state]]
    while True:
        num = PAGE + len(yielded)
        async with store.pipeline(transaction=False) as pipe:
            for key in indexes:
                pipe.zrevrangebyscore(key, first, min_score, start=0, num=num, withscores=True)
            entries = [entry for page in await pipe.execute() for entry in page]
        scores = {text(name): score for name, score in sorted(entries, key=lambda entry: entry[1], reverse=True)[:num]}
        if not (fresh := [name for name in scores if name not in yielded]):
            return
        yield fresh
        last = min(scores.values())
        yielded = {name for name, score in scores.items() if score == last}
        first = repr(last)


async def _read(store: Redis, names: Sequence[str]) -> list[Row | None]:
    answers = await aexecute_many(store, [("HGETALL", keys.webhook_row(name)) for name in names])
    return [
        Row.parse(name, [part for item in raw.items() for part in item]) if raw else None
        for name, raw in zip(names, answers, strict=True)
    ]
