"""Chat templates: a list of messages as the prompt that a model was trained on.

    files -> TemplateSource (parsed, not run) -> ChatTemplate (compiled) -> render(messages) -> text

A template comes with a model, from anybody. It runs in a sandbox (sandbox.py) and is given plain JSON data only; in a
process that must stay well, use `engine.text.chat.confined`, which bounds its time and memory, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2.exceptions import SecurityError

from engine.errors import ModelError, RequestError
from engine.text.chat.sandbox import environment
from engine.text.files import read_files, read_object

#: Stands for the place where a final message is to go on. The space at its end shows whether the template strips.
_HERE: Final = "PENSTOCK:GOES:ON:HERE "
#: Names that an assistant's reasoning comes under; templates read the first, some the second.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_LONGEST: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template's text, and the special tokens that it sees as `bos_token` and the like. Nothing of it has run."""

    text: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ModelError where the text is not a template.

        It is parsed only: compiling a template computes what is constant in it, which may be huge.
        """
        if len(self.text) > _LONGEST:
            raise ModelError(f"the chat template has {len(self.text)} characters; at most {_LONGEST} are taken")
        try:
            environment().parse(self.text)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template cannot be compiled: {error}") from error

    @classmethod
    def from_bytes(cls, files: Mapping[str, bytes]) -> TemplateSource | None:
        """From chat_template.jinja, else tokenizer_config.json's chat_template (of several, that named "default").

        None for a model that has no template. Raises ModelError.
        """
        config = read_object(files, "tokenizer_config.json")
        if "chat_template.jinja" in files:
            try:
                text = files["chat_template.jinja"].decode("utf-8")
            except UnicodeDecodeError as error:
                raise ModelError(f"chat_template.jinja is not UTF-8: {error}") from error
            return cls(text, _special_tokens(config))
        entry = config.get("chat_template")
        if isinstance(entry, list):
            entry = next(
                (one.get("template") for one in entry if isinstance(one, dict) and one.get("name") == "default"), None
            )
        if entry is None:
            return None
        if not isinstance(entry, str):
            raise ModelError("tokenizer_config.json has a chat_template that is not a string")
        return cls(entry, _special_tokens(config))


class ChatTemplate:
    """Thread-safe once made."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` are what the template sees as `bos_token` and the like.

        Raises ModelError where the source is not a template.
        """
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template cannot be compiled: {error}") from error

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate | None:
        """None for a model that has no template."""
        return cls.from_bytes(read_files(folder))

    @classmethod
    def from_bytes(cls, files: Mapping[str, bytes]) -> ChatTemplate | None:
        """See TemplateSource.from_bytes."""
        source = TemplateSource.from_bytes(files)
        return None if source is None else cls(source.text, source.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        now: float | None = None,
        **variables: Any,
    ) -> str:
        """The prompt as text, special tokens included. `variables` are passed on, for instance `tools`. `now`: the time
        that a template which writes the date is told, in UTC (s since the epoch); None: the clock's, in local time.

        `continue_final_message`: the text ends where the last message's content does, so that the model goes on with
        it; `add_generation_prompt` should be False then. Both mean what they mean in transformers.

        Raises RequestError where the template refuses the messages or cannot make sense of them, ModelError where
        the template tries what the sandbox forbids.
        """
        given: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **variables}
        given |= {"messages": [_reasoning_by_all_names(message) for message in messages]}
        given = _plain(given | {"add_generation_prompt": add_generation_prompt})
        if now is not None:
            given["strftime_now"] = datetime.fromtimestamp(now, UTC).strftime
        final = self._mark(given["messages"]) if continue_final_message else None
        try:
            text = self._template.render(given)
        except SecurityError as error:
            raise ModelError(f"the model's chat template was stopped: {error}") from error
        except MemoryError:
            raise
        except Exception as error:
            # A template fails on odd messages in as many ways as Python does.
            raise RequestError(
                f"the model's chat template does not accept these messages: {error}", param="messages"
            ) from error
        return text if final is None else _cut(text, final)

    def _mark(self, messages: list[Any]) -> str:
        """Put the mark behind the last message's text (of several parts, the last text); what stood before it."""
        last = messages[-1] if messages else None
        content = last.get("content") if isinstance(last, dict) else None
        if isinstance(content, list):
            part = next((p for p in reversed(content) if isinstance(p, dict) and isinstance(p.get("text"), str)), None)
            if part is not None:
                before: str = part["text"]
                part["text"] = before + _HERE
                return before
        if not isinstance(last, dict) or not isinstance(content, str):
            raise RequestError("continue_final_message needs a last message with text to go on from", param="messages")
        last["content"] = content + _HERE
        return content


def _cut(text: str, final: str) -> str:
    """The text up to the mark. Where the template stripped the message, the space before the mark goes too."""
    at = text.rfind(_HERE.strip())
    if at < 0 or final.strip() not in text:
        raise RequestError(
            "the last message does not stand in the prompt as it was given, so that it cannot go on: "
            "the model's chat template changes or leaves out parts of it",
            param="messages",
        )
    return text[:at] if text.startswith(_HERE, at) else text[:at].rstrip()


def _reasoning_by_all_names(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy in plain JSON types: methods of richer objects could do what the sandbox knows nothing of."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise RequestError(
        f"messages and template variables must be JSON data, not {type(value).__name__}",
        param="messages",
        code="invalid_type",
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """tokenizer_config.json's bos_token, eos_token and so on, each a string or {"content": string}."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
