"""Outputs on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Protocol

#: What a model's text must not do to a terminal: control characters, but for tab and line break, become visible.
VISIBLE = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"} | {
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
}


def printable(text: str, terminal: bool) -> str:
    """Text for standard output: as it is for a file or a pipe, harmless for a terminal."""
    return text.translate(VISIBLE) if terminal else text


def choices(outputs: Sequence[dict[str, Any]]) -> str:
    """The text of a single output; several under a heading each."""
    if len(outputs) == 1:
        return str(outputs[0]["text"])
    return "\n".join(f"--- {one['index']} ({one['finish_reason']}) ---\n{one['text']}" for one in outputs)


class Shown(Protocol):
    """Where events go as they come."""

    def show(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One event a line."""

    def show(self, event: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Nothing is held back."""


class TextStream:
    """The text of one output as it comes; of several, each when it is complete, for they come at the same time."""

    def __init__(self, outputs: int) -> None:
        self._terminal = sys.stdout.isatty()
        self._several = outputs > 1
        self._texts: dict[int, list[str]] = {}
        self._at_line_start = True

    def show(self, event: dict[str, Any]) -> None:
        if event["event"] == "end":
            for index in sorted(self._texts):
                self._whole(index, None)
        elif event["event"] == "prompt":
            return  # how likely the prompt was is for --json
        elif not self._several:
            self._write(event["text"])
        else:
            self._texts.setdefault(event["choice"], []).append(event["text"])
            if event.get("finish_reason"):
                self._whole(event["choice"], event["finish_reason"])

    def close(self) -> None:
        """Leave the cursor where the next command's output can begin."""
        if not self._at_line_start:
            self._write("\n")

    def _whole(self, index: int, reason: str | None) -> None:
        text = "".join(self._texts.pop(index))
        self._write(f"--- {index} ({reason}) ---\n{text}\n")

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(printable(text, self._terminal))
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")
