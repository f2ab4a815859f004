"""Lua scripts as values: a `Call` says which script with which keys and arguments; `run` sends it.

    call = protocol.cancel("t1")          # pure: nothing is sent
    accepted, status = run(redis, call)   # or `await arun(redis, call)`, or `run_many(redis, calls)`

Every script may be called again when its reply was lost, so a call that met NOSCRIPT is simply sent again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import NoScriptError

from producers.trouble import trouble

INCLUDE = "-- include: "


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua file's text and the SHA-1 by which the server knows it."""

    text: str
    sha: str


@cache
def script(package: str, name: str) -> Script:
    """Read `<package>/scripts/<name>.lua`; a line `-- include: FILE` is replaced by that file's text."""
    folder = resources.files(package) / "scripts"
    lines = []
    for line in (folder / f"{name}.lua").read_text("utf-8").splitlines():
        if line.startswith(INCLUDE):
            line = (folder / line.removeprefix(INCLUDE).strip()).read_text("utf-8")
        lines.append(line)
    text = "\n".join(lines)
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a script, not yet sent."""

    script: Script
    keys: Sequence[str]
    args: Sequence[str | bytes | int | float]

    @property
    def command(self) -> tuple[Any, ...]:
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.args)


def run(redis: Redis, call: Call) -> Any:
    """Send the call and return the script's answer (redis-py's types; see `text` for strings)."""
    try:
        return redis.execute_command(*call.command)
    except NoScriptError:
        redis.script_load(call.script.text)
        return redis.execute_command(*call.command)


async def arun(redis: AsyncRedis, call: Call) -> Any:
    """`run` for redis.asyncio."""
    try:
        return await redis.execute_command(*call.command)
    except NoScriptError:
        await redis.script_load(call.script.text)
        return await redis.execute_command(*call.command)


def run_many(redis: Redis, calls: Sequence[Call]) -> list[Any]:
    """Send all calls in one round trip. An error of the call's own is returned in its place, as an exception object.

    Raises redis errors when the round trip failed, or the server takes no such call from anybody just now
    (`producers.trouble`): then any of the calls may have run.
    """
    if not calls:
        return []
    answers = _pipeline(redis, calls)
    missing = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
    if missing:
        for text in {calls[i].script.text for i in missing}:
            redis.script_load(text)
        for i, answer in zip(missing, _pipeline(redis, [calls[i] for i in missing]), strict=True):
            answers[i] = answer
    for answer in answers:
        if isinstance(answer, Exception) and trouble(answer) is not None:
            raise answer
    return answers


def _pipeline(redis: Redis, calls: Sequence[Call]) -> list[Any]:
    with redis.pipeline(transaction=False) as pipe:
        for call in calls:
            pipe.execute_command(*call.command)
        return list(pipe.execute(raise_on_error=False))


def text(value: Any) -> str:
    """A reply as str, whatever `decode_responses` says."""
    return value.decode() if isinstance(value, bytes) else str(value)
