"""Quantised checkpoints give what the weights give that they stand for, and broken ones are refused by name."""

from __future__ import annotations

import json
import zlib
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import ModelError
from engine.kernels.layer import PreparedLinear
from engine.kernels.native import load_library
from engine.kernels.pruned import agree, is_pruned, semi_structured_product
from engine.kernels.reference import Reference
from engine.models import Model, load_model, shape_of
from engine.text.checkpoint import count_parameters
from tests.engine.quant.packers import (
    Numbers,
    Pack,
    awq,
    bitmask,
    compressed_config,
    gptq,
    numbers,
    packed,
    pruned,
    sparsity_config,
    write_quantised,
)
from tests.engine.random_models import FAMILIES
from tests.exhaustive import few

CPU = torch.device("cpu")
#: Inputs of 64 and 96: groups of 32 divide both.
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def drawn(name: str, weight: Tensor, **how: Any) -> Numbers:
    if how["group"] == -1:
        how["group"] = weight.shape[1]
    return numbers(*weight.shape, seed=zlib.crc32(name.encode()), **how)


def by(packer: Any, **how: Any) -> Pack:
    def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        given = drawn(name, weight, **how)
        return packer(given), given.dense()

    return pack


FORMS: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq": (GPTQ, by(gptq, bits=4, group=32)),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, by(partial(gptq, version=2), bits=4, group=32)),
    "gptq-act-order": (GPTQ | {"desc_act": True}, by(gptq, bits=4, group=32, shuffled=True)),
    "gptq-symmetric": (GPTQ | {"sym": True}, by(gptq, bits=4, group=32, zeros=False)),
    "gptq-whole": (GPTQ | {"group_size": -1}, by(gptq, bits=4, group=-1)),
    "gptq-8": (GPTQ | {"bits": 8}, by(gptq, bits=8, group=32, zeros=False)),
    "gptq-8-zeros-act-order": (GPTQ | {"bits": 8, "desc_act": True}, by(gptq, bits=8, group=32, shuffled=True)),
    "awq": (AWQ, by(awq, bits=4, group=32)),
    "awq-old-names": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "version": "GEMM"},
        by(awq, bits=4, group=-1),
    ),
    "packed-4": (
        compressed_config("pack-quantized", 4, 32),
        by(partial(packed, zeros=False), bits=4, group=32, zeros=False),
    ),
    "packed-4-zeros": (
        compressed_config("pack-quantized", 4, 32, symmetric=False),
        by(partial(packed, zeros=True), bits=4, group=32),
    ),
    "packed-8": (
        compressed_config("pack-quantized", 8, None),
        by(partial(packed, zeros=False), bits=8, group=-1, zeros=False),
    ),
    "int8": (
        compressed_config("int-quantized", 8, None),
        by(
            lambda given: {"weight": (given.q - 128).to(torch.int8), "weight_scale": given.scales.T.contiguous()},
            bits=8,
            group=-1,
            zeros=False,
        ),
    ),
}


#: 8 bits for the matrices that a group of their own names.
EIGHT = FORMS["packed-8"][0]["config_groups"]["group_0"] | {"targets": [r"re:.*layers\.\d+\.mlp\.(down|x)_proj$"]}
MIXED = FORMS["packed-4"][0] | {"config_groups": FORMS["packed-4"][0]["config_groups"] | {"group_1": EIGHT}}
FORMS["packed-mixed"] = (
    MIXED,
    lambda name, weight: FORMS["packed-8" if "down_proj" in name else "packed-4"][1](name, weight),
)


