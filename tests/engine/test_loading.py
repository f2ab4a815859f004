"""Loading an engine: from which files, with which settings, and what is refused before."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from engine import Engine, EngineConfig, EngineError, ModelError, Request, RequestError, SamplingParams
from tests.engine.conftest import Load
from tests.engine.random_models import write_model
from tests.engine.test_engine import GREEDY, TEXTS


def test_a_sequence_may_be_as_long_as_the_cache_has_room_for(load: Load) -> None:
    engine = load(kv_cache_bytes=1 << 15)
    assert engine.kv_capacity < engine.max_model_len
    prompt = [1] * (engine.kv_capacity - GREEDY.max_tokens + 1)
    (output,) = engine.generate([prompt], GREEDY)
    assert len(output.token_ids) == GREEDY.max_tokens
    with pytest.raises(RequestError) as refusal:
        engine.generate([[*prompt, 1]], GREEDY)
    assert refusal.value.code == "kv_capacity_exceeded"


def test_a_model_without_tokenizer_serves_token_ids(tmp_path: Path, load: Load) -> None:
    engine = load(write_model(tmp_path, tokenizer=False))
    assert engine.tokenizer is None
    assert engine.card is None
    found = engine.generate([[1, 2, 3]], GREEDY)[0]
    assert (len(found.token_ids), found.text) == (12, "")
    with pytest.raises(RequestError, match=r"no tokenizer.json"):
        engine.generate(["text"], GREEDY)
    with pytest.raises(RequestError, match=r"no tokenizer\.json: bad_words"):
        engine.generate([[1, 2]], SamplingParams(bad_words=["x"]))


def test_a_bad_word_may_be_written_by_tokens_that_the_model_lacks(tmp_path: Path, load: Load) -> None:
    folder = write_model(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    engine = load(folder)
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("x")
    plain, without = engine.generate([prompt] * 2, [GREEDY, replace(GREEDY, bad_words=("x<image>", "<image>"))])
    assert (without.error, without.token_ids) == (None, plain.token_ids)


def test_the_end_token_ends_also_without_a_tokenizer(tmp_path: Path, load: Load) -> None:
    free = load(write_model(tmp_path / "free", tokenizer=False)).generate([[1, 2, 3]], GREEDY)[0].token_ids
    for eos in (free[3], [free[3], 319]):
        folder = write_model(tmp_path / f"{eos}", tokenizer=False, eos_token_id=eos)
        found = load(folder).generate([[1, 2, 3]], SamplingParams(max_tokens=12, temperature=0.0))[0]
        assert found.token_ids == free[: free.index(free[3]) + 1]
        assert found.finish_reason == "stop"


def test_the_fingerprint_tells_dtypes_and_sizes_of_blocks_apart_and_is_stable(load: Load) -> None:
    first, again, others = load(), load(), (load(dtype="bfloat16"), load(block_size=8))
    assert re.fullmatch("[0-9a-f]{8}", first.fingerprint)
    assert first.fingerprint == again.fingerprint
    assert len({one.fingerprint for one in (first, *others)}) == 3


def test_a_step_of_few_tokens_has_few_sequences_where_nobody_said_how_many(load: Load) -> None:
    limits: list[dict[str, int]] = [{}, {"max_num_batched_tokens": 8}, {"max_non_priority_step_tokens": 9}]
    found = [load(max_num_seqs=None, device="cpu", **limit).max_num_seqs for limit in limits]
    assert found == [64, 8, 9]


def test_settings_that_do_not_fit_are_refused(load: Load, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="max_model_len=513 is more than the model's context of 512"):
        load(max_model_len=513)
    with pytest.raises(EngineError, match="does not hold the KV blocks of a single sequence"):
        load(kv_cache_bytes=10)
    with pytest.raises(ModelError, match=r"has no config.json"):
        Engine.load(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none(model_folder: Path) -> None:
    with pytest.raises(EngineError, match="torch finds no CUDA device"):
        Engine.load(model_folder, EngineConfig(device="cuda"))


def test_the_card_and_the_version_are_the_folders(load: Load, model_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "renamed"
    shutil.copytree(model_folder, copy)
    first, second = load().card, load(copy).card
    assert first is not None
    assert second is not None
    assert (second.name, second.version) == ("renamed", first.version)


def test_an_engine_is_a_context_manager(model_folder: Path) -> None:
    with Engine.load(model_folder, EngineConfig(device="cpu", threads=1, kv_cache_bytes=1 << 20)) as engine:
        assert engine.generate([[1]], GREEDY)[0].finish_reason == "length"
    with pytest.raises(EngineError, match="closed"):
        engine.submit(Request("a", [1]), lambda event: None)


def test_every_kernel_set_says_the_same(load: Load, device: torch.device) -> None:
    sets = ["reference", "ragged", "sdpa", *(["cpu"] if device.type == "cpu" else [])]
    engines = [load(kernels=name) for name in sets] + [load(kernels="ragged", graphs=False, overlap=1)]
    found = [[one.token_ids for one in engine.generate(TEXTS, GREEDY)] for engine in engines]
    assert all(one == found[0] for one in found)
    assert [engine.stats().kernels for engine in engines] == [*sets, "ragged"]


def test_a_cache_that_the_device_cannot_hold_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 90.00 GiB")

    monkeypatch.setattr("engine.execution.placement.DeviceRunner", full)
    with pytest.raises(EngineError, match=r"no memory for a KV cache of \d+ blocks; lower kv_cache_bytes .* 90.00 GiB"):
        load(kernels="ragged")
