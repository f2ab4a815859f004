"""The place of a waiting message in its queue, as `redis/scripts/standing.lua` reckons it, by playing the turns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy

from producers.broker.memory.message import Sent, Unusable, read
from producers.broker.memory.server import Server
from producers.broker.memory.turns import Turns
from producers.broker.values import Standing
from producers.contract.message import Message


def standing(server: Server, lists: Sequence[str], message: Message) -> Standing | None:
    """Its place in one of `lists`, those of its tier; `server.lock` is held."""
    for name in lists:
        turns = _all_sorted(server, name)
        if any(sent.id == message.id for sent in turns.messages().values()):
            alone = len(turns.queues) == 1
            return Standing(_takes_before(server, turns, message.id), alone)
    for one in server.delayed[message.queue]:
        with suppress(Unusable):
            if read(one.raw).id == message.id:
                return Standing(due_s=max(0.0, one.due - server.clock()) / 1000)
    return None


def _all_sorted(server: Server, name: str) -> Turns:
    """A list's turns, as if all that arrived were sorted already."""
    turns, number = deepcopy(server.turns[name]), server.arrivals
    for raw in reversed(server.lists[name]):
        number += 1
        with suppress(Unusable):
            sent = read(raw)
            turns.place(server.returned.get(sent.id, number), sent)
    return turns


def _takes_before(server: Server, turns: Turns, task_id: str) -> int:
    taken = 0
    while (head := turns.head(set())) is not None and head[1].id != task_id:
        number, sent = head
        turns.serve(sent.tenant, number, _charge(sent) / server.weights.get(sent.tenant, 1.0))
        taken += 1
    return taken


def _charge(sent: Sent) -> float:
    return max(1.0, sent.tokens)
