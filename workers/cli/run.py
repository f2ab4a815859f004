"""`penstock run` and `penstock chat`: a model's output on the terminal.

run computes one prompt's output in this process and ends. chat is a conversation through the gateway of --url. Where
none was named and the usual one does not serve the model, it is through a system of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from engine.params import BEAMS
from workers.cli.commands import Commands
from workers.cli.exits import CALLER_STATUS, Exit, Failure, check_extras, needs, refusing, touching
from workers.cli.options import (
    DEFAULT_URL,
    ENGINE_OF_ONE,
    SAMPLING,
    AsChat,
    Model,
    OpenObjects,
    Prompt,
    Url,
    find_models,
    is_set,
    takes,
)
from workers.cli.terminal import TextStream, WaitNotes, note_end, prompt_text, text_from

if TYPE_CHECKING:
    from engine import Engine, Event, Request, SamplingParams
    from engine.declared import Declared
    from workers.cli.client import Gateway

#: Sampling parameters whose results are not printed, or not as they come.
NOT_SHOWN = frozenset({"best_of", *BEAMS, "logprobs", "prompt_logprobs"})
RUN_STATUS = "Exit status: 0 done, 1 it failed, 2 refused, 130 interrupted."
HELP: Final = """\
/exit           leave; so do /bye and Ctrl-D
/reset          start a new conversation; so does /clear
/system TEXT    set the system message; without TEXT: remove it
/save FILE      write the conversation into a file
/load FILE      go on with the conversation in a file
/help           show this
Three double quotes begin and end a message of several lines. Ctrl-C stops the answer."""
#: What is said of an answer that ended for its length.
CUT: Final = "cut at the output's limit; --max-tokens sets another"
#: Begins and ends a message of several lines.
QUOTES: Final = '"' * 3
#: Sampling temperature for a model that has none of its own.
TEMPERATURE: Final = 0.7
#: Most tokens of an answer without --max-tokens: a model that does not end would fill its whole context.
MAX_ANSWER: Final = 1024

app = Commands("Start here", RUN_STATUS)


def _with_help(field: Declared, text: str) -> Declared:
    """A sampling parameter with another help text."""
    return replace(field, option=None if field.option is None else replace(field.option, help=text))


#: The sampling parameters of a chat.
OF_CHATS: Final = (
    _with_help(
        SAMPLING["max_tokens"], f"Most tokens of an answer. Unset: {MAX_ANSWER:,}, less near the context's end."
    ),
    _with_help(SAMPLING["temperature"], f"Sampling temperature. 0: greedy. Unset: the model's, else {TEMPERATURE}."),
    *(SAMPLING[name] for name in ("top_p", "seed", "stop")),
)


@app.shown("penstock run tiny 'Write fibonacci(n).' --max-tokens 64 --temperature 0")
@takes(
    engine=ENGINE_OF_ONE.values(),
    sampling=[parameter for parameter in SAMPLING.values() if parameter.name not in NOT_SHOWN],
)
def run(
    model: Model,
    prompt: Prompt,
    *,
    chat: AsChat = None,
    system: Annotated[str | None, typer.Option(help="The system message of a chat.")] = None,
    sampling: dict[str, Any],
    open_objects: OpenObjects = False,
    adapter: Annotated[
        str | None,
        typer.Option(metavar="NAME=PATH", help="Use the LoRA adapter in the folder PATH, as PEFT saves one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    engine: dict[str, Any],
) -> None:
    """Load a model, print its output for one prompt as it comes, and end. Uses no server and no queue."""

    if system is not None and chat is False:
        raise Failure("--system is a chat's, and --raw leaves the chat template out: leave one of them out")
    adapter_name, _, adapter_path = ("" if adapter is None else adapter).partition("=")
    if adapter is not None and not (adapter_name and adapter_path):
        raise Failure(f"--adapter {adapter} is not NAME=PATH")
    with needs("worker"):
        from engine import Engine, EngineConfig, EngineError, Request, SamplingParams
        from engine.grammar.schema import bounded
        from engine.params import filled
        from workers.library import verify
    (resolved,) = find_models([model])
    if "draft_model" in engine:
        (guesser,) = find_models([engine["draft_model"]])
        engine["draft_model"] = str(guesser.folder)
    with refusing(EngineError):
        checked = SamplingParams(**sampling)  # refuses bad parameters before the model is loaded for seconds
        if checked.json_schema is not None:
            sampling["json_schema"] = bounded(json.loads(checked.json_schema), open_objects=open_objects).schema
        config = EngineConfig(**engine | ({"max_num_seqs": sampling["n"]} if "n" in sampling else {}))
        text = prompt_text(prompt)
        verify(resolved.folder)
        with Engine.load(resolved.folder, config) as loaded:
            if loaded.card is None:
                raise Failure(f"{resolved.folder} has no tokenizer.json: it cannot read text")
            if adapter_name:
                loaded.load_adapter(adapter_name, adapter_path)
            params = SamplingParams(**sampling, **filled(sampling, loaded.card.defaults))
            prompt_ids = _prompt_ids(loaded, resolved.folder, text, chat, system)
            _show(loaded, Request("run", prompt_ids, params, adapter=adapter_name), as_json)


def _prompt_ids(engine: Engine, folder: Path, text: str, chat: bool | None, system: str | None) -> list[int]:
    """The tokens of a prompt, or of a user's message. `chat`: None if the model's files decide."""
    assert engine.tokenizer is not None
    if chat is False:
        return engine.tokenizer.encode(text)
    from engine.text import ConfinedTemplate, ModelCard, TemplateSource

    source = TemplateSource.from_bytes(ModelCard.tokenizer_files(folder))
    if source is None and chat is None and system is None:
        return engine.tokenizer.encode(text)
    if source is None:
        raise Failure(f"{folder} has no chat template; leave --chat and --system out to continue the text as it is")
    messages = [{"role": "system", "content": system}] if system is not None else []
    with closing(ConfinedTemplate(source)) as template:
        rendered = template.render([*messages, {"role": "user", "content": text}])
    return engine.tokenizer.encode(rendered, add_special_tokens=False)


def _show(engine: Engine, request: Request, as_json: bool) -> None:
    """Print the outputs. Raises Failure if the model fails, and when interrupted."""
    params: SamplingParams = request.params
    outputs: list[dict[str, Any]] = [
        {"index": index, "text": "", "token_ids": [], "finish_reason": None} for index in range(params.n)
    ]
    shown = None if as_json else TextStream(params.n)
    last: Event | None = None
    try:
        for last in _events(engine, request):
            output = outputs[last.choice]
            output["token_ids"] += last.token_ids
            output["text"] += "".join(last.texts)
            output["finish_reason"] = last.finish_reason
            if shown is not None:
                for index, text in enumerate(last.texts):
                    final = last.finish_reason if index + 1 == len(last.texts) else None
                    shown.show({"event": "token", "choice": last.choice, "text": text, "finish_reason": final})
        if shown is not None:
            shown.show({"event": "end"})
    except KeyboardInterrupt:
        engine.abort(request.id)
        raise Failure("interrupted", Exit.INTERRUPTED) from None
    finally:
        if shown is not None:
            shown.close()
    assert last is not None
    if last.error is not None:
        raise Failure(f"the model failed: {last.error}", Exit.TASK_FAILED)
    if as_json:
        output_tokens = sum(len(output["token_ids"]) for output in outputs)
        usage = {"prompt_tokens": last.prompt_tokens, "output_tokens": output_tokens}
        typer.echo(json.dumps({"choices": outputs, "usage": usage}))
    else:
        note_end(any(output["text"] for output in outputs), [output["finish_reason"] for output in outputs])


def _events(engine: Engine, request: Request) -> Iterator[Event]:
    """The request's events, up to its last one."""
    events: SimpleQueue[Event] = SimpleQueue()
    engine.submit(request, events.put)
    while True:
        event = events.get()
        yield event
        if event.done:
            return


