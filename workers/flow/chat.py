"""Messages to token ids, by the model's own chat template: for tasks that no gateway has rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import ModelError, RequestError
from engine.text import ConfinedTemplate, TemplateSource


class ChatPrompts:
    """`files`: the model's, by name. `limit`: the most tokens of a prompt. The template runs in a process of its own,
    which begins with the first chat."""

    def __init__(self, files: Mapping[str, bytes], tokenizer: Any, limit: int) -> None:
        self._files = files
        self._tokenizer = tokenizer
        self._limit = limit
        self._template: ConfinedTemplate | None = None

    def encode(self, messages: Sequence[Mapping[str, Any]], created_ms: int | None) -> list[int]:
        """The prompt of a task. A date in it is that of the task's creation, in UTC, so that every worker that takes
        the task up makes the same prompt.

        Raises RequestError where the template does not take the messages, or cannot be used, or they are too long.
        """
        now = None if created_ms is None else created_ms / 1000
        try:
            text = self._loaded().render(messages, now=now)
        except ModelError as error:
            raise RequestError(str(error), param="model", code="model_broken") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, limit=self._limit)
        return ids

    def _loaded(self) -> ConfinedTemplate:
        if self._template is None:
            source = TemplateSource.from_bytes(self._files)
            if source is None:
                raise RequestError("the model has no chat template", param="messages", code="unsupported_model")
            self._template = ConfinedTemplate(source)
        return self._template
