"""Everything about a model's text that needs no weights: what a gateway shares with an engine. No torch.

Messages become a prompt (template; in a process of its own: confined), a prompt becomes token ids (tokenizer), tokens
become text again as they are generated (detokenizer), and those who never load a model know it by its card (card).
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
