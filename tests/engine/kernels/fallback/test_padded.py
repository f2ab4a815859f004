"""Sequences in padded batches: which share one."""

from __future__ import annotations

import torch

from engine.kernels.fallback.padded import groups_of, masked
from tests.engine.kernels.ragged_cases import Shape, ragged_case


def test_sequences_of_similar_length_are_one_group_and_prompts_of_equal_length_too() -> None:
    case = ragged_case(Shape(block=4), [(1, 5), (1, 14), (1, 40), (12, 12), (12, 12)])
    groups = groups_of(case.batch, 4, (2.0, 4))
    # 14 <= 2 * 5 + 4, 40 is too far from 5.
    assert [(one.row, one.query_len, one.kv_lens) for one in groups] == [
        (0, 1, (5, 14)),
        (2, 1, (40,)),
        (3, 12, (12, 12)),
    ]
    first, second, third = (masked(one, None, 4, torch.float32) for one in groups)
    assert first.block_tables.shape == (2, 4)
    assert first.block_tables[1].tolist() == case.tables[1].tolist()
    assert first.mask is not None
    assert (first.mask.view(2, -1) == 0).sum(-1).tolist() == [5, 14]
    assert second.mask is not None
    assert third.mask is None


def test_without_slack_only_equal_lengths_share_a_group() -> None:
    groups = groups_of(ragged_case(Shape(), [(1, 2), (1, 3), (1, 3)]).batch, 16, (1.0, 0))
    assert [one.kv_lens for one in groups] == [(2,), (3, 3)]
