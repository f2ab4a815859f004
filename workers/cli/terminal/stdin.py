"""Text from standard input."""

from __future__ import annotations

from collections.abc import Callable

from workers.cli.exits import Failure


def text_from(read: Callable[[], str]) -> str:
    """What `read` takes from standard input. Raises Failure where that is no text, and what `read` does.

    Depending on the locale, Python refuses a byte that is no UTF-8, or makes a lone surrogate of it, which no
    tokenizer and no JSON parser takes.
    """
    try:
        text = read()
        text.encode()
    except UnicodeError as error:
        raise Failure(f"standard input is not text in UTF-8: {error}") from error
    return text
