"""The inference engine: continuous batching over a paged KV cache. It has no queue and no HTTP.

engine takes a caller's Request (request, params); scheduling/ splits it into sequences and plans each step
kv/ allocates the KV blocks that a plan needs
execution/ runs the plan on one device through models/, layers/ and kernels/, and plans the next step meanwhile
sampling/ picks the next tokens; speculate/ proposes draft tokens; output makes text (text/) and detects the end
quant/ reads and makes quantised weights; bench/ measures
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.errors import EngineError, ModelError, RequestError
    from engine.logprobs import TokenLogprobs
    from engine.params import SamplingParams
    from engine.request import Choice, Event, Output, Request, Tier

__all__ = [
    "Choice",
    "Engine",
    "EngineConfig",
    "EngineError",
    "Event",
    "ModelError",
    "Output",
    "Request",
    "RequestError",
    "SamplingParams",
    "Tier",
    "TokenLogprobs",
]

# Lazy, so that a process that wants engine.text alone never imports torch.
_HOMES = {
    "Choice": "engine.request",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "EngineError": "engine.errors",
    "Event": "engine.request",
    "ModelError": "engine.errors",
    "Output": "engine.request",
    "Request": "engine.request",
    "RequestError": "engine.errors",
    "SamplingParams": "engine.params",
    "Tier": "engine.request",
    "TokenLogprobs": "engine.logprobs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
