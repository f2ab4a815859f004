"""The store's side of the protocol: one function for each script, which returns the `Call` to send.

The head of each `scripts/*.lua` has its precondition, effect and answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from producers.connection.script import Call, script, text
from producers.contract import keys, levels
from producers.contract.record import Record
from producers.store.access.audit import KEPT, Change
from producers.store.references import Reference

PACKAGE: Final = "producers.store"

#: Age (ms) at which a submit is refused, well before the sweeper acts: a retry cannot revive a swept task.
SUBMIT_WINDOW_MS: Final = 15_000
#: Time (ms) after which the sweeper sends the message of a record that is still `submitting`.
SWEEP_AGE_MS: Final = 30_000
#: Time (s) for which a settled record and its stream are kept, unless the task has a `ttl`.
DEFAULT_TTL_S: Final = 24 * 3600
#: Time (s) after which the writer of a noted blob counts as dead: far more than a commit, or a join, takes.
NOTED_S: Final = 6 * 3600
#: Time (s) for which at least the id of a deleted task is kept: longer than a request that makes it may be under way.
ERASED_S: Final = 3600
#: The same time for a plain Celery task, which its message would make again: SQS keeps a message for 14 days at most.
ERASED_PLAIN_S: Final = 15 * 24 * 3600
#: Time (s) for which an id is noted that was revoked before it had a record, and the most ids: as long as a plain
#: message may wait for a worker, and as many as a Celery worker remembers.
REVOKED_S: Final = ERASED_PLAIN_S
MAX_REVOKED: Final = 50_000
#: Worker deaths without a new token after which a task is given up; or STRETCH times as many deaths in all.
MAX_DEATHS: Final = 3
#: Silence (s) after which a reader counts as gone.
READER_LEASE_S: Final = 15.0
#: `claim.lua` has the same number.
STRETCH: Final = 4


def admit(
    task_id: str,
    nonce: str,
    asked_ms: int,
    record: Mapping[str, str | int],
    *,
    accounts: Sequence[str] = (),
    charge: str = "",
    bounds: str = "",
    generation: int | None = None,
) -> Call:
    """ADMIT: create a record. Answers `new`, `mine` (the same request came before), `exists`, `erased` (a task with
    this id was deleted), `late` or `rerouted`.

    `accounts`: those that are charged, as `charge` says (JSON, `producers.store.usage.limits`): then the answer is not
    `new`, but what is read there. `bounds`: on what waits (JSON, `producers.store.waiting.Room`); where one is reached,
    the answer is what `producers.store.waiting.refused` reads. Where the store is too full for the task's tier, it is
    `[storage, bytes in use and promised, the most for its tier]`. `generation`: of the routing that gave the record its
    version, 0 where there was none; where the routing has changed since, and leads to that version no more, the answer
    is `rerouted`. None: any version is taken.
    """
    pairs = chain.from_iterable(record.items())
    return Call(
        script(PACKAGE, "admit"),
        (keys.task(task_id), keys.SUBMITTING, keys.DEADLINES, *map(keys.account, accounts)),
        (task_id, nonce, asked_ms, SUBMIT_WINDOW_MS, charge, bounds, "" if generation is None else generation, *pairs),
    )


def queued(task_id: str) -> Call:
    """QUEUED: mark a record as queued. Answers its status then, or `gone`."""
    return Call(script(PACKAGE, "queued"), (keys.task(task_id), keys.SUBMITTING), (task_id,))


def cancel(task_id: str) -> Call:
    """CANCEL: cancel a task. Answers `[accepted 0|1, status]`."""
    return Call(script(PACKAGE, "cancel"), (keys.task(task_id), keys.stream(task_id)), (task_id,))


def delete(task_id: str, nonce: str) -> Call:
    """DELETE: remove a task, cancelled if it has not ended, and all that the store has of it.

    `nonce`: of this call, which is repeated with it. Answers `[its status before]`, `[mine]` (the same call came
    before), `[gone]` or `[batch, id]`: it is a line of that batch, and stays.
    """
    kept = (ERASED_S, ERASED_PLAIN_S)
    return Call(script(PACKAGE, "delete"), (keys.task(task_id), keys.stream(task_id)), (task_id, nonce, *kept))


def revoke(task_id: str, seconds: float = REVOKED_S, limit: int = MAX_REVOKED) -> Call:
    """REVOKE: follow Celery's revoke of a task. Answers `noted` (it has no record), `owned` (a live worker has it and
    hears of it by itself), or its status after CANCEL."""
    names = keys.task(task_id), keys.stream(task_id), keys.REVOKED
    return Call(script(PACKAGE, "revoke"), names, (task_id, int(seconds * 1000), limit))


def unread(task_id: str, over_ms: int) -> Call:
    """UNREAD: cancel a task whose reader lease ended at `over_ms`, as LAPSED answered.

    Answers `[1, accepted 0|1, status]`, or `[0]` if the lease was renewed.
    """
    return Call(script(PACKAGE, "unread"), (keys.task(task_id), keys.stream(task_id), keys.READERS), (task_id, over_ms))


def expire(task_id: str) -> Call:
    """EXPIRE: end a task whose deadline has passed and that no worker runs. Answers its status then, or `gone`."""
    return Call(script(PACKAGE, "expire"), (keys.task(task_id), keys.stream(task_id), keys.DEADLINES), (task_id,))


@dataclass(frozen=True, slots=True)
class Claimed:
    """CLAIM's answer: `lost`, `done` with the reason to keep the message, if any, `erased` (a plain task that was
    deleted), `busy`, `elsewhere` with the queue that the message belongs to, `settle` or `go` with the record."""

    answer: str
    record: Record | None = None
    queue: str = ""
    letter: str = ""


def claim(
    task_id: str,
    claim_id: str,
    incarnation: str,
    pool: keys.Pool,
    *,
    plain: Mapping[str, str | int] | None = None,
    condemned: bool = False,
    max_deaths: int = MAX_DEATHS,
    needs: int = 0,
) -> Call:
    """CLAIM: take a task for a delivery; `read_claim` reads the answer.

    `pool`: the worker's. `plain`: the record's fields, for a plain Celery message, which may have no record yet.
    `needs`: the level that such a message needs.
    """
    pairs = [part for item in (plain or {}).items() for part in item]
    return Call(
        script(PACKAGE, "claim"),
        (keys.task(task_id), keys.stream(task_id)),
        (
            task_id,
            claim_id,
            incarnation,
            int(plain is not None),
            max_deaths,
            int(condemned),
            pool.version,
            pool.version_queue,
            pool.fingerprint,
            levels.LEVEL,
            needs,
            *pairs,
        ),
    )


def is_last_chance(record: Record, max_deaths: int) -> bool:
    """Whether the task is given up if its current worker dies, too. False if a single death is enough."""
    remaining = min(max_deaths - record.stuck, STRETCH * max_deaths - record.deaths)
    return remaining <= 1 < max_deaths


def read_claim(task_id: str, answer: Sequence[Any]) -> Claimed:
    kind = text(answer[0])
    if len(answer) == 1:
        return Claimed(kind)
    if kind == "done":
        return Claimed(kind, letter=text(answer[1]))
    if kind == "elsewhere":
        return Claimed(kind, queue=text(answer[1]))
    return Claimed(kind, Record.parse(task_id, dict(zip(answer[2::2], answer[3::2], strict=True))))


@dataclass(slots=True)
class Append:
    """One sequence's new entries. `entries`: stream entries (JSON); the first is the choice's token `index`."""

    task_id: str
    claim_id: str
    choice: int
    index: int
    entries: list[str] = field(default_factory=list)
    scored: bool = False
    """Whether the prompt's entries were published before; nothing is appended if they are missing."""
    discarded: int = 0
    """Number of unpublished tokens of best_of's candidates, or of beams."""
    prompt_tokens: int = 0
    """Length of a text prompt that the record does not have yet; 0: no news."""
    run: str = ""
    """Its engine's account of it (`producers.contract.record.Run.script_argument`); empty: no news."""


