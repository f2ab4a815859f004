"""Greedy fp32 output is transformers', token for token, of every family, however the work was cut up."""

from __future__ import annotations

import json
import operator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.fallback import Sdpa
from engine.kernels.reference import Reference
from engine.models import Model, load_model
from engine.models.families import FAMILIES as SERVED
from engine.text.config import Config, read_config
from tests.engine.random_models import BASE, FAMILIES, VARIANTS, write_model
from tests.exhaustive import few
from tests.parity.conftest import Truth, transformers
from tests.parity.driver import Driver, greedy, prompts_of, recorded

#: Shorter and longer than a window, on both sides of the switch of "phi3-longrope"; some go past it on their way.
LENGTHS = [1, 17, 30, 50, 59, 61, 120]
COUNT = 14


#: Each family on the plain runner and on the device's, which takes "ragged" kernels. Kept is one of each kind of keys
#: and values: all in one cache, behind a window, turning by length, in two groups.
EITHER = pytest.mark.parametrize(
    ("variant", "kernels"),
    few(
        product(VARIANTS | FAMILIES, ["auto", "ragged"]),
        *(("gqa", "auto"), ("mistral-window", "auto"), ("phi3-longrope", "ragged"), ("gemma3", "ragged")),
    ),
)


@pytest.fixture
def kernels() -> str:
    return "auto"


@pytest.fixture
def model(variant: str, kernels: str, folders: dict[str, Path], device: torch.device) -> Model:
    return load_model(folders[variant], "float32", device, kernels)


