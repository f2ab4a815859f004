"""Kept decisions, computed again from their kept inputs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from producers.contract.profile import Profile
from workers.autoscaler.policy import Memory, Rules, Signals, TierQueue, decide, restored
from workers.trials.simulate.replay import replay


def kept(seen: Signals | None, memory: Memory, rules: Rules) -> dict[str, Any]:
    """A decision as the autoscaler keeps it, as far as replay reads it."""
    decision, after = decide(rules, seen, memory)
    signals = None if seen is None else asdict(seen)
    said = {"at": 5.0, "wanted": decision.target, "reason": decision.reason, "signals": signals}
    return {**said, "before": asdict(memory), "memory": asdict(after), "rules": asdict(rules)}


@pytest.fixture
def history() -> list[dict[str, Any]]:
    rules, memory, found = Rules(max=9, cool_down=20.0), Memory(), []
    profile = Profile(knee=4.0, tokens_per_s=50.0, tokens_per_task=20.0, cold_start={"total": 3.0})
    for at, waiting in ((0.0, 1), (6.0, 40), (12.0, 40), (18.0, 3)):
        seen = Signals(at, {"default": TierQueue(waiting, 1.5)}, in_flight=2, ready=1, profile=profile)
        found.append(kept(seen, memory, rules))
        memory = restored(Memory, found[-1]["memory"])
    return [*found, kept(None, memory, rules)]


def written(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return path


def test_decisions_come_out_as_they_were_kept(history: list[dict[str, Any]], tmp_path: Path) -> None:
    said = replay(written(tmp_path / "d", {"pool": "tiny", "history": history}, history[0]))
    assert (said.decisions, said.ended, said.differences) == (6, 0, [])


def test_one_that_differs_is_told_with_why(history: list[dict[str, Any]], tmp_path: Path) -> None:
    other, forgot = {**history[1], "wanted": 7}, {**history[2], "memory": history[0]["memory"]}
    said = replay(written(tmp_path / "d", {"pool": "tiny", "history": [history[0], other, forgot]}))
    first, second = said.differences
    assert (first.pool, first.kept, first.computed) == ("tiny", 7, 2)
    assert first.why.startswith("out from 1 to 2: 40 queued and 2 in flight, 5 a worker")
    assert second.why == "what it remembers differs"


def test_ends_of_replaced_versions_are_not_the_policys(history: list[dict[str, Any]], tmp_path: Path) -> None:
    ended = {**history[1], "wanted": 0, "reason": "0: another version has replaced it, and nothing of it is left"}
    assert replay(written(tmp_path / "d", ended)).ended == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 1 is no JSON"),
        ("[1]", "line 1 is no JSON object"),
        ("{}", "line 1: no decision that can be computed again: KeyError('signals')"),
        ("", "has no decision"),
    ],
)
def test_what_is_no_decision_is_named(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "d").write_text(line)
    with pytest.raises(ValueError) as refused:  # noqa: PT011  compared below
        replay(tmp_path / "d")
    assert says in str(refused.value)


@pytest.mark.parametrize("broken", ["before", "signals", "memory", "rules"])
def test_a_broken_part_is_named(broken: str, history: list[dict[str, Any]], tmp_path: Path) -> None:
    for wrong in (3, {"x": 1}):
        with pytest.raises(ValueError, match="line 2: no decision that can be computed again"):
            replay(written(tmp_path / "d", history[0], {**history[1], broken: wrong}))
