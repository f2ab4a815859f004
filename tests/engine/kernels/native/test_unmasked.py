"""Operations of encoders against those in plain torch, over shapes and threads; and to the bit against themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.reference import Reference
from engine.kernels.unmasked import SPARE_DISTANCES, TextBatch
from tests.engine.kernels.native.conftest import Make
from tests.engine.kernels.native.test_kernels import noise

REFERENCE = Reference(torch.float32)
CPU = torch.device("cpu")
#: Below, at and above tiles of keys, chunks of them and pieces of queries.
LENGTHS = [1, 2, 31, 32, 33, 48, 97, 255, 256, 257, 600]


def batch_of(lengths: list[int], biases: Tensor | None = None) -> TextBatch:
    """`biases`: [heads, 2 * 1000 + 1], of distances from -1000 on."""
    if biases is None:
        return TextBatch.of(lengths, CPU)
    farthest = max(lengths)
    return TextBatch.of(lengths, CPU, biases[:, 1000 - farthest : 1000 + farthest + SPARE_DISTANCES].contiguous())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("heads", "head_dim", "biased", "reach"),
    [
        (2, 32, False, None),
        (3, 8, True, None),
        (2, 64, True, None),
        (1, 24, False, 0),
        (2, 64, False, 5),
        (1, 32, False, 64),
    ],
)
def test_attention_is_the_references(
    make: Make, heads: int, head_dim: int, biased: bool, reach: int | None, threads: int
) -> None:
    biases = noise(heads, 2100, seed=3) if biased else None
    rows = noise(sum(LENGTHS), 3, heads, head_dim)
    kernels = make(torch.float32, threads)
    whole = kernels.attend_unmasked(rows, batch_of(LENGTHS, biases), reach)
    expected = REFERENCE.attend_unmasked(rows, batch_of(LENGTHS, biases), reach)
    torch.testing.assert_close(whole, expected, atol=2e-5, rtol=1e-4)
    # Each sequence alone, to the bit.
    for own, part in zip(torch.split(rows, LENGTHS), torch.split(whole, LENGTHS), strict=True):
        assert torch.equal(kernels.attend_unmasked(own, batch_of([len(own)], biases), reach), part)


def test_heads_of_no_multiple_of_eight_are_attended_to_as_well(make: Make) -> None:
    rows = noise(40, 3, 2, 12)
    found = make(torch.float32, 1).attend_unmasked(rows, batch_of([40]), None)
    torch.testing.assert_close(found, REFERENCE.attend_unmasked(rows, batch_of([40]), None))


def test_numbers_that_overflow_stay_with_their_sequence(make: Make) -> None:
    rows = noise(90, 3, 2, 32)
    rows[7] = float("nan")
    found = make(torch.float32, 2).attend_unmasked(rows, batch_of([40, 50]), None)
    assert not found[:40].isfinite().any()
    assert found[40:].isfinite().all()


@pytest.mark.parametrize("width", [384, 40, 7])
def test_norms_are_torchs(make: Make, width: int) -> None:
    x, residual = noise(300, width), noise(300, width, seed=1)
    weight, bias = noise(width, seed=2), noise(width, seed=3)
    kernels = make(torch.float32, 2)
    normed, total = kernels.add_layer_norm(x.clone(), residual.clone(), weight, bias, 1e-5)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, F.layer_norm(x + residual, (width,), weight, bias, 1e-5), atol=1e-5, rtol=1e-5)
    far = x + 100  # where the difference of two squares would lose digits
    expected = F.layer_norm(far, (width,), weight, None, 1e-5)
    torch.testing.assert_close(kernels.layer_norm(far, weight, None, 1e-5), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(kernels.layer_norm(x[5:6], weight, bias, 1e-5), kernels.layer_norm(x, weight, bias, 1e-5)[5:6])
    # As torch's: not the bias, of which nobody would see that the row has no norm.
    assert kernels.layer_norm(x[:1] * 1e22, weight, bias, 1e-5).isnan().all()


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "relu", "silu", "tanh"])
def test_activations_are_torchs_and_depend_on_their_number_alone(make: Make, name: str) -> None:
    functions = {
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "silu": F.silu,
        "tanh": torch.tanh,
    }
    kernels = make(torch.float32, 2)
    x = torch.cat((noise(200, 37) * 4, torch.linspace(-12, 12, 37)[None]))
    x[3, 6] = float("nan")
    expected = functions[name](x)
    found = kernels.activation(name)(x)
    finite = ~expected.isnan()
    torch.testing.assert_close(found[finite], expected[finite], atol=2e-6, rtol=1e-5)
    assert found[3, 6].isnan()
    up = noise(201, 37, seed=5)
    gated = kernels.gate(name)(torch.cat((x, up), 1))
    torch.testing.assert_close(gated[finite], (expected * up)[finite], atol=1e-5, rtol=1e-5)
    assert torch.equal(kernels.activation(name)(x[:, :1].contiguous())[finite[:, :1]], found[:, :1][finite[:, :1]])