@app.shown("penstock chat tiny --system 'Answer in Python.'", status=CALLER_STATUS)
@takes(sampling=OF_CHATS)
def chat(
    context: typer.Context,
    model: Model,
    *,
    system: Annotated[str | None, typer.Option(help="The system message to begin with.")] = None,
    sampling: dict[str, Any],
    url: Url = DEFAULT_URL,
) -> None:
    """Chat with a model on the terminal. /help shows the chat's own commands.

    Where no URL is given and no gateway at the default one serves the model, a system is started for this chat. The
    API key in PENSTOCK_API_KEY goes only to a gateway that --url or PENSTOCK_URL names.
    """
    with _gateway(model, url, named=is_set(context, "url")) as (gateway, name):
        served = {card["id"]: card for card in gateway.models()}
        if name not in served:
            raise Failure(f"{gateway.url} serves no model {name!r}; it has: {', '.join(sorted(served)) or 'none'}")
        capabilities = served[name]["capabilities"]
        if "chat" not in capabilities and "generate" in capabilities:
            raise Failure(f"{name} has no chat template; it can continue texts: penstock run {name} TEXT")
        if "chat" not in capabilities:
            raise Failure(f"{name} generates no text; it can {', '.join(capabilities)}")
        if "temperature" not in served[name].get("defaults", {"temperature": None}):  # a gateway of 0.1.0 does not say
            sampling = {"temperature": TEMPERATURE, **sampling}
        Chat(gateway, {"model": name, **sampling}, system).run()


