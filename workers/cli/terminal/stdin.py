"""Reads text from standard input."""

from __future__ import annotations

from collections.abc import Callable

from workers.cli.exits import Failure


def text_from(read: Callable[[], str]) -> str:
    """The text that `read` reads from standard input. Raises Failure if it is not UTF-8, and what `read` raises.

    Depending on the locale, Python refuses a byte that is not UTF-8 or turns it into a lone surrogate, which no
    tokenizer and no JSON parser accepts.
    """
    try:
        text = read()
        text.encode()
    except UnicodeError as error:
        raise Failure(f"standard input is not text in UTF-8: {error}") from error
    return text
