"""Proves, of a run, what Penstock promises; shares no code with it, so that no fault of it is believed.

    journals (what clients saw, what was done to whom) -> `history` -> \
    broker and store, as they are                      -> `store`   ->  `rules` -> violations -> `report`
    workers' leases, renewed since then                -> `rest`    -> /
    the same prompts, run in quiet                     -> `outputs` -> /

Imports redis-py and Python's own alone (`lint-imports` and a test see to that); its idea of Penstock's formats is its
own, written from their description in docs/protocol.md.
"""

from workers.chaos.checker.history import History, Seen
from workers.chaos.checker.report import Report
from workers.chaos.checker.rules import Case, Violation, judge
from workers.chaos.checker.store import Stores, Watcher

__all__ = ["Case", "History", "Report", "Seen", "Stores", "Violation", "Watcher", "judge"]
