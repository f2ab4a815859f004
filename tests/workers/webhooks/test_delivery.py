"""Deliveries by real webhooks processes to real receivers, with everything that receivers may do wrong."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from redis import Redis
from standardwebhooks import Webhook

from producers import AsyncClient
from producers.connection.script import run, text
from producers.contract import keys
from producers.contract.sealing import KEY_FILE, new_key, parse
from producers.contract.webhook import new_secret
from producers.store import outbox
from producers.store.endpoints import Endpoint, Secrets
from producers.store.outbox import Row
from tests.receiver import Event, Receiver
from tests.waiting import PATIENCE_S, until
from tests.webhooks_process import WebhooksProcess
from workers.webhooks import deliverer
from workers.webhooks.deliverer import Deliverer, WebhookSettings


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as one:
        yield one


@pytest.fixture
def secret() -> str:
    return new_secret()


def put(valkey: Redis, name: str, url: str, secret: str = "", **more: str) -> str:
    """A due row of a task's own webhook, or of the endpoint that is named."""
    fields = {"webhook_id": f"evt_{name}", "type": "response.completed", "object": f"resp_{name}", "url": url}
    row = f"evt_{name}.{more.get('endpoint', 'own')}"
    run(valkey, outbox.put(row, fields | ({"secret": secret} if secret else {}) | more))
    return row


def row_of(valkey: Redis, name: str) -> Row:
    raw: Any = valkey.hgetall(keys.webhook_row(name))
    return Row.parse(name, [part for item in raw.items() for part in item])


def ended(process: WebhooksProcess, valkey: Redis, name: str) -> Row:
    process.until(lambda: row_of(valkey, name).state != "due")
    return row_of(valkey, name)


def add_endpoint(valkey: Redis, url: str, secrets: Secrets, **more: Any) -> str:
    types = ("response.completed",)
    one = Endpoint("whe_1", url, "ours", types, secrets, created_at=1, updated_at=1, **more)
    valkey.hset(keys.WEBHOOK_ENDPOINTS, one.id, one.to_json())
    return one.id


def verified(event: Event, secret: str) -> Any:
    """The event, if the reference implementation and OpenAI's client take its signature."""
    client = openai.OpenAI(api_key="none", webhook_secret=secret)
    unwrapped = client.webhooks.unwrap(event.body, event.headers)
    assert Webhook(secret).verify(event.body, event.headers)["id"] == unwrapped.id
    return unwrapped


def test_an_event_arrives_signed_once(valkey_url: str, valkey: Redis, receiver: Receiver, secret: str) -> None:
    name = put(valkey, "a", f"{receiver.url}/ok", secret)
    with WebhooksProcess(valkey_url) as process:
        row = ended(process, valkey, name)
        event = verified(receiver.event(), secret)
        assert (event.id, event.type, event.data.id) == ("evt_a", "response.completed", "resp_a")
        assert event.created_at == row.at
        assert (row.state, row.tries, row.attempts[0].status) == ("delivered", 1, 204)
        assert process.stop() == 0
    assert len(receiver.events) == 1


def test_tasks_without_a_secret_are_signed_with_their_tenants(
    valkey_url: str, valkey: Redis, receiver: Receiver
) -> None:
    put(valkey, "a", f"{receiver.url}/ok", tenant="acme")
    put(valkey, "b", f"{receiver.url}/status/200")
    with WebhooksProcess(valkey_url):
        first, second = receiver.event(), receiver.event("/status/200")
    own: Any = {text(name): json.loads(value) for name, value in valkey.hgetall(keys.WEBHOOK_SECRETS).items()}  # type: ignore[union-attr]
    assert own["acme"] != own[""]
    assert verified(first, own["acme"]["secret"]).id == "evt_a"
    assert verified(second, own[""]["secret"]).id == "evt_b"


