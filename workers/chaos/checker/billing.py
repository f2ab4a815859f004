"""The rules about what tasks are billed: usage, the ledger, and the accounts of keys with limits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Final

from workers.chaos.checker.case import Case, Violation
from workers.chaos.checker.ledger import Row, total
from workers.chaos.checker.store import FINAL, Stream
from workers.chaos.checker.streams import tokens_of

#: Counts that no stream and no record tells for sure: a death is taken back after the end, where the worker turns out
#: to live; an engine's time may be noted once more.
UNSURE: Final = frozenset({"deaths", "engine"})


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
    for task_id, wanted in ended.items():
        row = rows.setdefault(task_id, wanted) if not case.shared else rows.get(task_id, wanted)
        if wrong := {name: row[name] for name in wanted.keys() - UNSURE if row[name] != wanted[name]}:
            yield Violation("ledger_is_the_streams", task_id, f"is in the ledger with {wrong}, not {wanted}")
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
        wanted = _spent(case, key_id, int(account.get("month", 0)))
        if key.limits and int(account.get("spent", 0)) != wanted:
            yield Violation("accounts_are_the_streams", key_id, f"spent {account.get('spent')}, its streams {wanted}")


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
    found = {}
    for task_id, record in case.stores.records.items():
        if record.get("status") in FINAL:
            found[task_id] = _billed(case.streams.get(task_id) or case.stores.streams.get(task_id), record)
    return found


def _billed(stream: Stream | None, record: Mapping[str, str]) -> dict[str, str]:
    """What the row of this task must count. `stream`: None where it is only known from the record."""
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
