"""The invariants. Each is a function that yields the violations in a case.

1 accepted tasks end, 2 streams are whole, 3 outputs are those of an uninterrupted run, 4 accepted cancels win, 5 the KV
pool is whole; then links, leftovers and processes' ends. `billing` has those about usage, `keys` those about API keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from workers.trials.chaos.checker.billing import (
    accounts_are_the_streams,
    ledger_is_the_streams,
    limits_hold,
    refusals_make_nothing,
    tenants_are_apart,
    usage_is_the_stream,
)
from workers.trials.chaos.checker.case import DECLINES, NOTHING, Case, ObservedTask, Rule, Violation, outputs_of
from workers.trials.chaos.checker.rest import held_by
from workers.trials.chaos.checker.store import FINAL, Stream

EXPIRED = "expired"
#: Time (s) after its end at which a reader lease counts as never removed.
UNREAD_S = 30.0


def accepted_tasks_end(case: Case) -> Iterator[Violation]:
    """1: each accepted task has a final, settled record, in a state that it may end in."""

    def wrong(task_id: str, description: str) -> Violation:
        return Violation("accepted_tasks_end", task_id, description)

    for task_id, observed in case.history.by_id.items():
        record = case.stores.records.get(task_id)
        if record is None:
            if observed.accepted and observed.via != "celery":
                yield wrong(task_id, f"was accepted (number {observed.number}), and there is no record of it")
            elif observed.accepted:
                yield wrong(task_id, "was sent as a plain Celery message, and nobody made a record of it")
    for task_id, record in case.stores.records.items():
        status = record.get("status", "")
        if status not in FINAL:
            yield wrong(task_id, f"is {status or 'without a state'}")
        elif "settled" not in record or record.keys() & {"claim", "owner"}:
            yield wrong(task_id, f"is {status}, and not settled: {sorted(record)}")
        else:
            submitted = case.history.by_id.get(task_id)
            if not _may_end(case, task_id, submitted, record):
                yield wrong(task_id, f"ended {status}: {record.get('error')}")


def _may_end(case: Case, task_id: str, observed: ObservedTask | None, record: Mapping[str, str]) -> bool:
    status = record["status"]
    if status == "completed" or task_id in case.meant:
        return True
    if observed is None:  # nobody got its id: a caller who waits, or one whose answer was lost
        return status == "cancelled" or EXPIRED in record.get("error", "") or "deadline" in record
    if status == "cancelled":
        # Who waited for an answer and was not there for its end (killed, maybe) is what cancels it.
        disconnected = observed.via == "waiting" and (observed.texts is None or not observed.texts[1])
        return bool(observed.cancels) or disconnected
    return "timeout" in observed.task and (status == "incomplete" or EXPIRED in record.get("error", ""))


def refusals_are_declared(case: Case) -> Iterator[Violation]:
    """Refused tasks got 429 or 503, never another error."""
    for observed in case.history.tasks.values():
        for line in observed.refused:
            if line["status"] not in DECLINES:
                yield Violation(
                    "refusals_are_declared", f"number {observed.number}", f"{line['status']}: {line['error']}"
                )


def streams_are_whole(case: Case) -> Iterator[Violation]:
    """2: positions and indexes run from 0, each once; one terminal entry, the last; the record counts the same."""
    for task_id, stream, record in case.ended():
        for fault in _stream_faults(stream, record):
            yield Violation("streams_are_whole", task_id, fault)
        now = case.stores.streams.get(task_id)
        if now is not None and now != stream:
            yield Violation("streams_are_whole", task_id, f"had {len(stream)} entries at its end, and {len(now)} later")
    for task_id, record in case.stores.records.items():
        if task_id not in case.streams and task_id not in case.stores.streams and not case.shared:
            observed = case.history.by_id.get(task_id)
            if observed is not None:
                yield Violation("streams_are_whole", task_id, f"is {record.get('status')}, and has no stream")


def _stream_faults(stream: Stream, record: Mapping[str, str]) -> Iterator[str]:
    names = [name for name, _ in stream]
    if names != [f"{at}-0" for at in range(1, len(names) + 1)]:
        yield f"has entries {_runs(names)}"
    indexes: dict[int, list[int]] = {}
    for _, entry in stream:
        if isinstance(entry, list):
            indexes.setdefault(entry[0], []).append(entry[1])
    for choice, numbers in indexes.items():
        if numbers != list(range(len(numbers))):
            yield f"has indexes {numbers} in choice {choice}"
    for choice in range(int(record.get("n", 1))):
        counted, streamed = int(record.get(f"next:{choice}", 0)), len(indexes.get(choice, ()))
        if counted != streamed:
            yield f"counts {counted} tokens of choice {choice}, and has {streamed}"
    ends = [at for at, (_, entry) in enumerate(stream) if isinstance(entry, dict) and "end" in entry]
    if ends != [len(stream) - 1]:
        yield f"has terminal entries at {ends} of {len(stream)}"
    elif stream[-1][1]["end"] != record.get("status"):
        yield f"is {record.get('status')}, and its stream ends {stream[-1][1]['end']}"


def _runs(names: list[str]) -> str:
    wrong = next((at for at, name in enumerate(names) if name != f"{at + 1}-0"), len(names))
    return f"1-0 to {wrong}-0, then {names[wrong : wrong + 3]}, {len(names)} in all"


def readers_are_given_the_stream(case: Case) -> Iterator[Violation]:
    """2: a reader that resumes as often as it must gets each entry once, in order and unchanged."""
    for task_id, observed in case.history.by_id.items():
        stream = case.streams.get(task_id) or case.stores.streams.get(task_id) or []
        for description in _reader_faults(observed, [entry for _, entry in stream]):
            yield Violation("readers_are_given_the_stream", task_id, description)
        if observed.accepted and observed.via in ("http", "redis") and len(observed.entries) < len(stream):
            description = f"its reader was given {len(observed.entries)} entries of {len(stream)}, and no end"
            yield Violation("readers_are_given_the_stream", task_id, description)
        if observed.accepted and observed.via == "poll" and not observed.finals:
            yield Violation("readers_are_given_the_stream", task_id, "nobody who polls was told of its end")


def _reader_faults(observed: ObservedTask, entries: list[Any]) -> Iterator[str]:
    positions = [position for _, position, _ in observed.entries]
    if positions != list(range(len(positions))):
        at = next(at for at, position in enumerate(positions) if position != at)
        yield f"its reader was given position {positions[at]} after {positions[at - 1] if at else 'nothing'}"
    for _, position, entry in observed.entries:
        if position >= len(entries):
            yield f"its reader was given position {position} of {len(entries)}: {entry}"
            break
        if not same_entry(entries[position], entry):
            yield f"its reader was given {entry} at {position}, where {entries[position]} stands"
            break
    tokens, end = outputs_of(entries), next((e for e in entries if isinstance(e, dict) and "end" in e), None)
    for body in observed.finals:
        polled = {choice["index"]: tuple(choice["token_ids"]) for choice in body.get("choices") or ()}
        if end is None or body["status"] != end["end"]:
            yield f"a poll says {body['status']}, its stream {end and end['end']}"
        elif any(polled.get(choice, ()) != output.tokens for choice, output in tokens.items()):
            yield "a poll tells other tokens than the stream"
        elif any(
            choice["text"] != tokens[choice["index"]].text
            for choice in body.get("choices") or ()
            if choice["index"] in tokens
        ):
            yield "a poll tells another text than the stream"


def same_entry(stored: Any, received: Any) -> bool:
    """Whether a reader's entry equals the stored one. The stored one may hold more."""
    if isinstance(stored, list) and isinstance(received, list):
        return stored[:4] == received[:4] and (stored[5] if len(stored) > 5 else None) == received[4]
    if isinstance(stored, dict) and isinstance(received, dict):
        return all(stored.get(name) == value for name, value in received.items())
    return False


