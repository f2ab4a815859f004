"""Forms that are read for seconds or hours are refused by their size, or ended; others' forms go on meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.chaos.hostile.stage import Stage, stage
from tests.engine.grammar.test_trial import ENDLESS
from tests.waiting import until

#: Forms of an ordinary caller: one that is judged at once, and one that is tried out.
USUAL = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ODD = {"allOf": [{"type": "string"}, {"minLength": 2}]}
#: The most processes in which a gateway tries forms out.
PROCESSES = 2


def submit(hostile: Stage, caller: str, **fields: Any) -> tuple[int, str]:
    """The status and the error's code of a task."""
    answer = hostile.http(caller, "POST", "/v1/tasks", json={"model": "tiny", "prompt": "x", **fields})
    return answer.status_code, answer.json().get("error", {}).get("code", "")


def trying(pid: int) -> int:
    """The processes of a gateway in which forms are tried out."""
    found = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            parent = status.read_text().partition("PPid:")[2].split()[0]
            found += int(parent) == pid and b"engine.grammar.child" in (status.parent / "cmdline").read_bytes()
        except (OSError, IndexError):  # it has just ended
            continue
    return found


def test_a_large_form_times_its_outputs_is_refused_before_any_work() -> None:
    schema = {"properties": {f"p{n}": {"type": "string"} for n in range(2000)}}
    with stage() as hostile:
        for _ in range(20):
            assert submit(hostile, "attacker", json_schema=schema, n=32) == (400, "form_too_large")
        assert trying(hostile.pid) == 0
        assert submit(hostile, "victim", json_schema=USUAL, n=32)[0] == 202


def test_endless_forms_of_one_tenant_hold_up_no_other() -> None:
    with stage() as hostile, ThreadPoolExecutor(3) as attackers:
        attack = [attackers.submit(submit, hostile, "attacker", json_schema=ENDLESS) for _ in range(3)]
        until(lambda: trying(hostile.pid) == 1)
        for n in range(5):
            assert submit(hostile, "victim", json_schema=USUAL)[0] == 202
            odd = {**ODD, "description": str(n)}  # not one whose verdict is remembered
            assert submit(hostile, "victim", json_schema=odd)[0] == 202
            assert hostile.http(None, "GET", "/readyz").status_code == 200
            assert trying(hostile.pid) <= PROCESSES
        found = {one.result() for one in attack}
        assert found <= {(400, "form_stopped"), (429, "form_busy")}
        assert (400, "form_stopped") in found
        assert submit(hostile, "attacker", json_schema=ODD)[0] == 202
