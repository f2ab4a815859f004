"""A model on its way to being served: found, loaded, and announced in the store so that clients know it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from redis import Redis

from producers import keys
from workers.connect import Refused

#: What a model may be called: its name is part of queues' names.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Models that come with Penstock.
BUNDLED = Path(__file__).parent / "models"


def find_model(name: str) -> Path:
    """The folder of a model given by path, or by the name of a bundled one. Raises Refused."""
    for path in (Path(name), BUNDLED / name):
        if (path / "config.json").is_file():
            return path
    bundled = ", ".join(sorted(p.parent.name for p in BUNDLED.glob("*/config.json")))
    raise Refused(f"no model {name!r}: give a folder that holds a config.json, or one of the bundled models: {bundled}")


def load_engine(model: str, options: dict[str, Any]) -> tuple[Any, dict[str, bytes]]:
    """`engine.Engine` for the model, and its tokenizer's files by name. Raises Refused."""
    from engine import Engine, EngineConfig, EngineError  # torch takes seconds to import
    from engine.text import ModelCard

    folder = find_model(model)
    try:
        engine = Engine.load(folder, EngineConfig(**options))
    except EngineError as exc:
        raise Refused(f"cannot serve {folder}: {exc}") from exc
    if engine.card is None:
        raise Refused(f"cannot serve {folder}: it has no tokenizer.json")
    if not NAME.fullmatch(engine.card.name):
        raise Refused(
            f"cannot serve {folder}: a model is called as its folder, and {engine.card.name!r} cannot name a queue; "
            "use letters, digits, '.', '_' and '-'"
        )
    return engine, ModelCard.tokenizer_files(folder)


def announce(store: Redis, engine: Any, files: dict[str, bytes]) -> tuple[dict[str, Any], str]:
    """Write the model's card, tokenizer files and route into the store; return the card as served, and the queue.

    The card outlives the worker, so that a gateway can check, tokenise and queue while no worker is up.
    """
    card = json.loads(engine.card.to_json())
    card["context_length"] = min(card["context_length"], engine.max_model_len)
    queue = keys.pool_queue(card["name"], card["version"], engine.fingerprint)
    for name, data in files.items():
        store.set(keys.blob(card["files"][name]), data)
    pool = {"model": card["name"], "version": card["version"], "fingerprint": engine.fingerprint}
    store.hset(keys.POOLS, queue, json.dumps(pool))
    store.hset(keys.MODELS, card["name"], json.dumps(card))
    store.hset(keys.ROUTES, card["name"], queue)
    return card, queue
