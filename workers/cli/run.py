"""`penstock run`: computes one prompt's output in this process and ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.commands import Commands
from workers.cli.exits import Exit, Failure, needs, refusing
from workers.cli.option_groups import ENGINE_OF_ONE, SAMPLING, takes
from workers.cli.options import AsChat, Model, Prompt, find_models
from workers.cli.terminal import TextStream, text_from

if TYPE_CHECKING:
    from engine import Engine, Event, Request, SamplingParams

#: Sampling parameters whose results are not printed.
NOT_SHOWN = frozenset({"best_of", "logprobs", "prompt_logprobs"})
STATUS = "Exit status: 0 done, 1 it failed, 2 refused, 130 interrupted."


app = Commands("Start here", STATUS)


@app.shown("penstock run tiny 'def fibonacci(n):' --max-tokens 64 --temperature 0")
@takes(engine=ENGINE_OF_ONE.values(), sampling=[one for one in SAMPLING.values() if one.name not in NOT_SHOWN])
def run(
    model: Model,
    prompt: Prompt,
    *,
    chat: AsChat = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    sampling: dict[str, Any],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    engine: dict[str, Any],
) -> None:
    """Load a model, print its output for one prompt as it comes, and end. Uses no server and no queue."""

    if system is not None and not chat:
        raise Failure("--system needs --chat")
    with needs("worker"):
        from engine import Engine, EngineConfig, EngineError, Request, SamplingParams
        from engine.params import filled
        from workers.library import verify
    (found,) = find_models([model])
    if "draft_model" in engine:
        (guesser,) = find_models([engine["draft_model"]])
        engine["draft_model"] = str(guesser.folder)
    with refusing(EngineError):
        SamplingParams(**sampling)  # refuses bad parameters before the model is loaded for seconds
        config = EngineConfig(**engine | ({"max_num_seqs": sampling["n"]} if "n" in sampling else {}))
        text = text_from(sys.stdin.read) if prompt == "-" else prompt
        verify(found.folder)
        with Engine.load(found.folder, config) as loaded:
            if loaded.card is None:
                raise Failure(f"{found.folder} has no tokenizer.json: it cannot read text")
            params = SamplingParams(**sampling, **filled(sampling, loaded.card.defaults))
            _show(loaded, Request("run", _prompt_ids(loaded, found.folder, text, chat, system), params), as_json)


def _prompt_ids(engine: Engine, folder: Path, text: str, chat: bool, system: str | None) -> list[int]:
    assert engine.tokenizer is not None
    if not chat:
        return engine.tokenizer.encode(text)
    from engine.text import ConfinedTemplate, ModelCard, TemplateSource

    source = TemplateSource.from_bytes(ModelCard.tokenizer_files(folder))
    if source is None:
        raise Failure(f"{folder} has no chat template; leave --chat out to continue the text as it is")
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
                for place, text in enumerate(last.texts):
                    final = last.finish_reason if place + 1 == len(last.texts) else None
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
        made = sum(len(output["token_ids"]) for output in outputs)
        usage = {"prompt_tokens": last.prompt_tokens, "output_tokens": made}
        typer.echo(json.dumps({"choices": outputs, "usage": usage}))


def _events(engine: Engine, request: Request) -> Iterator[Event]:
    """The request's events, up to its last one."""
    came: SimpleQueue[Event] = SimpleQueue()
    engine.submit(request, came.put)
    while True:
        event = came.get()
        yield event
        if event.done:
            return
