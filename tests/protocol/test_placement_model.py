"""Which worker a message waits for, and for how long: the model's promises, and that each of its rules is needed."""

from __future__ import annotations

import pytest

from tests.exhaustive import few
from tests.protocol.model import placement as model


@pytest.mark.parametrize("ordered", few([False, True], False))
def test_a_head_waits_for_a_holder_but_a_moment_whoever_dies(ordered: bool) -> None:
    said, states = model.check(ordered=ordered)
    assert not said
    assert states > 1000


@pytest.mark.parametrize("rule", few(model.RULES, "time", "count", "longer", "own"))
def test_every_rule_is_needed(rule: str) -> None:
    said, _ = model.check(model.ALL - {rule}, ordered=rule == "ordered")
    assert said, model.RULES[rule]
