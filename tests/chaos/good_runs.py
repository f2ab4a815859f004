"""Runs in which every promise was kept, as the checker reads them; its tests break one at a time."""

from __future__ import annotations

import copy
import json
from typing import Any

from workers.trials.chaos.checker.case import Case, History, outputs_of
from workers.trials.chaos.checker.store import COUNTS, Ledger, Stores, total

TOKENS = (7, 8, 9)


def token_of(index: int, reason: str | None = None) -> list[Any]:
    return [0, index, TOKENS[index], f" w{TOKENS[index]}", *([None, reason] if reason else [])]


def end_of(status: str, count: int) -> dict[str, Any]:
    usage = {"prompt_tokens": 2, "cached_tokens": 0, "output_tokens": count}
    return {"end": status, "reasons": ["length"] if status == "completed" else [], "usage": usage, "error": None}


def shown_of(entry: Any) -> Any:
    """An entry as a reader writes it down."""
    return [*entry[:4], entry[5] if len(entry) > 5 else None] if isinstance(entry, list) else entry


def stream_of(status: str, count: int) -> list[tuple[str, Any]]:
    last = "length" if status == "completed" else None
    entries = [token_of(at, last if at == count - 1 else None) for at in range(count)] + [end_of(status, count)]
    return [(f"{at}-0", entry) for at, entry in enumerate(entries, 1)]


def record_of(status: str, count: int, **more: str) -> dict[str, str]:
    record = {"status": status, "end": status, "settled": "1", "n": "1", "started": "1", "prompt_tokens": "2"}
    return record | {"next:0": str(count)} | more


def row_of(name: str, stream: list[tuple[str, Any]]) -> dict[str, str]:
    row = dict.fromkeys(COUNTS, "0") | {"prompt": "2", "output": str(len(stream) - 1)}
    return row | {"id": name, "status": stream[-1][1]["end"], "key": "", "tenant": ""}


def good() -> Case:
    """A whole run: one of each kind of task, and their quiet twin."""
    history, streams, records = History(), {}, {}
    whole, half = stream_of("completed", 3), stream_of("cancelled", 2)
    kinds = {
        "read": ("http", whole),
        "cancelled": ("http", half),
        "polled": ("poll", whole),
        "plain": ("celery", whole),
    }
    lines: list[dict[str, Any]] = []
    for number, (name, (via, stream)) in enumerate(kinds.items()):
        lines.append({"t": 1.0, "e": "ask", "k": number, "v": 0, "via": via, "task": {"model": "m", "n": 1}})
        lines.append({"t": 1.1, "e": "accepted", "k": number, "id": name})
        entries = [[at, shown_of(entry)] for at, (_, entry) in enumerate(stream)]
        if via == "http":
            lines.append({"t": 1.2, "e": "came", "id": name, "from": 0})
            lines += [{"t": 2.0 + at, "e": "got", "id": name, "entries": [one]} for at, one in enumerate(entries)]
        elif via == "poll":
            made = {"index": 0, "token_ids": list(TOKENS), "text": " w7 w8 w9", "finish_reason": "length"}
            lines.append({"t": 5.0, "e": "final", "id": name, "body": {"status": "completed", "choices": [made]}})
        status = stream[-1][1]["end"]
        streams[name], records[name] = stream, record_of(status, len(stream) - 1)
    lines.append({"t": 1.0, "e": "ask", "k": 0, "v": 0, "via": "http", "task": {"model": "m", "n": 1}, "quiet": True})
    lines.append({"t": 3.0, "e": "cancel", "id": "cancelled", "accepted": None, "status": None})
    lines.append({"t": 3.0, "e": "cancel", "id": "cancelled", "accepted": True, "status": "cancelled"})
    lines.append({"t": 1.0, "e": "ask", "k": 9, "v": 0, "via": "waiting", "task": {"model": "m", "n": 1}})
    lines.append({"t": 6.0, "e": "text", "k": 9, "texts": [" w7 w8 w9"], "whole": True})
    kill = {"t": 2.5, "e": "fault", "kind": "kill", "role": "worker", "target": "w", "process": "w.g1"}
    lines.append(kill | {"stood": 2.4, "stopped": {"read": 1}, "lease_left": 1.0})
    lines.append({"t": 2.9, "e": "resumed", "id": "read", "length": 1})
    lines.append({"t": 7.0, "e": "exit", "process": "w.g2", "role": "worker", "code": 0, "asked": True, "served": True})
    history.extend(copy.deepcopy(lines))
    result = {"status": "SUCCESS", "result": {"text": " w7 w8 w9"}}
    idle = {"worker": "w", "tasks": 0, "running": 0, "waiting": 0, "kv_blocks_used": 0}
    stores = Stores(records, {"read": copy.deepcopy(whole)}, {"plain": result}, ["plain"], [], [], [idle])
    rows = {f"{at}-0": row_of(name, stream) for at, (name, stream) in enumerate(streams.items())}
    ledger = Ledger(rows, total(rows.values()))
    return Case(history, stores, streams, {0: outputs_of([entry for _, entry in whole])}, ledger=ledger)


#: The limits of the key that submitted `read`: as much as it had, 2 tokens of its prompt and 3 of output.
LIMITS = {"max_in_flight": 1, "rpm": 1, "tpm": 5, "budget_tokens": 5}


def with_keys() -> Case:
    """The same run, in which a key of acme submitted `read`, was refused once, and one of globex asked about it."""
    case = good()
    case.history.extend(
        [
            {"t": 0.1, "e": "key", "id": "a1", "tenant": "acme", "limits": LIMITS},
            {"t": 0.1, "e": "key", "id": "tenant:acme", "tenant": "acme", "limits": {"max_in_flight": 1}},
            {"t": 0.1, "e": "key", "id": "g1", "tenant": "globex", "limits": {}},
            {"t": 1.2, "e": "refused", "k": 0, "status": 429, "error": "full", "attempt": "first"},
            {"t": 1.3, "e": "refused", "k": 0, "status": 503, "error": "away", "attempt": "second"},
            {"t": 2.0, "e": "spied", "id": "read", "by": "g1", "status": 404},
            {"t": 2.0, "e": "listed", "by": "g1", "ids": []},
        ]
    )
    case.history.by_id["read"].key = "a1"
    usage = json.dumps(case.streams["read"][-1][1]["usage"])
    of_key = {"key": "a1", "tenant": "acme"}
    case.stores.records["read"] |= of_key | {
        "metadata": '{"attempt": "third"}',
        "reserved": '{"estimate": 7}',
        "usage": usage,
    }
    case.stores.records["read"] |= {"created": "0", "finished": "1"}
    case.ledger.rows["0-0"] = {**case.ledger.rows["0-0"], **of_key}
    case.ledger.totals = total(case.ledger.rows.values())
    account = {"open": "0", "reserved": "0", "spent": "5", "month": "0"}
    case.stores.accounts = {"a1": account, "tenant:acme": {**account}}
    return case
