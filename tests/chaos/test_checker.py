"""The checker sees each way in which a promise can be broken: else to find nothing would prove nothing."""

from __future__ import annotations

import ast
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import workers.trials.chaos.checker
from tests.chaos.good_runs import LIMITS, good, record_of, shown_of, stream_of, token_of, with_keys
from workers.trials.chaos.checker.case import NOTHING, Case, Key, lines_of, outputs_of
from workers.trials.chaos.checker.report import Report
from workers.trials.chaos.checker.rules import judge
from workers.trials.chaos.checker.store import COUNTS, Stores, total


def test_a_whole_run_is_found_whole() -> None:
    assert judge(with_keys()) == []
    case = good()
    assert judge(case) == []
    report = Report.of(case, [], command="c", seed=1, lease=1.0)
    assert report.gaps.served == [0.5], "it stood still at 2.4, and went on at 2.9"
    assert report.gaps.observed == [pytest.approx(0.6)], "its reader was given that at 3.0"
    assert (report.tasks, report.tokens, report.kills["worker"]) == (4, 11, 1)


def _drop_record(case: Case) -> None:
    del case.stores.records["read"]


def _leave_running(case: Case) -> None:
    case.stores.records["read"]["status"] = "in_progress"


def _leave_unsettled(case: Case) -> None:
    case.stores.records["read"] |= {"claim": "c", "owner": "w.1"}


def _fail(case: Case) -> None:
    case.stores.records["polled"]["status"] = "failed"


def _cancel_answered(case: Case) -> None:
    """Of a caller who waited to the end."""
    seen = case.history.tasks[False, 9]
    case.history.by_id["waited"] = seen
    case.stores.records["waited"] = record_of("cancelled", 3)
    case.streams["waited"] = stream_of("cancelled", 3)  # type: ignore[index]


def _forget_cancel(case: Case) -> None:
    """As if it had gone on to its end."""
    case.streams["cancelled"][:] = stream_of("completed", 3)  # type: ignore[index]
    case.stores.records["cancelled"] = record_of("completed", 3)
    seen = case.history.by_id["cancelled"]
    seen.entries = [(0.0, at, shown_of(entry)) for at, (_, entry) in enumerate(stream_of("completed", 3))]


def _stream_edit(edit: Callable[[list[tuple[str, Any]]], None]) -> Callable[[Case], None]:
    def apply(case: Case) -> None:
        stream = copy.deepcopy(case.streams["read"])
        edit(stream)
        case.streams["read"] = stream  # type: ignore[index]
        case.stores.streams["read"] = copy.deepcopy(stream)

    return apply


def _hole(stream: list[tuple[str, Any]]) -> None:
    del stream[1]


def _double(stream: list[tuple[str, Any]]) -> None:
    stream.insert(2, ("3-0", list(stream[1][1])))
    stream[:] = [(f"{at}-0", entry) for at, (_, entry) in enumerate(stream, 1)]


def _two_ends(stream: list[tuple[str, Any]]) -> None:
    stream.append((f"{len(stream) + 1}-0", stream[-1][1]))


def _other_token(stream: list[tuple[str, Any]]) -> None:
    stream[1][1][2] = 99


def _overcharge(stream: list[tuple[str, Any]]) -> None:
    stream[-1][1]["usage"]["output_tokens"] += 1


def _overcharge_prompt(stream: list[tuple[str, Any]]) -> None:
    stream[-1][1]["usage"]["prompt_tokens"] *= 2


def _grow_later(case: Case) -> None:
    case.stores.streams["read"].append(("5-0", token_of(0)))


def _lose_stream(case: Case) -> None:
    del case.streams["cancelled"]  # type: ignore[attr-defined]


def _reader(edit: Callable[[list[tuple[float, int, Any]]], None]) -> Callable[[Case], None]:
    return lambda case: edit(case.history.by_id["read"].entries)


def _misled(entries: list[tuple[float, int, Any]]) -> None:
    entries[1][2][3] = " else"


def _given_twice(entries: list[tuple[float, int, Any]]) -> None:
    entries.insert(1, entries[0])


def _skipped(entries: list[tuple[float, int, Any]]) -> None:
    del entries[1]


def _cut_short(entries: list[tuple[float, int, Any]]) -> None:
    del entries[2:]


