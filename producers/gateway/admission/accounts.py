"""Accounts of a request: what its key may use, and its tasks made to fit.

tasks ─▶ sized: within the largest prompt and output ─▶ the request's Charge ─▶ ADMIT (`producers.store.usage.limits`)
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import HTTPConnection

from producers.client.aio import AsyncClient
from producers.contract.task import Task
from producers.gateway.http.caller import charge_of, principal_of
from producers.gateway.http.errors import Problem
from producers.store.access.principal import NO_LIMITS, Limits


class Accounts:
    """The accounts of one gateway's callers."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def sized(self, connection: HTTPConnection, tasks: Sequence[Task]) -> list[Task]:
        """The tasks within their key's largest prompt and output, before their Idempotency-Key is taken. A task that
        names no largest output may be shortened by a budget.

        Raises Problem (400), and what `AsyncClient.known` does.
        """
        limits = principal_of(connection).limits
        if limits == NO_LIMITS:
            return [*tasks]
        context = int((await self._client.known(tasks[0].model)).card["context_length"])
        if (charge := charge_of(connection)) is not None and tasks[0].max_tokens is None:
            charge.shortens = True
        return [_sized(limits, task, context) for task in tasks]


def _sized(limits: Limits, task: Task, context: int) -> Task:
    """The task within its key's largest prompt and output. Its own largest output, if it names none, is the key's, or
    what the model's context (tokens) leaves.

    Raises Problem (400).
    """
    prompt, output = task.prompt_tokens, task.max_tokens
    if limits.max_prompt is not None and prompt is not None and prompt > limits.max_prompt:
        said = f"The prompt has {prompt} tokens; with this key it may have {limits.max_prompt}."
        raise Problem(400, said, code="prompt_too_long", param="prompt")
    if limits.max_output is None:
        return task
    if output is not None and output > limits.max_output:
        said = f"max_tokens is {output}; with this key it may be {limits.max_output} at most."
        raise Problem(400, said, code="output_too_long", param="max_tokens")
    left = max(1, context - (prompt or 1))
    return task if output is not None else task.model_copy(update={"max_tokens": min(limits.max_output, left)})
