"""Whole models, quantised and compared."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.models import load_model
from engine.quant.make import Recipe, compare, quantise, windows
from engine.quant.make.model import Writer, decoder, rows_of
from engine.quant.make.walk import hidden
from engine.text import ModelCard, Tokenizer
from engine.text.checkpoint import count_parameters
from tests.engine.quant.forward import in_chunks
from tests.engine.random_models import FAMILIES, write_model
from tests.exhaustive import few
from workers.library.corpus import standard_library
from workers.library.reference import bundled

CPU = torch.device("cpu")
DRAWN = torch.Generator().manual_seed(1)
WINDOWS = [torch.randint(0, 320, (length,), generator=DRAWN).tolist() for length in (40, 17, 33)]


@pytest.mark.parametrize("name", few(["gemma3", "phi3-longrope", "qwen2-window"], "gemma3"))
def test_every_family_is_made_and_read_again(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "model", tokenizer=False, **FAMILIES[name])
    (tmp_path / "out").mkdir()
    assert quantise(folder, tmp_path / "out", Recipe(8), WINDOWS, CPU) == Recipe(8)
    found = compare(decoder(folder, CPU), decoder(tmp_path / "out", CPU), WINDOWS)
    assert found.tokens == sum(map(len, WINDOWS)) - 3
    assert 0 < found.divergence < 0.01
    assert found.agreement > 0.9


@pytest.mark.parametrize(("name", "recipe"), [("mixtral", Recipe(4, down=8)), ("qwen3-moe", Recipe(8))])
def test_experts_are_made_and_read_again_and_routers_stay_as_they_are(
    tmp_path: Path, name: str, recipe: Recipe
) -> None:
    """Also experts that no row of the text is routed to."""
    folder = write_model(tmp_path / "model", tokenizer=False, **FAMILIES[name])
    (tmp_path / "out").mkdir()
    quantise(folder, tmp_path / "out", recipe, [WINDOWS[0][:3]], CPU)
    before, after = (load_file(where / "model.safetensors") for where in (folder, tmp_path / "out"))
    assert {one for one in before if one.endswith(".gate.weight")} <= after.keys()
    assert {one.removesuffix("_packed") for one in after if ".experts." in one and one.endswith("_packed")} == {
        one for one in before if ".experts." in one
    }
    found = compare(decoder(folder, CPU), decoder(tmp_path / "out", CPU), WINDOWS)
    assert 0 < found.divergence < (0.02 if recipe.bits == 8 else 0.5)


def test_experts_in_one_tensor_are_rounded_as_apart(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tokenizer=False, **FAMILIES["qwen3-moe"])
    held = load_file(folder / "model.safetensors")
    apart = {name: held.pop(name) for name in list(held) if ".experts." in name}
    for layer in sorted({name.partition("experts.")[0] for name in apart}):
        gate, up, down = (
            torch.stack([apart[f"{layer}experts.{i}.{kind}_proj.weight"] for i in range(6)])
            for kind in ("gate", "up", "down")
        )
        held |= {f"{layer}experts.gate_up_proj": torch.cat((gate, up), 1), f"{layer}experts.down_proj": down}
    (tmp_path / "together").mkdir()
    save_file(held, tmp_path / "together" / "model.safetensors")
    (tmp_path / "together" / "config.json").write_text((folder / "config.json").read_text())
    found = []
    for where in (folder, tmp_path / "together"):
        out = tmp_path / f"{where.name}-out"
        out.mkdir()
        quantise(where, out, Recipe(8), WINDOWS, CPU)
        found.append(load_file(out / "model.safetensors"))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_an_expert_with_too_few_rows_gets_those_for_which_it_is_likeliest() -> None:
    logits = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 0.0], [5.0, 0.0], [0.0, 9.0]])
    chosen = logits.argmax(1, keepdim=True)
    assert rows_of(1, logits, chosen, 1).tolist() == [1, 4]
    assert rows_of(1, logits, chosen, 3).tolist() == [1, 2, 4]
    assert rows_of(1, logits, chosen, 9).tolist() == [0, 1, 2, 3, 4]


def test_the_group_is_the_largest_that_fits_and_others_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tokenizer=False)
    (tmp_path / "out").mkdir()
    assert quantise(folder, tmp_path / "out", Recipe(4, "nearest"), [], CPU) == Recipe(4, "nearest", 32)
    with pytest.raises(ModelError, match="a group of 64 does not divide a matrix's 96 inputs"):
        quantise(folder, tmp_path / "out", Recipe(4, "nearest", 64), [], CPU)
    with pytest.raises(ModelError, match="is quantised already"):
        quantise(tmp_path / "out", tmp_path / "out", Recipe(8, "nearest"), [], CPU)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_rounded_where_that_is_asked_for_and_with_it_a_tied_embedding(tmp_path: Path, tied: bool) -> None:
    """Also where a tied checkpoint has the table twice."""
    folder = write_model(tmp_path / "model", tokenizer=False, tie_word_embeddings=tied)
    before = load_file(folder / "model.safetensors")
    if tied:
        save_file(
            before | {"lm_head.weight": before["model.embed_tokens.weight"].clone()}, folder / "model.safetensors"
        )
    (tmp_path / "out").mkdir()
    quantise(folder, tmp_path / "out", Recipe(4, "nearest", head=8), [], CPU)
    name = "model.embed_tokens" if tied else "lm_head"
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert {one for one in after if "embed" in one or "head" in one} == {
        *(f"{name}.{end}" for end in ("weight_packed", "weight_scale", "weight_shape")),
        *([] if tied else ["model.embed_tokens.weight"]),
    }
    assert count_parameters(tmp_path / "out") == sum(one.numel() for one in before.values())
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["ignore"] == []
    assert [one["weights"]["num_bits"] for one in said["config_groups"].values()] == [4, 8]

    table = before[f"{name}.weight"].float()
    model = decoder(tmp_path / "out", CPU)
    ids = torch.tensor([5, 319, 0, 5])
    rows = model.embedding()[1](ids)
    if tied:
        assert (rows - table[ids]).abs().max() <= table.abs().max() / 127
        assert not torch.equal(rows, table[ids])
        torch.testing.assert_close(model.logits(torch.eye(64))[:, ids].T, rows)
    else:
        assert torch.equal(rows, before["model.embed_tokens.weight"][ids].float())


def test_what_is_not_a_matrix_stays_as_it_is(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tokenizer=False, tie_word_embeddings=False, attention_bias=True)
    (tmp_path / "out").mkdir()
    quantise(folder, tmp_path / "out", Recipe(4, "nearest"), [], CPU)
    before, after = (load_file(where / "model.safetensors") for where in (folder, tmp_path / "out"))
    kept = [name for name in before if not name.endswith("_proj.weight")]
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert "lm_head.weight" in kept
    matrices = [name for name in before if name.endswith("_proj.weight")]
    assert len(after) == len(kept) + 3 * len(matrices)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["quantization_config"]["ignore"] == ["lm_head"]
    del said["quantization_config"]
    assert said == json.loads((folder / "config.json").read_text())


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tokenizer=False)
    held = load_file(folder / "model.safetensors")
    held["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(held, folder / "model.safetensors")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.up_proj\.weight has numbers that are not finite"):
        quantise(folder, tmp_path / "out", Recipe(4, "nearest"), [], CPU)


def test_a_model_is_like_itself(tmp_path: Path) -> None:
    model = decoder(write_model(tmp_path, tokenizer=False), CPU)
    found = compare(model, model, WINDOWS)
    assert (found.divergence, found.agreement, found.increase) == (0, 1, 0)


def test_a_walk_ends_where_a_forward_pass_does(tmp_path: Path) -> None:
    """Against the cache of an ordinary pass, in two chunks."""
    folder = write_model(tmp_path, tokenizer=False, **FAMILIES["gemma2"])
    model = decoder(folder, CPU)
    walked = hidden(model, WINDOWS[:1])
    torch.testing.assert_close(walked, in_chunks(load_model(folder, "float32", CPU, "reference"), WINDOWS[0], 15))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "limit"), [(Recipe(8), 0.005), (Recipe(4), 0.02)])
def test_the_bundled_model_keeps_its_perplexity(tmp_path: Path, recipe: Recipe, limit: float) -> None:
    folder = bundled()["tiny-v2"]
    tokenizer = Tokenizer(ModelCard.tokenizer_files(folder))
    files = standard_library()
    learnt = windows(tokenizer, (file.text[:4000] for file in files if not file.held_out), 4096, 1024)
    judged = windows(tokenizer, (file.text[:4000] for file in files if file.held_out), 8192, 1024)
    quantise(folder, tmp_path, recipe, learnt, CPU)
    found = compare(decoder(folder, CPU), decoder(tmp_path, CPU), judged)
    assert found.perplexity_before < 20
    assert found.increase < limit


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_text_that_makes_no_finite_numbers_is_refused_by_where_it_does(tmp_path: Path, value: float) -> None:
    folder = write_model(tmp_path / "model", tokenizer=False)
    held = load_file(folder / "model.safetensors")
    held["model.layers.1.post_attention_layernorm.weight"][0] = value
    save_file(held, folder / "model.safetensors")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=r"inputs of model\.layers\.1\.mlp\.gate_proj,up_proj become NaN or infinite"):
        quantise(folder, tmp_path / "out", Recipe(8), WINDOWS, CPU)


def test_who_may_read_the_settings_may_read_the_weights(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.put("a", torch.ones(2))
    writer.finish({})
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode


def test_a_disk_that_is_full_is_an_error_of_the_system(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.put("a", torch.ones(1 << 16))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match=r"model-00001.safetensors: .*too large"):
            writer.finish({})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