def test_while_a_secret_rotates_both_sign(valkey_url: str, valkey: Redis, receiver: Receiver) -> None:
    old = Secrets.new()
    new = old.rotated(time.time(), keep_old=True)
    # The endpoint has moved since the event: its present URL counts.
    endpoint = add_endpoint(valkey, f"{receiver.url}/ok", new)
    name = put(valkey, "a", f"{receiver.url}/status/500", endpoint=endpoint)
    with WebhooksProcess(valkey_url) as process:
        ended(process, valkey, name)
    for one in (old, new):
        assert verified(receiver.event(), one.secret).id == "evt_a"
    with pytest.raises(openai.InvalidWebhookSignatureError):
        verified(receiver.event(), new_secret())


def test_whatever_goes_wrong_is_tried_again_and_then_dead_and_harms_nobody_else(
    valkey_url: str, valkey: Redis, receiver: Receiver, secret: str
) -> None:
    faults = ("hang", "status/500", "status/404", "redirect", "close", "half", "noise")
    bad = {fault: put(valkey, fault, f"{receiver.url}/{fault}", secret, tenant="a\nb") for fault in faults}
    bad["private"] = put(valkey, "private", f"http://10.0.0.1:{receiver.port}/ok", secret)
    bad["nowhere"] = put(valkey, "nowhere", "https://nowhere.invalid/", secret)
    bad["refused"] = put(valkey, "refused", "http://127.0.0.1:1/ok", secret)
    good = [put(valkey, word, f"{receiver.url}/{word}", secret) for word in ("flood", "drip", "ok")]
    with WebhooksProcess(valkey_url, timeout=2.0) as process:
        for name in good:
            assert ended(process, valkey, name).state == "delivered"
        rows = {fault: ended(process, valkey, name) for fault, name in bad.items()}
        told = process.log.read_text().splitlines()
    assert {row.state for row in rows.values()} == {"dead"}
    assert {row.tries for row in rows.values()} == {3}
    tries = {fault: row.attempts[-1] for fault, row in rows.items()}
    assert [tries[one].status for one in faults] == [None, 500, 404, 302, None, None, None]
    assert [line for line in told if not line[:4].isdecimal()] == [], "a line begins with what a stranger said"
    assert tries["status/500"].answer == "it is 500"
    for fault, why in (("hang", "2 s"), ("close", "closed"), ("private", "10.0.0.1"), ("nowhere", "nowhere.invalid")):
        assert why in tries[fault].error
    assert len(row_of(valkey, good[0]).attempts[0].answer) == 1024
    assert "/ok" not in [event.path for event in receiver.events if event.id == "evt_redirect"]


def test_a_receiver_may_ask_for_time_and_one_that_is_gone_is_disabled(
    valkey_url: str, valkey: Redis, receiver: Receiver, secret: str
) -> None:
    later = put(valkey, "later", f"{receiver.url}/later/3600", secret)
    endpoint = add_endpoint(valkey, f"{receiver.url}/status/410", Secrets.new())
    gone = put(valkey, "gone", "", endpoint=endpoint)
    with WebhooksProcess(valkey_url) as process:
        assert ended(process, valkey, gone).tries == 1
        again = put(valkey, "again", "", endpoint=endpoint)
        assert "410" in ended(process, valkey, again).attempts[0].error
        process.until(lambda: row_of(valkey, later).tries == 1)
    assert row_of(valkey, later).state == "due"
    until = float(valkey.zscore(keys.WEBHOOKS_DUE, later) or 0) / 1000 - float(valkey.time()[0])  # type: ignore[index]
    assert 3500 < until < 3600 * 1.3


def test_receivers_that_hang_slow_nobody_else(valkey_url: str, valkey: Redis, receiver: Receiver, secret: str) -> None:
    """More rows of those that hang than there are places: all of the others' arrive while they still hang."""
    with Receiver() as hanging:
        for number in range(600):
            put(valkey, f"hang{number}", f"{hanging.url}/hang", secret, tenant=f"t{number % 300}")
        good = [put(valkey, f"ok{number}", f"{receiver.url}/ok", secret) for number in range(100)]
        with WebhooksProcess(valkey_url, timeout=50.0, lease=120.0) as process:
            process.until(lambda: all(row_of(valkey, name).state == "delivered" for name in good))
            assert not any(row_of(valkey, f"evt_hang{number}.own").tries for number in range(600))


