from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.output import OutputState
from engine.params import SamplingParams
from engine.request import Request
from engine.scheduling.policy import WaitingQueue, effective_tier
from engine.sequence import Sequence


def sequence(
    serial: int, tier: int, arrival: float, waited: float = 0.0, preempted_at: float | None = None
) -> Sequence:
    request = Request(f"r{serial}", [1], tier=tier, arrival=arrival)
    return Sequence(
        request=request,
        choice=0,
        tokens=[1],
        prompt_len=1,
        output=OutputState(SamplingParams(), (), None, 9),
        seed=0,
        serial=serial,
        queued_at=arrival if preempted_at is None else preempted_at,
        waited=waited,
        preempted=preempted_at is not None,
    )


@pytest.mark.parametrize(
    ("tier", "waited", "effective"),
    [(3, 0.0, 3), (3, 9.9, 3), (3, 10.0, 2), (3, 29.0, 1), (3, 30.0, 0), (3, 1e9, 0), (0, 50.0, 0), (1, -5.0, 1)],
)
def test_each_ageing_period_raises_by_one_down_to_zero(tier, waited, effective):
    assert effective_tier(tier, waited, 10.0) == effective


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 50),
            st.one_of(st.none(), st.tuples(st.integers(0, 40), st.integers(50, 60))),
        ),
        max_size=12,
    ),
    st.integers(60, 120),
    st.data(),
)
def test_the_first_is_the_one_a_full_sort_puts_first(entries, now, data):
    queue = WaitingQueue(ageing_s=10.0)
    seqs = []
    for serial, (tier, arrival, preempted) in enumerate(entries):
        waited, at = (0.0, None) if preempted is None else preempted
        seqs.append(sequence(serial, tier, float(arrival), waited, at))
        queue.push(seqs[-1])

    def order(seq: Sequence) -> tuple[int, float, int]:
        waited = seq.waited + now - seq.queued_at
        return effective_tier(seq.request.tier, waited, 10.0), seq.request.arrival, seq.serial

    while seqs:
        assert len(queue) == len(seqs)
        assert sorted(seq.serial for seq in queue) == sorted(seq.serial for seq in seqs)
        right = min(seqs, key=order)
        assert queue.first(now) == (order(right)[0], right)
        for below in range(4):
            better = [seq for seq in seqs if seq.request.tier < below]
            first = queue.first(now, below)
            assert (first and first[1]) == min(better, key=order, default=None)
        gone = data.draw(st.sampled_from(seqs))
        queue.remove(gone)
        seqs.remove(gone)
    assert queue.first(now) is None
