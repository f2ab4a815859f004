"""Checkpoints whole, sharded, broken and hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.models import load_model
from engine.models.loader import match, weights_of
from engine.text.checkpoint import count_parameters
from engine.text.tensors import INDEX, SINGLE, locate
from tests.engine.random_models import BASE, tensors, write_model

CPU = torch.device("cpu")
LAYER = "model.layers.1.self_attn.k_proj.weight"


def rewrite(folder: Path, change: Any) -> None:
    """Apply `change` to the checkpoint's tensors."""
    held = load_file(folder / SINGLE)
    change(held)
    save_file(held, folder / SINGLE)


def load(folder: Path, targets: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    with weights_of(match(folder, locate(folder), targets, str), dtype) as fill:
        fill(targets)


def places(folder: Path) -> dict[str, torch.Tensor]:
    return {name: torch.empty(tensor.shape) for name, tensor in load_file(folder / SINGLE).items()}


def test_every_tensor_comes_as_it_is_stored(tmp_path: Path) -> None:
    write_model(tmp_path)
    targets = places(tmp_path)
    load(tmp_path, targets)
    for name, tensor in tensors(BASE).items():
        assert torch.equal(targets[name], tensor)


def test_loading_leaves_the_number_of_threads_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    write_model(tmp_path)
    load(tmp_path, places(tmp_path))
    assert set_to[0] == 1, "small tensors are copied by one thread"
    assert set_to[-1] == torch.get_num_threads()


def test_shards_hold_the_same_as_one_file(tmp_path: Path) -> None:
    write_model(tmp_path / "one")
    write_model(tmp_path / "three", shards=3)
    targets, sharded = places(tmp_path / "one"), places(tmp_path / "one")
    load(tmp_path / "one", targets)
    load(tmp_path / "three", sharded)
    assert all(torch.equal(targets[name], sharded[name]) for name in targets)


def test_files_beside_the_checkpoint_are_not_part_of_it(tmp_path: Path) -> None:
    """Shards that a single file has replaced, the same weights under the names of another library, and garbage."""
    write_model(tmp_path, shards=2)
    shards = locate(tmp_path)
    parameters = count_parameters(tmp_path)
    (tmp_path / "junk.safetensors").write_bytes(b"xx")
    save_file(tensors(BASE), tmp_path / "consolidated.safetensors")
    assert (locate(tmp_path), count_parameters(tmp_path)) == (shards, parameters)
    save_file(tensors(BASE), tmp_path / SINGLE)
    assert {found.path.name for found in locate(tmp_path).values()} == {SINGLE}, "as transformers chooses"
    assert count_parameters(tmp_path) == parameters


def test_what_is_read_is_told_after_each_tensor(tmp_path: Path) -> None:
    write_model(tmp_path, shards=3)
    told: list[tuple[int, int]] = []
    load_model(tmp_path, "auto", CPU, progress=lambda done, total: told.append((done, total)))
    whole = sum(tensor.stored.nbytes for tensor in locate(tmp_path).values())
    assert told == sorted(told)
    assert (told[-1], {total for _, total in told}) == ((whole, whole), {whole})


def test_weights_are_rounded_to_the_dtype_also_in_wider_places(tmp_path: Path) -> None:
    write_model(tmp_path)
    targets = places(tmp_path)
    load(tmp_path, targets, torch.bfloat16)
    assert torch.equal(targets[LAYER], tensors(BASE)[LAYER].bfloat16().float())
    assert not torch.equal(targets[LAYER], tensors(BASE)[LAYER])


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    rewrite(tmp_path, lambda held: held.pop(LAYER))
    with pytest.raises(ModelError, match=LAYER):
        load_model(tmp_path, "auto", CPU)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    write_model(tmp_path)
    rewrite(tmp_path, lambda held: held.update({LAYER: torch.zeros(32, 63)}))
    with pytest.raises(ModelError, match=rf"{LAYER} has shape \[32, 63\].*\[32, 64\]"):
        load_model(tmp_path, "auto", CPU)


def test_a_tensor_that_nothing_uses_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(tmp_path, lambda held: held.update({name: torch.zeros(64)}))
    with pytest.raises(ModelError, match=f"does not use: {name}"):
        load_model(tmp_path, "auto", CPU)


def test_leftovers_of_older_checkpoints_are_passed_over(tmp_path: Path) -> None:
    write_model(tmp_path)
    leftovers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "lm_head.weight": torch.zeros(320, 64),
    }
    rewrite(tmp_path, lambda held: held.update(leftovers))
    load_model(tmp_path, "auto", CPU)


def test_integers_are_not_weights(tmp_path: Path) -> None:
    write_model(tmp_path)
    rewrite(tmp_path, lambda held: held.update({LAYER: torch.zeros(32, 64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=rf"{LAYER} is stored as I8"):
        load_model(tmp_path, "auto", CPU)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(ModelError, match=f"neither {SINGLE} nor {INDEX}"):
        load_model(tmp_path, "auto", CPU)


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/secret.safetensors", "..", "", "a\\b.safetensors", "weights.bin", 7, None]
)
def test_a_shard_must_be_a_plain_file_name(tmp_path: Path, shard: object) -> None:
    write_model(tmp_path / "model", shards=2)
    save_file({LAYER: torch.zeros(32, 64)}, tmp_path / "secret.safetensors")
    index = tmp_path / "model" / INDEX
    content = json.loads(index.read_text())
    content["weight_map"][LAYER] = shard
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="not the name of a safetensors file beside it"):
        locate(tmp_path / "model")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002.safetensors.*is missing"):
        locate(tmp_path)


def test_an_index_that_lies_about_a_shard_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, shards=2)
    index = tmp_path / INDEX
    content = json.loads(index.read_text())
    first, second = sorted(set(content["weight_map"].values()))
    content["weight_map"][LAYER] = second if content["weight_map"][LAYER] == first else first
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=f"does not hold {LAYER}"):
        locate(tmp_path)