def outputs_equal_the_quiet_run(case: Case) -> Iterator[Violation]:
    """3: outputs equal those of the run without faults; early ends are prefixes. All variants completed there."""
    for subject, description in (*_never_quiet(case), *_other_tokens(case), *_other_texts(case)):
        yield Violation("outputs_equal_the_quiet_run", subject, description)


def _never_quiet(case: Case) -> Iterator[tuple[str, str]]:
    for variant in sorted(
        {observed.variant for observed in case.history.tasks.values() if observed.quiet} - case.outputs.keys()
    ):
        yield f"variant {variant}", "was not completed in quiet: there is nothing to compare with"


def _other_tokens(case: Case) -> Iterator[tuple[str, str]]:
    for task_id, stream, record in case.ended():
        observed = case.history.by_id.get(task_id)
        expected = case.outputs.get(observed.variant) if observed is not None else None
        if observed is None or expected is None or observed.quiet:
            continue
        whole, outputs = record["status"] == "completed", outputs_of([entry for _, entry in stream])
        for choice in sorted(expected.keys() | outputs.keys()):
            output, tokens = expected.get(choice, NOTHING), outputs.get(choice, NOTHING).tokens
            if tokens != (output.tokens if whole else output.tokens[: len(tokens)]):
                at = next((k for k, (a, b) in enumerate(zip(tokens, output.tokens, strict=False)) if a != b), None)
                difference = f"token {at}" if at is not None else f"{len(tokens)} tokens, not {len(output.tokens)}"
                yield task_id, f"variant {observed.variant}, choice {choice} differs: {difference}"


