"""A tenant sends more messages, and more parts of JSON, than any chat has."""

from __future__ import annotations

import gzip
import json

import pytest

from producers.contract import keys
from tests.chaos.hostile.stage import TENANT, Stage
from tests.chaos.hostile.test_large_text import beside, hostile, minute
from tests.producers.gateway.conftest import CARD

__all__ = ["hostile"]

pytestmark = pytest.mark.slow


def messages(count: int) -> bytes:
    body = {"model": CARD.name, "messages": [{"role": "user", "content": "x"}] * count}
    return gzip.compress(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (messages(100_000), "too_many_parts"),
        (messages(10_000), "array_above_max_length"),
        (gzip.compress(b'{"model": "tiny", "messages": [' + b"[]," * 1_300_000 + b"1]}"), "too_many_parts"),
        (gzip.compress(b"[" * 4_000_000), "too_many_parts"),
    ],
    ids=["messages", "fewer messages", "lists", "depth"],
)
def test_they_are_refused_before_they_are_read_and_count(hostile: Stage, body: bytes, code: str) -> None:
    hostile.key("attacker", scopes=TENANT, rpm=3)
    begun = minute(hostile)
    answers = beside(hostile, "/v1/chat/completions", body)
    assert (400, code) in answers
    assert answers.keys() <= {(400, code), (429, "rate_limit_exceeded")}
    # Requests at the same time are counted when they end: those of two minutes may all be let in.
    assert len(answers) == 2 or minute(hostile) > begun
    assert not hostile.redis.exists(f"{keys.TASKS}:attacker")


def test_large_chats_take_turns_and_no_small_one_waits_for_them(hostile: Stage) -> None:
    """As many messages as there may be, from a key without limits."""
    hostile.key("attacker", scopes=TENANT)
    answers = beside(hostile, "/v1/chat/completions", messages(4096))
    assert answers.keys() <= {(400, "context_length_exceeded"), (429, "template_busy"), (429, "body_busy")}
