"""How much of a batch's results is in memory at a time."""

from __future__ import annotations

from producers.contract.record import Record
from producers.sweeper.batches.results import chunks


def test_vectors_are_answered_some_lines_at_a_time() -> None:
    one_text = {k: Record(str(k), {"result_bytes": str(384 * 4 * 4 // 3)}) for k in range(100)}
    assert [len(each) for each in chunks(range(100), one_text)] == [100]
    largest = {k: Record(str(k), {"result_bytes": str(1 << 20)}) for k in range(3)}
    assert [*chunks(range(3), largest)] == [[0], [1], [2]]
