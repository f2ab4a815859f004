"""The rules about what tasks are billed and what API keys may do: usage, ledger, accounts, tenants, refusals, limits.

The usage and the ledger count what the streams hold. What a key made is its tenant's, refusals make nothing, and no
limit is exceeded.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from workers.trials.chaos.checker.case import DECLINES, Case, Violation, tokens_of
from workers.trials.chaos.checker.store import FINAL, Row, Stream, total

#: Counts that no stream and no record tells for sure: a death is taken back after the end, where the worker turns out
#: to live; an engine's time may be noted once more.
UNSURE: Final = frozenset({"deaths", "engine"})
Record = Mapping[str, str]
_MINUTE_MS: Final = 60_000


def usage_is_the_stream(case: Case) -> Iterator[Violation]:
    """Usage counts the prompt once and each streamed token once, however often they were computed."""
    for task_id, stream, record in case.ended():
        entry = stream[-1][1]
        if not isinstance(entry, dict) or "usage" not in entry:
            continue
        tokens = sum(tokens_of([e for _, e in stream]).values()) + int(record.get("discarded", 0))
        usage = entry["usage"]
        if usage["output_tokens"] != tokens:
            yield Violation("usage_is_the_stream", task_id, f"is billed {usage} for {tokens} tokens")
        prompt = int(record.get("prompt_tokens", usage["prompt_tokens"]))
        if usage["prompt_tokens"] not in ((prompt,) if "started" in record else (0, prompt)):
            yield Violation("usage_is_the_stream", task_id, f"is billed {usage} for a prompt of {prompt}")


def ledger_is_the_streams(case: Case) -> Iterator[Violation]:
    """Each task that ended has one row, which counts what its stream holds for its key and tenant; rows and sums
    together count all of it, by key and tenant.

    Records may be past their time to live in a long run, and rows of clocks that were set ahead unseen: then the ledger
    counts at least what is known.
    """
    rows: dict[str, Row] = {}
    for entry, row in case.ledger.rows.items():
        if row["id"] in rows:
            yield Violation("ledger_is_the_streams", row["id"], f"has a second row, {entry}: {row}")
        rows[row["id"]] = row
    ended = _ended(case)
    for task_id, expected in ended.items():
        row = rows.setdefault(task_id, expected) if not case.shared else rows.get(task_id, expected)
        if wrong := {name: row[name] for name in expected.keys() - UNSURE if row[name] != expected[name]}:
            yield Violation("ledger_is_the_streams", task_id, f"is in the ledger with {wrong}, not {expected}")
    sums, counted = total(rows.values()), case.ledger.totals.copy()
    for whose in [*sums, *counted]:
        if whose[-1] in UNSURE:
            del sums[whose], counted[whose]
    same = sums <= counted if rows.keys() - ended.keys() else sums == counted
    if not case.shared and not same:
        yield Violation("ledger_is_the_streams", "penstock:ledger", f"counts {counted}, and the tasks {sums}")


def accounts_are_the_streams(case: Case) -> Iterator[Violation]:
    """After rest no account has anything open or reserved. Each key of the run spent what its tasks' streams hold."""
    for name, account in () if case.shared else case.stores.accounts.items():
        if still := {field: account[field] for field in ("open", "reserved") if account.get(field, "0") != "0"}:
            yield Violation("accounts_are_the_streams", name, f"has nothing under way, and {still}")
    for key_id, key in case.history.keys.items():
        account = case.stores.accounts.get(key_id, {})
        expected = _spent(case, key_id, int(account.get("month", 0)))
        if key.limits and int(account.get("spent", 0)) != expected:
            yield Violation("accounts_are_the_streams", key_id, f"spent {account.get('spent')}, its streams {expected}")


def charged_to(task: Mapping[str, str], name: str) -> bool:
    """Whether a task of this record or row is charged to a key, by its id, or to a tenant, as `tenant:<name>`."""
    return name in (task["key"], f"tenant:{task.get('tenant')}") and task["key"] != ""


