"""bf16 and fp16 are as close to the fp32 truth as transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.models import load_model
from tests.parity.conftest import Truth, transformers
from tests.parity.driver import Driver, greedy, prompts_of, recorded


@pytest.fixture
def variant() -> str:
    return "gqa"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_costs_no_more_than_in_transformers(
    folders: dict[str, Path], variant: str, truth: Truth, device: torch.device, dtype: str
) -> None:
    model = load_model(folders[variant], dtype, device)
    prompt = prompts_of([120], model.vocab_size, seed=5)[0]
    seen = recorded(model)
    driver = Driver(model, tokens=48)
    driver.add("a", prompt, greedy(12))
    tokens = prompt + driver.run()["a"]
    exact = truth.logits(tokens)[len(prompt) - 1 : -1]
    peer = transformers.AutoModelForCausalLM.from_pretrained(folders[variant], dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        theirs = peer(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
    ours = torch.cat(seen).float().cpu()
    assert (ours - exact).square().mean() <= 1.5 * (theirs.float() - exact).square().mean()