def _poll_other(case: Case) -> None:
    case.history.by_id["polled"].finals[0]["choices"][0]["token_ids"] = [7, 8]


def _poll_text(case: Case) -> None:
    case.history.by_id["polled"].finals[0]["choices"][0]["text"] = " w7"


def _poll_never(case: Case) -> None:
    case.history.by_id["polled"].finals.clear()


def _answer_other(case: Case) -> None:
    case.history.tasks[False, 9].texts = [" w7 w8 else"], True


def _break_quiet_off(case: Case) -> None:
    case.outputs.clear()  # type: ignore[attr-defined]


def _choice_too_many(case: Case) -> None:
    case.history.tasks[False, 9].texts = [" w7 w8 w9", " w7"], True


def _refuse(case: Case) -> None:
    case.history.tasks[False, 0].refused.append({"status": 500, "error": "internal"})


def _lose_link(case: Case) -> None:
    case.stores.links.clear()


def _lose_result(case: Case) -> None:
    case.stores.results.clear()


def _other_result(case: Case) -> None:
    case.stores.results["plain"]["result"]["text"] = "else"


def _leave_message(case: Case) -> None:
    case.stores.leftovers.append("penstock:inflight:w.1")


def _leave_reader(case: Case) -> None:
    case.stores.readers = {"polled": 31.0}


def _dead_letter(case: Case) -> None:
    case.stores.dead.append({"reason": "not JSON", "message": "{"})


def _leak(case: Case) -> None:
    case.stores.workers[0]["kv_blocks_used"] = 3


def _crash(case: Case) -> None:
    case.history.exits.append(case.history.exits[0] | {"asked": False, "code": 1})


def _fail_to_drain(case: Case) -> None:
    case.history.exits[0]["code"] = -11


def _bill(**wrong: str) -> Callable[[Case], None]:
    def apply(case: Case) -> None:
        case.ledger.rows["0-0"] = {**case.ledger.rows["0-0"], **wrong}

    return apply


def _bill_twice(case: Case) -> None:
    case.ledger.rows["9-0"] = case.ledger.rows["0-0"]
    case.ledger.totals += total([case.ledger.rows["0-0"]])


def _sum_twice(case: Case) -> None:
    case.ledger.totals["", "", "output"] += 1


def _sum_for_another(case: Case) -> None:
    """As if what one tenant used were counted for another one."""
    for name in COUNTS:
        case.ledger.totals["g1", "globex", name] = case.ledger.totals.pop(("a1", "acme", name), 0)


def _sum_nothing(case: Case) -> None:
    """As if the rows had gone before they were added."""
    case.ledger.rows.clear()
    case.ledger.totals.clear()


def _account(**wrong: str) -> Callable[[Case], None]:
    return lambda case: case.stores.accounts["a1"].update(wrong)


def _charge_tenant(case: Case) -> None:
    """As if a tenant were charged for what only its key was."""
    case.stores.accounts["tenant:acme"]["spent"] = "6"


def _lose_account(case: Case) -> None:
    case.stores.accounts.clear()


def _limit(name: str) -> Callable[[Case], None]:
    """A key that had one more than this limit allows."""
    return lambda case: case.history.keys.update(a1=Key("acme", LIMITS | {name: LIMITS[name] - 1}))


def _overlap(case: Case) -> None:
    """A second task, that was admitted before the first had ended."""
    case.stores.records["read"]["finished"] = "3"
    case.stores.records["polled"] |= {"key": "a1", "created": "2", "reserved": '{"estimate": 0}'}


def _make_refused(case: Case) -> None:
    case.stores.records["read"]["metadata"] = '{"attempt": "first"}'


def _answer_stranger(case: Case) -> None:
    case.history.spied[0]["status"] = 200


def _list_for_stranger(case: Case) -> None:
    case.history.listed[0]["ids"].append("read")


def _other_tenant(case: Case) -> None:
    case.stores.records["read"]["tenant"] = "globex"


