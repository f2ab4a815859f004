"""Secrets that are stored already are encrypted, all of them, and only over what was read."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from producers.admin.secrets import Sealed, seal_all
from producers.connection.script import run
from producers.contract import keys
from producers.contract.sealing import Keyring, new_key, parse
from producers.contract.webhook import new_secret
from producers.store import outbox, protocol
from producers.store.endpoints import Endpoint, Secrets
from tests.producers.gateway.keys.test_secrets import everything

NOTHING = Sealed()


def ring(*lines: str) -> Keyring:
    return parse("\n".join(lines), "the file")


def fill(valkey: Redis, keyring: Keyring) -> list[str]:
    """Stores one secret of each kind, as a process with these keys does. Returns them."""
    made = [new_secret() for _ in range(5)]
    stored = [keyring.seal(secret) for secret in made]
    one = Endpoint("whe_1", "https://a.example/", "", ("batch.failed",), Secrets(stored[0], stored[1], 7), 1, 1)
    valkey.hset(keys.WEBHOOK_ENDPOINTS, one.id, one.to_json())
    valkey.hset(keys.WEBHOOK_SECRETS, "acme", json.dumps(asdict(Secrets(stored[2]))))
    fields = {"model": "tiny", "webhook": "{}", "webhook_secret": stored[3]}
    run(valkey, protocol.admit("t", "n", int(valkey.time()[0]) * 1000, fields))  # type: ignore[index]
    valkey.expire(keys.task("t"), 1000)
    run(valkey, outbox.put("evt_1.own", {"webhook_id": "evt_1", "url": "https://a.example/", "secret": stored[4]}))
    return made


def read(valkey: Redis, keyring: Keyring) -> list[str]:
    """The secrets, where the store has them."""
    one: Any = Endpoint.parse(valkey.hget(keys.WEBHOOK_ENDPOINTS, "whe_1"))
    own = Secrets.parse(json.loads(str(valkey.hget(keys.WEBHOOK_SECRETS, "acme"))))
    record, row = valkey.hget(keys.task("t"), "webhook_secret"), valkey.hget(keys.webhook_row("evt_1.own"), "secret")
    return [keyring.open(str(stored)) for stored in (one.secrets.secret, one.secrets.old, own.secret, record, row)]


@pytest.fixture
def texts(valkey_url: str, valkey: Redis) -> Redis:
    return Redis.from_url(valkey_url, decode_responses=True)


async def test_all_kinds_are_encrypted_and_then_rotated_to_a_new_key(
    texts: Redis, valkey: Redis, valkey_url: str
) -> None:
    made = fill(texts, Keyring())
    first, second = new_key(), new_key()
    async with AsyncRedis.from_url(valkey_url) as store:
        for keyring in (ring(first), ring(second, first)):
            assert await seal_all(store, keyring) == Sealed(1, 1, 1, 1)
            dump = everything(valkey)
            assert [secret for secret in made if secret.removeprefix("whsec_") in dump] == []
            assert read(texts, keyring) == made
            assert await seal_all(store, keyring) == NOTHING
        assert read(texts, ring(second)) == made, "the first key is needed no more"
    assert 0 < texts.ttl(keys.task("t")) <= 1000  # type: ignore[operator]
    audit: Any = texts.xrange(keys.AUDIT)
    assert audit == []


async def test_those_of_a_lost_key_stay_and_are_counted(texts: Redis, valkey_url: str) -> None:
    lost = ring(new_key())
    made = fill(texts, lost)
    async with AsyncRedis.from_url(valkey_url) as store:
        assert await seal_all(store, ring(new_key())) == replace(NOTHING, unreadable=4)
    assert read(texts, lost) == made
