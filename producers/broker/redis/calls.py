"""The broker's side of the protocol: one function a script, each giving the `Call` to send and reading its answer.

The preconditions and effects stand at the head of each `scripts/*.lua`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from producers.broker.redis import keys
from producers.broker.values import Counted, Credit, Fetched, Standing
from producers.connection.script import Call, script, text
from producers.contract import keys as contract_keys
from producers.contract.levels import split
from producers.contract.message import Message

PACKAGE: Final = "producers.broker.redis"

#: Messages of each list that one FETCH sorts: a round trip's worth of the server's time, also with all lists full.
BITE: Final = 64


def lists(queues: Sequence[str]) -> list[tuple[str, int]]:
    """The lists of the queues, each with its tier's rank, best tier first."""
    ranked = sorted((rank, tier) for tier, (rank, _) in contract_keys.TIERS.items())
    return [(name, rank) for rank, tier in ranked for queue in queues for name in keys.tier_lists(queue, tier)]


def fetch(
    incarnation: str,
    queues: Sequence[str],
    uuids: Sequence[str],
    credit: Credit,
    *,
    capacity: tuple[int, int],
    plain_tokens: int,
    ageing_ms: int,
    max_redeliveries: int,
    bite: int = BITE,
    home: str | None = None,
) -> Call:
    """`capacity` is (sequences, tokens) of the whole engine: a task that wants more is counted as that much. Of each
    list `bite` messages are sorted by tenant, at most. `home`: where what is delayed waits, the first unless given."""
    named = lists(queues)
    return Call(
        script(PACKAGE, "fetch"),
        (
            contract_keys.lease(incarnation),
            keys.inflight(incarnation),
            keys.delayed(home or queues[0]),
            keys.DEAD,
            keys.REAPED,
            keys.UNSERVED,
            keys.RETURNED,
            keys.ARRIVALS,
            keys.WEIGHTS,
            *(name for name, _ in named),
        ),
        (
            ageing_ms,
            max_redeliveries,
            *capacity,
            plain_tokens,
            bite,
            *credit.seqs,
            *credit.tokens,
            *(rank for _, rank in named),
            *uuids,
        ),
    )


def places(queues: Sequence[str]) -> dict[str, tuple[str, int]]:
    """The lists of the queues, each with its queue and its tier's rank."""
    return {name: (queue, rank) for queue in queues for name, rank in lists([queue])}


def read_fetch(answer: Sequence[Any], places: Mapping[str, tuple[str, int]]) -> list[Fetched] | None:
    """`places`: of the queues that were fetched from. None where the incarnation's lease is gone."""
    if len(answer) == 1:
        return None
    found = []
    for uuid, list_name, raw, said in zip(
        answer[::4], answer[1::4], answer[2::4], map(text, answer[3::4]), strict=True
    ):
        at, buried = places[text(list_name)], "" if uuid else said
        found.append(Fetched(text(uuid), *at, raw, not buried and said != "0", said == "condemned", buried))
    return found


def ack(incarnation: str, uuid: str, reason: str = "", used: int = 0, settled: str = "") -> Call:
    """With a reason, the message is kept on the dead-letter list. Its tenant is charged the KV tokens `used` in place
    of the estimate. `settled`: the task of which the worker says so.

    Answers 1, 0 where there is no such delivery, -1 where that task is not settled.
    """
    return Call(
        script(PACKAGE, "ack"),
        (keys.inflight(incarnation), keys.REAPED, keys.DEAD, contract_keys.task(settled)),
        (uuid, reason, used, int(bool(settled))),
    )


def back(incarnation: str, queue: str, uuid: str, delay_ms: int = 0, to: str = "") -> Call:
    """Return a delivery to the front of its list, or of its tier's in the queue `to`; with a delay, it waits for that
    in `queue`. Answers 1, or 0 where there is no such delivery."""
    names = (keys.inflight(incarnation), keys.delayed(queue), keys.RETURNED)
    ranked = sorted(contract_keys.TIERS, key=lambda tier: contract_keys.TIERS[tier][0])
    return Call(script(PACKAGE, "back"), names, (uuid, delay_ms, *(keys.tier_list(to, tier) for tier in ranked if to)))


def scheduled(queue: str, count: int) -> Call:
    """Answers the messages (JSON) that wait there for their time, soonest first, `count` at most."""
    return Call(script(PACKAGE, "scheduled"), (keys.delayed(queue),), (count,))


def oldest(lists: Sequence[str]) -> Call:
    """Answers for how long (ms) the oldest message of each list waits, -1 where none says it."""
    return Call(script(PACKAGE, "oldest"), [key for name in lists for key in (name, keys.sorted_of(name))], ())