def append(batch: Sequence[Append]) -> Call:
    """APPEND: one call for a whole engine step. `read_append` gives (answer, next) for each sequence."""
    names: list[str] = []
    args: list[str | int] = []
    for a in batch:
        names += (keys.task(a.task_id), keys.stream(a.task_id))
        count, more = len(a.entries), ""
        if a.scored or a.discarded or a.prompt_tokens or a.run:
            more = f"{int(a.scored)} {a.discarded} {a.prompt_tokens} {a.run}"
        args += (a.task_id, a.claim_id, f"next:{a.choice}", a.index, a.index + count, more, count, *a.entries)
    return Call(script(PACKAGE, "append"), names, args)


def read_append(answer: Sequence[Any]) -> list[tuple[str, int]]:
    return [(text(kind), int(n)) for kind, n in zip(answer[::2], answer[1::2], strict=True)]


def follow(process: str, task_ids: Sequence[str], *, on: bool = True) -> Call:
    """FOLLOW: publish what comes of these tasks on the channel of a process, too (`keys.process_channel`); or no more.
    Answers for each 1 if that is so now, else 0."""
    return Call(script(PACKAGE, "follow"), tuple(map(keys.task, task_ids)), (process, int(on)))


def prompt(task_id: str, claim_id: str, entries: Sequence[str]) -> Call:
    """PROMPT: append a prompt's log probabilities (`producers.contract.stream.encode_prompt`).

    Answers `ok`, `gone`, `other`, `cancel` or `full`: the store has no room, nothing was appended.
    """
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
    run: str = "",
    result: str = "",
    settle_ttl_s: int | None = None,
) -> Call:
    """FINISH: make a record final. Answers `[won, status]`, `[gone]`, `[other]` or `[resend, next ...]`.

    `reasons`: JSON array with a finish reason for each choice. `nexts`: each choice's number of tokens. `error`: JSON.
    `scored`: the prompt's entries were published. `run`: as in `Append`. `result`: JSON, what a task that generates
    nothing made. `settle_ttl_s`: of a task in which Celery has no part: it is settled with it, as by `settle` with this
    default; None: SETTLE follows.
    """
    ttl = "" if settle_ttl_s is None else settle_ttl_s
    counts = prompt_tokens, cached_tokens, int(scored)
    return Call(
        script(PACKAGE, "finish"),
        (keys.task(task_id), keys.stream(task_id)),
        (task_id, claim_id, status, reasons, error, *counts, run, result, ttl, *nexts),
    )


