"""Finds the versions of models: of the card in the store, and of the files on this machine. No worker has to run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from workers.cli.exits import Failure, needs
from workers.cli.models.references import find_models

if TYPE_CHECKING:
    from redis import Redis

_WITH_VERSION: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)@([0-9a-f]{12})")


def versions(references: Sequence[str], store: Redis | None, say: Callable[[str], None]) -> list[tuple[str, str]]:
    """Names and versions of models. Two for one name if another version is served than that on this machine.

    Raises Failure for a model that is found nowhere; redis.exceptions.RedisError.
    """
    return list(dict.fromkeys(pair for one in references for pair in _of(one, store, say)))


def _of(reference: str, store: Redis | None, say: Callable[[str], None]) -> list[tuple[str, str]]:
    if given := _WITH_VERSION.fullmatch(reference):
        return [(given[1], given[2])]
    from workers.errors import Refused
    from workers.library import name_of

    try:
        name = name_of(reference)
    except Refused as refused:
        raise Failure(str(refused)) from refused
    served = _served(name, store)
    if served and reference.startswith("hf://"):  # no need to download it
        return served
    try:
        return [*served, *_local(reference, say)]
    except Failure as failure:
        if served:
            return served
        unserved = "; the store has no card of it" if store is not None else ""
        raise Failure(f"{failure}{unserved}; or give the version, as NAME@0123456789ab") from failure


def _served(name: str, store: Redis | None) -> list[tuple[str, str]]:
    """The version of the store's card."""
    from producers.contract import keys

    card = None if store is None else store.hget(keys.MODELS, name)
    return [] if card is None else [(name, str(json.loads(card)["version"]))]


def _local(reference: str, say: Callable[[str], None]) -> list[tuple[str, str]]:
    with needs("worker"):
        from engine.text.checkpoint import model_version
    found = find_models([reference], say)
    return [(one.name, model_version(one.folder)) for one in found]
