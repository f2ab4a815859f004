"""The accounts of what keys and tenants have used, one for all gateways: ADMIT charges, ends of tasks settle.

    ADMIT: a limit is reached ─▶ nothing is written, 429
           else ─▶ record with `reserved`, its accounts charged ─▶ any end of the task: settled by what it used
    refused after a gateway had worked for it ─▶ REFUSED: one more of `requests`

An account is the hash `penstock:limits:<key id>`, or `penstock:limits:tenant:<name>`. One script makes the record and
charges its key's and its tenant's, one script makes the record final and settles them (`scripts/_limits.lua`). So
`open` is the number of the account's tasks that have not ended, and `reserved` the sum of what is reserved for them,
whichever process dies.

| field | what it counts |
| --- | --- |
| `minute`, `requests`, `tokens` | of this minute: tasks, and the tokens that they are estimated to need, or have used |
| `open`, `reserved` | tasks that have not ended, and the most tokens that they may use |
| `month`, `spent` | prompt and output tokens of tasks that ended in this month (UTC) |
| `pledged`, `paid` | the same as `reserved` and `spent` in money, in billionths of the currency |

`requests` also has the requests that were refused after a gateway had rendered, tokenized or compiled for them.

Budgets reserve the most that a task may use, so no budget is overrun: its prompt, and for each choice `max_tokens`, or
what the context leaves. A task that names no `max_tokens` is shortened to what is left of a budget, which the record's
`max_output` says. `tpm` takes an estimate (`Task.kv_tokens`): a rate that waited for whole contexts would let hardly
anything through.

Money is counted where an account has a budget in it, at the prices that were in force at ADMIT. Each task's cost is
rounded up to a billionth.

A record's `reserved` has the names of its accounts, and what they were charged: {accounts, estimate, tokens, money,
rates}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from producers.connection.script import Call, script, text
from producers.contract import keys
from producers.contract.task import Task
from producers.errors import LimitReached
from producers.store.access.api_keys import Account

#: Fewest output tokens of a choice to which a task is shortened: OpenAI's least `max_output_tokens`.
SHORTEST: Final = 16
#: Limit -> the code of an answer that it refuses; a budget's is OpenAI's.
CODES: Final[dict[str, str]] = {
    "rpm": "rate_limit_exceeded",
    "tpm": "token_limit_exceeded",
    "max_in_flight": "too_many_in_flight",
    "budget_tokens": "insufficient_quota",
    "budget_money": "insufficient_quota",
    "reserved": "budget_reserved",
}
#: Limit -> the text for a caller that reached it.
LIMIT_TEXTS: Final = {
    "rpm": "{rpm} tasks a minute",
    "tpm": "{tpm} tokens a minute, and the task may need {tokens}",
    "max_in_flight": "{max_in_flight} tasks that have not ended",
    "budget_tokens": "{budget_tokens} tokens in this month, of which too few are left; {renewed}",
    "budget_money": "tasks for {money} {currency} in this month, of which too little is left; {renewed}",
    "reserved": "no more than its budget, and what is left of it is reserved for tasks that have not ended; "
    "try again once some have",
}


@dataclass(slots=True)
class Charge:
    """The accounts that a request's tasks are charged to."""

    accounts: tuple[Account, ...]
    shortens: bool = False
    """Whether tasks may be shortened: the request names no largest output."""
    rates: tuple[int, ...] | None = None
    """The prices of a token (`Prices.rates`); there if an account has a budget in money."""
    currency: str = ""
    all: tuple[int, int] | None = None
    """Tokens of the prompts, and the least of the outputs, of all tasks of the request, if they are taken together or
    not at all: what no budget has left for them, no wait brings. The first one asks for that."""
    answer: list[Any] = field(default_factory=list)
    """ADMIT's answer (`told` in `scripts/_limits.lua`); of several tasks, the one with the least left."""
    counted: bool = False
    """Whether the request counts in `requests` by now, or cannot, since a minute's are used up."""

    @property
    def names(self) -> list[str]:
        return [account.name for account in self.accounts]

    def request_json(self, task: Task, card: Mapping[str, Any], estimate: int) -> str:
        """The most that a task may need, and the limits, as ADMIT takes them (JSON). `estimate`: tokens for `tpm`."""
        limits = ", ".join([account.limits.counted_json for account in self.accounts])
        prompt, output, least, width = needed(task, card, self.shortens)
        rates = "" if self.rates is None else f', "rates": {[*self.rates]}'
        numbers = f'"prompt": {prompt}, "output": {output}, "least": {least}, "width": {width}'
        together = "" if self.all is None else f', "all": {[*self.all]}'
        return f'{{"limits": [{limits}], "tokens": {estimate}, {numbers}{rates}{together}}}'

    @property
    def used_up(self) -> Account | None:
        """The account that has no request of this minute left, if ADMIT or REFUSED named it."""
        kind, whose, _, _, rpm, *_ = self.answer
        if text(kind) == "new":
            of = [account for account in self.accounts if account.limits.rpm == rpm]
            return of[0] if len(of) == 1 else None
        return self.accounts[int(whose)] if text(kind) in ("rpm", "refused") and int(whose) >= 0 else None

    def check(self, estimate: int) -> None:
        """Raise LimitReached for a task of so many tokens that no minute has room for."""
        for account in self.accounts:
            if account.limits.tpm is not None and estimate > account.limits.tpm:
                reason = LIMIT_TEXTS["tpm"].format(tpm=account.limits.tpm, tokens=estimate)
                raise LimitReached(f"The account may have {reason}.", CODES["tpm"], None)

    def apply_answer(self, kind: str, answer: list[Any], request_json: str) -> None:
        """Keep ADMIT's answer of this kind (its first element, as text). Raises LimitReached if a limit is reached."""
        if not self.answer or answer[3:] < self.answer[3:]:
            self.answer = answer
        self.counted = self.counted or kind in ("new", "rpm")
        if kind == "new":
            return
        account, tokens = self.accounts[int(answer[1])], json.loads(request_json)["tokens"]
        counted = account.limits.counted
        never = kind in ("budget_tokens", "budget_money") or (kind == "tpm" and tokens > counted["tpm"])
        wait_s = int(answer[2]) / 1000 if kind in ("rpm", "tpm") else 1.0
        more = {
            "tokens": tokens,
            "money": account.limits.budget_money,
            "currency": self.currency,
            "renewed": _renewed(),
        }
        message = f"This {account.whose} may have {LIMIT_TEXTS[kind].format(**counted, **more)}."
        raise LimitReached(message, CODES[kind], None if never else wait_s)