def _spent(case: Case, key_id: str, month: int) -> int:
    """The tokens of the key's or tenant's tasks that ended in that month."""
    ends: dict[str, tuple[int, Row]] = {
        row["id"]: (int(entry.split("-")[0]), row) for entry, row in case.ledger.rows.items()
    }
    for task_id, counts in _ended(case).items():
        ends[task_id] = int(case.stores.records[task_id].get("finished", 0)), counts
    charged = [row for at, row in ends.values() if charged_to(row, key_id) and _month(at) == month]
    return sum(int(row["prompt"]) + int(row["output"]) for row in charged)


def _month(at: int) -> int:
    """The number of the month of a time (ms), in UTC: 12 a year since 1970."""
    then = time.gmtime(at / 1000)
    return 12 * (then.tm_year - 1970) + then.tm_mon - 1


def _ended(case: Case) -> dict[str, dict[str, str]]:
    """Task id -> what the row of it must count, for each task that ended."""
    rows = {}
    for task_id, record in case.stores.records.items():
        if record.get("status") in FINAL:
            rows[task_id] = _billed(case.streams.get(task_id) or case.stores.streams.get(task_id), record)
    return rows


def _billed(stream: Stream | None, record: Mapping[str, str]) -> dict[str, str]:
    """The counts that the row of this task must have. `stream`: None if only the record is known."""
    end = stream[-1][1] if stream else None
    usage = end.get("usage", {}) if isinstance(end, dict) else json.loads(record.get("usage", "{}"))
    discarded, output = int(record.get("discarded", 0)), usage.get("output_tokens", 0)
    if stream:
        output = sum(tokens_of([entry for _, entry in stream]).values()) + discarded
    counts = {"output": output, "discarded": discarded, "again": record.get("again", 0)}
    counts |= {"prompt": usage.get("prompt_tokens", 0), "cached": usage.get("cached_tokens", 0)}
    counts |= {"attempts": record.get("claims", 0), "deaths": record.get("deaths", 0)}
    ran = int(record.get("finished", 0)) - int(record["started"]) if "started" in record else 0
    counts |= {"ms": max(0, ran), "engine": 0}
    whose = {name: record.get(name, "") for name in ("status", "key", "tenant")}
    return whose | {name: str(count) for name, count in counts.items()}


def tenants_are_apart(case: Case) -> Iterator[Violation]:
    """A task is its key's and tenant's. To strangers it is unknown, and no list of another tenant has it."""
    records, keys = case.stores.records, case.history.keys
    for task_id, observed in case.history.by_id.items():
        if observed.key is None or task_id not in records:
            continue
        whose, recorded = (
            (observed.key, keys[observed.key].tenant),
            (records[task_id].get("key"), records[task_id].get("tenant")),
        )
        if recorded != whose:
            yield Violation("tenants_are_apart", task_id, f"was submitted by {whose}, and is of {recorded}")
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
    task_ids = {json.loads(record["metadata"]).get("attempt"): task_id for task_id, record in _with(case, "metadata")}
    for observed in case.history.tasks.values():
        for line in observed.refused:
            task_id = task_ids.get(line.get("attempt"))
            if line["status"] == 429 and line.get("attempt") and task_id:
                yield Violation("refusals_make_nothing", task_id, f"was refused: {line['error']}")


def limits_hold(case: Case) -> Iterator[Violation]:
    """No key had more than its limits allow. Not judged where the store's clock was set: minutes are the store's."""
    if any(line["kind"] == "clock" and line["target"] == "store" for line in case.history.faults):
        return
    for key_id, key in case.history.keys.items():
        tasks = [record for _, record in _with(case, "key") if charged_to(record, key_id)]
        for limit, maximum in key.limits.items():
            if (amount := _HAD[limit](tasks)) > maximum:
                yield Violation("limits_hold", key_id, f"had {limit} {amount}; its limit is {maximum}")


def _with(case: Case, field: str) -> Iterator[tuple[str, Record]]:
    return ((task_id, record) for task_id, record in case.stores.records.items() if field in record)


def _in_flight(tasks: Sequence[Record]) -> int:
    changes = [(int(task["created"]), 1) for task in tasks]
    changes += [(int(task["finished"]), -1) for task in tasks if "finished" in task]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def _a_minute(tasks: Sequence[Record], worth: Callable[[Record], int]) -> int:
    """The most that tasks of one minute are worth."""
    sums: Counter[int] = Counter()
    for task in tasks:
        sums[int(task["created"]) // _MINUTE_MS] += worth(task)
    return max(sums.values(), default=0)


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
