"""Checks whether a run kept Penstock's promises. It shares no code with the product, so it shares none of its bugs.

    journals (what clients saw, which faults came) -> `history` -> \
    broker and store after the run                 -> `store`   ->  `rules` -> violations -> `report`
    workers' leases, renewed after the run         -> `rest`    -> /
    the same prompts, run without faults           -> `outputs` -> /

Imports only redis-py and the standard library (`lint-imports` and a test check that). It parses Penstock's formats
itself, from their description in docs/how/protocol.md.
"""

from workers.chaos.checker.case import Case, Violation
from workers.chaos.checker.history import History, Seen
from workers.chaos.checker.report import Report
from workers.chaos.checker.rules import judge
from workers.chaos.checker.store import Stores, Watcher

__all__ = ["Case", "History", "Report", "Seen", "Stores", "Violation", "Watcher", "judge"]
