"""Options of `penstock keys`, read from text."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from inspect import Parameter
from typing import Annotated, Final

import typer

from workers.cli.exits import Failure

MONEY: Final = "budget_money"
#: What limits may be set, and the help of their options.
LIMITS: Final = {
    "rpm": "Most tasks that may be submitted in a minute.",
    "tpm": "Most tokens that the tasks of a minute may need.",
    "max_in_flight": "Most tasks that have not ended.",
    "budget_tokens": "Most tokens in a month (UTC).",
    MONEY: "Most that tasks may cost in a month, in the prices' currency.",
    "max_prompt": "Most tokens of a prompt.",
    "max_output": "Most tokens of a choice's output.",
    "max_waiting": "Most tasks that wait for a worker.",
    "max_streams": "Most streams and waiting requests that are open at one gateway process.",
    "shorten_to": "Most tokens of a choice's output under overload, default tier.",
}
#: The same of a tenant alone: what is kept for it.
KEPT: Final = {
    "max_file_bytes": "Most bytes of all files that are kept.",
    "max_files": "Most files that are kept.",
    "max_batches": "Most batches that have not ended.",
    "max_lines": "Most lines of batches that wait, run, or are to be written.",
    "max_endpoints": "Most webhook endpoints.",
    "max_task_bytes": "Most bytes of tasks and their results that are kept.",
    "max_idempotency_keys": "Most idempotency keys that begin within a day.",
}
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


def options(kind: type) -> list[Parameter]:
    """The options of a key's limits, as numbers or, for `limits`, as texts."""
    return _options(LIMITS, kind)


def options_of_tenants() -> list[Parameter]:
    """The options of a tenant's limits, as texts."""
    return _options({name: said for name, said in LIMITS.items() if name != "shorten_to"} | KEPT, str)


def _options(helps: Mapping[str, str], kind: type) -> list[Parameter]:
    kinds = {name: str if name == MONEY else kind for name in helps}
    made = {name: Annotated[one | None, typer.Option(help=helps[name])] for name, one in kinds.items()}
    return [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=one) for name, one in made.items()]


def limits(given: Mapping[str, str]) -> dict[str, int | str | None]:
    """The limits in options that were given; `none` unsets one. Raises Failure for what is no number."""
    for name, value in given.items():
        if value != "none" and name != MONEY and re.fullmatch(r"[0-9]{1,100}", value) is None:
            raise Failure(f"--{name.replace('_', '-')} is {value!r}; it must be a whole number, or none")
    return {n: None if value == "none" else value if n == MONEY else int(value) for n, value in given.items()}


def names(text: str | None) -> list[str] | None:
    """The names in an option, between commas."""
    return None if text is None else [name.strip() for name in text.split(",")]


def duration(text: str, option: str) -> int:
    """Seconds. Raises Failure for what is no length of time."""
    read = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    if read is None and text != "0":
        raise Failure(f"{option} is {text!r}; it must look like 24h, 30m or 7d, or be 0")
    return 0 if read is None else int(read[1]) * _SECONDS[read[2]]


def moment(text: str | None, option: str) -> int | None:
    """Unix seconds of a time, or of the end of a length of time that begins now. Raises Failure."""
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}[smhdw]", text):
        return int(time.time()) + duration(text, option)
    try:
        at = datetime.fromisoformat(text)
        return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise Failure(
            f"{option} is {text!r}; it must look like 30d, 12h, 2027-01-31 or 2027-01-31T08:00+01:00"
        ) from None


def when(seconds: int) -> str:
    """A time as it is shown, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
