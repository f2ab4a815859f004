"""Text processing that needs no weights, shared by gateways and engines. No torch.

template: renders messages as a prompt, in a sandbox; confined_template, for gateways: in a child process
spelled_tools: tools for templates that have none
tokenizer: encodes a prompt as token ids; confined_tokenizer, for gateways: in a child process
detokenizer: turns generated tokens back into text
card: describes a model for processes that never load it
config, checkpoint, tensors, files: read a model folder's files, which are untrusted, within bounds; gguf: the same of a
GGUF file
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.lazy import lazily

if TYPE_CHECKING:
    from engine.errors import ModelError, RequestError
    from engine.text.card import ModelCard
    from engine.text.confined_template import ConfinedTemplate
    from engine.text.detokenizer import Detokenizer
    from engine.text.spelled_tools import has_tools, lists_tools
    from engine.text.template import ChatTemplate, TemplateSource
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
    "has_tools",
    "lists_tools",
]

# The process of a confined template loads no tokenizer, and starts sooner.
__getattr__, __dir__ = lazily(
    __name__,
    {
        "engine.errors": "ModelError RequestError",
        "engine.text.card": "ModelCard",
        "engine.text.confined_template": "ConfinedTemplate",
        "engine.text.template": "ChatTemplate TemplateSource",
        "engine.text.detokenizer": "Detokenizer",
        "engine.text.spelled_tools": "has_tools lists_tools",
        "engine.text.tokenizer": "Tokenizer",
    },
)
