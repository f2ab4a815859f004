"""One random model for each variant that is claimed to be served, and transformers' word on what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import Model, load_model
from tests.engine.random_models import FAMILIES, VARIANTS, write_model

transformers = pytest.importorskip("transformers")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
#: transformers' logits this close to each other may fall either way in another order of summation.
TIE = 1e-4


class Truth:
    """transformers on one model, in fp32 on the CPU, one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        rope = self._model.config.rope_parameters
        #: Tokens up to which a sequence's keys turn by other frequencies than in longer ones.
        self._switch = rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    @torch.no_grad()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        key = (tuple(prompt), count)
        if key not in self._known:
            ids = torch.tensor([prompt])
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            self._known[key] = out[0, len(prompt) :].tolist()
        return self._known[key]

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """fp32 [tokens, vocabulary], each row as if its token were the last."""
        logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0]
        if self._switch is not None and len(tokens) > self._switch:
            logits[: self._switch] = self._model(torch.tensor([tokens[: self._switch]])).logits[0]
        return logits

    def check(self, prompt: list[int], found: list[int]) -> None:
        """Fail unless `found` is the greedy output, up to a first difference at a tie.

        One pass over it all: while the tokens agree, so do the logits with those of a step-by-step generation.
        """
        logits = self.logits(prompt + found)[len(prompt) - 1 : -1]
        expected = logits.argmax(-1).tolist()
        if found == expected:
            return
        place = next(i for i, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other)
        gap = float(logits[place, expected[place]] - logits[place, found[place]])
        assert gap <= TIE, f"token {place}: {found[place]} for {expected[place]}, whose lead is {gap:.2e}"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("parity")
    return {
        name: write_model(root / name, seed=i, shards=1 + i % 2, tokenizer=False, **changes)
        for i, (name, changes) in enumerate((VARIANTS | FAMILIES).items())
    }


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=[*VARIANTS, *FAMILIES])
def variant(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def truths(folders: dict[str, Path]) -> Any:
    known: dict[str, Truth] = {}

    def find(name: str) -> Truth:
        if name not in known:
            known[name] = Truth(folders[name])
        return known[name]

    return find


@pytest.fixture
def truth(variant: str, truths: Any) -> Truth:
    found: Truth = truths(variant)
    return found


@pytest.fixture
def model(variant: str, folders: dict[str, Path], device: torch.device) -> Model:
    return load_model(folders[variant], "float32", device)
