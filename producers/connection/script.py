"""Lua scripts as values: a `Call` holds a script, its keys and its arguments; `run` sends it.

    call = protocol.cancel("t1")          # pure: nothing is sent
    accepted, status = run(redis, call)   # or `await arun(redis, call)`, or `run_many(redis, calls)`

A server that does not know a script (it is new, or got SCRIPT FLUSH) gets the script's text with the call, in one
command, so that no flush can come between.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from hiredis import pack_command
from redis import ConnectionPool, Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import NoScriptError, ResponseError

from producers.connection.trouble import trouble

INCLUDE = "-- include: "


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script's text, its SHA-1 for EVALSHA, and whether it reads only (`#!lua flags=no-writes`): then its caller
    needs no right to write its keys."""

    text: str
    sha: str
    reads: bool = False


@cache
def script(package: str, name: str) -> Script:
    """Load `<package>/scripts/<name>.lua`. A line `-- include: FILE` is replaced by that file's text, recursively;
    `PACKAGE/FILE` is another package's.

    Raises RuntimeError if the package's files are missing.
    """
    text = _whole(package, f"{name}.lua")
    reads = text.startswith("#!lua") and "no-writes" in text.partition("\n")[0]
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), reads)


def _whole(package: str, name: str) -> str:
    lines = []
    for line in _files(package)[name].splitlines():
        if line.startswith(INCLUDE):
            other, _, file = line[len(INCLUDE) :].strip().rpartition("/")
            line = _whole(other or package, file)
        lines.append(line)
    return "\n".join(lines)


@cache
def _files(package: str) -> dict[str, str]:
    """All scripts of a package, read together at first use: installing another version must not change them later."""
    folder = resources.files(package) / "scripts"
    try:
        files = {file.name: file.read_text("utf-8") for file in folder.iterdir() if file.name.endswith(".lua")}
    except OSError as error:  # an OSError would look like an unreachable server
        raise RuntimeError(
            f"{folder} cannot be read ({error}): install Penstock again and restart this process"
        ) from error
    if not files:
        raise RuntimeError(f"{folder} has no scripts: install Penstock again and restart this process")
    return files


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a script, not sent yet."""

    script: Script
    keys: Sequence[str]
    args: Sequence[str | bytes | int | float]

    @property
    def command(self) -> tuple[Any, ...]:
        name = "EVALSHA_RO" if self.script.reads else "EVALSHA"
        return (name, self.script.sha, len(self.keys), *self.keys, *self.args)

    @property
    def whole(self) -> tuple[Any, ...]:
        """The command with the script's text, for a server that does not know the script; it then keeps it."""
        name = "EVAL_RO" if self.script.reads else "EVAL"
        return (name, self.script.text, len(self.keys), *self.keys, *self.args)


def run(redis: Redis, call: Call) -> Any:
    """Send the call and return the script's answer (redis-py's types; see `text` for strings)."""
    (answer,) = _pipeline(redis, [call.command])
    if isinstance(answer, NoScriptError):
        (answer,) = _pipeline(redis, [call.whole])
    if isinstance(answer, Exception):
        raise answer
    return answer


async def arun(redis: AsyncRedis, call: Call) -> Any:
    """`run` for redis.asyncio."""
    try:
        return await aexecute(redis, *call.command)
    except NoScriptError:
        return await aexecute(redis, *call.whole)


async def aexecute(redis: AsyncRedis, *command: Any) -> Any:
    """The server's answer as it came. redis.asyncio's own `execute_command` takes twice the time of the processor."""
    pool = redis.connection_pool
    connection = await pool.get_connection()
    try:
        await connection.send_packed_command([pack_command(command)])
        return await connection.read_response()
    except ResponseError:
        raise
    except BaseException:  # also if the caller leaves: the next command must not read this one's answer
        await connection.disconnect(nowait=True)
        raise
    finally:
        await pool.release(connection)


async def aexecute_many(redis: AsyncRedis, commands: Sequence[Sequence[str | bytes | int]]) -> list[Any]:
    """The answers to commands, in one round trip. Raises the first error among them."""
    if not commands:
        return []
    async with redis.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        answers: list[Any] = await pipe.execute()
        return answers


def run_many(redis: Redis, calls: Sequence[Call]) -> list[Any]:
    """Send all calls in one round trip. A call's own error is returned at its index, as an exception object.

    Raises redis errors if the round trip failed, or the server takes no such calls now
    (`producers.connection.trouble`). Any of the calls may have run then.
    """
    if not calls:
        return []
    answers = _pipeline(redis, [call.command for call in calls])
    while missing := [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]:
        first = {calls[i].script.sha: i for i in reversed(missing)}
        again = [calls[i].whole if first[calls[i].script.sha] == i else calls[i].command for i in missing]
        for i, answer in zip(missing, _pipeline(redis, again), strict=True):
            answers[i] = answer
    for answer in answers:
        if isinstance(answer, Exception) and trouble(answer) is not None:
            raise answer
    return answers


def _pipeline(redis: Redis, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The answers to commands, in one round trip. redis-py's own pipelines inspect each argument and answer again,
    which doubles the time."""
    pool: ConnectionPool = redis.connection_pool
    connection = pool.get_connection()
    try:
        connection.send_packed_command([b"".join(map(pack_command, commands))])
        return [_answer(connection) for _ in commands]
    except BaseException:  # also if the caller is interrupted: the next command must not read these answers
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def text(value: Any) -> str:
    """A reply as str, with and without `decode_responses`."""
    return value.decode() if isinstance(value, bytes) else str(value)


def ms(time: Sequence[Any]) -> int:
    """A reply to TIME (seconds, microseconds) in milliseconds."""
    return int(time[0]) * 1000 + int(time[1]) // 1000


def seconds(time: Sequence[Any]) -> float:
    """A reply to TIME in seconds."""
    return int(time[0]) + int(time[1]) / 1e6


def parsed_value(raw: str | bytes | None) -> Any:
    """The value of JSON text; None if it cannot be parsed."""
    try:
        return json.loads(raw or "null")
    except (ValueError, RecursionError):
        return None


def parsed(raw: str | bytes | None) -> dict[str, Any]:
    """The object of JSON text; empty if it is not an object."""
    value = parsed_value(raw)
    return value if isinstance(value, dict) else {}