def run_all(driver: Driver, truth: Truth, vocab_size: int, preempt_every: int | None = None) -> list[list[int]]:
    """The prompts' outputs."""
    prompts = prompts_of(LENGTHS, vocab_size)
    for i, prompt in enumerate(prompts):
        driver.add(str(i), prompt, greedy(COUNT))
    found = driver.run(preempt_every)
    for i, prompt in enumerate(prompts):
        assert len(found[str(i)]) == COUNT
        truth.check(prompt, found[str(i)])
    return [found[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("tokens", few([16, 64, 512], 16))
def test_in_one_batch_at_every_chunk_size(model: Model, truth: Truth, tokens: int) -> None:
    run_all(Driver(model, tokens=tokens), truth, model.vocab_size)


def test_transformers_own_loop_generates_the_same_where_nothing_is_tied(folders: dict[str, Path], truths: Any) -> None:
    model = load_model(folders["gqa"], "float32", torch.device("cpu"))
    found = run_all(Driver(model), truths("gqa"), model.vocab_size)
    generated = [truths("gqa").greedy(prompt, COUNT) for prompt in prompts_of(LENGTHS, model.vocab_size)]
    assert sum(map(operator.eq, found, generated)) >= len(LENGTHS) - 1


@EITHER
@pytest.mark.parametrize(
    ("every", "overlap", "block_size"), few([(1, 0, 16), (2, 0, 16), (3, 1, 4), (7, 0, 16)], (3, 1, 4))
)
def test_with_a_preemption_at_every_kth_step(
    model: Model, truth: Truth, every: int, overlap: int, block_size: int
) -> None:
    driver = Driver(model, tokens=64, block_size=block_size, overlap=overlap)
    run_all(driver, truth, model.vocab_size, preempt_every=every)
    assert driver.scheduler.stats().preemptions >= driver.steps // every - len(LENGTHS)


@EITHER
@pytest.mark.parametrize("caching", few([True, False], True))
def test_with_too_little_memory_for_all(model: Model, truth: Truth, caching: bool) -> None:
    # Behind a short window all of them would go into what one without takes.
    blocks = 14 if model.kv_groups[0].window == 21 else 38
    driver = Driver(model, blocks=blocks, block_size=4, tokens=64, enable_prefix_caching=caching)
    run_all(driver, truth, model.vocab_size)
    assert driver.scheduler.stats().preemptions > 0


@EITHER
def test_behind_cached_prefixes(model: Model, truth: Truth) -> None:
    shared = prompts_of([40], model.vocab_size, seed=3)[0]
    tails = prompts_of([1, 30, 8], model.vocab_size, seed=4)
    prompts = [shared, *(shared + tail for tail in tails), shared[:30], shared]
    driver = Driver(model, tokens=64, block_size=4)
    for i, prompt in enumerate(prompts):
        driver.add(str(i), prompt, greedy(COUNT))
        found = driver.run()
    for i, prompt in enumerate(prompts):
        truth.check(prompt, found[str(i)])
    assert driver.cached["0"] == 0
    assert driver.cached["5"] == 36
    # A sequence beyond the switch shares nothing with those before it.
    assert driver.cached["2"] == (0 if model.rope_switch is not None else 40)


@EITHER
def test_choices_of_one_prompt(model: Model, truth: Truth) -> None:
    prompt = prompts_of([54], model.vocab_size, seed=6)[0]
    driver = Driver(model, tokens=32, block_size=4, enable_prefix_caching=False)
    driver.add("a", prompt, replace(greedy(COUNT), n=3))
    driver.run()
    for tokens in driver.found["a"].values():
        truth.check(prompt, tokens)


@pytest.mark.parametrize("kernels", [Reference, Sdpa])
@pytest.mark.parametrize("variant", few(VARIANTS | FAMILIES, "gqa"))
def test_with_every_kernel_set(folders: dict[str, Path], variant: str, truth: Truth, kernels: type) -> None:
    model = load_model(folders[variant], "float32", torch.device("cpu"), kernels)
    run_all(Driver(model), truth, model.vocab_size)


def test_logits_are_those_of_transformers(model: Model, truth: Truth) -> None:
    """Closer than tokens can tell: a slip in scaling or rotation that no argmax shows would be seen here."""
    prompt = prompts_of([180], model.vocab_size, seed=9)[0]
    driver = Driver(model, tokens=64)
    seen = recorded(model)
    driver.add("a", prompt, greedy(COUNT))
    found = driver.run()["a"]
    expected = truth.logits(prompt + found)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.cat(seen).cpu(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", FAMILIES)
def test_settings_are_the_same_from_a_folder_that_transformers_wrote(
    variant: str, folders: dict[str, Path], truth: Truth, tmp_path: Path
) -> None:
    truth._model.save_pretrained(tmp_path)
    read = SERVED[FAMILIES[variant]["architectures"][0]].read
    ours, theirs = (read(Config.of_model(read_config(folder))) for folder in (folders[variant], tmp_path))
    assert ours == theirs
    load_model(tmp_path, "auto", torch.device("cpu"))


def test_layers_whose_window_is_as_long_as_the_context_keep_their_own_rope(tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer=False, **FAMILIES["gemma3"] | {"sliding_window": 512})
    model = load_model(tmp_path, "float32", torch.device("cpu"))
    assert [group.window for group in model.kv_groups] == [None]
    run_all(Driver(model), Truth(tmp_path), model.vocab_size)


#: One variant of each family.
EACH = ["gqa", "mistral-window", "qwen2", "qwen3", "phi3-longrope", "gemma2", "gemma3"]


@pytest.mark.parametrize("stored", few(["bfloat16", "float16"], "bfloat16"))
@pytest.mark.parametrize("name", EACH)
def test_checkpoints_in_half_precision_are_as_close_as_transformers(name: str, stored: str, tmp_path: Path) -> None:
    """In shards or whole, of the dtype that config.json names."""
    changes = FAMILIES.get(name, {}) | {"dtype": stored}
    write_model(tmp_path, shards=3 if stored == "bfloat16" else 1, tokenizer=False, **changes)
    prompt = prompts_of([50], BASE["vocab_size"], seed=5)[0]
    exact = Truth(tmp_path).logits(prompt)[-1]
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        theirs = peer(torch.tensor([prompt])).logits[0, -1].float()
    model = load_model(tmp_path, "auto", torch.device("cpu"))
    assert model.dtype == peer.dtype == getattr(torch, stored)
    driver = Driver(model, tokens=32)
    seen = recorded(model)
    driver.add("a", prompt, greedy(1))
    driver.run()
    ours = torch.cat(seen)[0].float()
    assert (ours - exact).square().mean() <= 1.5 * (theirs - exact).square().mean()


@pytest.mark.parametrize("published", [False, True])
def test_the_text_of_a_checkpoint_with_images(tmp_path: Path, published: bool) -> None:
    """As transformers writes it, and as published: text_config without what is the architecture's default."""
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = {key: BASE[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    text |= {"num_hidden_layers": 7, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 20}
    text |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = transformers.Gemma3Config(
        text_config=dict(text),
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=300,
        boi_token_index=301,
        eoi_token_index=302,
    )
    peer = transformers.Gemma3ForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(2)
    for parameter in peer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    peer.save_pretrained(tmp_path)
    if published:
        written = read_config(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(written | {"text_config": text}))
    model = load_model(tmp_path, "auto", torch.device("cpu"))
    assert [group.window for group in model.kv_groups] == [None, 20]
    prompt = prompts_of([60], 300)[0]
    driver = Driver(model, tokens=32)
    driver.add("a", prompt, greedy(COUNT))
    found = driver.run()["a"]
    with torch.no_grad():
        logits = peer(torch.tensor([prompt + found])).logits[0, len(prompt) - 1 : -1]
    assert found == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", None),
        ("vision_tower.vision_model.embeddings.patch_embedding.weight", None),
        ("model.multi_modal_projector.mm_soft_emb_norm.weight", None),
        ("model.layers.0.other", "model.layers.0.other"),
    ],
)
@pytest.mark.parametrize("variant", ["gemma3"])
def test_names_in_checkpoints_with_images(model: Model, name: str, ours: str | None) -> None:
    assert model.canonical(name) == ours
