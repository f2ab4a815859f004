"""A sweeper's condition, for the probes of whoever runs it: whether the store answers, and which sweeps fail.

It is ready while it leads or stands by. It is not once the store has been silent, or one of its sweeps has failed each
time, for longer than a server takes to restart. So a release whose sweeps fail stops its own rollout. No reason here
ends the process: each sweep is tried again, and a new process would find the same.
"""

from __future__ import annotations

import time
from typing import Final

from producers.client.leader import Leadership
from producers.connection.trouble import error_text

#: Silence (s) of the store, beside the lease, after which a sweeper is not ready.
SILENT_S: Final = 10.0
#: Time (s) for which a sweep fails before the sweeper is not ready.
FAILING_S: Final = 60.0


class Condition:
    """What one sweeper tells of itself. The event loop writes it, and another thread may read it."""

    given_up = ""

    def __init__(self) -> None:
        self.leadership: Leadership | None = None
        self.failing: dict[object, tuple[float, str]] = {}
        """Sweep -> when (monotonic) the first of its failures in a row came, and the last one's reason."""

    def succeeded(self, sweep: object) -> None:
        self.failing.pop(sweep, None)

    def failed(self, sweep: object, error: Exception) -> None:
        since, _ = self.failing.get(sweep, (time.monotonic(), ""))
        self.failing[sweep] = since, error_text(error)

    def unready(self) -> list[str]:
        """Why it does not do its work now; empty while it leads, or stands by, as it should."""
        now, leadership = time.monotonic(), self.leadership
        if leadership is None:
            return ["it has not begun"]
        if now - leadership.heard_at > SILENT_S + leadership.lease_s:
            return [leadership.fault]
        failing = [(now - since, reason) for since, reason in list(self.failing.values())]
        return [f"a sweep has failed for {age:.0f} s: {reason}" for age, reason in failing if age > FAILING_S]
