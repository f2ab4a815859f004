"""Adapters as PEFT writes and runs them: its merged and unmerged outputs are the oracle."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.adapters import Adapter, load_adapter
from engine.models import Model, load_model
from tests.engine.adapters.folders import write_adapter
from tests.engine.quant.packers import write_quantised
from tests.engine.quant.test_checkpoints import FORMS
from tests.engine.random_models import FAMILIES, VARIANTS, write_model
from tests.exhaustive import few
from tests.parity.conftest import TIE
from tests.parity.driver import Driver, greedy, prompts_of, recorded

transformers = pytest.importorskip("transformers")

# PEFT warns of tied embeddings, which some of these adapters untie on purpose.
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
COUNT = 8
#: What PEFT is asked for, by name: all linear modules; rsLoRA, with ranks and alphas by module, in some layers; the
#: embedding and the head saved whole; changes of low rank of them.
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"},
    "rslora": {
        "r": 3,
        "lora_alpha": 2,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "qkv_proj", "o_proj", "up_proj", "gate_up_proj", "down_proj"],
        "rank_pattern": {"o_proj": 5},
        "alpha_pattern": {"down_proj": 1, "^model.layers.1.self_attn.o_proj": 3},
        "layers_to_transform": [1],
    },
    "whole": {
        "r": 2,
        "target_modules": ["o_proj", "down_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
    },
    "low-rank-head": {"r": 4, "target_modules": ["o_proj", "embed_tokens", "lm_head"]},
}
#: The shapes whose Linears differ: q, k and v apart or as one matrix, tied or not, with biases, norms of heads, scaled
#: embeddings, capped logits, windows.
VARIANTS_TRIED = ["gqa", "biases", "qwen3", "phi3", "gemma2", "gemma3"]


@dataclass
class Peer:
    """PEFT with one adapter on one model."""

    folder: Path
    model: Any

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        logits: Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits

    def merged(self) -> Peer:
        return Peer(self.folder, self.model.merge_and_unload())


def written(base: Path, folder: Path, kind: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> Peer:
    """A random adapter of `base` that PEFT has saved in `folder`, as PEFT itself loads it from there."""
    peft = pytest.importorskip("peft")  # here, since it takes a second to import: only who runs these tests does
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(_base(base, dtype), peft.LoraConfig(init_lora_weights=False, **kind))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name or ".modules_to_save." in name:
                    parameter.copy_(torch.randn(parameter.shape) * 0.15)
        adapted.save_pretrained(folder)
        return Peer(folder, peft.PeftModel.from_pretrained(_base(base, dtype), folder).eval())


def _base(folder: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def outputs(model: Model, adapter: Adapter | None, prompt: list[int], **settings: Any) -> tuple[list[int], Tensor]:
    """The greedy output and the logits that it was chosen by."""
    driver = Driver(model, **settings)
    logits = recorded(model)
    driver.add("a", prompt, greedy(COUNT), adapter)
    return driver.run()["a"], torch.cat(logits).float()


def check(peer: Peer, prompt: list[int], tokens: list[int], logits: Tensor | None = None, atol: float = TIE) -> None:
    """`tokens` are the peer's greedy output, up to a first tie, and `logits` those of the peer."""
    expected = peer.logits(prompt + tokens)[len(prompt) - 1 : -1]
    lead = expected.max(-1).values - expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert float(lead.max()) <= 2 * atol
    if logits is not None:
        torch.testing.assert_close(logits, expected, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", few(VARIANTS_TRIED, "gqa", "phi3", "gemma2"))
def test_logits_are_those_of_peft_merged_and_unmerged(variant: str, kind: str, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", tokenizer=False, **(VARIANTS | FAMILIES)[variant])
    peer = written(base, tmp_path / "adapter", KINDS[kind])
    model = load_model(base, "float32", CPU)
    adapter = load_adapter(peer.folder, model)
    prompt = prompts_of([40], model.vocab_size)[0]
    tokens, logits = outputs(model, adapter, prompt, tokens=16)
    check(peer, prompt, tokens, logits)
    if kind != "low-rank-head":  # PEFT merges both changes into a tied table, which it warns about
        # Other sums: the merged weights are rounded to fp32.
        check(peer.merged(), prompt, tokens, logits, atol=2e-4)


#: Changes of experts. "experts" is saved with the names of transformers 4, of each matrix of each expert,
#: as most published folders are; "stacked" with those of the matrices of all experts that transformers 5 has.
EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"r": 3, "lora_alpha": 5},
    "stacked": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["q_proj"],
        "target_parameters": ["gate.weight", "experts.gate_up_proj", "experts.down_proj"],
        "alpha_pattern": {"experts.down_proj": 5},
    },
    "stacked-down": {"r": 5, "target_modules": ["v_proj"], "target_parameters": ["experts.down_proj"]},
}