def test_a_killed_process_loses_nothing_and_a_stopped_one_gives_back(
    valkey_url: str, valkey: Redis, receiver: Receiver, secret: str
) -> None:
    names = [put(valkey, f"{number}", f"{receiver.url}/ok", secret) for number in range(300)]
    for kill_after in (1, 100):
        with WebhooksProcess(valkey_url, lease=2.0, timeout=1.0) as process:
            process.until(lambda least=kill_after: len({event.id for event in receiver.events}) >= least)
            process.stop(signal.SIGKILL)
    hung = put(valkey, "hang", f"{receiver.url}/hang", secret)
    with WebhooksProcess(valkey_url, timeout=100.0, lease=200.0, drain=0.1) as process:
        process.until(lambda: all(row_of(valkey, name).state == "delivered" for name in names))
        receiver.event("/hang")
        assert process.stop() == 0
    assert {event.id for event in receiver.events} >= {f"evt_{number}" for number in range(300)}
    assert row_of(valkey, hung).tries == 0
    assert float(valkey.zscore(keys.WEBHOOKS_DUE, hung) or 0) <= 1000 * time.time()


def test_a_name_is_what_tls_asks_for_and_verifies(valkey_url: str, valkey: Redis, tmp_path: Path, secret: str) -> None:
    """The connection goes to the checked address; certificate and Host are the name's."""
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    with Receiver(cert, key) as receiver:
        named = put(valkey, "named", f"https://localhost:{receiver.port}/ok", secret)
        number = put(valkey, "number", f"https://127.0.0.1:{receiver.port}/ok", secret)
        allowed = ["127.0.0.0/8", "::1"]
        with WebhooksProcess(valkey_url, SSL_CERT_FILE=cert, schedule=[0.0], allowed=allowed) as process:
            assert ended(process, valkey, named).state == "delivered"
            assert "certificate" in ended(process, valkey, number).attempts[0].error.lower()
        (event,) = receiver.events
    assert (event.headers["host"], event.sni) == (f"localhost:{receiver.port}", "localhost")


def test_what_cannot_be_read_holds_up_nobody_else(
    valkey_url: str, valkey: Redis, receiver: Receiver, secret: str
) -> None:
    """An endpoint and a secret that are no JSON, an endpoint of a later version, a row of which little is left."""
    later = {**json.loads(Endpoint("whe_1", f"{receiver.url}/ok", "n", (), Secrets.new(), 1, 1).to_json()), "new": 1}
    valkey.hset(keys.WEBHOOK_ENDPOINTS, mapping={"whe_0": "{", "whe_1": json.dumps(later)})
    broken = put(valkey, "broken", f"{receiver.url}/ok", endpoint="whe_0")
    valkey.hset(keys.WEBHOOK_SECRETS, "acme", "{")
    unsigned = put(valkey, "unsigned", f"{receiver.url}/ok", tenant="acme")
    valkey.hset(keys.webhook_row("bare"), "attempts", "{")
    valkey.zadd(keys.WEBHOOKS_DUE, {"bare": 1})
    fine = [put(valkey, "later", "", endpoint="whe_1"), put(valkey, "fine", f"{receiver.url}/ok", secret)]
    with WebhooksProcess(valkey_url) as process:
        for name in fine:
            assert ended(process, valkey, name).state == "delivered"
        for name in (broken, unsigned):
            assert "cannot be read" in ended(process, valkey, name).attempts[0].error


