"""What becomes of a task's copy for another version: the model's promises, and that each of its rules is needed."""

from __future__ import annotations

import pytest

from tests.protocol.model import shadow as model


def test_a_copy_is_compared_at_most_once_and_goes_whoever_dies() -> None:
    broken, states = model.check()
    assert not broken
    assert states > 150


@pytest.mark.parametrize("rule", model.RULES)
def test_every_rule_is_needed(rule: str) -> None:
    assert model.check(model.ALL - {rule})[0], model.RULES[rule]