#: Delayed messages that one STANDING looks through.
DELAYED: Final = 1000


def standing(message: Message, counted: Counted) -> Call:
    """Answers where a message stands; `read_standing` reads it."""
    lists = keys.tier_lists(message.queue, message.tier)
    before, size = ("" if one is None else f"{one:.6f}" for one in (counted.before, counted.tokens))
    about = (message.id, message.tenant, message.at, message.tokens, DELAYED, before, size)
    tenants = json.dumps(dict(counted.tenants))
    names = (keys.delayed(split(message.queue)[0]), keys.WEIGHTS, keys.RETURNED, *lists)
    return Call(script(PACKAGE, "standing"), names, (*about, tenants))


def read_standing(answer: Sequence[Any]) -> Standing | None:
    match [text(part) if isinstance(part, bytes) else part for part in answer]:
        case ["waiting", ahead, exact]:
            return Standing(int(ahead), bool(exact))
        case ["delayed", ms]:
            return Standing(due_s=int(ms) / 1000)
    return None


def recall(queue: str, pools: Sequence[str], count: int) -> Call:
    """RECALL: return a queue's sorted messages to its lists' fronts, if no worker of the `pools` that serve it lives.

    Answers the number of messages, at most `count` (fewer: all are done), or -1 if a worker lives. Of a queue beside
    another, only workers count whose release can do what its tasks need.
    """
    names = (keys.INCARNATIONS, *(name for name, _ in lists([queue])))
    return Call(script(PACKAGE, "recall"), names, (count, split(queue)[1], *pools))


def adopt(source: str, target: str) -> Call:
    """Move what waits in the own queue of a pool without workers to the front of another's lists, its version's.
    Answers how many messages; -1 where a worker of the pool lives. Of a queue beside another, only workers count whose
    release can do what its tasks need."""
    names = [name for pair in zip(lists([source]), lists([target]), strict=True) for name, _ in pair]
    delayed = (keys.delayed(source), keys.delayed(target))
    return Call(script(PACKAGE, "adopt"), (keys.INCARNATIONS, *delayed, *names), split(source))


def bury(list_name: str, message: bytes, task_id: str, reason: str) -> Call:
    """A message that waits in a list becomes a dead letter. Answers 1, or 0 where it does not wait there."""
    names = (list_name, keys.DEAD, keys.REAPED, keys.RETURNED)
    return Call(script(PACKAGE, "bury"), names, (message, task_id, reason))


def move(list_name: str, target: str, message: bytes) -> Call:
    """A message that waits in a list goes to the front of another. Answers 1, or 0 where it does not wait there."""
    return Call(script(PACKAGE, "move"), (list_name, target), (message,))


def due(queue: str) -> Call:
    """Answers how many messages were delayed, and are due and in their lists now."""
    return Call(script(PACKAGE, "due"), (keys.delayed(queue),), ())


def replay(entry: bytes, list_name: str, message: bytes, task_id: str) -> Call:
    """A dead letter's message goes onto a list. Answers 1, or 0 where there is no such entry."""
    return Call(script(PACKAGE, "replay"), (keys.DEAD, keys.REAPED, list_name), (entry, message, task_id))


def reap(incarnation: str, looker: str = "", queue: str = "", since: int = 0) -> Call:
    """Answers how many deliveries of a dead incarnation went back to their lists; -1 while it lives.

    `looker`: the incarnation that found it silent, if its lease stands, and `since` which join lease values count for
    it. Ordinary Celery tasks then wait in `queue`."""
    names = (keys.inflight(incarnation), keys.INCARNATIONS, keys.REAPED, keys.RETURNED, keys.delayed(queue))
    return Call(script(PACKAGE, "reap"), (contract_keys.lease(incarnation), *names), (incarnation, looker, since))


def strays(incarnation: str, held: Sequence[str]) -> Call:
    """`held`: what its worker knows of. Answers `[uuid, task id, ...]`, see `read_strays`."""
    return Call(script(PACKAGE, "strays"), (keys.inflight(incarnation),), held)


def read_strays(answer: Sequence[Any]) -> dict[str, str]:
    """Task ids by delivery."""
    return {text(uuid): text(task_id) for uuid, task_id in zip(answer[::2], answer[1::2], strict=True)}


def lease(incarnation: str, about: str, ttl_ms: int, *, take: bool, queue: str = "") -> Call:
    """Take or renew a worker's lease; `about`: what it says of itself. `queue` lists it with its pool's. Answers 1, or
    0 where it is gone."""
    return Call(
        script(PACKAGE, "lease"),
        (contract_keys.lease(incarnation), keys.INCARNATIONS),
        (incarnation, about, ttl_ms, int(take), queue),
    )
