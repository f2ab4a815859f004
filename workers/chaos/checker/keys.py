"""The rules about API keys: what a key made is its tenant's, refusals make nothing, and no limit is exceeded."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from workers.chaos.checker.billing import charged_to
from workers.chaos.checker.case import DECLINES, Case, Violation

Record = Mapping[str, str]
_MINUTE_MS: Final = 60_000


def tenants_are_apart(case: Case) -> Iterator[Violation]:
    """A task is its key's and tenant's. To strangers it is unknown, and no list of another tenant has it."""
    records, keys = case.stores.records, case.history.keys
    for task_id, seen in case.history.by_id.items():
        if seen.key is None or task_id not in records:
            continue
        whose, found = (seen.key, keys[seen.key].tenant), (records[task_id].get("key"), records[task_id].get("tenant"))
        if found != whose:
            yield Violation("tenants_are_apart", task_id, f"was submitted by {whose}, and is of {found}")
    for line in case.history.spied:
        if line["status"] not in DECLINES | {404}:
            yield Violation("tenants_are_apart", line["id"], f"answers {line['status']} to the key {line['by']}")
    for line in case.history.listed:
        tenant = keys[line["by"]].tenant
        for task_id in line["ids"]:
            if records.get(task_id, {}).get("tenant", tenant) != tenant:
                yield Violation("tenants_are_apart", task_id, f"is in a list of the tenant {tenant}")


def refusals_make_nothing(case: Case) -> Iterator[Violation]:
    """A request that was answered 429 made no record. One that was answered 503 may have: its task comes later."""
    made = {json.loads(record["metadata"]).get("attempt"): task_id for task_id, record in _with(case, "metadata")}
    for seen in case.history.tasks.values():
        for line in seen.refused:
            task_id = made.get(line.get("attempt"))
            if line["status"] == 429 and line.get("attempt") and task_id:
                yield Violation("refusals_make_nothing", task_id, f"was refused: {line['error']}")


def limits_hold(case: Case) -> Iterator[Violation]:
    """No key had more than its limits allow. Not judged where the store's clock was set: minutes are the store's."""
    if any(line["kind"] == "clock" and line["target"] == "store" for line in case.history.faults):
        return
    for key_id, key in case.history.keys.items():
        tasks = [record for _, record in _with(case, "key") if charged_to(record, key_id)]
        for limit, most in key.limits.items():
            if (found := _HAD[limit](tasks)) > most:
                yield Violation("limits_hold", key_id, f"had {limit} {found}; its limit is {most}")


def _with(case: Case, field: str) -> Iterator[tuple[str, Record]]:
    return ((task_id, record) for task_id, record in case.stores.records.items() if field in record)


def _in_flight(tasks: Sequence[Record]) -> int:
    changes = [(int(task["created"]), 1) for task in tasks]
    changes += [(int(task["finished"]), -1) for task in tasks if "finished" in task]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def _a_minute(tasks: Sequence[Record], worth: Callable[[Record], int]) -> int:
    """The most that tasks of one minute are worth."""
    found: Counter[int] = Counter()
    for task in tasks:
        found[int(task["created"]) // _MINUTE_MS] += worth(task)
    return max(found.values(), default=0)


def _charged(task: Record) -> int:
    """Tokens that it counts for in its minute: those that were used, if it ended within it."""
    ended = int(task.get("finished", 0)) // _MINUTE_MS == int(task["created"]) // _MINUTE_MS
    return _used(task) if ended else int(json.loads(task["reserved"])["estimate"])


def _used(task: Record) -> int:
    usage = json.loads(task.get("usage", "{}"))
    return int(usage.get("prompt_tokens", 0)) + int(usage.get("output_tokens", 0))


#: Limit -> what a key had of it, from its tasks' records.
_HAD: Final[Mapping[str, Callable[[Sequence[Record]], int]]] = {
    "max_in_flight": _in_flight,
    "rpm": lambda tasks: _a_minute(tasks, lambda _: 1),
    "tpm": lambda tasks: _a_minute(tasks, _charged),
    "budget_tokens": lambda tasks: sum(map(_used, tasks)),
}
