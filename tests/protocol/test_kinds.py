"""What becomes of messages of unknown kinds: the model's promises, and that each of its rules is needed."""

from __future__ import annotations

import pytest

from tests.protocol.model import kinds as model


@pytest.mark.parametrize("knows", [True, False])
def test_it_is_run_or_its_sender_is_told_whoever_dies(knows: bool) -> None:
    said, states = model.check(knows=knows)
    assert not said
    assert states > 200


@pytest.mark.parametrize("rule", model.RULES)
def test_every_rule_is_needed(rule: str) -> None:
    said = [model.check(model.ALL - {rule}, knows=knows)[0] for knows in (True, False)]
    assert any(said), model.RULES[rule]
