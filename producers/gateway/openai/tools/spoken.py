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


#: What an output says: text is content.
Said = str | Begun | Arguments


class Listener:
    """Follows one output. Its grammar has made sure of the form, so that little is checked here."""

    def __init__(self, calling: Calling) -> None:
        self._marks = calling.marks
        self._begin = calling.format.begin
        self._head = re.compile(rf'\{{"name": "([\w-]+)", "{calling.format.arguments}": ')
        self._step = self._talk
        #: Text that is not yet sure to be content, or not yet a call's whole head.
        self._held = ""
        self._depth = 0
        self._quoted = self._escaped = False
        self.calls = 0

    def hear(self, tokens: Iterable[Token]) -> list[Said]:
        """What further tokens say."""
        said: list[Said] = []
        text = "".join(self._marks.get(token.token_id, token.text) for token in tokens)
        while text:
            text = self._step(text, said)
        return said

    def end(self) -> list[Said]:
        """What was held back until it was sure to be content."""
        return [self._held] if self._held and self._step == self._talk else []

    def _talk(self, text: str, said: list[Said]) -> str:
        """Content, up to the first call. Returns the text of the calls."""
        text, self._held = self._held + text, ""
        if not self._begin:
            self._step = self._find if text.startswith("{") else self._say
            return text
        at = text.find(self._begin)
        if at >= 0:
            self._step = self._find
            said += [before] if (before := text[:at].rstrip()) else []
            return text[at + len(self._begin) :]
        # White space at the end, and what may be the beginning of `begin`, may belong to a call.
        size = next((n for n in range(len(self._begin) - 1, 0, -1) if text.endswith(self._begin[:n])), 0)
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
        said.append(Begun(self.calls, found[1]))
        self.calls += 1
        self._step = self._argue
        return text[found.end() :]

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
