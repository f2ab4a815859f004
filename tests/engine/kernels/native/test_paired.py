"""Attention over a paired cache: by tiles, and to the bit the same in plain vectors, in any cut and any company."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from engine.kernels.native import Native
from engine.kernels.native.library import _SIGNATURES, Library, Storage
from engine.kernels.ragged import RaggedBatch, ragged_attention
from engine.models import load_model
from tests.engine.deterministic.logits import Steps
from tests.engine.kernels.native.conftest import PATIENT
from tests.engine.kernels.native.test_kernels import noise
from tests.engine.kernels.ragged_cases import Case, Shape, ragged_case
from tests.engine.random_models import VARIANTS, write_model
from tests.exhaustive import few
from tests.histories import examples

#: threads -> a kernel set that has the cache's operations alone
Threads = Callable[[int], Native]
#: Places around the edges of panels, pairs of them, steps and chunks.
PLACES = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 255, 256, 257, 300, 511, 513]


@pytest.fixture(scope="module")
def kernels(tiles_build: Path) -> Threads:
    found = ctypes.CDLL(str(tiles_build))
    calls = {name: getattr(found, f"penstock_{name}") for name in ("pool", "free", "rope_and_write", "attention")}
    for name, call in calls.items():
        call.argtypes, call.restype = _SIGNATURES.get(f"penstock_{name}"), None
    calls["pool"].restype = ctypes.c_void_p
    calls["pool"].argtypes = [ctypes.c_int, ctypes.c_int]
    built = SimpleNamespace(isa="tiles", rounds=True, paired=True, **calls)
    return lambda threads: Native(torch.bfloat16, cast(Library, built), threads)


def paired(cache: Tensor) -> Tensor:
    """A cache [2, blocks, block_size, kv_heads, head_dim] with its numbers where paired.h says."""
    keys, values = cache.unflatten(2, (-1, 16))
    return torch.stack(
        (
            keys.unflatten(-1, (-1, 2)).permute(0, 1, 3, 4, 2, 5).reshape(cache.shape[1:]),
            values.unflatten(2, (-1, 2)).permute(0, 1, 4, 2, 5, 3).reshape(cache.shape[1:]),
        )
    )


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def drawn(random: Random) -> Case:
    kv_heads, share = random.randint(1, 3), random.randint(1, 9)
    shape = Shape(
        kv_heads * share,
        kv_heads,
        random.choice([32, 64, 96, 128, 160]),
        random.choice([16, 32, 48]),
        random.choice([None, None, 1, 17, 64, 100, 300]),
        torch.bfloat16,
    )
    lengths = []
    for _ in range(random.randint(1, 3)):
        places = random.choice(PLACES)
        lengths.append((min(places, random.choice([1, 2, 3, 40, 200])), places))
    case = ragged_case(shape, lengths, padding=1, spare_rows=1, seed=random.randrange(1000))
    return replace(case, query=case.query.float() * random.choice([0.1, 1, 4]))


def part(case: Case, sequence: int, begin: int, end: int) -> tuple[Tensor, RaggedBatch]:
    """The queries from `begin` to `end` of one sequence's step, as a step of their own."""
    first = int(case.batch.query_starts[sequence])
    count, places = case.lengths[sequence]
    alone = replace(
        case.batch,
        query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
        kv_lens=torch.tensor([places - count + end], dtype=torch.int32),
        table_rows=case.batch.table_rows[sequence : sequence + 1],
    )
    return case.query[first + begin : first + end], alone


def cuts(random: Random, count: int) -> list[tuple[int, int]]:
    """Single queries, which are few rows; chunks of all sizes, which are few or many."""
    ends = sorted({0, count, *(random.randint(0, count) for _ in range(3))})
    singles = {0, count - 1, *(random.randrange(count) for _ in range(4))}
    return [*pairwise(ends), *((i, i + 1) for i in singles)]


@pytest.mark.parametrize("first", few(range(0, 300, 20), 0))
def test_a_row_is_the_references_and_has_the_same_bits_in_any_cut_and_company(kernels: Threads, first: int) -> None:
    for seed in range(first, first + examples(6, 20)):
        check(kernels, seed)


def check(kernels: Threads, seed: int) -> None:
    random = Random(seed)
    case, softcap = drawn(random), random.choice([None, 0.8, 30.0])
    cache = paired(case.cache)
    whole = kernels(2).paged_attention(case.query, cache, case.batch, case.scale, softcap)
    again = kernels(5).paged_attention(case.query, cache, case.batch, case.scale, softcap)
    assert torch.equal(bits(whole), bits(again))
    for sequence, (count, _) in enumerate(case.lengths):
        first = int(case.batch.query_starts[sequence])
        for begin, end in cuts(random, count):
            query, batch = part(case, sequence, begin, end)
            found = kernels(random.choice([1, 2])).paged_attention(query, cache, batch, case.scale, softcap)
            assert torch.equal(bits(found), bits(whole[first + begin : first + end])), (sequence, begin, end)
    # Each weight is rounded to bf16, by up to 2^-9 of itself, and so is the total of all.
    query, (keys, values) = case.query.bfloat16().float(), case.cache.float()
    expected = ragged_attention(query, torch.stack((keys, values)), case.batch, case.scale, softcap)
    sizes = ragged_attention(query, torch.stack((keys, values.abs())), case.batch, case.scale, softcap)
    assert ((whole - expected).abs() <= 2**-8 * sizes + 1e-5).all()