def _other_texts(case: Case) -> Iterator[tuple[str, str]]:
    for observed in case.history.tasks.values():
        expected = case.outputs.get(observed.variant)
        if observed.texts is None or expected is None:
            continue
        texts, whole = observed.texts
        for choice, text in enumerate(texts):
            true = expected.get(choice, NOTHING).text
            if text != true and (whole or not true.startswith(text)):
                yield f"number {observed.number}", f"was answered another text: {text[:80]!r}"


def accepted_cancels_win(case: Case) -> Iterator[Violation]:
    """4: a task with an accepted cancel ends `cancelled`; one with a refused cancel ended otherwise."""
    for task_id, observed in case.history.by_id.items():
        status = case.stores.records.get(task_id, {}).get("status")
        if True in observed.cancels and status != "cancelled":
            yield Violation("accepted_cancels_win", task_id, f"a cancel was accepted, and it ended {status}")


def links_ran(case: Case) -> Iterator[Violation]:
    """Each completed plain Celery task sent its link at least once, and its result is the stream's text."""
    sent = Counter(case.stores.links)
    for task_id, observed in case.history.by_id.items():
        record = case.stores.records.get(task_id, {})
        if observed.via != "celery" or record.get("status") != "completed":
            continue
        if not sent[task_id]:
            yield Violation("links_ran", task_id, "is completed, and its link was never sent")
        result = case.stores.results.get(task_id)
        text = outputs_of([entry for _, entry in case.streams.get(task_id, [])])
        if result is None or result.get("status") != "SUCCESS":
            yield Violation("links_ran", task_id, f"is completed, and the result backend says {result}")
        elif text and result["result"].get("text") != text[0].text:
            yield Violation("links_ran", task_id, f"the result backend tells another text: {result['result']}")


def nothing_is_left(case: Case) -> Iterator[Violation]:
    """No message, index entry or unexpected dead letter is left, and no reader lease is long over.

    If a server's clock was set ahead, leases count as over from then on.
    """
    for name in case.stores.leftovers:
        yield Violation("nothing_is_left", name, "was left behind")
    set_ahead = sum(
        max(0.0, line["amount"])
        for line in case.history.faults
        if line["e"] == "fault" and line["kind"] == "clock" and line["target"] in ("broker", "store")
    )
    for task_id, over in case.stores.readers.items():
        if over > UNREAD_S + set_ahead:
            yield Violation("nothing_is_left", f"penstock:readers {task_id}", f"its reader was gone for {over:.0f} s")
    for letter in case.stores.dead:
        task_ids = [task_id for task_id in case.history.by_id if task_id in letter.get("message", "")]
        if (task_ids or not case.shared) and not any(task_id in case.meant for task_id in task_ids):
            yield Violation("nothing_is_left", "penstock:dead", f"{letter.get('reason')}: {letter.get('message')}")


def memory_is_whole(case: Case) -> Iterator[Violation]:
    """5: an idle worker holds no task and no KV block."""
    for lease in case.stores.workers:
        leaked = held_by(lease)
        if leaked and not case.shared:
            yield Violation("memory_is_whole", lease["worker"], f"has nothing to do, and holds {leaked}")


def processes_end_as_told(case: Case) -> Iterator[Violation]:
    """No process that served dies unasked, and a drained process exits with 0.

    A drained worker may exit with 1: it could not hand its tasks back in time (a server is away or the machine busy).
    """
    for line in case.history.exits:
        if line["asked"]:
            if line["code"] not in ((0, 1, -9) if line["role"] == "worker" else (0, -9)):
                yield Violation("processes_end_as_told", line["process"], f"was told to stop: {line['code']}")
        elif line["served"]:
            yield Violation("processes_end_as_told", line["process"], f"ended unasked: {line['code']}")


RULES: tuple[Rule, ...] = (
    accepted_tasks_end,
    refusals_are_declared,
    streams_are_whole,
    readers_are_given_the_stream,
    outputs_equal_the_quiet_run,
    accepted_cancels_win,
    usage_is_the_stream,
    ledger_is_the_streams,
    accounts_are_the_streams,
    limits_hold,
    refusals_make_nothing,
    tenants_are_apart,
    links_ran,
    nothing_is_left,
    memory_is_whole,
    processes_end_as_told,
)


def judge(case: Case) -> list[Violation]:
    """All violations, rule by rule."""
    return [violation for rule in RULES for violation in rule(case)]
