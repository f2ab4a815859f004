"""OpenAI's endpoints for text, each request one task or several whose caller waits for them.

    body -> parameters (known, offered, within limits) -> messages, template | prompts -> token ids -> Task
    Foreground: submit all, their events as they come; the caller who leaves takes them along
    events -> outputs (by choice) -> chunks as they come -> usage -> [DONE]
                                  -> whole: JSON by choice, the large in turns; echo: the prompt, once for all choices

What is OpenAI's is named as there; what is not offered is refused by name.
"""

from producers.gateway.openai.chat import router as chat
from producers.gateway.openai.completions import router as completions

ROUTERS = (chat, completions)

__all__ = ["ROUTERS"]
