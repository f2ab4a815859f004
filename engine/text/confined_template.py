"""Renders a chat template in a child process, so that it cannot take this process's time or memory.

A child renders one template only, so it cannot affect the templates of other models.
"""

from __future__ import annotations

import codecs
import html  # noqa: F401 - these, and Jinja's own two below: a sealed process cannot import them later
import pprint  # noqa: F401
import textwrap  # noqa: F401
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import jinja2.constants
import jinja2.debug  # noqa: F401

from engine.confined import ConfinedProcess, Limits, Stopped
from engine.errors import RequestError
from engine.text.template import ChatTemplate, TemplateSource

# A sealed process cannot import. Jinja imports these modules, and this codec's, when a template first needs them.
codecs.lookup("unicode-escape")

_TARGET: Final = "engine.text.confined_template:renderer"


class ConfinedTemplate:
    """A template in a child process. Blocking and thread-safe: renders take turns. The first one starts the child.
    Close it after use."""

    def __init__(self, source: TemplateSource, limits: Limits | None = None) -> None:
        self.source = source
        self._process = ConfinedProcess(_TARGET, asdict(source), limits)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        now: float | None = None,
        tools_as_text: bool | str = False,
        **variables: Any,
    ) -> str:
        """Render as ChatTemplate.render does. If the template does not mention the `developer` role, it gets `system`.

        Raises RequestError with the code "template_stopped" if the template exceeded its limits.
        """
        if "developer" not in self.source.text:
            # `developer` is OpenAI's newer name of the role. Nearly all templates know only the older one.
            messages = [
                {**message, "role": "system"} if message.get("role") == "developer" else message for message in messages
            ]
        request = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "now": now,
            "tools_as_text": tools_as_text,
            "variables": variables,
        }
        try:
            text: str = self._process.call(request)
        except Stopped as error:
            raise RequestError(
                f"the model's chat template was stopped on these messages: {error}",
                param="messages",
                code="template_stopped",
            ) from None
        except RequestError as error:
            raise RequestError(error.message, param="messages", code=error.code) from None
        return text

    def kill(self) -> None:
        """End a render that runs. It raises RequestError with the code "template_stopped"."""
        self._process.kill()

    def close(self) -> None:
        """End the child, after the current render. A later render starts another."""
        self._process.close()


def renderer(source: dict[str, Any]) -> Callable[[dict[str, Any]], str]:
    """Makes the function that the child runs for each request. The template is compiled with the first one, under its
    limits."""
    template: ChatTemplate | None = None

    def render(request: dict[str, Any]) -> str:
        nonlocal template
        if template is None:
            template = ChatTemplate(source["text"], source["special_tokens"], source["with_tools"])
        variables = request.pop("variables")
        return template.render(request.pop("messages"), **request, **variables)

    return render
