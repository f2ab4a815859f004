"""An output's text as content and calls, piece by piece as it comes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from producers.contract.stream.events import Token
from producers.gateway.openai.tools.grammar import Calling


@dataclass(frozen=True, slots=True)
class Begun:
    """A call begins. `at`: its number in the output."""

    at: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments, which are JSON together."""

    at: int
    text: str


#: A piece of an output: text is content.
Said = str | Begun | Arguments


class Listener:
    """Follows one output. Its grammar has made sure of the form, so that little is checked here."""

    def __init__(self, calling: Calling) -> None:
        self._mark = calling.begin
        self._format = calling.format
        self._head = re.compile(rf'\{{"name": "([\w-]+)", "{calling.format.arguments}": ')
        self._step = self._find if calling.must else self._talk
        #: Text that is not yet sure to be content, or not yet a call's whole head.
        self._held = ""
        self._depth = 0
        self._quoted = self._escaped = False
        self._silent = calling.must
        self.calls = 0

    @property
    def called(self) -> bool:
        """Whether the output has calls, and all of them are whole."""
        return self.calls > 0 and self._step != self._argue

    def hear(self, tokens: Iterable[Token]) -> list[Said]:
        """The pieces in further tokens."""
        said: list[Said] = []
        for token in tokens:
            if self._mark is not None and token.token_id == self._mark and self._step == self._talk:
                self._step = self._find
            text = token.text
            while text:
                text = self._step(text, said)
        return said

    def end(self) -> list[Said]:
        """The content that was held back until it was sure to be that."""
        held, self._held = self._held, ""
        if self._step == self._find:
            held = "" if self.calls or self._silent else self._before(held)
        return [held] if held else []

    def _talk(self, text: str, said: list[Said]) -> str:
        """Content, up to the first call. Returns the text of the calls."""
        text, self._held = self._held + text, ""
        begin = self._format.begin
        if not begin:
            self._step = self._find if text.startswith("{") else self._say
            return text
        if self._mark is None and begin in text:
            self._step = self._find
            return text
        # White space at the end, and what may be the beginning of `begin`, may belong to a call.
        size = next((n for n in range(len(begin) - 1, 0, -1) if text.endswith(begin[:n])), 0)
        sure = text[: len(text) - size].rstrip()
        said += [sure] if sure else []
        self._held = text[len(sure) :]
        return ""

    def _say(self, text: str, said: list[Said]) -> str:
        """Content to the end."""
        said.append(text)
        return ""

    def _find(self, text: str, said: list[Said]) -> str:
        """The next call's head. Returns the text after it."""
        text, self._held = self._held + text, ""
        found = self._head.search(text)
        if found is None:
            self._held = text
            return ""
        # Text before the mark may come after its token, for what was held back until it was sure.
        if not self.calls and not self._silent and (before := self._before(text[: found.start()])):
            said.append(before)
        said.append(Begun(self.calls, found[1]))
        self.calls += 1
        self._step = self._argue
        return text[found.end() :]

    def _before(self, text: str) -> str:
        """The content in a text that ends where the first call begins, or on the way there."""
        content, mark, _ = text.partition(self._format.begin) if self._format.begin else (text, "", "")
        return content.rstrip() if mark else content.removesuffix(self._format.opening).rstrip()

    def _argue(self, text: str, said: list[Said]) -> str:
        """The arguments up to their last brace. Returns the text after it."""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            else:
                self._depth += (char in "{[") - (char in "}]")
                if char in "}]" and not self._depth:
                    self._step = self._find
                    said.append(Arguments(self.calls - 1, text[: at + 1]))
                    return text[at + 1 :]
        said.append(Arguments(self.calls - 1, text))
        return ""
