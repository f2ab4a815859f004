"""The inference engine: continuous batching over a paged KV cache. It has no queue and no HTTP.

engine takes a caller's Request (request, params); scheduling/ splits it into sequences and plans each step
kv/ allocates the KV blocks that a plan needs
execution/ runs the plan on one device through models/, layers/ and kernels/, and plans the next step meanwhile
sampling/ picks the next tokens; speculate/ proposes draft tokens; output makes text (text/) and detects the end
pooling/ serves models that generate nothing: vectors, labels, scores
quant/ reads and makes quantised weights; bench/ measures
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.lazy import lazily

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.errors import EngineError, ModelError, RequestError
    from engine.params import SamplingParams
    from engine.pooling import PoolingEngine
    from engine.request import Choice, Event, Output, Request, Tier, TokenLogprobs

__all__ = [
    "Choice",
    "Engine",
    "EngineConfig",
    "EngineError",
    "Event",
    "ModelError",
    "Output",
    "PoolingEngine",
    "Request",
    "RequestError",
    "SamplingParams",
    "Tier",
    "TokenLogprobs",
]

# A process that wants engine.text alone never imports torch.
__getattr__, __dir__ = lazily(
    __name__,
    {
        "engine.config": "EngineConfig",
        "engine.engine": "Engine",
        "engine.errors": "EngineError ModelError RequestError",
        "engine.params": "SamplingParams",
        "engine.pooling": "PoolingEngine",
        "engine.request": "Choice Event Output Request Tier TokenLogprobs",
    },
)
