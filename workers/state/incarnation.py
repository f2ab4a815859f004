"""One life of a worker: a name that is never used again, and what it holds.

A worker whose lease lapsed is dead to everyone else: its deliveries go to others, its claims may be taken. It must not
act on them any more, so it begins a new life under a new name, with nothing in its hands.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Incarnation:
    """A name that is never reused: the worker's and a random suffix."""

    worker: str
    id: str = field(init=False)
    begun: bool = False
    """The lease was taken."""
    over: bool = False
    """It is gone."""
    lost: dict[str, int] = field(default_factory=dict)
    """UUID -> KV tokens, of deliveries that the store said are another's before this life was seen to be over."""

    def __post_init__(self) -> None:
        self.id = f"{self.worker}.{secrets.token_hex(6)}"
