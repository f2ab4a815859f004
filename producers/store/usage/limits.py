"""The account of what a key with limits has used, one for all gateways: ADMIT charges it, ends of tasks settle it.

    ADMIT: a limit is reached ─▶ nothing is written, 429
           else ─▶ record with `reserved`, the account charged ─▶ any end of the task: settled by what it used

An account is the hash `penstock:limits:<key id>`. One script makes the record and charges it, one script makes the
record final and settles it (`scripts/_limits.lua`). So `open` is the number of the key's tasks that have not ended, and
`reserved` the sum of their `reserved`, whichever process dies.

| field | what it counts |
| --- | --- |
| `minute`, `requests`, `tokens` | of this minute: tasks, and tokens that were reserved, less what ended below that |
| `open`, `reserved` | tasks that have not ended, and the tokens reserved for them |
| `month`, `spent` | prompt and output tokens of tasks that ended in this month (UTC) |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from producers.connection.script import text
from producers.errors import LimitReached
from producers.store.access.principal import Limits

#: Limit -> the code of an answer that it refuses; a budget's is OpenAI's.
CODES: Final[dict[str, str]] = {
    "rpm": "rate_limit_exceeded",
    "tpm": "token_limit_exceeded",
    "max_in_flight": "too_many_in_flight",
    "budget_tokens": "insufficient_quota",
}
#: Limit -> what a caller is told that reached it.
SAID: Final = {
    "rpm": "{most} tasks a minute",
    "tpm": "{most} tokens a minute",
    "max_in_flight": "{most} tasks that have not ended",
    "budget_tokens": "{most} tokens in this month",
}


@dataclass(slots=True)
class Charge:
    """The account that a request's tasks are charged to. What ADMIT answers is kept: the least of several."""

    key: str
    limits: Limits
    requests: int | None = None
    tokens: int | None = None
    """What is left in this minute; None where there is no such limit, or nothing was charged yet."""
    reset_ms: int = 60_000
    """Time until the next minute."""

    def to_json(self) -> str:
        """The limits, as ADMIT takes them."""
        return _json(self.limits)

    def hear(self, answer: Sequence[Any], asked: int) -> None:
        """Take what ADMIT answered for a task of `asked` tokens. Raises LimitReached."""
        said, requests, tokens = text(answer[0]), int(answer[1]), int(answer[2])
        self.requests = None if requests < 0 else min(requests, requests if self.requests is None else self.requests)
        self.tokens = None if tokens < 0 else min(tokens, tokens if self.tokens is None else self.tokens)
        self.reset_ms = int(answer[3])
        if said == "new":
            return
        most = self.limits.counted[said]
        never = said == "budget_tokens" or (said == "tpm" and asked > most)
        wait_s = 1.0 if said == "max_in_flight" else self.reset_ms / 1000
        message = f"This key may have {SAID[said].format(most=most)}"
        message += f", and the task may need {asked} tokens." if "tokens" in SAID[said] else "."
        raise LimitReached(message, CODES[said], None if never else wait_s)


@lru_cache(maxsize=1024)
def _json(limits: Limits) -> str:
    return json.dumps(limits.counted)
