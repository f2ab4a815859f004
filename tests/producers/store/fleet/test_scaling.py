"""The kept decisions of the autoscaler: which of them count."""

from __future__ import annotations

from typing import Any

import pytest

from producers.store.fleet.scaling import is_fresh


@pytest.mark.parametrize(
    ("at", "fresh"),
    [(1000, True), (970.0, True), (969, False), (1030, True), (9e99, False), (None, False), ("1000", False)],
)
def test_a_decision_counts_for_half_a_minute_and_not_if_it_is_of_the_future(at: Any, fresh: bool) -> None:
    assert is_fresh(at, 1000.0) is fresh
