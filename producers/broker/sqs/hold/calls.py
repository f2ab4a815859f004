"""The scripts of a worker's messages in flight: one function each, giving the `Call` to send.

The preconditions, effects and answers stand at the head of each `../scripts/*.lua`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from producers.broker.redis import keys as shared
from producers.broker.sqs import keys
from producers.broker.sqs.hold.held import Held
from producers.connection.script import Call, script
from producers.contract import keys as contract_keys

PACKAGE: Final = "producers.broker.sqs"
#: An answer of NOTE and TAKE: the incarnation's lease is gone.
LOST: Final = [-1]


def note(incarnation: str, name: str, messages: Sequence[tuple[Held, bool]]) -> Call:
    """`messages`: of one list; each with whether the worker has a copy of it already. Those without a receipt stay in
    the index: what SQS has is another copy."""
    names = (contract_keys.lease(incarnation), keys.inflight(incarnation), shared.REAPED)
    args: list[str | bytes | int] = [name]
    for held, known in messages:
        args += [held.field, held.entry(), held.member if held.receipt else "", held.id, int(known)]
    return Call(script(PACKAGE, "note"), names, args)


def take(incarnation: str, lists: Sequence[str], taken: Sequence[Held]) -> Call:
    """Answers also what the index has of the `lists`; only that for none `taken`."""
    names = (contract_keys.lease(incarnation), keys.inflight(incarnation), shared.UNSERVED)
    args = [arg for h in taken for arg in (h.in_buffer, h.uuid, h.entry(), h.tokens, h.list)]
    return Call(script(PACKAGE, "take"), (*names, *map(keys.waiting, lists)), (len(lists), *lists, *args))


def out(
    held: Held,
    way: str,
    *,
    to: str = "",
    delay: float = 0.0,
    kept: str | bytes = "",
    reason: str = "",
    settled: bool = False,
) -> Call:
    """`to`: the list that it goes to, its own by default; `delay`: seconds; `kept`: what the store keeps of it."""
    names = (keys.inflight(held.incarnation), keys.delayed(held.queue), shared.DEAD, contract_keys.task(held.id))
    args = (held.field, way, to or held.list, int(delay * 1000), held.member, kept, reason, int(settled))
    return Call(script(PACKAGE, "out"), names, args)


def down(held: Held, *, deleted: bool) -> Call:
    names = (keys.inflight(held.incarnation), shared.REAPED, contract_keys.task(held.id))
    return Call(script(PACKAGE, "down"), names, (held.field, held.id, held.list, held.member, int(deleted)))


def due(queue: str, count: int, seconds: float = 60.0, *, every: bool = False, sent: Sequence[bytes] = ()) -> Call:
    """Answers messages (JSON of `list` and `body`) whose delay is over, or of `every` one; they are the caller's for so
    many seconds. First it removes those that were `sent`."""
    return Call(script(PACKAGE, "due"), (keys.delayed(queue),), (count, int(seconds * 1000), int(every), *sent))


def sent(name: str, member: str, at: float) -> Call:
    """A message of a list is about to be sent; its task was submitted `at` (ms; 0: not known)."""
    return Call(script(PACKAGE, "sent"), (), (name, member, int(at)))