@contextmanager
def _gateway(model: str, url: str, *, named: bool) -> Iterator[tuple[Gateway, str]]:
    """A gateway and the model's name there. `named`: it is this URL's, and no other."""
    from workers.cli.client import Gateway, Refused
    from workers.library import name_of

    if named:
        yield Gateway(url), model
        return
    # Whoever may listen there is not known: it gets no key.
    name, served, unnamed = name_of(model), False, Gateway(url, with_key=False)
    try:
        served = any(card["id"] == name for card in unnamed.models())
    except Failure as failure:  # most often, none answers there
        if isinstance(failure, Refused) and failure.http_status == 401:
            typer.echo(f"(the gateway at {url} asks for an API key, which is sent to it with --url {url})", err=True)
    if served:
        typer.echo(f"{name}, through the gateway at {url}", err=True)
        yield unnamed, name
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
                if line.lstrip().startswith(QUOTES):
                    self.say(_several_lines(line.lstrip(), partial(input, "... ") if terminal else _line))
                elif not line.startswith("/"):
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
        command, _, argument = line.strip().partition(" ")
        if command in ("/reset", "/clear"):
            self.turns.clear()
            typer.echo("(a new conversation begins)", err=True)
        elif command == "/system":
            self.system = argument.strip() or None
            typer.echo("(the system message is set)" if self.system else "(there is no system message)", err=True)
        elif command == "/help":
            typer.echo(HELP, err=True)
        elif command in ("/exit", "/bye"):
            return False
        elif command in ("/save", "/load") and not argument.strip():
            typer.echo(f"({command} needs the name of a file)", err=True)
        elif command == "/save":
            self.save(Path(argument.strip()).expanduser())
        elif command == "/load":
            self.load(Path(argument.strip()).expanduser())
        else:
            typer.echo(f"(no command {command}; /help shows them)", err=True)
        return True

    def save(self, file: Path) -> None:
        """Write the conversation into a file. Raises Failure."""
        conversation = {"model": self.fields["model"], "system": self.system, "messages": self.turns}
        with touching(file, "write"):
            file.write_text(json.dumps(conversation, ensure_ascii=False, indent=1) + "\n", "utf-8")
        typer.echo(f"({len(self.turns)} messages are in {file})", err=True)

    def load(self, file: Path) -> None:
        """Go on with a conversation that `save` has written. Raises Failure; the conversation is then unchanged."""
        with touching(file, "read"):
            text = file.read_bytes()
        try:
            conversation = json.loads(text)
            system = conversation["system"]
            turns = [{"role": str(one["role"]), "content": str(one["content"])} for one in conversation["messages"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Failure(f"{file} holds no conversation that /save has written") from error
        self.system, self.turns = None if system is None else str(system), turns
        typer.echo(f"({len(turns)} messages are read from {file})", err=True)

    def say(self, text: str) -> None:
        """Send a message and print the answer as it comes. Ctrl-C stops it; the part that came stays in the history.

        Raises Failure; the conversation is then unchanged.
        """
        first = [{"role": "system", "content": self.system}] if self.system is not None else []
        message = {"role": "user", "content": text}
        answer: list[str] = []
        shown = TextStream(1)
        end: dict[str, Any] = {}
        began = 0.0
        try:
            with closing(self._pieces([*first, *self.turns, message], end)) as pieces:
                for piece in pieces:
                    began = began or (time.monotonic() if piece else 0.0)
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
        if sys.stdin.isatty() and (line := _about(end, time.monotonic() - began)):
            typer.echo(line, err=True)
        elif end.get("finish_reason") == "length":
            typer.echo(f"({CUT})", err=True)
        elif end.get("finish_reason") == "stop":
            note_end(any(answer), [])

    def _pieces(self, messages: list[dict[str, str]], end: dict[str, Any]) -> Generator[str]:
        """The answer as it comes, of at most MAX_ANSWER tokens where the user has set no limit. `end`: as of
        `Gateway.chat`."""
        from workers.cli.client import Refused

        request, waits = {**self.fields, "messages": messages}, WaitNotes().show
        if "max_tokens" not in request:
            try:
                yield from self.gateway.chat({**request, "max_tokens": MAX_ANSWER}, end, waits)
            except Refused as refused:
                if refused.error.get("param") != "max_tokens":
                    raise
            else:
                return
        # There is less room than MAX_ANSWER, or it was set: the gateway's own limit is what is left.
        yield from self.gateway.chat(request, end, waits)


def _about(end: dict[str, Any], took_s: float) -> str:
    """The line below an answer: how many tokens came, how fast, and whether it was cut; empty if nothing is known.
    `took_s`: from the first token on."""
    tokens = end.get("usage", {}).get("completion_tokens")
    if tokens is None:
        return ""
    rate = f", {(tokens - 1) / took_s:.1f} a second" if tokens > 1 and took_s > 0 else ""
    cut = f"; {CUT}" if end.get("finish_reason") == "length" else ""
    return f"({tokens} tokens{rate}{cut})"


def _several_lines(first: str, read: Callable[[], str]) -> str:
    """A message between QUOTES, which may end in the line that it begins in. Raises Failure, and what `read` raises."""
    lines = [first.removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(text_from(read))
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


def _line() -> str:
    """Reads a line of standard input that is not a terminal. Raises EOFError."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