CORRUPTED = {
    "accepted_tasks_end": (_drop_record, _leave_running, _leave_unsettled, _fail, _cancel_answered),
    "accepted_cancels_win": (_forget_cancel,),
    "streams_are_whole": (*map(_stream_edit, (_hole, _double, _two_ends)), _grow_later, _lose_stream),
    "outputs_equal_the_quiet_run": (_stream_edit(_other_token), _answer_other, _choice_too_many, _break_quiet_off),
    "usage_is_the_stream": tuple(map(_stream_edit, (_overcharge, _overcharge_prompt))),
    "ledger_is_the_streams": (
        _bill(output="4"),
        _bill(status="failed"),
        _bill(id="unknown", output="400"),
        _bill_twice,
        _sum_twice,
        _sum_nothing,
        _bill(key="g1"),
        _bill(tenant="globex"),
        _sum_for_another,
    ),
    "accounts_are_the_streams": (
        _account(open="1"),
        _account(reserved="7"),
        _account(spent="6"),
        _account(spent="4"),
        _account(month="1"),
        _charge_tenant,
        _lose_account,
    ),
    "limits_hold": (*map(_limit, LIMITS), _overlap),
    "refusals_make_nothing": (_make_refused,),
    "tenants_are_apart": (_answer_stranger, _list_for_stranger, _other_tenant),
    "readers_are_given_the_stream": (
        *map(_reader, (_misled, _given_twice, _skipped, _cut_short)),
        _poll_other,
        _poll_text,
        _poll_never,
    ),
    "refusals_are_declared": (_refuse,),
    "links_ran": (_lose_link, _lose_result, _other_result),
    "nothing_is_left": (_leave_message, _leave_reader, _dead_letter),
    "memory_is_whole": (_leak,),
    "processes_end_as_told": (_crash, _fail_to_drain),
}


@pytest.mark.parametrize(
    ("rule", "number"), [(rule, k) for rule, edits in CORRUPTED.items() for k in range(len(edits))]
)
def test_each_way_to_break_a_promise_is_seen(rule: str, number: int) -> None:
    case = with_keys()
    CORRUPTED[rule][number](case)
    assert rule in {violation.rule for violation in judge(case)}


def test_every_rule_can_fail() -> None:
    from workers.trials.chaos.checker.rules import RULES

    assert {rule.__name__ for rule in RULES} == set(CORRUPTED)


def test_what_others_do_on_a_shared_system_is_none_of_ours() -> None:
    case = good()
    case.shared = True
    _dead_letter(case)
    _leak(case)
    case.ledger.totals["", "", "output"] += 9
    assert judge(case) == []


def test_a_reader_lease_that_the_clock_ended_is_not_one_that_nobody_takes_away() -> None:
    case = good()
    case.stores.readers = {"read": -9.0, "polled": 29.0, "plain": 3600.0}
    assert [violation.subject for violation in judge(case)] == ["penstock:readers plain"]
    case.history.faults.append({"t": 2.6, "e": "fault", "kind": "clock", "target": "store", "amount": 3600.0})
    assert judge(case) == []


def test_what_was_completed_in_quiet_is_what_the_others_are_compared_with() -> None:
    history, whole = good().history, stream_of("completed", 3)
    history.tasks[True, 0].id = "twin"
    assert Case.of(history, Stores(), {"twin": whole}).outputs == {0: outputs_of([entry for _, entry in whole])}
    assert Case.of(history, Stores(), {"twin": [whole[-1]]}).outputs == {0: {0: NOTHING}}, "it ended at once"
    assert Case.of(history, Stores(), {"twin": whole[:2]}).outputs == {}
    assert Case.of(history, Stores(), {}).outputs == {}


def test_a_torn_last_line_is_no_line_and_any_other_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "client.0001.jsonl"
    path.write_bytes(b'{"t":1,"e":"phase","name":"load"}\n{"t":2,"e":"ph')
    assert [line["e"] for line in lines_of(path)] == ["phase"]
    path.write_bytes(b'{"t":1,"e":"ph\n{"t":2,"e":"phase","name":"load"}\n')
    with pytest.raises(json.JSONDecodeError):
        list(lines_of(path))


def test_the_checker_imports_nothing_of_the_product() -> None:
    folder = Path(workers.trials.chaos.checker.__file__).parent
    allowed = sys.stdlib_module_names | {"redis"}
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.startswith(workers.trials.chaos.checker.__name__) or name.partition(".")[0] in allowed, (
                    path.name,
                    name,
                )
