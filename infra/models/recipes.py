"""The recipe of each bundled model: its shape, its starting weights, and its training."""

import math
from dataclasses import dataclass

from infra.models.llama import Shape


@dataclass(frozen=True, slots=True)
class Recipe:
    """The training of one model. Rates are peaks. Each step has `batch_tokens` tokens."""

    title: str
    """A short description of the model, for its card."""
    purpose: str
    """The model's purpose in a sentence or two, for its card."""
    shape: Shape
    steps: int
    muon_rate: float
    adam_rate: float
    warm_up: int
    """The number of steps until the peak rates."""
    long_share: float
    """The share of the steps, at the end, with windows of the whole context. Earlier steps have short windows, which
    are cheaper."""
    cosine: bool = False
    """Whether rates fall along a cosine from the first step on. Otherwise they are constant, and fall linearly to zero
    over the last `long_share`. The training before that is then the same for any number of steps, so that a run can be
    shortened or extended (Hu et al., "MiniCPM", 2024, section 4)."""
    decay: float = 0.02
    """The weight decay of the hidden matrices."""
    batch_tokens: int = 2048
    start: str | None = None
    """A bundled model to start from, grown to this shape, with its tokenizer. Unset: random weights."""
    tokenizer: str | None = None
    """A bundled model whose tokenizer this one shares. Unset: it is learnt from the training text."""

    def long_from(self, steps: int) -> int:
        """The first of `steps` steps that sees the whole context."""
        return steps - round(steps * self.long_share)

    def rate(self, step: int, steps: int) -> float:
        """The factor of the peak rates at a step, counted from 0."""
        warm = (step + 1) / self.warm_up
        if self.cosine:
            return min(warm, 0.5 * (1 + math.cos(math.pi * step / steps)))
        return min(1.0, warm, (steps - step) / max(1, steps - self.long_from(steps)))

    def schedule(self) -> str:
        """A description of the schedule."""
        if self.cosine:
            return "cosine to zero"
        return f"constant rate, then straight to zero over the last {self.long_share:.0%}"


#: The rates were found by short runs. The tied embedding, which Adam trains, needs a far higher one than usual.
RECIPES = {
    "tiny": Recipe(
        title="Penstock's bundled model",
        purpose=(
            "It exists so that a fresh install serves something real, and so that tests can measure perplexity and "
            "speculation."
        ),
        shape=Shape(),
        steps=2400,
        muon_rate=0.02,
        adam_rate=0.02,
        warm_up=60,
        long_share=0.3,
        cosine=True,
    ),
    "tiny-v2": Recipe(
        title="the successor of Penstock's bundled model",
        purpose=(
            "It is `tiny`, grown wider and trained on: a second version of the same model, to be rolled out beside the "
            "first."
        ),
        shape=Shape(intermediate_size=480),
        steps=2600,
        muon_rate=0.012,
        adam_rate=0.012,
        warm_up=50,
        long_share=0.4,
        decay=0.05,
        start="tiny",
        tokenizer="tiny",
    ),
    "tiny-draft": Recipe(
        title="the draft for Penstock's bundled model",
        purpose=(
            "It has the tokenizer of `tiny` and about a tenth of its size: it guesses tokens cheaply, for `tiny` to "
            "accept or refuse."
        ),
        shape=Shape(hidden_size=64, intermediate_size=96, layers=2, heads=4, kv_heads=2, head_dim=16),
        steps=3000,
        muon_rate=0.02,
        adam_rate=0.02,
        warm_up=100,
        long_share=0.4,
        tokenizer="tiny",
    ),
}
