"""Options that several commands have, each with one meaning and one help text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

DEFAULT_URL = "http://127.0.0.1:8000"


#: What clocks and servers can still reckon with: 30 years, in seconds.
LONGEST: Final = 1e9


def finite(time: float | None) -> float | None:
    """Of an option that is a length of time, or is not given. Raises typer.BadParameter."""
    if time is None:
        return None
    if not math.isfinite(time):
        raise typer.BadParameter(f"{time} is no length of time")
    if time > LONGEST:
        raise typer.BadParameter(f"{time:g} is too long a time: {LONGEST:g} is the most")
    return time


def process_name(name: str | None) -> str | None:
    """Of an option that is the name of a process, or is not given. Raises typer.BadParameter."""
    if name is not None and not re.fullmatch(r"[!-~]{1,512}", name):
        raise typer.BadParameter(f"{name!r} must be 1 to 512 letters, digits or signs of ASCII, without spaces")
    return name


def _origins(origins: list[str] | None) -> list[str] | None:
    """Raises typer.BadParameter for what no browser would send as Origin."""
    for origin in origins or ():
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):
            raise typer.BadParameter(f"{origin!r} is no origin: that is SCHEME://HOST or SCHEME://HOST:PORT, or *")
    return origins


def _known(notice: str | None) -> str | None:
    if notice not in (None, "aws"):
        raise typer.BadParameter(f"{notice!r} is not known; there is aws")
    return notice


Url = Annotated[str, typer.Option(envvar="PENSTOCK_URL", help="Where the gateway is.")]
MaxTokens = Annotated[int | None, typer.Option(help="Longest output; unset: as far as the context goes.")]
MinTokens = Annotated[int | None, typer.Option(help="Shortest output.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; unset: the model's own.")]
TopK = Annotated[int | None, typer.Option(help="Sample from this many tokens; 0: all.")]
TopP = Annotated[float | None, typer.Option(help="Sample from this much probability.")]
MinP = Annotated[float | None, typer.Option(help="Leave out what is less likely than this share of the likeliest.")]
TypicalP = Annotated[float | None, typer.Option(help="Sample from this much probability of the least surprising.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: tokens that were there before are less likely.")
]
PresencePenalty = Annotated[float | None, typer.Option(help="Above 0: less likely once they were written.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="Above 0: less likely each time they were written.")]
Seed = Annotated[int | None, typer.Option(help="Makes the output repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own end.")]
Outputs = Annotated[int | None, typer.Option("-n", help="How many outputs.")]
DType = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
Quantization = Annotated[
    str | None,
    typer.Option(help="none, or fp8: weights and activations in 8 bits, on CUDA from compute capability 8.9."),
]
KvCacheDType = Annotated[
    str | None,
    typer.Option(help="auto, int8 or fp8: keys and values in 8 bits, for more context in the same memory."),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic", help="Output that depends on no neighbour, chunk or interruption, to the bit; slower."
    ),
]
Speculate = Annotated[
    str | None,
    typer.Option(
        help="Guess tokens and compute several in one step, with the same output: lookup (what followed the same words "
        "before), draft (a smaller model), none; unset: draft with --draft-model, else none."
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(help="The smaller model that guesses, named as MODEL is; it has the model's own vocabulary."),
]
SpeculateTokens = Annotated[
    int | None, typer.Option(min=1, max=16, help="Tokens guessed at a time, at most; unset: 5.")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Gpus = Annotated[
    str | None,
    typer.Option(help="One process for each of these GPUs: all, or numbers, GPU-... and MIG-... names, as in 0,1."),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; unset: as many as cores, or as a container may use.")]
StepLimit = Annotated[
    float,
    typer.Option(
        min=0,
        callback=finite,
        help="Seconds after which a step is taken to hang: tasks go elsewhere, and the worker ends. 0: off.",
    ),
]
MaxDeaths = Annotated[
    int, typer.Option(min=1, help="Workers that a task may lose, with no new token, before it is given up.")
]
SpotNotice = Annotated[
    str | None,
    typer.Option(
        callback=_known, help="aws: drain when the instance is about to be taken away; unset: nobody is asked."
    ),
]
SpotEndpoint = Annotated[str | None, typer.Option(help="Where the instance's metadata are; unset: where AWS has them.")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Sequences in one batch.")]
MaxBatchedTokens = Annotated[int | None, typer.Option(help="Tokens computed in one step.")]
UnhurriedTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a step without a prompt of the priority tier: such a request may have to wait for one; "
        "unset: as many as of any."
    ),
]
KvCacheBytes = Annotated[int | None, typer.Option(help="Memory for keys and values.")]
MemoryShare = Annotated[
    float | None,
    typer.Option(help="Part of a GPU's memory to take where --kv-cache-bytes is not given; unset: 0.85."),
]
MaxQueued = Annotated[
    int | None,
    typer.Option(min=1, help="Tasks of a pool that may wait; more are refused with 429, lower tiers first."),
]
MaxQueuedPerTenant = Annotated[int | None, typer.Option(min=1, help="Tasks of one tenant that may wait in a pool.")]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        callback=_origins,
        help="Let web pages of this origin (https://chat.example.org; * for all) call the gateway. May be repeated; "
        "unset: none.",
    ),
]


def check_spot(notice: str | None, endpoint: str | None) -> None:
    """Raises typer.BadParameter for an endpoint that nobody would ask, or that is none."""
    if endpoint is not None and (notice is None or not endpoint.startswith(("http://", "https://"))):
        raise typer.BadParameter("it is a URL, http://..., beside --spot-notice", param_hint="--spot-endpoint")


def health_ports(first: int | None, workers: int) -> list[int | None]:
    """One for each of so many workers: the first one's, and those that follow it; 0 is any, for all. Raises
    typer.BadParameter where there are not as many."""
    if first is None or first == 0:
        return [first] * workers
    if first + workers - 1 > 65535:
        raise typer.BadParameter(
            f"{workers} workers need the ports {first} to {first + workers - 1}, and 65535 is the last",
            param_hint="--health-port",
        )
    return list(range(first, first + workers))


def said_again(context: typer.Context, *, only: Sequence[str] = (), without: Sequence[str] = ()) -> list[str]:
    """What the command line said of its options, to be said to another command; but for what has its place in the
    environment. `only` these, or all `without` those, by the names of the parameters."""
    argv: list[str] = []
    for option in context.command.params:
        value = context.params.get(str(option.name))
        if value is None or value == option.default or isinstance(option.envvar, str):
            continue
        if (not only or option.name in only) and option.name not in without:
            for one in value if isinstance(value, list) else [value]:
                argv += [option.opts[0]] if one is True else [option.opts[0], str(one)]
    return argv


def speculation(speculate: str | None, draft_model: str | None, speculate_tokens: int | None) -> dict[str, Any]:
    """Of EngineConfig, but for the draft model, which is still named as the caller did."""
    chosen = "draft" if speculate is None and draft_model is not None else speculate
    return {"speculate": chosen, "draft_model": draft_model, "speculate_tokens": speculate_tokens}
