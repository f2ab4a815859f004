"""The training loop: data in a fixed order, and checkpoints from which a run continues as if it had not stopped.

A run is reproducible on the same machine, library and number of threads. Elsewhere, sums of floats in another order
give a different model of the same quality.
"""

import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from infra.models.chat import chat_pairs
from infra.models.llama import Llama
from infra.models.muon import Muon
from infra.models.recipes import Recipe
from infra.models.tokenizer import END_OF_TEXT_ID, chat_text
from workers.library.corpus import SourceFile

#: Gradients are summed over parts of this size, which is faster because activations stay in the cache.
_PART_TOKENS = 1024
#: The window of early steps, because attention over short windows is cheaper. The last steps train all positions.
_SHORT_WINDOW = 256
_REPORT_EVERY = 50
_SAVE_EVERY = 100


def documents(files: list[SourceFile], tokenizer: Tokenizer, seed: int) -> list[Tensor]:
    """The token ids of every training file and chat pair, each beginning with the end-of-text token."""
    rng = random.Random(seed)  # noqa: S311 - it shuffles, it guards nothing
    texts = [file.text for file in files]
    for file in files:
        texts += [chat_text(pair.system, pair.user, pair.assistant) for pair in chat_pairs(file, rng)]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [torch.tensor([END_OF_TEXT_ID, *encoding.ids]) for encoding in encoded]


def batches(texts: list[Tensor], tokens: int, length: int, random_state: torch.Generator) -> Iterator[Tensor]:
    """Yield `[tokens / length, length + 1]` windows endlessly. Each pass reads all texts in a new order."""
    rows = tokens // length
    while True:
        order = torch.randperm(len(texts), generator=random_state).tolist()
        stream = torch.cat([texts[i] for i in order])
        windows = stream.unfold(0, length + 1, length)
        shuffled = torch.randperm(len(windows), generator=random_state)
        for start in range(0, len(windows), rows):
            yield windows[shuffled[start : start + rows]]


def schedule(texts: list[Tensor], recipe: Recipe, steps: int, context: int, seed: int) -> Iterator[Tensor]:
    """Yield the batch of each step: short windows first, the whole context last."""
    random_state = torch.Generator().manual_seed(seed)
    source = batches(texts, recipe.batch_tokens, min(_SHORT_WINDOW, context), random_state)
    for step in range(steps):
        if step == recipe.long_from(steps):
            source = batches(texts, recipe.batch_tokens, context, random_state)
        yield next(source)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A file that stores a run between two steps. Saving is atomic."""

    path: Path

    def save(self, content: dict[str, Any]) -> None:
        partial = self.path.with_name(f".{self.path.name}.partial")
        torch.save(content, partial)
        os.replace(partial, self.path)

    def load(self, recipe: Recipe, steps: int) -> dict[str, Any] | None:
        """The saved content, or None if there is none.

        Raises ValueError if a run of `steps` steps would differ before the saved step.
        """
        if not self.path.exists():
            return None
        content: dict[str, Any] = torch.load(self.path, weights_only=True)
        shared = steps if content["steps"] == steps else min(map(recipe.long_from, (steps, content["steps"])))
        if content["step"] > shared or (recipe.cosine and content["steps"] != steps):
            raise ValueError(
                f"{self.path} is at step {content['step']} of {content['steps']}: a run of {steps} steps parts from it "
                f"at step {shared}; go on with --steps {content['steps']}, or begin anew with another --checkpoint"
            )
        return content


def train(
    model: Llama,
    texts: list[Tensor],
    recipe: Recipe,
    steps: int,
    seed: int,
    checkpoint: Checkpoint | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Train in place, from the checkpoint if it exists. Raises ValueError if the checkpoint is of another run."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    muon = Muon(matrices, decay=recipe.decay)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    done, smooth = 0, math.log(model.shape.vocab_size)
    if checkpoint and (saved := checkpoint.load(recipe, steps)):
        model.load_state_dict(saved["model"])
        muon.load(saved["muon"])
        adam.load_state_dict(saved["adam"])
        done, smooth = saved["step"], saved["smooth"]
        say(f"going on from step {done}")
    started = time.monotonic()
    for step, batch in enumerate(schedule(texts, recipe, steps, model.shape.context, seed)):
        if step < done:  # already trained; skipped only to advance the order of the data
            continue
        total = 0.0
        for part in batch.chunk(max(1, recipe.batch_tokens // _PART_TOKENS)):
            loss = model.loss(part) * (len(part) / len(batch))
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves Tensor.backward unannotated
            total += loss.item()
        scale = recipe.rate(step, steps)
        for group in adam.param_groups:
            group["lr"] = recipe.adam_rate * scale
        adam.step()
        muon.step(recipe.muon_rate * scale)
        model.zero_grad()
        smooth += (total - smooth) * max(0.02, 1 / (step + 1))
        if (step + 1) % _REPORT_EVERY == 0 or step + 1 == steps:
            say(f"step {step + 1}/{steps}  loss {smooth:.3f}  {time.monotonic() - started:.0f} s")
        if checkpoint and (step + 1) % _SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "muon": muon.velocity, "adam": adam.state_dict()}
            checkpoint.save({"step": step + 1, "steps": steps, "smooth": smooth, **state})