@pytest.mark.parametrize("share", [3, 12])
@pytest.mark.parametrize("block", [16, 48])
def test_a_row_is_the_same_wherever_its_table_begins(kernels: Threads, block: int, share: int) -> None:
    """Blocks behind the window are dropped; what is in the others before their first places may be anything."""
    case = ragged_case(Shape(share, 1, 64, block, 300, torch.bfloat16), [(40, 1000), (1, 901)])
    case = replace(case, query=case.query.float())
    whole = kernels(3).paged_attention(case.query, paired(case.cache), case.batch, case.scale)
    for dropped in (1, 255 // block, 270 // block, 600 // block):
        found = kernels(3).paged_attention(case.query, paired(case.cache), case.later(dropped), case.scale)
        assert torch.equal(bits(found), bits(whole)), dropped


@pytest.mark.parametrize("share", [2, 12])
def test_numbers_below_the_normal_ones_are_zero_and_the_threads_flags_stay(kernels: Threads, share: int) -> None:
    case = ragged_case(Shape(share, 1, 32, 16, None, torch.bfloat16), [(30, 90)])
    sizes = torch.logspace(-10, -40, 32)
    keys, values = case.cache
    cache = paired(torch.stack((keys, (values * sizes).bfloat16())))
    query = case.query.float()
    whole = kernels(1).paged_attention(query, cache, case.batch, case.scale)
    for i in range(30):
        one, batch = part(replace(case, query=query), 0, i, i + 1)
        found = kernels(1).paged_attention(one, cache, batch, case.scale)
        assert torch.equal(bits(found), bits(whole[i : i + 1]))
    assert (torch.full((64,), 1e-39) * 0.5 > 0).all()
    assert whole[..., 0].abs().min() > 0


@pytest.mark.parametrize("head_dim", [32, 96])
def test_heads_are_written_in_pairs(kernels: Threads, head_dim: int) -> None:
    tokens, heads, kv_heads, still = 300, 2, 3, torch.ones(300, 1, head_dim)
    x = noise(tokens, heads + 2 * kv_heads, head_dim)
    slots = torch.randperm(320, generator=torch.Generator().manual_seed(2))[:tokens]
    batch = ragged_case(Shape(heads, kv_heads, head_dim), [(tokens, tokens)]).batch
    batch = replace(batch, slots=torch.cat((slots[:-1], torch.tensor([-1]))))
    plain = torch.zeros(2, 10, 32, kv_heads, head_dim, dtype=torch.bfloat16)
    plain.view(2, -1, kv_heads, head_dim)[:, slots[:-1]] = torch.stack(
        (x[:-1, heads:-kv_heads], x[:-1, -kv_heads:])
    ).bfloat16()
    found = torch.zeros_like(plain)
    assert torch.equal(kernels(3).rope_and_write(x.clone(), still, 0 * still, found, batch), x[:, :heads])
    assert torch.equal(found.view(torch.int16), paired(plain).view(torch.int16))


@pytest.mark.parametrize(
    ("pairs", "name", "block", "head_dim", "kind"),
    [
        (True, "bfloat16", 16, 64, 4),
        (True, "bfloat16", 48, 96, 4),
        (True, "bfloat16", 8, 64, 1),
        (True, "bfloat16", 16, 80, 1),
        (True, "float32", 16, 64, 0),
        (True, "int8", 16, 64, 2),
        (False, "bfloat16", 16, 64, 1),
    ],
)
def test_caches_in_bf16_of_whole_panels_and_steps_are_paired_by_builds_that_pair(
    pairs: bool, name: str, block: int, head_dim: int, kind: int
) -> None:
    built = cast(Library, SimpleNamespace(paired=pairs))
    assert Storage(built, name).kind(torch.empty(2, 2, 5, block, 3, head_dim)) == kind


@pytest.mark.parametrize("together", [pytest.param(True, marks=PATIENT), pytest.param(False, marks=PATIENT)])
def test_a_models_logits_depend_on_no_cut(tiles_library: Library, tmp_path: Path, together: bool) -> None:
    folder = write_model(tmp_path, **VARIANTS["wide-heads"])

    def make(dtype: torch.dtype) -> Native:
        kernels = Native(dtype, tiles_library, 2)
        if not together:
            kernels.prepare_layers = lambda layers, norm: None  # type: ignore[method-assign]
        return kernels

    model = load_model(folder, "bfloat16", torch.device("cpu"), make)
    tokens = [(13 * i) % 300 + 5 for i in range(150)]
    steps = Steps(model)
    whole = steps.by_cuts(0, tokens, ())
    for slot, at in ((5, (1, 60, 149)), (6, range(100, 150)), (7, (64,))):
        assert torch.equal(steps.by_cuts(slot, tokens, at), whole)
