"""Text processing that needs no weights, shared by gateways and engines. No torch.

chat/: renders messages as a prompt, in a sandbox and, for gateways, in a child process
tokenizer: encodes a prompt as token ids; detokenizer: turns generated tokens back into text; words: spells bad words
card: describes a model for processes that never load it
config, checkpoint, files, folder, sanity: read a model folder's files, which are untrusted, within bounds
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.errors import ModelError, RequestError
    from engine.text.card import ModelCard
    from engine.text.chat.confined import ConfinedTemplate
    from engine.text.chat.template import ChatTemplate, TemplateSource
    from engine.text.detokenizer import Detokenizer
    from engine.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "ConfinedTemplate",
    "Detokenizer",
    "ModelCard",
    "ModelError",
    "RequestError",
    "TemplateSource",
    "Tokenizer",
]

# Lazy, so that the process of a confined template loads no tokenizer, and starts sooner.
_HOMES = {
    "ChatTemplate": "engine.text.chat.template",
    "ConfinedTemplate": "engine.text.chat.confined",
    "Detokenizer": "engine.text.detokenizer",
    "ModelCard": "engine.text.card",
    "ModelError": "engine.errors",
    "RequestError": "engine.errors",
    "TemplateSource": "engine.text.chat.template",
    "Tokenizer": "engine.text.tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine.text' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
