"""An event as it is sent: its body, and headers signed as standardwebhooks.com says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Final

from standardwebhooks import Webhook

from producers.store.outbox import Row

USER_AGENT: Final = f"Penstock/{version('penstock')}"


def body_of(row: Row) -> str:
    """The event as JSON, the same at each try."""
    event = {
        "id": row.webhook_id,
        "object": "event",
        "created_at": row.at,
        "type": row.type,
        "data": {"id": row.object},
    }
    return json.dumps(event, separators=(",", ":"))


def headers_of(row: Row, body: str, secrets: Sequence[str], now: datetime | None = None) -> dict[str, str]:
    """The headers of a try at `now` (UTC): one signature for each secret."""
    # standardwebhooks takes any time's wall clock for UTC, so it gets UTC alone.
    at = (now or datetime.now(UTC)).astimezone(UTC)
    return {
        "content-type": "application/json",
        "user-agent": USER_AGENT,
        "accept-encoding": "identity",
        "webhook-id": row.webhook_id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": " ".join(Webhook(secret).sign(row.webhook_id, at, body) for secret in secrets),
    }
