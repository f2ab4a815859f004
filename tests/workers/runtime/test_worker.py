"""What a worker tells of its model in the store."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from redis import Redis

from producers.contract import keys
from tests.producers.gateway.conftest import CARD
from workers.runtime.worker import announce


def told(valkey: Redis, *, placing: bool = False, **engine: Any) -> dict[str, Any]:
    """The card in the store, once a worker with such an engine has said what it serves."""
    usual = {"card": CARD, "fingerprint": "test", "max_model_len": 1 << 20, "kv_capacity": 1 << 20, "watermarks": None}
    announce(valkey, SimpleNamespace(**usual | {"marked_block": 16} | engine), {}, placing=placing)
    card: dict[str, Any] = json.loads(valkey.hget(keys.MODELS, CARD.name) or "")
    return card


def test_a_card_says_what_a_worker_has_room_for_where_that_is_less_than_the_context(valkey: Redis) -> None:
    assert told(valkey, kv_capacity=CARD.context_length) == json.loads(CARD.to_json()) | {"served": True}
    assert told(valkey, max_model_len=500)["context_length"] == 500


def test_a_card_keeps_what_the_largest_cache_has_room_for(valkey: Redis) -> None:
    seen = [told(valkey, kv_capacity=room).get("kv_capacity") for room in (300, 200, 400, CARD.context_length, 100)]
    assert seen == [300, 300, 400, None, None]


def test_a_card_says_by_which_blocks_prompts_are_placed_by_the_worker_that_announced_last(valkey: Redis) -> None:
    seen = [told(valkey, placing=placing).get("marked_block") for placing in (False, True, False)]
    assert seen == [None, 16, None]


def test_another_version_begins_anew(valkey: Redis) -> None:
    told(valkey, kv_capacity=300)
    card = CARD.to_json().replace(CARD.version, "0123456789ab")
    assert told(valkey, kv_capacity=200, card=SimpleNamespace(to_json=lambda: card))["kv_capacity"] == 200
