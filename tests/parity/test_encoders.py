"""Encoders' rows and classifiers' logits are transformers', whatever is beside a sequence in its batch."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ModelError
from engine.kernels.native import load_library
from engine.models import load_encoder, load_model
from engine.models.encoders import ENCODERS as SERVED
from tests.engine.random_encoders import ENCODERS, write_encoder
from tests.exhaustive import few
from tests.parity.conftest import transformers  # noqa: F401  (skips without it)
from tests.parity.driver import prompts_of

#: Shorter and longer than a window, two of one length; beyond that of a window's block of queries in `long`.
LENGTHS = [1, 5, 9, 9, 40, 90]


def rows_of(truth: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.tensor([prompt])
        rows: torch.Tensor = truth(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    return rows


@pytest.mark.parametrize(
    ("name", "kernels"),
    few(product(ENCODERS, ["auto", "reference"]), *((name, "auto") for name in ENCODERS), ("bert", "reference")),
)
def test_rows_are_those_of_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    truth = write_encoder(tmp_path, name)
    encoder = load_encoder(tmp_path, "float32", torch.device("cpu"), kernels)
    prompts = prompts_of(LENGTHS, truth.config.vocab_size - 3)
    prompts = [[token + 3 for token in prompt] for prompt in prompts]  # none is padding
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    hidden = encoder.forward(tokens, torch.zeros_like(tokens), LENGTHS)
    for prompt, rows in zip(prompts, torch.split(hidden, LENGTHS), strict=True):
        torch.testing.assert_close(rows, rows_of(truth, prompt), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("labels", [1, 5])
def test_logits_of_classifiers_are_those_of_transformers(name: str, labels: int, tmp_path: Path) -> None:
    truth = write_encoder(tmp_path, name, "ForSequenceClassification", num_labels=labels)
    encoder = load_encoder(tmp_path, "float32", torch.device("cpu"))
    prompts = [[token + 3 for token in prompt] for prompt in prompts_of(LENGTHS, truth.config.vocab_size - 3)]
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    logits = encoder.classify(encoder.forward(tokens, torch.zeros_like(tokens), LENGTHS), LENGTHS)
    with torch.no_grad():
        for prompt, scores in zip(prompts, logits, strict=True):
            ids = torch.tensor([prompt])
            expected = truth(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
            torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)


def test_the_second_text_of_a_pair_has_its_own_token_type(tmp_path: Path) -> None:
    truth = write_encoder(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    encoder = load_encoder(tmp_path, "float32", torch.device("cpu"))
    ids, types = torch.arange(5, 25), torch.tensor([0] * 8 + [1] * 12)
    with torch.no_grad():
        expected = truth(input_ids=ids[None], token_type_ids=types[None]).logits[0]
    logits = encoder.classify(encoder.forward(ids, types, [20]), [20])
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits[0], encoder.classify(encoder.forward(ids, types * 0, [20]), [20])[0])


@pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")
def test_a_sequence_does_not_depend_on_its_batch_to_the_bit(tmp_path: Path) -> None:
    """On native kernels, the default of CPUs, and with each kind of attention."""
    for name in ("bert", "mpnet", "modernbert"):
        truth = write_encoder(tmp_path / name, name)
        encoder = load_encoder(tmp_path / name, "float32", torch.device("cpu"), deterministic=True)
        prompts = prompts_of(LENGTHS, truth.config.vocab_size)
        tokens = torch.tensor([token for prompt in prompts for token in prompt])
        together = encoder.forward(tokens, torch.zeros_like(tokens), LENGTHS).split(LENGTHS)
        for prompt, rows in zip(prompts, together, strict=True):
            alone = torch.tensor(prompt)
            assert torch.equal(rows, encoder.forward(alone, torch.zeros_like(alone), [len(prompt)]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["modernbert", "nomic"])
def test_texts_of_1_to_8192_tokens_in_one_batch(name: str, tmp_path: Path) -> None:
    """Across windows, blocks of keys, spans of queries; bf16 stays close, with weights larger than trained ones."""
    truth = write_encoder(tmp_path, name, max_position_embeddings=8192)
    lengths = [1, 2, 240, 241, 1023, 1024, 1025, 2049, 8192]
    prompts = [[token + 3 for token in prompt] for prompt in prompts_of(lengths, truth.config.vocab_size - 3)]
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    types = torch.zeros_like(tokens)
    exact = load_encoder(tmp_path, "float32", torch.device("cpu"), deterministic=load_library() is not None)
    half = load_encoder(tmp_path, "bfloat16", torch.device("cpu"))
    together, rounded = (model.forward(tokens, types, lengths).split(lengths) for model in (exact, half))
    for prompt, rows, near in zip(prompts, together, rounded, strict=True):
        expected = rows_of(truth, prompt)
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)
        assert torch.nn.functional.cosine_similarity(near.float().mean(0), expected.mean(0), dim=0) > 0.998
    alone = torch.tensor(prompts[6])
    if load_library() is not None:
        assert torch.equal(exact.forward(alone, alone * 0, [len(alone)]), together[6])


@pytest.mark.parametrize("architecture", ["NomicBertModel", "NewModel"])
def test_checkpoints_in_their_publishers_own_names(architecture: str, tmp_path: Path) -> None:
    """Nomic's and Alibaba's folders name settings and tensors otherwise than those that transformers writes."""
    name = "nomic" if architecture == "NomicBertModel" else "gte"
    truth = write_encoder(tmp_path, name)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text()) | {"architectures": [architecture]}
    if name == "nomic":
        theirs = {
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "n_inner": "intermediate_size",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "layer_norm_eps",
        }
        settings |= {new: settings.pop(old) for new, old in theirs.items()}
        settings |= {"activation_function": "swiglu", "rotary_emb_base": 1000, "qkv_proj_bias": False, "prenorm": False}
        del settings["rope_parameters"], settings["hidden_act"]
    path.write_text(json.dumps(settings))
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any("Wqkv" in key or "qkv_proj" in key for key in names)
    encoder = load_encoder(tmp_path, "float32", torch.device("cpu"))
    prompt = list(range(5, 35))
    rows = encoder.forward(torch.tensor(prompt), torch.zeros(30, dtype=torch.long), [30])
    torch.testing.assert_close(rows, rows_of(truth, prompt), rtol=1e-4, atol=1e-5)


def test_an_engine_that_generates_says_what_serves_an_encoder(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    with pytest.raises(ModelError, match="BertModel generates no text; `penstock worker` and PoolingEngine serve it"):
        load_model(tmp_path, "float32", torch.device("cpu"))


def test_each_served_architecture_is_tried() -> None:
    prefixes = {prefix for prefix, _ in ENCODERS.values()} | {"New"}
    assert {name for name in SERVED if name.endswith("Model")} == {f"{prefix}Model" for prefix in prefixes}
