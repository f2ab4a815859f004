"""When a task has its last chance, as `claim.lua` will see it at the next death."""

from __future__ import annotations

import pytest

from producers.contract.record import Record
from producers.store.protocol import is_last_chance


@pytest.mark.parametrize(
    ("deaths", "stuck", "limit", "expected"),
    [
        (0, 0, 3, False),
        (1, 1, 3, False),
        (2, 2, 3, True),
        (7, 1, 3, False),
        (10, 0, 3, False),
        (11, 0, 3, True),
        (0, 0, 1, False),
        (1, 1, 2, True),
    ],
)
def test_a_last_chance_is_one_death_from_the_end(deaths: int, stuck: int, limit: int, expected: bool) -> None:
    record = Record("t", {"status": "in_progress", "deaths": str(deaths), "stuck": str(stuck)})
    assert is_last_chance(record, limit) is expected
