"""`penstock chat`: a conversation on the terminal, through a running gateway or a system of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from workers.cli.commands import Commands
from workers.cli.exits import CALLER_STATUS, Exit, Failure, check_extras
from workers.cli.option_groups import SAMPLING, takes
from workers.cli.options import Model, find_models
from workers.cli.terminal import TextStream, text_from

if TYPE_CHECKING:
    from workers.cli.client import Gateway

HELP: Final = """\
/exit           leave; so does Ctrl-D
/reset          start a new conversation
/system TEXT    set the system message; without TEXT: remove it
/help           show this
Ctrl-C stops the answer."""


app = Commands("Start here", CALLER_STATUS)


@app.shown("penstock chat tiny --system 'Answer in Python.'")
@takes(sampling=[SAMPLING[name] for name in ("max_tokens", "temperature", "top_p", "seed", "stop")])
def chat(
    model: Model,
    *,
    system: Annotated[str | None, typer.Option(help="The system message to begin with.")] = None,
    sampling: dict[str, Any],
    url: Annotated[
        str | None,
        typer.Option(envvar="PENSTOCK_URL", help="The URL of a running gateway. Unset: start a system for this chat."),
    ] = None,
) -> None:
    """Chat with a model on the terminal. /help shows the chat's own commands."""
    with _gateway(model, url) as (gateway, name):
        served = {one["id"]: one for one in gateway.models()}
        if name not in served:
            raise Failure(f"{gateway.url} serves no model {name!r}; it has: {', '.join(sorted(served)) or 'none'}")
        if "chat" not in served[name]["capabilities"]:
            raise Failure(f"{name} has no chat template; it can continue texts: penstock run {name} TEXT")
        Chat(gateway, {"model": name, **sampling}, system).run()


@contextmanager
def _gateway(model: str, url: str | None) -> Iterator[tuple[Gateway, str]]:
    """A gateway and the model's name there."""
    from workers.cli.client import Gateway

    if url is not None:
        yield Gateway(url), model
        return

    check_extras("gateway", "worker", "webhooks")
    from workers.cli.system import running_system

    try:
        models = find_models([model])
        typer.echo(f"loading {models[0].name} ...", err=True)
        with running_system(models) as system:
            yield Gateway(system.url), models[0].name
    except KeyboardInterrupt:
        raise Failure("interrupted", Exit.INTERRUPTED) from None


@dataclass(slots=True)
class Chat:
    """A conversation. `fields` go into every request."""

    gateway: Gateway
    fields: dict[str, Any]
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def run(self) -> None:
        """Converse until the user leaves. Raises Failure only without a terminal; on a terminal, it prints failures."""
        terminal = sys.stdin.isatty()
        if terminal:
            with suppress(ImportError):
                import readline  # noqa: F401 - input() edits lines and remembers them then
            typer.echo("Chat with /help for help; Ctrl-D leaves.", err=True)
        while True:
            try:
                line = text_from(partial(input, "> ") if terminal else _line)
                if not line.startswith("/"):
                    if line.strip():
                        self.say(line)
                elif not self.obey(line):
                    return
            except EOFError:
                if terminal:
                    typer.echo()
                return
            except KeyboardInterrupt:
                if not terminal:
                    raise
                typer.echo("\n(/exit or Ctrl-D leaves)", err=True)
            except Failure as failure:
                if not terminal:
                    raise
                typer.echo(f"penstock: {failure}", err=True)

    def obey(self, line: str) -> bool:
        """Carry out a command; False to leave."""
        command, _, rest = line.strip().partition(" ")
        if command == "/reset":
            self.turns.clear()
            typer.echo("(a new conversation begins)", err=True)
        elif command == "/system":
            self.system = rest.strip() or None
            typer.echo("(the system message is set)" if self.system else "(there is no system message)", err=True)
        elif command == "/help":
            typer.echo(HELP, err=True)
        elif command == "/exit":
            return False
        else:
            typer.echo(f"(no command {command}; /help shows them)", err=True)
        return True

    def say(self, text: str) -> None:
        """Send a message and print the answer as it comes. Ctrl-C stops it; the part that came stays in the history.

        Raises Failure; the conversation is then unchanged.
        """
        first = [{"role": "system", "content": self.system}] if self.system is not None else []
        message = {"role": "user", "content": text}
        answer: list[str] = []
        shown = TextStream(1)
        try:
            request = {**self.fields, "messages": [*first, *self.turns, message]}
            with closing(self.gateway.chat(request)) as pieces:
                for piece in pieces:
                    answer.append(piece)
                    shown.show({"event": "token", "text": piece})
        except KeyboardInterrupt:
            shown.close()
            typer.echo("(stopped)", err=True)
        except Failure as failure:
            if self.turns and "maximum context length" in str(failure):
                raise Failure(f"{failure} /reset starts a new conversation.", failure.status) from failure
            raise
        finally:
            shown.close()
        self.turns += [message, {"role": "assistant", "content": "".join(answer)}]


def _line() -> str:
    """Reads a line of standard input that is not a terminal. Raises EOFError."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
