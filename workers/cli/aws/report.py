"""Prints what was found in an AWS account, and tells AWS's errors."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import typer

from workers.cli.exits import Exit, Failure
from workers.cli.terminal.show import say

if TYPE_CHECKING:
    from producers.broker.sqs.queues.setup import Finding

#: Action -> words for it, done and only looked at.
_WORDS: Final = {
    "create": ("created", "missing"),
    "change": ("changed", "differs"),
    "keep": ("as it is", "in order"),
    "wrong": ("wrong", "wrong"),
}


def show(findings: Sequence[Finding], *, applied: bool, as_json: bool) -> None:
    """Print each finding on a line of its own."""
    for one in findings:
        word = _WORDS[one.action][0 if applied else 1]
        if as_json:
            about = {"kind": one.kind, "name": one.name, "action": one.action, "details": dict(one.details)}
            typer.echo(json.dumps(about | {"url": one.url, "list": one.list}))
            continue
        details = "".join(f"\n          {name}: {text}" for name, text in one.details.items())
        say(f"{word:<8}  {one.kind} {one.name}{details}")


@contextmanager
def telling(broker: str) -> Iterator[None]:
    """Within it, errors of AWS and of the store raise Failure, which says what to do. `broker`: its URL."""
    from redis.exceptions import RedisError

    from producers.connection.aws import AwsError, AwsNotInstalled
    from producers.connection.trouble import Trouble, said, trouble

    try:
        yield
    except (ValueError, AwsNotInstalled) as error:
        raise Failure(str(error)) from error
    except AwsError as error:
        away = error.trouble is Trouble.AWAY
        advice = _like(urlsplit(broker).netloc) if error.code == "Unreachable" else ""
        raise Failure(f"{error}{advice}", Exit.UNREACHABLE if away else Exit.REFUSED) from error
    except (RedisError, OSError) as error:
        status = Exit.UNREACHABLE if trouble(error) is Trouble.AWAY else Exit.REFUSED
        raise Failure(f"the store: {said(error)}", status) from error


def _like(region: str) -> str:
    """Advice where nothing answers in a region that boto3 does not know."""
    import boto3

    session = boto3.session.Session()
    known = [one for kind in session.get_available_partitions() for one in session.get_available_regions("sqs", kind)]
    if region in known:
        return ""
    close = difflib.get_close_matches(region, known, 1)
    return f" (no region {region} is known{f'; is it {close[0]}?' if close else ''})"
