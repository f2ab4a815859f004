"""Prompt in, tokens out: continuous batching over a paged KV cache. Knows no queue and no HTTP.

A Request (request) is checked and queued; the scheduler plans each step over all sequences, within what kv/ can
hold, on a GPU while the step before it runs (pipeline); batch and runner, or device/, turn the plan into tensors and
run models/, layers/ and kernels/ on one device; sampling/ picks the next tokens, output turns them into text and finds
their end; events go back to whoever submitted.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.errors import EngineError, ModelError, RequestError
    from engine.params import SamplingParams
    from engine.request import Choice, Event, Output, Request, Tier, TokenLogprobs

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
    "TokenLogprobs": "engine.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
