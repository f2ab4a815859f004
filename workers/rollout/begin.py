"""The beginning of a rolling update: everything that can be wrong with it is found before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from redis import Redis

from producers.store.fleet import cards, rollouts
from producers.store.fleet.rollouts import Rollout
from workers.errors import Refused
from workers.library import Found


@dataclass(frozen=True, slots=True)
class New:
    """The new version: where it is, its card, and its tokenizer's files."""

    found: Found
    card: dict[str, Any]
    files: dict[str, bytes]

    @property
    def version(self) -> str:
        return str(self.card["version"])


def begin(store: Redis, new: New, workers: int | None, ready: int) -> Rollout:
    """Write the record, or take up the one that is under way. Raises Refused; redis errors.

    `workers`: ready workers to wait for; None: as many as the old version has, `ready`, and one at least.
    """
    name = new.found.name
    last = rollouts.read(store, name)
    if last is not None and last.phase in rollouts.UNDER_WAY and last.version == new.version:
        return _again(store, last, workers)
    card = cards.read(store, name)
    _check(new, card)
    assert card is not None
    cards.pin(store, name, card["version"])  # else the first new worker would take the new tasks
    now = rollouts.now(store)
    asked = Rollout(name, new.found.reference, new.version, card["version"], workers or max(1, ready), now, now)
    if last is not None and last.version == asked.before:
        asked = replace(asked, before_reference=last.reference)
    stands = rollouts.begin(store, asked)
    if stands.version != new.version:
        raise Refused(
            f"a rollout of {name} to version {stands.version} ({stands.reference}) is under way: let it end, or run "
            f"`penstock rollout {name} --cancel`"
        )
    return stands


def cancel(store: Redis, model: str) -> Rollout:
    """End a rollout that has not switched yet. Raises Refused where there is none; redis errors."""
    while True:
        stands, card = rollouts.read(store, model), cards.read(store, model)
        if stands is None or stands.phase not in rollouts.UNDER_WAY:
            raise Refused(f"no rollout of {model} is under way" + ("" if stands is None else f": it is {stands.phase}"))
        if stands.phase == "draining" or (card is not None and card["version"] == stands.version):
            raise Refused(
                f"new tasks of {model} go to version {stands.version} already: roll back with "
                f"`penstock rollout {model}=FOLDER`, the folder of version {stands.before}"
            )
        ended = stands.to("cancelled", rollouts.now(store), "an operator cancelled it")
        if rollouts.change(store, stands, ended):
            return ended


def _again(store: Redis, stands: Rollout, workers: int | None) -> Rollout:
    """Go on with a rollout, perhaps with another number of workers."""
    if workers is None or workers == stands.workers:
        return stands
    other = replace(stands, workers=workers)
    return other if rollouts.change(store, stands, other) else rollouts.read(store, stands.model) or stands


def _check(new: New, card: dict[str, Any] | None) -> None:
    """Raise Refused for an update that is none, or that would break requests of today."""
    name = new.found.name
    if card is None:
        raise Refused(f"there is no model {name} to update: `penstock models publish {new.found.reference}` begins it")
    if card["version"] == new.version:
        raise Refused(f"new tasks of {name} go to version {new.version} already, and {new.found.folder} has that one")
    missing = [one for one in card["capabilities"] if one not in new.card["capabilities"]]
    if missing:
        raise Refused(
            f"version {new.version} in {new.found.folder} lacks {', '.join(missing)}, which version "
            f"{card['version']} of {name} has: requests would fail. `penstock models publish` switches all the same"
        )