def written_by_expert(base: Path, folder: Path, kind: dict[str, Any]) -> Peer:
    """A random adapter of each expert's matrices, with the names of transformers 4, as PEFT loads it."""
    peft = pytest.importorskip("peft")
    names = [name for name in load_file(base / "model.safetensors") if re.search(r"experts|\.gate\.|q_proj", name)]
    shapes = {name.removesuffix(".weight"): load_file(base / "model.safetensors")[name].shape for name in names}
    generator = torch.Generator().manual_seed(3)
    values = {}
    for module, (outputs, inputs) in shapes.items():
        name = f"base_model.model.{module}"
        values[f"{name}.lora_A.weight"] = torch.randn(kind["r"], inputs, generator=generator) * 0.15
        values[f"{name}.lora_B.weight"] = torch.randn(outputs, kind["r"], generator=generator) * 0.15
    modules = sorted({module.rpartition(".")[2] for module in shapes})
    write_adapter(folder, values, **kind, target_modules=modules, task_type="CAUSAL_LM")
    return Peer(folder, peft.PeftModel.from_pretrained(_base(base, torch.float32), folder).eval())


@pytest.mark.parametrize(
    ("variant", "kind"),
    few(product(["mixtral", "qwen3-moe"], EXPERTS), ("mixtral", "stacked"), ("qwen3-moe", "experts")),
)
def test_changes_of_experts_are_those_of_peft_merged_and_unmerged(variant: str, kind: str, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", tokenizer=False, **(VARIANTS | FAMILIES)[variant])
    write = written_by_expert if kind == "experts" else written
    peer = write(base, tmp_path / "adapter", EXPERTS[kind])
    prompt = prompts_of([40], 320)[0]
    for kernels in ("auto", "reference"):
        model = load_model(base, "float32", CPU, kernels)
        tokens, logits = outputs(model, load_adapter(peer.folder, model), prompt, tokens=16)
        check(peer, prompt, tokens, logits)
    check(peer.merged(), prompt, tokens, logits, atol=2e-4)


@pytest.mark.parametrize("kernels", few(["auto", "cpu", "sdpa", "reference", "ragged"], "auto", "cpu", "ragged"))
def test_rows_of_one_batch_have_each_their_own_adapter(kernels: str, tmp_path: Path) -> None:
    """Also in steps that mix prompts and decodes, after preemptions, and beside rows that have none."""
    base = write_model(tmp_path / "base", tokenizer=False, tie_word_embeddings=False)
    peers: list[Peer | None] = [
        written(base, tmp_path / name, kind, seed=i) for i, (name, kind) in enumerate(KINDS.items())
    ]
    model = load_model(base, "float32", CPU, kernels)
    adapters = [load_adapter(peer.folder, model) for peer in peers if peer is not None]
    plain = Peer(base, _base(base, torch.float32))
    driver = Driver(model, tokens=24, sequences=6)
    prompts = prompts_of([20, 1, 33, 7, 12, 5], model.vocab_size)
    which = [0, 1, 2, 3, 1, None]
    for i, (prompt, adapter) in enumerate(zip(prompts, which, strict=True)):
        driver.add(str(i), prompt, greedy(COUNT), None if adapter is None else adapters[adapter])
    found = driver.run(preempt_every=5)
    for i, (prompt, adapter) in enumerate(zip(prompts, which, strict=True)):
        peer = plain if adapter is None else peers[adapter]
        assert peer is not None
        check(peer, prompt, found[str(i)])


def test_prompt_logprobs_are_the_adapters(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", tokenizer=False)
    peer = written(base, tmp_path / "adapter", KINDS["whole"])
    model = load_model(base, "float32", CPU)
    adapter = load_adapter(peer.folder, model)
    prompts = prompts_of([30, 20], model.vocab_size)
    driver = Driver(model, tokens=64)
    params = replace(greedy(2), prompt_logprobs=0)
    driver.add("plain", prompts[1], greedy(2))
    driver.add("adapted", prompts[0], params, adapter)
    driver.run()
    (scores,) = (event.prompt_logprobs for event in driver.events if event.prompt_logprobs)
    expected = peer.logits(prompts[0]).log_softmax(-1)
    for i, score in enumerate(scores[1:]):
        assert score is not None
        assert score.logprob == pytest.approx(float(expected[i, prompts[0][i + 1]]), abs=1e-4)


@pytest.mark.parametrize("form", ["gptq", "packed-8"])
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_on_a_base_of_4_or_8_bits(form: str, kernels: str, tmp_path: Path) -> None:
    """As on the weights that the bits stand for."""
    plain = write_quantised(tmp_path, *FORMS[form])
    peer = written(plain, tmp_path / "adapter", KINDS["linear"])
    prompt = prompts_of([40], 320)[0]
    dense, bits = (load_model(folder, "float32", CPU, kernels) for folder in (plain, tmp_path / "packed"))
    tokens, logits = outputs(bits, load_adapter(peer.folder, bits), prompt)
    expected = peer.logits(prompt + tokens)[len(prompt) - 1 : -1]
    # Kernels for few bits may round rows to 8 bits: then no worse than the base without an adapter.
    base = outputs(bits, None, prompt)[1][0] - outputs(dense, None, prompt)[1][0]
    error, base_error = (logits - expected)[0].square().mean(), base.square().mean()
    assert error <= max(4 * base_error, 1e-8)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_on_a_base_in_bf16_it_is_as_close_as_peft(stored: torch.dtype, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", tokenizer=False, dtype="bfloat16")
    exact = written(base, tmp_path / "adapter", KINDS["linear"])
    if stored is torch.bfloat16:
        _store_as_bf16(tmp_path / "adapter")
    theirs = written(base, tmp_path / "other", KINDS["linear"], torch.bfloat16)
    model = load_model(base, "auto", CPU)
    prompt = prompts_of([50], model.vocab_size)[0]
    _, logits = outputs(model, load_adapter(exact.folder, model), prompt)
    expected = exact.logits(prompt)[-1]
    own = (theirs.logits(prompt)[-1].float() - expected).square().mean()
    # PEFT keeps A and B in fp32 on a base in bf16; here they are rounded as the base is.
    assert (logits[0] - expected).square().mean() <= 2 * own


def _store_as_bf16(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)


def test_peft_reads_the_configuration_that_is_refused_alike(tmp_path: Path) -> None:
    """DoRA's folder differs from LoRA's: it is refused by name, not run as a LoRA."""
    from engine.errors import ModelError

    base = write_model(tmp_path / "base", tokenizer=False)
    peer = written(base, tmp_path / "adapter", {"r": 2, "target_modules": ["q_proj"], "use_dora": True})
    assert json.loads((peer.folder / "adapter_config.json").read_text())["use_dora"]
    with pytest.raises(ModelError, match="use_dora=True is not supported"):
        load_adapter(peer.folder, load_model(base, "float32", CPU))
