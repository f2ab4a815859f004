"""Publishes a model: clients can send tasks to it from now on, whether a worker is up or not. It needs no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from redis import Redis

from producers.store.fleet import cards
from workers.errors import Refused
from workers.library.reference import Found
from workers.library.verify import verify


def publish(
    store: Redis, found: Found, over: str | None = None, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Write the model's card and tokenizer files into the store, and send new tasks to this version.

    The files are checked as a worker checks them. Returns the card that stands: another version's where `over` is given
    and the store's version is neither `over` nor this one. Raises Refused for a folder that cannot be served; redis
    errors.
    """
    card, files = described(found, say)
    return cards.publish(store, card, files, over)


def described(found: Found, say: Callable[[str], None] = lambda line: None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A model's card and tokenizer files, once its files are checked. Raises Refused."""
    from engine.errors import ModelError
    from engine.text import ModelCard

    verify(found.folder, say=say)
    try:
        card = ModelCard.from_folder(found.folder, found.name)
        return json.loads(card.to_json()), ModelCard.tokenizer_files(found.folder)
    except ModelError as error:
        raise Refused(f"cannot serve {found.folder}: {error}") from error