def settle(task_id: str, default_ttl_s: int = DEFAULT_TTL_S, letter: str = "") -> Call:
    """SETTLE: mark a final record as settled. Answers 1, 0 if the record is not final, -1 if there is none,
    or -2 if it was deleted.

    `letter`: the reason to keep its message as a dead letter, which CLAIM repeats to whoever gets the message.
    """
    return Call(script(PACKAGE, "settle"), (keys.task(task_id), keys.stream(task_id)), (task_id, default_ttl_s, letter))


def orphan(task_id: str, *, gone: bool = False, default_ttl_s: int = DEFAULT_TTL_S) -> Call:
    """ORPHAN: settle a final task without its message. Answers `settled`, `owned`, `message`, `gone` or `open`.

    `gone`: the caller has seen that the message no longer exists. `message`: the task needs its message to be settled.
    """
    return Call(
        script(PACKAGE, "orphan"),
        (keys.task(task_id), keys.stream(task_id), keys.UNSETTLED),
        (task_id, default_ttl_s, int(gone)),
    )


def compact(
    task_id: str, settled_ms: int, entries: int, blocks: Sequence[bytes], reference: Reference | None = None
) -> Call:
    """COMPACT: replace a settled stream by its blocks (`producers.contract.stream`), or by a reference to a
    noted blob that holds them.

    `settled_ms`: the record's `settled`. Answers `done`, `gone`, `other`, `unsettled`, `changed` or `late`.
    """
    reference_json, name = ("", "") if reference is None else (reference.to_json(), reference.name)
    return Call(
        script(PACKAGE, "compact"),
        (keys.task(task_id), keys.stream(task_id), keys.result(task_id), keys.SETTLED, keys.FILE_NOTES),
        (task_id, settled_ms, entries, reference_json, name, NOTED_S, *blocks),
    )


def count(done: Mapping[str, int]) -> Call:
    """COUNT: add to how often a sweeper did its duties. Answers 1."""
    return Call(script(PACKAGE, "count"), (keys.SWEPT,), [part for item in done.items() for part in item])


