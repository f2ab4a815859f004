"""Settings of one webhooks process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Time (s) before each try, counted from the one before it; after the last there is none.
SCHEDULE: Final = (0.0, 5.0, 300.0, 1800.0, *(hours * 3600.0 for hours in (2, 5, 10, 14, 20, 24)))


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """Settings of `penstock webhooks run`. Times are seconds."""

    store: str
    allowed: tuple[str, ...] = ()
    """Networks (CIDR) whose addresses may be called though they are not public, by any scheme and port."""
    schedule: tuple[float, ...] = SCHEDULE
    timeout: float = 20.0
    """Longest try, from the name's resolution to the answer."""
    lease: float = 60.0
    """Time after which another process takes a killed one's rows; longer than any try."""
    drain: float = 25.0
    """Time that tries may go on after SIGTERM; the rest is given back untried."""
    health_port: int | None = None
    """Port of /livez and /readyz; 0: any free port; None: no port."""
    health_host: str = "0.0.0.0"  # noqa: S104 - whoever runs it asks from outside
