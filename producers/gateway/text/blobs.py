"""Reads a model's files from the store: `penstock:blob:<sha256>`, as named by the model's card."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any, Final

from redis.asyncio import Redis

from producers.errors import shown
from producers.gateway.http.errors import Problem, unavailable
from producers.store.fleet import cards

logger = logging.getLogger(__name__)

TOKENIZER: Final = "tokenizer.json"
#: Files that may hold a model's chat template.
TEMPLATE: Final = ("tokenizer_config.json", "chat_template.jinja")


async def read_blobs(store: Redis, card: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, bytes]:
    """Name -> content of the files that the model has. Raises Problem (503) for a missing or damaged one."""
    files = {}
    for name in names:
        digest = card["files"].get(name)
        if digest is None:
            continue
        data = await cards.get_file(store, digest)
        if data is None:
            raise _lacking(name, card["name"], "is not in the store; start a worker of it, which stores it.")
        if hashlib.sha256(data).hexdigest() != digest:
            logger.error("%s of %s (%s) does not match its hash", name, card["name"], digest)
            raise broken(card["name"], name)
        files[name] = data
    return files


def broken(model: str, name: str) -> Problem:
    return _lacking(name, model, "in the store is damaged; restart a worker of the model, which stores it again.")


def _lacking(name: str, model: str, why: str) -> Problem:
    return unavailable(f"{name} of model {shown(model)} {why}", code="model_unavailable", param="model")