def refused(accounts: Sequence[Account]) -> Call:
    """REFUSED: a request of these accounts was refused after work. Answers what `Charge.answer` takes."""
    limits = ", ".join([account.limits.counted_json for account in accounts])
    names = [keys.account(account.name) for account in accounts]
    return Call(script("producers.store", "refused"), names, (f"[{limits}]",))


def _renewed() -> str:
    """The beginning of the next month's budget, for people; by this machine's clock."""
    month = (datetime.now(UTC).replace(day=1) + timedelta(days=31)).replace(day=1)
    return f"the next month's budget begins on {month:%Y-%m-%d}, 00:00 UTC"


def needed(task: Task, card: Mapping[str, Any], shortens: bool) -> tuple[int, int, int, int]:
    """The most tokens that a task may use of its prompt, and of each choice's output; to how many the latter may be
    shortened; and its choices. A text, whose tokens nobody has counted, may be as long as the context."""
    context, prompt_tokens = int(card["context_length"]), task.prompt_tokens
    if task.kind != "generate":
        return sum(context if isinstance(item, str) else len(item) for item in task.input), 0, 0, 1
    room = context if prompt_tokens is None else max(1, context - prompt_tokens)
    output = room if task.max_tokens is None else min(task.max_tokens, room)
    prompt = context - output if prompt_tokens is None else prompt_tokens
    least = min(output, max(SHORTEST, task.min_tokens)) if shortens else output
    return prompt, output, least, task.width
