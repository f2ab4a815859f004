"""Tells the broker of which prefixes and adapters this worker holds, so that FETCH sends it tasks that need them.

    engine.marks() ─ each tick, what has changed ─▶ HOLDS ─▶ the broker, until REAP     docs/how/placement.md

A worker that takes no tasks (it drains, or is held back) holds nothing. Whatever is lost on the way is said again: the
broker answers how many marks it has, and if that is another number, all of them are entered anew.
"""

from __future__ import annotations

import time
from typing import Any, Final

from producers.broker.base import Consumer
from producers.contract.message import marks_in
from workers.flow.deliveries import Deliveries
from workers.state.delivery import Incarnation
from workers.state.served import Served

#: Most marks that one HOLDS enters, and that it drops: what a script does in a millisecond.
PORTION: Final = 256
#: Without a change it is said again after this time (s): what the broker has of it ends an hour after it was said.
AGAIN_S: Final = 60.0


class Holdings:
    """`held` may be read from any thread; the rest is the housekeeper's."""

    def __init__(self, served: Served, broker: Consumer, deliveries: Deliveries) -> None:
        self._served = served
        self._broker = broker
        self._deliveries = deliveries
        #: Marks that the broker has of this life, as far as is known.
        self.held: set[str] = set()
        self._life: Incarnation | None = None
        self._enter_all = True
        self._due = 0.0

    def tell(self, life: Incarnation) -> None:
        """Tell what has changed. Raises the broker's errors; may be called again."""
        if not self._served.places or not life.begun:
            return
        if life is not self._life:
            self._life, self._enter_all = life, True
        marks = self._served.engine.marks() if self._deliveries.serves else []
        self._enter_all = self._enter_all or bool(self.held and not marks)  # all of it goes at once, in no portions
        entered_marks = set() if self._enter_all else self.held
        enter = [mark for mark in dict.fromkeys(marks) if mark not in entered_marks][-PORTION:]
        drop = [*entered_marks.difference(marks)][:PORTION]
        if not (enter or drop or self._enter_all) and time.monotonic() < self._due:
            return
        enter_all, self._enter_all = self._enter_all, True  # until it has answered
        entered = self._broker.hold(life.id, enter, drop, anew=enter_all)
        if entered >= 0:
            self.held = (entered_marks | set(enter)).difference(drop)
            self._enter_all, self._due = entered != len(self.held), time.monotonic() + AGAIN_S

    def has_part(self, headers: dict[str, Any]) -> bool | None:
        """Whether it holds a part of what a message's task needs; None if the message does not say."""
        marks = marks_in(headers)
        return any(mark in self.held for mark in marks) if marks else None