def celery_result(key: str, value: str | bytes, expires_s: int) -> Call:
    """CELERY_RESULT: store a plain Celery task's result for `expires_s` seconds (0: for ever). Answers 1."""
    return Call(script(PACKAGE, "celery_result"), (key,), (value, expires_s))


def release(
    task_id: str,
    claim_id: str,
    why: str = "",
    run: str = "",
    *,
    error: str = "",
    letter: str = "",
    default_ttl_s: int = DEFAULT_TTL_S,
) -> Call:
    """RELEASE: give a claim up; `why` is kept in the record; `run`: as in `Append`. Answers 1, or 0 if another delivery
    holds it.

    `error`: of a task whose message goes to the dead letters, as nobody can use its record: it fails with this (JSON)
    and is settled. `letter`, `default_ttl_s`: as of `settle`.
    """
    names = keys.task(task_id), keys.stream(task_id)
    return Call(script(PACKAGE, "release"), names, (claim_id, why, error, run, letter, default_ttl_s))


def absolve(task_id: str, incarnation: str) -> Call:
    """ABSOLVE: take back the death of an owner who lives. Answers 1, or 0 if none was counted."""
    return Call(script(PACKAGE, "absolve"), (keys.task(task_id),), (incarnation,))


def lease(
    incarnation: str, pool: str, state: str, ttl_ms: int, *, take: bool, serves: bool = True, epoch: str = ""
) -> Call:
    """LEASE: take or renew a worker's lease here. `pool`: its pool's queue; `state`: the worker's state (JSON);
    `serves`: it neither drains nor is held back; `epoch`: the one that it began in. Answers 1, 0 if gone, or -1 in
    another epoch (`producers.store.epoch`)."""
    names = (keys.lease(incarnation), keys.workers(pool))
    return Call(script(PACKAGE, "lease"), names, (incarnation, state, ttl_ms, int(take), int(serves), epoch))


def enter(queue: str, entry: str, gone: str) -> Call:
    """ENTER: write a pool's entry, `entry` (JSON), and remove that of the queue `gone`. Answers 1."""
    return Call(script(PACKAGE, "enter"), (keys.POOLS,), (queue, entry, gone))


def eject(incarnation: str, pool: str, living: int, *, alone: bool) -> Call:
    """EJECT: ask whether a worker may be held back. `pool`: its pool's queue; `living`: workers of the pool with a
    lease, this one included; `alone`: it fails by itself, whatever others do. Answers 1, or 0 if it has to serve."""
    return Call(script(PACKAGE, "eject"), (keys.ejected(pool),), (incarnation, living, int(alone)))


def swap(
    name: str,
    field: str,
    old: str,
    new: str,
    *,
    max_fields: int = 0,
    audit: Change | None = None,
    dropped: Change | None = None,
    tenant_set: str | None = None,
    max_in_set: int | None = None,
) -> Call:
    """SWAP: change a hash's field from `old` to `new` (empty: no field), and append the change to the audit log.

    `dropped`: the removal of a field (its `what`), whose place a new one takes where there are `max_fields`.
    `tenant_set`: of webhook endpoints, the set of the tenant's, which may have `max_in_set` (None: any number).

    Answers 1; 0 if the field has another value than `old`; for a new field also -1 if there are `max_fields` already,
    and -2 if there are `max_in_set`.
    """
    audit_json, drop_arguments = (
        "" if audit is None else audit.to_json(),
        ("", "") if dropped is None else (dropped.what, dropped.to_json()),
    )
    log = keys.AUDIT if audit is None else audit.log
    names = (name,) if tenant_set is None else (name, tenant_set)
    return Call(
        script(PACKAGE, "swap"),
        names,
        (field, old, new, max_fields, audit_json, KEPT, *drop_arguments, log, max_in_set or 0),
    )


def endpoints(tenant: str | None) -> Call:
    """ENDPOINTS: the webhook endpoints of a tenant, or those without one. Answers `[JSON, ...]`."""
    return Call(script(PACKAGE, "endpoints"), (keys.WEBHOOK_ENDPOINTS, keys.endpoints_of(tenant)), ())
