"""Everything about a model's text that needs no weights: what a gateway shares with an engine. No torch.

Messages become a prompt (template), a prompt becomes token ids (tokenizer), tokens become text again as they are
generated (detokenizer), and a model is known to those who never load it by its card (card).
"""

from engine.errors import ModelError, RequestError
from engine.text.card import ModelCard
from engine.text.detokenizer import Detokenizer
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "ModelCard", "ModelError", "RequestError", "Tokenizer"]
