"""Prompt in, tokens out: continuous batching over a paged KV cache. Knows no queue and no HTTP.

engine: a caller's face -> scheduling/: requests become sequences, and each step a plan, within what kv/ can hold
execution/: the plan as tensors on one device, through models/, layers/ and kernels/; the next is planned meanwhile
sampling/ picks the next tokens, speculate/ guesses more; output turns them into text and finds the end (text/)
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