async def test_a_store_that_answers_and_refuses_is_told_from_one_that_does_not_answer(
    valkey_url: str, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliverer, "SILENT_S", 0.0)
    valkey.acl_setuser("limited", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-evalsha"])
    said = {valkey_url.replace("//", "//limited:x@"): "cannot be used: ", "redis://127.0.0.1:1/0": "does not answer"}
    for url, reason in said.items():
        async with AsyncClient(url, url) as client, asyncio.timeout(PATIENCE_S):
            one = Deliverer(client, WebhookSettings(url))
            running = asyncio.create_task(one.run())
            words = f"the store {reason}"
            await asyncio.to_thread(until, lambda one=one, words=words: any(words in why for why in one.unready()))
            one.stop()
            await running
            assert ("evalsha" in one.unready()[-1]) is (reason == "cannot be used: ")
    valkey.acl_deluser("limited")


def test_an_event_without_its_key_waits_unsent_until_the_key_is_there(
    valkey_url: str, valkey: Redis, receiver: Receiver, tmp_path: Path
) -> None:
    """Whoever's secret it is: an endpoint's, a tenant's, a task's own. A test event ends at once, and says why."""
    ring = parse(line := new_key(), "file")
    secrets = {who: new_secret() for who in ("endpoint", "tenant", "own")}
    sealed = {who: ring.seal(secret) for who, secret in secrets.items()}
    valkey.hset(keys.WEBHOOK_SECRETS, "acme", json.dumps(asdict(Secrets(sealed["tenant"]))))
    url = f"{receiver.url}/ok"
    endpoint = add_endpoint(valkey, url, Secrets(sealed["endpoint"]))
    names = {
        "endpoint": put(valkey, "endpoint", url, endpoint=endpoint),
        "tenant": put(valkey, "tenant", url, tenant="acme"),
        "own": put(valkey, "own", url, sealed["own"]),
    }
    test = put(valkey, "test_1", url, endpoint=endpoint)
    plain = put(valkey, "plain", url, secret := new_secret())
    file = tmp_path / "secrets.key"
    file.write_text(f"{new_key()}\n")
    env = {KEY_FILE: str(file)}

    def put_off() -> bool:
        due: Any = valkey.zrange(keys.WEBHOOKS_DUE, 0, -1, withscores=True)
        now: Any = valkey.time()
        return len(due) == 3 and all(score > 1000 * (now[0] + 10) for _, score in due)

    with WebhooksProcess(valkey_url, **env) as process:
        assert verified((ended(process, valkey, plain), receiver.event())[1], secret).id == "evt_plain"
        dead = ended(process, valkey, test)
        assert (dead.state, len(dead.attempts)) == ("dead", 1)
        assert f"the key '{next(iter(ring.keys))}', which {file} lacks" in dead.attempts[0].error
        process.until(lambda: "deliveries wait: " in process.log.read_text())
        process.until(put_off)
        assert [row_of(valkey, name).tries for name in names.values()] == [0, 0, 0]
        assert len(receiver.events) == 1
        with file.open("a") as lines:
            lines.write(line)
        valkey.zadd(keys.WEBHOOKS_DUE, dict.fromkeys(names.values(), 1))
        rows = {who: ended(process, valkey, name) for who, name in names.items()}
    assert {row.state for row in rows.values()} == {"delivered"}
    for who in names:
        (event,) = [event for event in receiver.events if event.id == f"evt_{who}"]
        assert verified(event, secrets[who]).type == "response.completed"


async def test_a_trace_changes_nothing_about_a_delivery(valkey_url: str, valkey: Redis, receiver: Receiver) -> None:
    """A try's span is made once its end is stored, or not at all: what arrived is never sent again for its sake."""
    states: list[str] = []
    spans: list[Any] = []
    good, bad = put(valkey, "good", f"{receiver.url}/ok"), put(valkey, "bad", f"{receiver.url}/ok")

    def sampled(*_: Any) -> bool:
        states.append(row_of(valkey, good).state)
        return True

    tracer: Any = SimpleNamespace(sampled=sampled, put=spans.append)
    valkey.hset(keys.task("good"), "created", 1)  # its event is of the response resp_good
    valkey.hset(keys.task("resp_bad"), "traceparent", b"\xff")
    async with AsyncClient(valkey_url, valkey_url) as client, asyncio.timeout(PATIENCE_S):
        deliveries = Deliverer(client, WebhookSettings(valkey_url, allowed=("127.0.0.0/8",)), tracer)
        running = asyncio.create_task(deliveries.run())
        await asyncio.to_thread(
            until, lambda: spans and {row_of(valkey, name).state for name in (good, bad)} == {"delivered"}
        )
        deliveries.stop()
        await running
    assert states == ["delivered"]
    assert [(span.name, span.attributes["penstock.task.id"]) for span in spans] == [("webhook", "good")]
    assert sorted(event.headers["webhook-id"] for event in receiver.events) == ["evt_bad", "evt_good"]
