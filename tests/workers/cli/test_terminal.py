"""What a model says is shown, and does nothing to the terminal."""

from __future__ import annotations

import pytest

from workers.cli.terminal import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc é 🎉", "a\tb\nc é 🎉"),
        ("\x1b[2J\x07", "\u241b[2J\u2407"),
        ("a\rb\x7f", "a\u240db\u2421"),
        ("\x9b31m", "\ufffd31m"),
    ],
)
def test_control_characters_become_visible_on_a_terminal(text: str, shown: str) -> None:
    assert printable(text, terminal=True) == shown


def test_a_file_gets_the_text_as_it_is() -> None:
    assert printable("\x1b[2J\r", terminal=False) == "\x1b[2J\r"
