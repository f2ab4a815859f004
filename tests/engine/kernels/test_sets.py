"""Every kernel set against formulas in float64, and against the reference."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from engine import EngineError
from engine.kernels import ExpertParts, Kernels, RaggedBatch, select
from engine.kernels.fallback import Cpu
from engine.kernels.native import load_library

BLOCK = 8
SETS = ["reference", "sdpa", "cpu", "native", *(["triton"] if find_spec("triton") is not None else [])]


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest, device: torch.device) -> Kernels:
    if request.param in ("cpu", "native") and device.type != "cpu":
        pytest.skip(f"the {request.param} set runs on CPUs alone")
    if request.param == "native" and load_library() is None:
        pytest.skip("native kernels are not built for this CPU")
    if request.param == "triton" and device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled here, not interpreted")
    return select(device, torch.float32, request.param)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_is_its_formula(kernels: Kernels, device: torch.device) -> None:
    x, weight = noise(5, 48), noise(48, seed=1)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    found = kernels.rms_norm(x.to(device), weight.to(device), 1e-5)
    torch.testing.assert_close(found.cpu().double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_row_whose_squares_overflow_has_no_norm(kernels: Kernels, device: torch.device) -> None:
    """Not 0, of which nobody would see that it is none."""
    x, weight = noise(3, 1, 48).to(device), noise(48, seed=1).to(device)
    expected = kernels.rms_norm(x, weight, 1e-5)
    x[1] *= 1e22
    assert x.isfinite().all()
    for found in (
        kernels.rms_norm(x[:, 0], weight, 1e-5),
        kernels.add_rms_norm(x[:, 0].clone(), torch.zeros_like(x[:, 0]), weight, 1e-5)[0],
        kernels.norm_heads(x.repeat(1, 3, 1), weight, weight, 1, 1e-5)[:, 0],
    ):
        assert found[1].isnan().all()
        torch.testing.assert_close(found[::2], expected[::2, 0])


def test_add_rms_norm_is_the_norm_of_the_sum_and_the_sum(kernels: Kernels, device: torch.device) -> None:
    x, residual, weight = (noise(3, 32, seed=s).to(device) for s in range(3))
    total = x + residual
    normed, summed = kernels.add_rms_norm(x.clone(), residual.clone(), weight[0], 1e-6)
    torch.testing.assert_close(summed, total)
    torch.testing.assert_close(normed, kernels.rms_norm(total, weight[0], 1e-6))


def test_heads_are_normed_one_by_one_but_for_values(kernels: Kernels, device: torch.device) -> None:
    heads, weights = noise(4, 7, 16).to(device), noise(2, 16, seed=1).to(device)
    expected = heads.clone()
    for head, weight in zip(range(5), [weights[0]] * 3 + [weights[1]] * 2, strict=True):
        expected[:, head] = kernels.rms_norm(heads[:, head], weight, 1e-6)
    torch.testing.assert_close(kernels.norm_heads(heads, *weights, 2, 1e-6), expected)


def test_rope_turns_pairs_as_complex_numbers(kernels: Kernels, device: torch.device) -> None:
    x = noise(4, 3, 16)
    angles = noise(4, 1, 8, seed=1).double() * 3
    cos, sin = angles.cos(), angles.sin()
    turned = torch.complex(x[..., :8].double(), x[..., 8:].double()) * torch.polar(torch.ones_like(angles), angles)
    found = kernels.rope(
        x.to(device), torch.cat((cos, cos), -1).float().to(device), torch.cat((-sin, sin), -1).float().to(device)
    )
    expected = torch.cat((turned.real, turned.imag), -1).float()
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_silu_mul_is_its_formula(kernels: Kernels, device: torch.device) -> None:
    x = noise(6, 24)
    gate, up = x.double().split(12, -1)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(kernels.silu_mul(x.to(device)).cpu().double(), expected, atol=1e-6, rtol=1e-5)


def test_gelu_tanh_mul_is_its_formula(kernels: Kernels, device: torch.device) -> None:
    x = noise(6, 24)
    gate, up = x.double().split(12, -1)
    expected = 0.5 * gate * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) * up
    torch.testing.assert_close(kernels.gelu_tanh_mul(x.to(device)).cpu().double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 19])
def test_experts_are_their_formula(kernels: Kernels, device: torch.device, rows: int, normed: bool) -> None:
    """One expert at a time, in float64. Expert 4 has no row."""
    x, gate_ups, downs = noise(rows, 24), noise(5, 40, 24, seed=1), noise(5, 24, 20, seed=2)
    logits = noise(rows, 5, seed=3) - torch.tensor([0, 0, 0, 0, 50])
    products = [[kernels.prepare_linear(one.to(device), None) for one in each] for each in (gate_ups, downs)]
    parts = ExpertParts(kernels.prepare_head(noise(5, 24).to(device), None), *map(tuple, products), 3, normed, "silu")
    found = kernels.prepare_experts(parts)(x.to(device), logits.to(device)).cpu()
    shares = logits.double().softmax(-1)
    shares *= shares >= shares.topk(3).values[:, -1:]
    if normed:
        shares /= shares.sum(-1, keepdim=True)
    expected = torch.zeros(rows, 24, dtype=torch.float64)
    for share, gate_up, down in zip(shares.T, gate_ups.double(), downs.double(), strict=True):
        gate, up = (x.double() @ gate_up.T).split(20, -1)
        expected += share[:, None] * ((gate * gate.sigmoid() * up) @ down.T)
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (128, 8), (512, 3), (6, 6)])
def test_experts_that_are_equally_likely_are_chosen_as_torch_does(
    kernels: Kernels, device: torch.device, experts: int, chosen: int
) -> None:
    logits = torch.randint(0, 3, (50, experts), generator=torch.Generator().manual_seed(experts)).float().to(device)
    found, shares = kernels.route(logits, chosen, False)
    likely = logits.softmax(-1)
    expected = likely.topk(chosen, -1)
    if kernels.name == "triton":
        # torch.topk has no fixed order on GPUs; here it is the first.
        assert torch.equal(found, torch.sort(likely, dim=-1, descending=True, stable=True).indices[:, :chosen])
    else:
        assert torch.equal(found, expected.indices)
    torch.testing.assert_close(shares, expected.values)


def test_rope_of_a_part_leaves_the_rest(kernels: Kernels, device: torch.device) -> None:
    x, angles = noise(4, 3, 16).to(device), noise(4, 1, 3, seed=1).to(device)
    cos, sin = (torch.cat(pair, -1) for pair in ((angles.cos(), angles.cos()), (-angles.sin(), angles.sin())))
    found = kernels.rope(x, cos, sin)
    torch.testing.assert_close(found[..., :6], kernels.rope(x[..., :6], cos, sin))
    assert torch.equal(found[..., 6:], x[..., 6:])


def test_a_weight_in_fp32_is_multiplied_before_rounding(kernels: Kernels, device: torch.device) -> None:
    x, weight = noise(5, 48).to(device, torch.bfloat16), (1 + noise(48, seed=1) / 100).to(device)
    exact = kernels.rms_norm(x.float(), weight, 1e-6)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-6), exact.bfloat16())


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("biased", [False, True])
def test_prepared_linear_is_the_product(kernels: Kernels, device: torch.device, rows: int, biased: bool) -> None:
    x, weight, bias = noise(rows, 40), noise(24, 40, seed=1), noise(24, seed=2) if biased else None
    linear = kernels.prepare_linear(weight.to(device), None if bias is None else bias.to(device))
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(linear(x.to(device)).cpu().double(), expected, atol=1e-4, rtol=1e-4)


class Paged:
    """Sequences in a shuffled paged cache, and the same keys and values laid out plainly."""

    def __init__(
        self,
        shapes: list[tuple[int, tuple[int, ...]]],
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int | None = None,
    ) -> None:
        """`shapes`: for each group the query length and the context lengths."""
        self.window = window
        total = sum(-(-n // BLOCK) for _, lens in shapes for n in lens)
        self.zero_block = total
        free = torch.randperm(total, generator=torch.Generator().manual_seed(5)).tolist()
        tokens = sum(query * len(lens) for query, lens in shapes)
        self.query = noise(tokens, heads, head_dim, seed=6)
        # What no sequence owns must not matter: leave rubbish there, except in the block that pads.
        self.cache = torch.full((2, total + 1, BLOCK, kv_heads, head_dim), 1e4)
        self.cache[:, total] = 0
        self.plain: list[tuple[slice, Tensor, Tensor]] = []
        self.sequences = [(query, n) for query, lens in shapes for n in lens]
        width = max(-(-n // BLOCK) for _, n in self.sequences)
        self.tables = torch.full((len(self.sequences), width), self.zero_block, dtype=torch.int32)
        self.writes = []
        row = 0
        for table, (query, n) in zip(self.tables, self.sequences, strict=True):
            own = [free.pop() for _ in range(-(-n // BLOCK))]
            table[: len(own)] = torch.tensor(own)
            keys, values = noise(2, n, kv_heads, head_dim, seed=row + 10)
            slots = torch.tensor([own[p // BLOCK] * BLOCK + p % BLOCK for p in range(n)])
            self.writes.append((slots, keys, values))
            self.plain.append((slice(row, row + query), keys, values))
            row += query

    def batch(self, device: torch.device) -> RaggedBatch:
        counts, lengths = zip(*self.sequences, strict=True)
        return RaggedBatch(
            slots=torch.empty(0, dtype=torch.int64),
            query_starts=torch.tensor([0, *counts]).cumsum(0).int().to(device),
            kv_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
            tables=self.tables.to(device),
            table_rows=torch.arange(len(counts), dtype=torch.int32).to(device),
            most_queries=max(counts),
            most_places=max(lengths),
            window=self.window,
        )

    def attend(self, kernels: Kernels, device: torch.device, softcap: float | None = None) -> Tensor:
        cache = self.cache.to(device)
        for slots, keys, values in self.writes:
            kernels.write_kv(keys.to(device), values.to(device), cache, slots.to(device))
        batch = kernels.arrange(self.batch(device), BLOCK, self.zero_block)
        return kernels.paged_attention(self.query.to(device), cache, batch, self.query.shape[-1] ** -0.5, softcap).cpu()

    def expected(self, softcap: float | None = None) -> Tensor:
        """Softmax attention one query at a time, in float64."""
        out = torch.empty_like(self.query, dtype=torch.float64)
        heads, head_dim = self.query.shape[1:]
        for rows, keys, values in self.plain:
            share = heads // keys.shape[1]
            for j in range(rows.start, rows.stop):
                seen = len(keys) - (rows.stop - 1 - j)
                first = 0 if self.window is None else max(0, seen - self.window)
                for h in range(heads):
                    k, v = keys[first:seen, h // share].double(), values[first:seen, h // share].double()
                    scores = k @ self.query[j, h].double() / math.sqrt(head_dim)
                    if softcap is not None:
                        scores = softcap * (scores / softcap).tanh()
                    out[j, h] = scores.softmax(0) @ v
        return out


SHAPES = [
    (1, (1,)),  # a first token
    (1, (9, 16, 23)),  # decodes, padded to the longest
    (5, (5, 5)),  # fresh prompts
    (3, (3, 11)),  # one fresh, one behind cached tokens
    (12, (29,)),  # a chunk in the middle of a prompt
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 8), (4, 1, 32)])
def test_attention_over_blocks_is_plain_attention(
    kernels: Kernels, device: torch.device, heads: int, kv_heads: int, head_dim: int
) -> None:
    paged = Paged(SHAPES, heads, kv_heads, head_dim)
    torch.testing.assert_close(paged.attend(kernels, device).double(), paged.expected(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("window", "softcap"), [(None, 0.7), (1, None), (4, 0.7), (10, None)])
def test_windows_and_caps_are_their_formulas(
    kernels: Kernels, device: torch.device, window: int | None, softcap: float | None
) -> None:
    paged = Paged(SHAPES, 6, 2, 8, window)
    found = paged.attend(kernels, device, softcap).double()
    torch.testing.assert_close(found, paged.expected(softcap), atol=1e-5, rtol=1e-4)


def test_scratch_memory_of_one_call_does_not_leak_into_the_next() -> None:
    kernels = Cpu(torch.float32)
    cpu = torch.device("cpu")
    large, small = Paged([(1, (40, 37))], 4, 2, 16), Paged([(1, (3,)), (2, (9,))], 4, 2, 16)
    for paged in (small, large, small):
        torch.testing.assert_close(paged.attend(kernels, cpu).double(), paged.expected(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("native", [False, True])
def test_bfloat16_is_computed_in_float32_where_the_cpu_only_emulates_it(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    chosen = select(torch.device("cpu"), torch.bfloat16, "cpu")
    assert (chosen.name, chosen.compute_dtype) == ("cpu", torch.bfloat16 if native else torch.float32)


def test_an_accelerator_computes_in_the_dtype_of_the_weights() -> None:
    chosen = select(torch.device("cuda"), torch.bfloat16)
    assert (chosen.name, chosen.compute_dtype) == ("triton" if "triton" in SETS else "sdpa", torch.bfloat16)


def test_kernels_for_another_device_are_refused() -> None:
    with pytest.raises(EngineError, match="kernels='cpu' are for CPUs"):
        select(torch.device("cuda"), torch.float32, "cpu")
