"""A model on its way to being served: found, loaded, and announced in the store so that clients know it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

from redis import Redis

from producers.contract import keys
from producers.store.fleet import cards
from workers.errors import Refused
from workers.library import find_model, verify
from workers.runtime.cold_start import COLD_START

logger = logging.getLogger(__name__)


def load_engine(model: str, options: dict[str, Any]) -> tuple[Any, dict[str, bytes]]:
    """`engine.Engine` for the model, by its reference, and its tokenizer's files by name. Raises Refused."""
    from engine import Engine, EngineConfig, EngineError  # torch takes seconds to import
    from engine.text import ModelCard

    COLD_START.mark("imports")
    found = find_model(model, say=logger.info)
    folder = found.folder
    verify(folder, say=logger.info)
    if "draft_model" in options:
        draft = find_model(options["draft_model"], say=logger.info).folder
        verify(draft, say=logger.info)
        options = options | {"draft_model": str(draft)}
    try:
        engine = Engine.load(folder, EngineConfig(**options), loaded=COLD_START.mark)
    except EngineError as exc:
        raise Refused(f"cannot serve {folder}: {exc}") from exc
    if engine.card is None:
        raise Refused(f"cannot serve {folder}: it has no tokenizer.json")
    engine.card = replace(engine.card, name=found.name)
    return engine, ModelCard.tokenizer_files(folder)


def pool_of(engine: Any) -> keys.Pool:
    """The pool that a worker with this engine belongs to."""
    card = json.loads(engine.card.to_json())
    return keys.Pool(card["name"], card["version"], engine.fingerprint)


def announce(store: Redis, engine: Any, files: dict[str, bytes]) -> tuple[dict[str, Any], keys.Pool]:
    """Write the model's card, tokenizer files and pool into the store; return the card as served, and the pool.

    The card outlives the worker, so that a gateway can check, tokenise and queue while no worker is up.
    """
    card = json.loads(engine.card.to_json())
    card["context_length"] = min(card["context_length"], engine.max_model_len)
    if engine.kv_capacity < card["context_length"]:
        card["kv_capacity"] = engine.kv_capacity
    pool = pool_of(engine)
    cards.announce(store, card, pool, files)
    return card, pool
