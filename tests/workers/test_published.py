"""A model that was published with no worker up: its tasks wait, and a worker tells of those that do not fit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx

from producers.contract import keys
from producers.store.fleet import cards
from tests.producers.gateway.conftest import Door, open_door
from tests.waiting import PATIENCE_S
from tests.workers.rig import Rig
from workers.library import find_model
from workers.library.reference import described

__all__ = ["open_door"]


def test_a_task_that_no_worker_has_room_for_fails_and_says_so_and_the_next_is_refused(
    rig: Rig, open_door: Callable[..., Door]
) -> None:
    version = cards.publish(rig.store, *described(find_model("tiny")))["version"]
    door = open_door(broker=rig.url, store=rig.store_url)
    answers: list[httpx.Response] = []

    def ask() -> None:
        task: dict[str, Any] = {"model": "tiny", "prompt": [5] * 500, "max_tokens": 20}
        answers.append(httpx.post(f"{door.url}/v1/completions", json=task, timeout=PATIENCE_S))

    waiting = threading.Thread(target=ask)
    waiting.start()
    rig.until(lambda: rig.waiting(keys.version_queue("tiny", version)))
    serve = "workers.runtime.worker:load_engine"
    rig.worker(model="tiny", engine_factory=serve, engine={"kv_cache_bytes": 1 << 17, "threads": 1})
    waiting.join()
    card = cards.read(rig.store, "tiny")
    assert card is not None
    assert card["kv_capacity"] < 500

    def said() -> str:
        """The last answer's message."""
        assert (answers[-1].status_code, answers[-1].json()["error"]["code"]) == (400, "kv_capacity_exceeded")
        return str(answers[-1].json()["error"]["message"])

    def refused() -> bool:
        """Asks again. The gateway refuses the task as soon as it reads the card anew."""
        ask()
        return f"have room for {card['kv_capacity']}; shorten the prompt" in said()

    assert f"do not fit the KV cache of {card['kv_capacity']} tokens; shorten the prompt" in said()
    rig.until(refused)
