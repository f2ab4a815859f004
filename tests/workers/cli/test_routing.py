"""`penstock models alias`, `split`, `rule`, `routing` and `versions`, and `publish --as`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from producers.contract import keys
from producers.store.shadows import Pair
from tests.workers.cli.conftest import Run
from workers.library import LocalModels
from workers.library.reference import BUNDLED


@pytest.fixture
def routed(operate: Run) -> list[str]:
    """`tiny` with two versions; the second one has the alias `candidate`. Returns both."""
    operate("models", "publish", "tiny")
    first = json.loads(operate("models", "versions", "tiny", "--json").out)
    ran = operate("models", "publish", "tiny-v2", "--as", "tiny@candidate", "--json")
    second: dict[str, Any] = json.loads(ran.out)
    assert (second["name"], second["alias"], second["before"]) == ("tiny", "candidate", first["version"])
    return [first["version"], second["version"]]


def test_a_candidate_gets_a_part_then_all_and_everything_goes_back(operate: Run, routed: list[str]) -> None:
    old, new = routed
    shown = operate("models", "split", "tiny", "candidate=5").out.splitlines()
    assert shown[0].startswith("tiny: generation 2, ")
    assert [line.split() for line in shown[1:3]] == [["default", old, "95%"], ["candidate", new, "5%"]]
    state = json.loads(operate("models", "alias", "tiny", "default=candidate", "--json").out)
    assert (state["default"], state["aliases"]) == (new, {"candidate": new})
    operate("models", "split", "tiny", "--off")
    operate("models", "rule", "tiny", "--to", old, "--tenant", "acme")
    assert f"tasks with tenant 'acme' go to {old}" in operate("models", "routing", "tiny").out
    back = operate("models", "routing", "tiny", "--back-to", "1", "--json")
    assert json.loads(back.out)["default"] == old
    states = operate("models", "routing", "tiny", "--history", "--json").out.splitlines()
    assert [json.loads(state)["generation"] for state in states] == [6, 5, 4, 3, 2, 1]
    listed = operate("models", "versions", "tiny").out
    assert f"{new}  " in listed
    assert "candidate" in listed


def test_a_change_tells_what_it_replaced_and_may_ask_for_a_generation(operate: Run, routed: list[str]) -> None:
    old, new = routed
    shown = operate("models", "alias", "tiny", "default=candidate", "--if-generation", "1").out
    assert re.search(rf"before, in generation 1, of .* by .*: default was {old}$", shown, re.MULTILINE), shown
    for late in (("alias", "tiny", f"default={old}"), ("split", "tiny", f"{old}=5"), ("rule", "tiny", "--clear")):
        ran = operate("models", *late, "--if-generation", "1")
        assert (ran.status, ran.out) == (2, "")
        assert "the routing of tiny has generation 2, by " in " ".join(ran.err.split())
    assert "before" not in operate("models", "alias", "tiny", f"default={new}").out, "nothing changed"
    assert "the split was off" in operate("models", "split", "tiny", f"{old}=5", "--if-generation", "2").out
    assert json.loads(operate("models", "routing", "tiny", "--json").out)["split"] == {old: 5}


def test_stages_are_set_and_shown(operate: Run, routed: list[str]) -> None:
    old, new = routed
    operate("models", "stage", "tiny", "default=approved", "candidate=staging", "--reason", "evaluated")
    shown = operate("models", "stage", "tiny", "--require-approval").out
    assert f"{old} is approved" in shown
    assert f"{new} is staging" in shown
    assert "lead to approved versions alone" in shown
    assert "is not approved" in " ".join(operate("models", "split", "tiny", "candidate=5").err.split())
    rows = map(json.loads, operate("models", "versions", "tiny", "--json").out.splitlines())
    assert {row["version"]: row["stage"] for row in rows} == {old: "approved", new: "staging"}


def test_a_shadow_is_set_and_shown_with_its_pairs(operate: Run, routed: list[str], valkey: Redis) -> None:
    old, new = routed
    assert "5% go to candidate" in operate("models", "shadow", "tiny", "--to", "candidate", "--percent", "5").out
    for same, status in ((1.0, "completed"), (0.5, "completed"), (None, "failed")):
        reasons, ms = (("stop",), ("stop",)), (100, 50)
        row = Pair("t", old, new, ("completed", status), (4, 2), same, reasons, ms, (None, 0.5))
        valkey.xadd(keys.shadow_pairs("tiny"), {"row": row.to_json()})
    valkey.hset(keys.shadow_drops("tiny"), "overload", 3)
    shown = operate("models", "shadow", "tiny", "--pairs", "1").out
    assert f"{old} and {new}: 3 pairs, of which both completed 2" in shown
    assert "before the first difference: 75.0%; equal outputs: 50.0%" in shown
    assert "same finish reasons: 100.0%; tokens: 0.50 times as many; time: 0.50 times as long" in shown
    assert "dropped: 3 overload" in shown
    assert "t  completed failed  tokens 4 2  same -" in shown
    state = json.loads(operate("models", "shadow", "tiny", "--off", "--json", "--pairs", "2").out)
    assert (state["shadow"], state["drops"], len(state["pairs"])) == (None, {"overload": 3}, 2)


def test_a_version_is_removed_once_nothing_uses_it(
    operate: Run, routed: list[str], valkey: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_MODELS", str(tmp_path))
    pulled = [LocalModels.default().copy("tiny", BUNDLED / name) for name in ("tiny-draft", "tiny-v2", "tiny")]
    old, new = routed
    operate("models", "publish", f"other={pulled[1].folder}")

    def unused(*options: str) -> list[str]:
        rows = map(json.loads, operate("models", "gc", "--json", *options).out.splitlines())
        return [row.get("version") or row["folder"] for row in rows]

    assert unused() == []
    ran = operate("models", "rm", f"tiny@{new}")
    assert (ran.status, f"{new} of tiny is in use: the alias 'candidate' leads to it" in ran.err) == (2, True)
    assert "has the aliases candidate: remove them first" in " ".join(operate("models", "rm", "tiny").err.split())
    operate("models", "alias", "tiny", "--rm", "candidate")
    assert unused() == [], "tasks may wait for it"
    valkey.hdel(keys.POOLS, keys.pool_queue("tiny", new, keys.UNSERVED))
    operate("models", "stage", "tiny", f"{new}=approved")
    valkey.hdel(keys.POOLS, keys.pool_queue("tiny", new, keys.UNSERVED))
    assert unused("--local") == [str(pulled[0].folder)], "the others are in use, or the last pulled"
    operate("models", "stage", "tiny", f"{new}=none")
    valkey.hdel(keys.POOLS, keys.pool_queue("tiny", new, keys.UNSERVED))
    assert unused("--local") == [f"tiny@{new}", str(pulled[0].folder)]
    (left := pulled[0].folder.with_name(".0123.removed")).mkdir()
    assert unused("--yes", "--local") == [f"tiny@{new}", str(pulled[0].folder)]
    assert [path.name for path in left.parent.iterdir() if path.name.endswith(".removed")] == [], "of a killed gc"
    assert [version.folder.exists() for version in pulled] == [False, True, True]
    assert [
        row["version"] for row in map(json.loads, operate("models", "versions", "tiny", "--json").out.split("\n")[:-1])
    ] == [old]
    assert "is no alias of tiny, and no version" in " ".join(operate("models", "rm", f"tiny@{new}").err.split())


def test_what_is_replaced_is_replaced_at_once_or_not_at_all(operate: Run, routed: list[str]) -> None:
    operate("models", "rule", "tiny", "--to", "candidate", "--tenant", "acme")
    assert operate("models", "rule", "tiny", "--clear", "--to", "typo", "--tenant", "acme").status != 0
    state = json.loads(operate("models", "rule", "tiny", "--json").out)
    assert (state["generation"], len(state["rules"])) == (2, 1)
    new = operate("models", "rule", "tiny", "--clear", "--to", "candidate", "--tier", "batch", "--json")
    state = json.loads(new.out)
    assert (state["generation"], state["rules"]) == (3, [{"to": "candidate", "tier": "batch"}])
    operate("models", "split", "tiny", "candidate=5")
    state = json.loads(operate("models", "split", "tiny", "--sticky", "tenant", "--json").out)
    assert (state["split"], state["sticky"]) == ({"candidate": 5}, "tenant")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("split", "tiny", "candidate=101"), "at most 100"),
        (("split", "tiny", "candidate=x"), "is a number, in percent"),
        (("split", "tiny", "candidate"), "is not TARGET=PERCENT"),
        (("split", "tiny", "candidate=5", "--off"), "give no parts with it"),
        (("alias", "tiny", "x=nowhere"), "publish FOLDER --as tiny@ALIAS"),
        (("rule", "tiny", "--tenant", "acme"), "a rule needs --to TARGET"),
        (("stage", "tiny", "candidate=archived"), "end that first (`penstock models alias tiny --rm candidate`)"),
        (("stage", "tiny", "--require-approval"), "is not approved"),
        (("shadow", "tiny", "--to", "candidate"), "give --to TARGET and --percent together"),
        (("shadow", "tiny", "--to", "candidate", "--percent", "200"), "200 percent are copied"),
        (("alias", "other"), "there is no model 'other'; there are tiny"),
        (("publish", "tiny-v2", "--as", "other@candidate"), "publish its first version without an alias"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_do(
    operate: Run, routed: list[str], command: tuple[str, ...], message: str
) -> None:
    ran = operate("models", *command)
    assert ran.status != 0
    assert message in " ".join(ran.err.split())
