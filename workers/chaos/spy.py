"""Asks for a task with another tenant's key, and journals what it was told.

accepted task -> GET, cancel and list as a stranger -> journal: `spied`, `listed`
"""

from __future__ import annotations

import random
from typing import Final

from workers.chaos.checker.history import Seen
from workers.chaos.journal import Journal
from workers.chaos.senders import AWAY, Declined, Senders

#: Share of the accepted tasks that strangers ask about.
SHARE: Final = 0.25
_ASKED: Final = (("GET", ""), ("POST", "/cancel"))


async def spy(senders: Senders, journal: Journal, seen: Seen) -> None:
    """Ask about this task as a stranger would, for some of the tasks. Without keys there are no strangers."""
    rng = random.Random(f"{seen.number} spy")  # noqa: S311 - it draws a load, it guards nothing
    strangers = [one for one in senders.holders.values() if one.tenant != senders.tenant(seen.key)]
    if not strangers or rng.random() > SHARE:
        return
    by = rng.choice(strangers).id
    for method, end in _ASKED:
        try:
            await senders.ask(method, f"/v1/tasks/{seen.id}{end}", key=by)
            status = 200
        except Declined as declined:
            status = declined.status
        except AWAY:
            continue
        journal.write("spied", id=seen.id, by=by, status=status)
    try:
        told = await senders.ask("GET", "/v1/tasks?limit=100", key=by)
    except (Declined, *AWAY):
        return
    journal.write("listed", by=by, ids=[task["id"] for task in told["data"]])
