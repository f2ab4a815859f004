"""The queues that there are, and whose workers take from each: a pool's own, its version's, its model's."""

from __future__ import annotations

import json
from collections.abc import Mapping

from producers.connection.script import parsed
from producers.contract import keys
from producers.contract.levels import looked_after, split


def takers_of(pools: Mapping[str, str], cards: Mapping[str, str] | None = None) -> dict[str, list[str]]:
    """Every queue, with the own queues of the pools that take from it; the pools' own come first.

    `pools` and `cards`: JSON by queue and by model, as the store has them. A model's queues are there before its pools.
    What is no card names no version: its model has the queue of plain senders alone.
    """
    found = {queue: [own] for own in pools for queue in looked_after(own)}
    for name, card in (cards or {}).items():
        found[keys.model_queue(name)] = []
        if version := parsed(card).get("version"):
            found |= {queue: [] for queue in looked_after(keys.version_queue(name, str(version)))}
    for queue, about in pools.items():
        for version in looked_after(version_queue_of(about)):
            found.setdefault(version, []).append(queue)
        found.setdefault(keys.model_queue(json.loads(about)["model"]), []).append(queue)
    return found


def takes_from(pool: str, queue: str) -> bool:
    """Whether workers of the pool with this own queue take from a pool's own queue, or a version's; from one beside it
    only those whose release can do what its tasks need."""
    base, _ = split(queue)
    return pool == base or pool.startswith(f"{base}.")


def version_queue_of(about: str) -> str:
    """The queue of the version that a pool serves (JSON)."""
    pool = json.loads(about)
    return keys.version_queue(pool["model"], pool["version"])