#: Of plain weights, and of quantised ones, without the zeros of a 2:4 pruning.
PRUNED = {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": sparsity_config("dense")}
BITMASK = {"sparsity_config": sparsity_config("sparse-24-bitmask")}


def pruned_plain(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return bitmask(pruned(weight)), pruned(weight)


def pruned_quantised(form: str) -> Pack:
    def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts, _ = FORMS["int8"][1](name, weight) if form == "int8" else _fp8(form)(name, weight)
        values = pruned(parts.pop("weight"))
        return bitmask(values) | parts, values.float() * parts["weight_scale"].float()

    return pack


FORMS |= {
    "pruned": (PRUNED | BITMASK, pruned_plain),
    "pruned-int8": (FORMS["int8"][0] | BITMASK, pruned_quantised("int8")),
    "pruned-fp8": (compressed_config("float-quantized", 8, None, kind="float") | BITMASK, pruned_quantised("channel")),
}


def targeting(*targets: Any) -> dict[str, Any]:
    """MIXED with other targets."""
    return MIXED | {"config_groups": MIXED["config_groups"] | {"group_1": EIGHT | {"targets": list(targets)}}}


def products(model: Model) -> dict[str, Tensor]:
    found = {}
    for i, (prefix, linear) in enumerate(model.linears()):
        x = torch.randn(3, linear.inputs, generator=torch.Generator().manual_seed(i))
        found[f"{i} {prefix}{','.join(linear.parts)}"] = linear(x)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_each_matrix_is_the_one_that_its_tensors_stand_for(tmp_path: Path, form: str) -> None:
    plain = write_quantised(tmp_path, *FORMS[form])
    wanted = products(load_model(plain, "float32", CPU, "reference"))
    got = products(load_model(tmp_path / "packed", "float32", CPU, "reference"))
    assert wanted.keys() == got.keys()
    assert len(wanted) == 8
    for name, one in wanted.items():
        torch.testing.assert_close(got[name], one, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def _fp8(scale: str) -> Pack:
    def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        given = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(outputs, inputs, generator=given).to(torch.float8_e4m3fn)
        if scale == "block":
            scales = torch.rand(-(-outputs // 40), -(-inputs // 32), generator=given) + 0.1
            wide = scales.repeat_interleave(40, 0)[:outputs].repeat_interleave(32, 1)
            return {"weight": values, "weight_scale_inv": scales}, values.float() * wide
        scales = torch.rand({"one": (), "channel": (outputs, 1)}[scale], generator=given) + 0.1
        extra = {"input_scale": torch.ones(())} if scale == "one" else {}
        return {"weight": values, "weight_scale": scales, **extra}, values.float() * scales

    return pack


FP8_CONFIGS = {
    "one": {"quant_method": "fp8", "activation_scheme": "static"},
    "channel": compressed_config("float-quantized", 8, None, kind="float"),
    "block": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [40, 32]},
}


@pytest.mark.parametrize(
    ("name", "form"), [("mixtral", "awq"), ("qwen3-moe", "gptq"), ("qwen3-moe", "packed-8"), ("qwen3-moe", "channel")]
)
def test_each_matrix_of_an_expert_is_the_one_that_its_tensors_stand_for(tmp_path: Path, name: str, form: str) -> None:
    """GPTQ's as it is published: with routers that are named as not quantised."""
    config, pack = FORMS[form] if form in FORMS else (FP8_CONFIGS[form], _fp8(form))
    if form == "gptq":
        config = config | {"dynamic": {r"-:.*mlp\.gate$": {}}}
    plain = write_quantised(tmp_path, config, pack, **FAMILIES[name])
    wanted = products(load_model(plain, "float32", CPU, "reference"))
    got = products(load_model(tmp_path / "packed", "float32", CPU, "reference"))
    assert wanted.keys() == got.keys()
    assert sum(".experts." in one for one in wanted) == {"mixtral": 4 * 4, "qwen3-moe": 3 * 6}[name] * 2
    for one, product in wanted.items():
        torch.testing.assert_close(got[one], product, rtol=1e-5, atol=1e-4)


def test_targets_name_matrices_as_the_checkpoint_does(tmp_path: Path) -> None:
    def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return FORMS["packed-8" if name.endswith(".w2") else "packed-4"][1](name, weight)

    plain = write_quantised(tmp_path, targeting("re:.*block_sparse_moe.*w2$"), pack, **FAMILIES["mixtral"])
    wanted = products(load_model(plain, "float32", CPU, "reference"))
    got = products(load_model(tmp_path / "packed", "float32", CPU, "reference"))
    for name, product in wanted.items():
        torch.testing.assert_close(got[name], product, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scale", FP8_CONFIGS)
def test_eight_bit_floats_are_written_out_on_a_cpu(tmp_path: Path, scale: str) -> None:
    plain = write_quantised(tmp_path, FP8_CONFIGS[scale], _fp8(scale))
    wanted = products(load_model(plain, "float32", CPU, "reference"))
    got = products(load_model(tmp_path / "packed", "float32", CPU, "reference"))
    for name, one in wanted.items():
        torch.testing.assert_close(got[name], one, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "form", few([*FORMS, *FP8_CONFIGS], "gptq-8-zeros-act-order", "awq", "packed-4", "int8", "block")
)
def test_its_shape_alone_is_prepared_as_the_whole_is(tmp_path: Path, form: str) -> None:
    """Without its matrices: zero points that are all the middle, and inputs in an order, are known by the rest."""
    write_quantised(tmp_path, *(FORMS[form] if form in FORMS else (FP8_CONFIGS[form], _fp8(form))))
    prepared: list[list[tuple[Any, ...]]] = []

    class Told(Reference):
        def keeps(self, shape: Any, nbytes: int) -> None:
            prepared[-1].append((tuple(shape), nbytes))

        def prepare_ordered(self, weight: Any, bias: Tensor | None, order: Tensor) -> PreparedLinear:
            prepared[-1].append(("ordered", tuple(order.shape)))
            return super().prepare_ordered(weight, bias, order)

    for load in (shape_of, partial(load_model, device=CPU)):
        prepared.append([])
        load(tmp_path / "packed", "float32", kernels=Told)
    assert prepared[0] == prepared[1]
    shape = shape_of(tmp_path / "packed", "float32", Told)
    for _, linear in shape.linears():
        given = torch.empty(3, linear.inputs, device="meta")
        assert linear(given).shape == (3, sum(linear.parts.values()))


def test_parts_that_are_not_quantised_alike_run_beside_each_other(tmp_path: Path) -> None:
    """q by another order than k; v not at all; with a bias where the architecture has none."""

    def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if name.endswith("v_proj"):
            return {"weight": weight}, weight
        given = drawn(name, weight, bits=4, group=32, shuffled=name.endswith("q_proj"))
        return gptq(given), given.dense()

    plain = write_quantised(tmp_path, GPTQ, pack)
    bias = torch.linspace(-1, 1, 32)
    held = load_file(tmp_path / "packed" / "model.safetensors")
    held["model.layers.0.self_attn.k_proj.bias"] = bias
    save_file(held, tmp_path / "packed" / "model.safetensors")
    wanted = products(load_model(plain, "float32", CPU, "reference"))
    got = products(load_model(tmp_path / "packed", "float32", CPU, "reference"))
    first = next(iter(wanted))
    wanted[first][:, 64:96] += bias
    for name, one in wanted.items():
        torch.testing.assert_close(got[name], one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "form", "kernels"),
    [
        ("Phi3ForCausalLM", "gptq-act-order", "cpu"),
        ("Qwen3ForCausalLM", "awq", "native"),
        ("Qwen3ForCausalLM", "gptq-act-order", "native"),
        ("Phi3ForCausalLM", "packed-8", "native"),
    ],
)
def test_an_engine_writes_what_the_plain_weights_write(
    tmp_path: Path, family: str, form: str, kernels: Literal["cpu", "native"]
) -> None:
    if kernels == "native" and load_library() is None:
        pytest.skip("native kernels are not built for this CPU")
    changes = {"architectures": [family], "model_type": "qwen3", "num_hidden_layers": 2}
    if family == "Phi3ForCausalLM":
        changes |= {"model_type": "phi3", "tie_word_embeddings": False}
    plain = write_quantised(tmp_path, *FORMS[form], **changes)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    texts = []
    for folder in (plain, tmp_path / "packed"):
        with Engine.load(folder, EngineConfig(dtype="float32", kernels=kernels, threads=1)) as engine:
            texts.append([one.token_ids for one in engine.generate([[5, 6, 7], list(range(40))], params)])
    assert texts[0] == texts[1]


def change(folder: Path, name: str, tensor: Tensor | None) -> None:
    held = load_file(folder / "model.safetensors")
    if tensor is None:
        del held[name]
    else:
        held[name] = tensor
    save_file(held, folder / "model.safetensors")


DOWN = "model.layers.1.mlp.down_proj."  # 64 outputs, 96 inputs
ODD = torch.arange(96, dtype=torch.int32) // 32
BROKEN: dict[str, tuple[str, str, Tensor | None, str]] = {
    "no scales": ("gptq", "scales", None, r"lacks .*down_proj\.scales"),
    "no zeros": ("awq", "qzeros", None, r"lacks .*down_proj\.qzeros"),
    "no weight": ("gptq", "qweight", None, r"lacks .*down_proj\.weight"),
    "few words": (
        "gptq",
        "qweight",
        torch.zeros(11, 64, dtype=torch.int32),
        r"qweight has shape \[11, 64\].*\[12, 64\]",
    ),
    "zeros of others": ("awq", "qzeros", torch.zeros(3, 7, dtype=torch.int32), r"qzeros has shape \[3, 7\].*\[3, 8\]"),
    "scales of others": ("packed-4", "weight_scale", torch.ones(64, 2), r"weight_scale has shape \[64, 2\].*\[64, 3\]"),
    "words of 64 bits": ("gptq", "qweight", torch.zeros(12, 64, dtype=torch.int64), "stored as I64; I32 is expected"),
    "whole scales": ("gptq", "scales", torch.ones(3, 64, dtype=torch.int32), "stored as I32; one of F32"),
    "a scale that is none": ("gptq", "scales", torch.full((3, 64), float("inf")).half(), "no finite numbers"),
    "group 3 of 3": ("gptq", "g_idx", torch.where(ODD == 2, 3, ODD).int(), "names group 3 where there are 3"),
    "group -1": ("gptq", "g_idx", ODD - 1, "names group -1 where there are 3"),
    "unequal groups": ("gptq", "g_idx", torch.tensor([0] * 33 + [1] * 31 + [2] * 32).int(), "group 0 33 inputs"),
    "another shape": ("packed-4", "weight_shape", torch.tensor([64, 95]), r"weight_shape is \[64, 95\].*\[64, 96\]"),
    "another's form": ("gptq", "weight_packed", torch.zeros(64, 12, dtype=torch.int32), "is of another form"),
    "bits of a mask": (
        "pruned",
        "bitmask",
        torch.full((64, 12), 0b01110001, dtype=torch.uint8),
        "does not keep two of each four",
    ),
    "a mask of others": ("pruned", "bitmask", torch.zeros(64, 11, dtype=torch.uint8), r"\[64, 11\].*\[64, 12\]"),
    "no mask": ("pruned", "bitmask", None, r"lacks .*down_proj\.weight"),
    "another shape of a pruned one": ("pruned-int8", "shape", torch.tensor([64, 95]), r"shape is \[64, 95\]"),
    "too much": ("awq", "g_idx", ODD, "does not use: .*g_idx"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_checkpoint_is_refused_by_the_tensor(tmp_path: Path, how: str) -> None:
    form, end, tensor, message = BROKEN[how]
    write_quantised(tmp_path, *FORMS[form])
    change(tmp_path / "packed", DOWN + end, tensor)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "packed", "float32", CPU, "reference")


PACKED = compressed_config("pack-quantized", 4, 32)
TWO_KINDS = PACKED | {
    "config_groups": {
        f"group_{bits}": compressed_config("pack-quantized", bits, 32)["config_groups"]["group_0"] for bits in (4, 8)
    }
}


def test_act_order_without_an_order_is_refused(tmp_path: Path) -> None:
    write_quantised(tmp_path, *FORMS["gptq-act-order"])
    change(tmp_path / "packed", DOWN + "g_idx", None)
    with pytest.raises(ModelError, match=r"lacks .*down_proj\.g_idx"):
        load_model(tmp_path / "packed", "float32", CPU, "reference")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not supported; gptq, awq"),
        (GPTQ | {"bits": 3}, "bits=3 is not supported; 4 and 8"),
        (GPTQ | {"bits": None}, "lacks quantization_config's bits"),
        (GPTQ | {"group_size": 48}, "group_size=48 is not supported"),
        (GPTQ | {"group_size": 128}, "group_size=128 does not divide a matrix's 64 inputs"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported"),
        (GPTQ | {"dynamic": {"-:.*": {}, "+:.*up.*": {"bits": 8}}}, "must be quantised alike"),
        (GPTQ | {"dynamic": ["-:.*"]}, "must be quantised alike"),
        (GPTQ | {"desc_act": 1}, "desc_act=1 must be true or false"),
        (AWQ | {"version": "gemv"}, "version='gemv' is not supported"),
        (AWQ | {"bits": 8}, "bits=8 is not supported; 4 is"),
        (AWQ | {"zero_point": False}, "zero_point=False is not supported"),
        (compressed_config("marlin-24", 4, 32), "format='marlin-24' is not supported"),
        (compressed_config("pack-quantized", 3, 32), "num_bits=3 with type 'int' is not supported"),
        (compressed_config("int-quantized", 8, None, symmetric=False), "symmetric=False is not supported"),
        (TWO_KINDS, "a class of matrices must be quantised alike"),
        (
            MIXED | {"config_groups": MIXED["config_groups"] | {"x": EIGHT | {"targets": ["re:(a+)+$"]}}},
            r"a target that '",
        ),
        (targeting("re:(a+)+$"), r"a target that 're:\(a\+\)\+\$' is not supported"),
        (targeting("re:" + "x.*" * 6000), "a target that makes the patterns longer than 16384 characters"),
        (targeting(3), "list of names as targets"),
        (targeting(), "list of names as targets"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "must be two sizes"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2' is not supported"),
        ([1], "must be an object"),
        (PRUNED | {"sparsity_config": sparsity_config("sparse-bitmask")}, "format='sparse-bitmask' is not supported"),
        (
            PRUNED | {"sparsity_config": sparsity_config("sparse-24-bitmask", "unstructured")},
            "sparsity_structure='unstructured' is not supported with sparse-24-bitmask",
        ),
        (PRUNED | {"sparsity_config": 5}, "sparsity_config=5 must be an object"),
        (PACKED | BITMASK, "format='pack-quantized' is not supported with sparse-24-bitmask"),
    ],
)
def test_settings_that_are_not_served_are_refused_by_name(tmp_path: Path, settings: Any, message: str) -> None:
    write_quantised(tmp_path, *FORMS["gptq"])
    path = tmp_path / "packed" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "packed", "float32", CPU, "reference")


def test_a_plain_checkpoint_that_is_said_to_be_quantised_is_refused(tmp_path: Path) -> None:
    plain = write_quantised(tmp_path, *FORMS["gptq"])
    (plain / "config.json").write_bytes((tmp_path / "packed" / "config.json").read_bytes())
    with pytest.raises(ModelError, match="no matrix is quantised"):
        load_model(plain, "float32", CPU, "reference")


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    write_quantised(tmp_path, *FORMS["gptq"])
    with pytest.raises(ModelError, match="quantised already"):
        load_model(tmp_path / "packed", "bfloat16", CPU, "reference", "fp8")


def test_a_pruned_checkpoint_with_its_zeros_is_an_ordinary_one_on_a_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And one with settings by their older name; each says what becomes of the zeros."""
    plain = write_quantised(tmp_path, PRUNED | BITMASK, pruned_plain)
    wanted = products(load_model(plain, "float32", CPU, "reference"))
    assert count_parameters(tmp_path / "packed") == count_parameters(plain)
    path = plain / "config.json"
    settings = json.loads(path.read_text())
    for changes in ({"quantization_config": PRUNED}, {"compression_config": PRUNED}):
        path.write_text(json.dumps(settings | changes))
        with caplog.at_level("INFO"):
            got = products(load_model(plain, "float32", CPU, "reference"))
        assert all(torch.equal(got[name], one) for name, one in wanted.items())
        assert "pruned 2:4; their zeros are multiplied, too" in caplog.text
        caplog.clear()


def test_a_product_of_nan_agrees_with_nothing() -> None:
    right = torch.tensor([[1.0, -2.0]])
    assert agree(right + 0.03, right)
    assert not agree(right + 0.05, right)
    assert not agree(torch.full_like(right, float("nan")), right)


def test_torchs_semi_structured_form_has_a_pruned_matrix_whole() -> None:
    """The form in which a GPU gets it, made on a CPU; and what is not so pruned is seen."""
    conversions = pytest.importorskip("torch.sparse._semi_structured_conversions")
    weight = pruned(torch.randn(64, 64, generator=torch.Generator().manual_seed(1))).half()
    compressed, meta = conversions.sparse_semi_structured_from_dense_cutlass(weight)
    assert compressed.shape == (64, 32)
    assert torch.equal(conversions.sparse_semi_structured_to_dense_cutlass(compressed, meta), weight)
    assert is_pruned(weight)
    assert not is_pruned(weight + 1)
    assert semi_structured_product(weight, None) is None, "the device is no GPU"
