"""Messages of plain Celery senders: `app.send_task("penstock.generate", kwargs={...})`.

They have no record before they are claimed; its fields are made here from the message's keyword arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from producers.contract import keys, levels
from producers.contract.record import error_json, trace_fields
from producers.contract.task import Task
from producers.errors import InvalidTask, SecretUnreadable
from workers.state.delivery import Plain
from workers.state.served import Served

#: Between the results that a chord makes one prompt of.
PARAGRAPH: Final = "\n\n"


def plain_fields(served: Served, now_ms: int, headers: dict[str, Any], arguments: dict[str, Any] | None) -> Plain:
    """`now_ms`: by the store's clock. `arguments` holds `args` and `kwargs`; None where they must not be decoded."""
    fields: dict[str, str | int] = {
        "model": served.model,
        "queue": served.pool.version_queue,
        "tier": "default",
        "n": 1,
        "task": "{}",
        "nonce": "",
        **trace_fields(headers.get("traceparent")),
    }
    if arguments is None:
        return Plain(fields)
    kwargs = arguments.get("kwargs") or {}
    try:
        kwargs = _with_prompt(arguments.get("args") or (), kwargs)
        task = _resolved(served, {"model": served.model, "tier": _tier(headers), **kwargs})
        webhook = {} if task.webhook is None else task.webhook.stored()
    except (InvalidTask, SecretUnreadable) as exc:
        # A webhook may hold a secret, which is not shown with the record.
        fields["task"] = json.dumps({name: value for name, value in kwargs.items() if name != "webhook"}, default=str)
        code, param = (exc.code, exc.param) if isinstance(exc, InvalidTask) else ("secret_unreadable", "webhook.secret")
        return Plain(fields, error_json(code, str(exc), param), levels.LEVEL + 1)  # a later release may take it
    fields |= {"task": task.to_json(), "tier": task.tier, "n": task.n, **webhook}
    if task.ttl is not None:
        fields["ttl"] = task.ttl
    deadline = _deadline_ms(now_ms, headers, task)
    if deadline is not None:
        fields["deadline"] = deadline
    if task.level:
        fields["level"] = task.level
    return Plain(fields, level=task.level)


def _resolved(served: Served, said: dict[str, Any]) -> Task:
    """The task, as its record has it. Raises InvalidTask."""
    task = Task.parse(said)
    if task.model != served.model:
        raise InvalidTask(f"this queue serves model {served.model!r}, not {task.model!r}", param="model")
    if task.order_key is not None:
        raise InvalidTask("messages of plain Celery keep no order; leave order_key out", param="order_key")
    return task.resolved(served.card)


def _with_prompt(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The fields, with the one positional argument as the prompt: a chain or chord puts a parent's result there.
    Of a task that names messages it is the last message, a user's.

    Raises InvalidTask where there are more, or a prompt is named as well.
    """
    if not args:
        return kwargs
    if len(args) > 1:
        raise InvalidTask(
            f"penstock.generate has {len(args)} positional arguments; it takes one, the prompt. Name the others: "
            "max_tokens=20, ..."
        )
    if kwargs.get("prompt") is not None:
        raise InvalidTask(
            "prompt is given twice: as a keyword, and as a positional argument, which is where a chain or chord puts "
            "the result before; leave one out, or make the signature immutable (.si)",
            param="prompt",
        )
    if isinstance(messages := kwargs.get("messages"), list):
        return {**kwargs, "messages": [*messages, {"role": "user", "content": _said(args[0])}]}
    return {**kwargs, "prompt": _said(args[0])}


def _said(value: Any) -> Any:
    """The prompt in a parent's result: of a result dictionary its text; of several results the texts, a paragraph each.
    Anything else as it is: text, token ids, or what a task refuses."""
    if isinstance(value, Mapping):
        return value.get("text")
    texts = [_said(one) for one in value] if isinstance(value, list) else []
    return PARAGRAPH.join(texts) if texts and all(isinstance(text, str) for text in texts) else value


def _tier(headers: dict[str, Any]) -> str:
    """The tier whose list the message's Celery priority put it into."""
    return keys.tier_of((headers.get("delivery_info") or {}).get("priority"))


def _deadline_ms(now_ms: int, headers: dict[str, Any], task: Task) -> int | None:
    """The task's own timeout, from when it was claimed, or Celery's `expires`, whichever is first."""
    found = []
    if task.timeout is not None:
        found.append(now_ms + int(task.timeout * 1000))
    expires = headers.get("expires")
    if isinstance(expires, str):
        at = datetime.fromisoformat(expires)
        found.append(int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000))
    return min(found, default=None)
