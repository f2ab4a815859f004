"""A model's files in the store, each as `penstock:blob:<sha256>`, named by the model's card."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any, Final

from redis.asyncio import Redis

from producers.errors import shown
from producers.gateway.http.errors import RETRY_AFTER, Problem
from producers.store import blobs

logger = logging.getLogger(__name__)

TOKENIZER: Final = "tokenizer.json"
#: What a chat template is read from, where the model has them.
TEMPLATE: Final = ("tokenizer_config.json", "chat_template.jinja")


async def read_blobs(store: Redis, card: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, bytes]:
    """Those of the files that the model has. Raises Problem (503) where one is missing or not what its name says."""
    files = {}
    for name in names:
        digest = card["files"].get(name)
        if digest is None:
            continue
        data = await blobs.get(store, digest)
        if data is None:
            raise unavailable(
                f"{name} of model {shown(card['name'])} is not in the store; start a worker, which puts it there."
            )
        if hashlib.sha256(data).hexdigest() != digest:
            logger.error("%s of %s (%s) is not what its name says", name, card["name"], digest)
            raise broken(card["name"], name)
        files[name] = data
    return files


def broken(model: str, name: str) -> Problem:
    return unavailable(
        f"{name} of model {shown(model)} in the store is broken; restart a worker of it, which puts it there anew."
    )


def unavailable(message: str) -> Problem:
    return Problem(503, message, code="model_unavailable", param="model", headers=RETRY_AFTER)
