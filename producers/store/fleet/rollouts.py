"""Rolling updates: the state of each model's last one, as asked for by `penstock rollout`.

One JSON object in the hash `penstock:rollouts` under the model's name:

    model       the model's name
    reference   the new version as workers get it: NAME=FOLDER, or NAME=URL of a version in a bucket
    version     the new version (`engine.text.checkpoint.model_version`)
    before      the version that new tasks had when the rollout was asked for
    workers     ready workers of the new version to wait for
    phase       "starting": new workers come up, new tasks still go to `before`
                "draining": the card is the new version's; workers of `before` go on until nothing of it is queued or
                in flight
                "done", "failed", "cancelled"
    reason      why it failed, or what it waits for
    before_reference
                as `reference`, of the version before, if the last rollout has it; else absent
    asked       unix seconds, on the store's clock
    changed     the same, of the last phase's begin

The card decides: a phase never says where tasks go. Whoever carries a rollout out may die between any two writes, and
any number of processes may carry out the same one. Each write names what it replaces (SWAP).

    dies after              what remains                                what the next run does
    the card is published   as before: `before` has the new tasks       writes the record
    record: starting        new workers come up, and stay up            waits for them, until its timeout
    the new card            new tasks go to the new version             sees the card: draining
    record: draining        old workers go on with what they have       waits until nothing of it is left
    record: done            the new version alone                       says that it is served
    record: failed          new workers end; `before` has the tasks     begins anew
    record: cancelled       the same; but where another process had     begins anew
                            looked before and switched after, that one
                            goes on: draining
    nothing runs it again   the phase stays. While it is `starting`, new workers stay up beside the old ones

A worker that dies in any phase is replaced as usual; its tasks return to the queue of their own version.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Self

from redis import Redis

from producers.connection.script import run, seconds, text
from producers.contract import keys
from producers.store.protocol import swap

UNDER_WAY: Final = ("starting", "draining")


@dataclass(frozen=True, slots=True)
class Rollout:
    """See the module's head."""

    model: str
    reference: str
    version: str
    before: str
    workers: int
    asked: float
    changed: float
    phase: str = "starting"
    reason: str = ""
    before_reference: str = ""

    @classmethod
    def of(cls, raw: Any) -> Self | None:
        """A stored record; None for a missing or unreadable one."""
        try:
            return None if raw is None else cls(**json.loads(raw))
        except (TypeError, ValueError):
            return None

    def to_json(self) -> str:
        """The stored form. Earlier releases read no record with another field, and wrote none."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "before_reference" or value})

    def to(self, phase: str, at: float, reason: str = "") -> Rollout:
        """In another phase."""
        return replace(self, phase=phase, changed=at, reason=reason)


def read(store: Redis, model: str) -> Rollout | None:
    """A model's last rollout. Raises redis.RedisError or OSError, as the others do."""
    return Rollout.of(store.hget(keys.ROLLOUTS, model))


def all_of(store: Redis) -> list[Rollout]:
    """The last rollout of each model, by name."""
    rollouts = (Rollout.of(raw) for _, raw in sorted(store.hgetall(keys.ROLLOUTS).items()))
    return [rollout for rollout in rollouts if rollout is not None]


def now(store: Redis) -> float:
    """The store's clock (unix s)."""
    return seconds(store.time())


def begin(store: Redis, new: Rollout) -> Rollout:
    """Write a new rollout unless one is under way that it may not replace. Returns the current one.

    A rollout that drains may be replaced: new tasks have its version already.
    """
    while True:
        raw = store.hget(keys.ROLLOUTS, new.model)
        current = Rollout.of(raw)
        begun = current is not None and current.phase in UNDER_WAY
        if current is not None and begun and (current.version == new.version or current.phase == "starting"):
            return current
        if _swap(store, new.model, text(raw or ""), new.to_json()):
            return new


def change(store: Redis, old: Rollout, new: Rollout) -> bool:
    """Replace a record. Returns False if it was replaced meanwhile."""
    return _swap(store, old.model, old.to_json(), new.to_json())


def _swap(store: Redis, model: str, old: str, new: str) -> bool:
    return bool(run(store, swap(keys.ROLLOUTS, model, old, new)))
