"""Queues of models and pools."""

from __future__ import annotations

import pytest

from producers.contract.keys import takers_of
from producers.contract.levels import looked_after


@pytest.mark.parametrize("card", ["", "{", "[1]", "null", '{"v": 1}'])
def test_what_is_no_card_stops_nobody_and_names_no_version(card: str) -> None:
    assert takers_of({}, {"bad": card, "good": '{"version": "1"}'}) == {
        "penstock:queue:bad": [],
        "penstock:queue:good": [],
        **{queue: [] for queue in looked_after("penstock:queue:good@1")},
    }
