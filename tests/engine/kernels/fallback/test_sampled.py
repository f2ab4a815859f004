"""Decodes that read keys and values where they lie: what they give, and what they never look at."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import select
from engine.kernels.fallback.cpu import Cpu
from engine.kernels.fallback.padded import PaddedGroup
from engine.kernels.fallback.pieces import piece
from engine.kernels.fallback.sampled import MOST_SHARED, SampledGroup
from tests.engine.kernels.test_sets import BLOCK, SHAPES, Paged

CPU = torch.device("cpu")


class Arranged(Cpu):
    """Counts the groups that it does not gather."""

    def __init__(self, paged: Paged) -> None:
        super().__init__(torch.float32)
        self.sampled = 0
        self.prepare_attention(paged.query.shape[1], paged.cache.shape[3], paged.query.shape[2], None)

    def arrange_group(self, group: PaddedGroup, window: int | None, block_size: int, zero_block: int) -> PaddedGroup:
        arranged = super().arrange_group(group, window, block_size, zero_block)
        self.sampled += isinstance(arranged, SampledGroup)
        return arranged


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 8), (5, 1, 32)])
@pytest.mark.parametrize("window", [None, 1, 4, 10])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_decodes_are_their_formula(
    heads: int, kv_heads: int, head_dim: int, window: int | None, softcap: float | None
) -> None:
    paged = Paged(SHAPES, heads, kv_heads, head_dim, window)
    kernels = Arranged(paged)
    found = paged.attend(kernels, CPU, softcap).double()
    torch.testing.assert_close(found, paged.expected(softcap), atol=1e-5, rtol=1e-4)
    assert kernels.sampled == 1


@pytest.mark.parametrize("window", [None, 6])
def test_nothing_is_read_but_what_a_query_sees(window: int | None) -> None:
    paged = Paged([(1, (9, 16, 23))], 4, 2, 16, window)
    paged.cache[:, : paged.zero_block] = float("nan")
    for i, written in enumerate(paged.writes):
        hidden = 0 if window is None else max(0, len(written[0]) - window)
        slots, keys, values = (one[hidden:] for one in written)
        paged.writes[i] = slots, keys, values
    found = paged.attend(Arranged(paged), CPU).double()
    torch.testing.assert_close(found, paged.expected(), atol=1e-5, rtol=1e-4)


def test_what_is_no_number_harms_its_own_sequence_and_layer_alone() -> None:
    paged = Paged([(1, (9, 16, 23))], 4, 2, 16)
    kernels = Arranged(paged)
    batch = kernels.arrange(paged.batch(CPU), BLOCK, paged.zero_block)
    good = paged.cache.clone()
    for slots, keys, values in paged.writes:
        kernels.write_kv(keys, values, good, slots)
    bad = good.clone()
    slots, keys, values = paged.writes[1]
    kernels.write_kv(keys * float("nan"), values, bad, slots)
    expected = paged.expected()
    for cache, clean in ((bad, [0, 2]), (good, [0, 1, 2])):
        found = Cpu.paged_attention(kernels, paged.query, cache, batch, 0.25).double()
        torch.testing.assert_close(found[clean], expected[clean], atol=1e-5, rtol=1e-4)
        assert found.isnan().all(-1).all(-1).tolist() == [i not in clean for i in range(3)]


@pytest.mark.parametrize(("heads", "dtype"), [(MOST_SHARED + 1, torch.float32), (4, torch.bfloat16)])
def test_others_gather(monkeypatch: pytest.MonkeyPatch, heads: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    kernels = select(CPU, dtype, "cpu")
    kernels.prepare_attention(heads, 1, 8, None)
    paged = Paged([(1, (9, 16))], heads, 1, 8)
    batch = kernels.arrange(paged.batch(CPU), BLOCK, paged.zero_block)
    assert not any(isinstance(group, SampledGroup) for group in batch.groups)
    # What is added to scores is made once for all layers.
    assert all(group.mask is not None and group.mask.dtype == dtype for group in batch.groups)


def test_many_scores_are_softened_in_pieces_as_if_they_were_few() -> None:
    lens = tuple(range(600, 663))
    paged = Paged([(1, lens)], 2, 1, 8)
    assert 1 < len(lens) // piece(len(lens), 2 * lens[-1]) < len(lens)
    torch.testing.assert_close(paged.attend(Arranged(paged), CPU).double(), paged.expected(), atol=1e-5, rtol=1e-4)
