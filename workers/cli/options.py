"""Options that several commands share, each with one meaning and one help text."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from engine.bounds import Biases, Bound, Flag, Integer, Number, Strings, TokenIds, shown
from engine.config import EngineConfig
from engine.declared import Declared, declared
from engine.errors import RequestError
from engine.params import SamplingParams
from workers.cli.exits import Failure

DEFAULT_URL = "http://127.0.0.1:8000"

#: Options' former names -> today's. They work for one more release, and --help does not show them.
RENAMED: Final = {
    "alone": "exclusive",
    "cache": "cache-dir",
    "drain": "drain-timeout",
    "folder": "report-dir",
    "head": "head-bits",
    "i-know": "confirm",
    "kills": "min-kills",
    "letters-kept": "dead-letter-days",
    "longest": "max-output-tokens",
    "max-deaths": "max-worker-deaths",
    "open-tasks": "concurrency",
    "pause": "max-interval",
    "replay": "plan",
    "shared-prefix": "shared-prefix-tokens",
    "spot-endpoint": "spot-metadata-url",
    "spot-notice": "spot-provider",
    "spread": "length-spread",
    "step-limit": "max-step-seconds",
    "unhurried-tokens": "max-non-priority-step-tokens",
    "warm-up": "warm-up-requests",
}


def todays_name(name: str) -> str:
    """An option's name of today, for a name that may be a former one."""
    return RENAMED.get(name, name)


#: The longest time that clocks and servers can still reckon with: 30 years, in seconds.
LONGEST: Final = 1e9


def finite(time: float | None) -> float | None:
    """Checks an option's length of time (s), or None. Raises typer.BadParameter."""
    if time is None:
        return None
    if not math.isfinite(time):
        raise typer.BadParameter(f"{time} is not a length of time")
    if time > LONGEST:
        raise typer.BadParameter(f"{time:g} is too long a time: {LONGEST:g} is the most")
    return time


def process_name(name: str | None) -> str | None:
    """Checks an option's process name, or None. Raises typer.BadParameter."""
    if name is not None and not re.fullmatch(r"[!-~]{1,512}", name):
        raise typer.BadParameter(
            f"{name!r} must be 1 to 512 ASCII letters, digits or punctuation marks, without spaces"
        )
    return name


def _origins(origins: list[str] | None) -> list[str] | None:
    """Checks origins. Raises typer.BadParameter for one that no browser would send."""
    for origin in origins or ():
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):
            raise typer.BadParameter(f"{origin!r} is not an origin; it must be SCHEME://HOST, SCHEME://HOST:PORT or *")
    return origins


def _proxies(proxies: list[str] | None) -> list[str] | None:
    """Checks addresses of proxies. Raises typer.BadParameter for a name: only addresses can be compared."""
    import ipaddress

    for proxy in proxies or ():
        try:
            ipaddress.ip_network("0.0.0.0/0" if proxy == "*" else proxy)
        except ValueError as error:
            raise typer.BadParameter(f"{error}; give an address, a network (10.0.0.0/8), or *") from None
    return proxies


def place(place: str | None) -> str | None:
    """Checks a place for files. Raises typer.BadParameter for a bad URL."""
    from producers.store.blobs.place import checked_place

    try:
        return None if place is None else checked_place(place)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _networks(networks: list[str] | None) -> list[str] | None:
    """Checks an allow-list. Raises typer.BadParameter for what is no network."""
    import ipaddress

    for network in networks or ():
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise typer.BadParameter(f"{error}; give a network (10.0.0.0/8) or an address") from None
    return networks


def _provider(notice: str | None) -> str | None:
    if notice not in (None, "aws"):
        raise typer.BadParameter(f"{notice!r} is unknown; the only provider is aws")
    return notice


Broker = Annotated[
    str,
    typer.Option(
        envvar="BROKER_URL",
        help="The server that holds the queues: Redis or Valkey (redis://HOST:PORT/DB, or "
        "redis+sentinel://HOST:PORT,.../NAME/DB), or SQS (sqs://REGION?prefix=pen-), which also needs --store.",
    ),
]
#: The broker in operators' commands. Unset, it is the server of the `penstock up` in this directory.
AnyBroker = Annotated[
    str | None,
    typer.Option(
        envvar="BROKER_URL",
        help="What holds the queues: a Redis or Valkey, or SQS (sqs://REGION?prefix=pen-). Unset: the server of "
        "`penstock up` in this directory.",
    ),
]
Prices = Annotated[
    Path | None,
    typer.Option(dir_okay=False, help="A table of prices (TOML or JSON): usage is shown with its cost."),
]
Store = Annotated[
    str | None,
    typer.Option(
        envvar="STORE_URL",
        help="The Redis or Valkey server that holds records and token streams. Unset: the broker, if it is one.",
    ),
]
LogLevel = Annotated[str, typer.Option(help="Least severe messages to log: debug, info, warning or error.")]
Url = Annotated[str, typer.Option(envvar="PENSTOCK_URL", help="The gateway's URL.")]
Gpus = Annotated[
    str | None,
    typer.Option(help="Run one worker on each of these GPUs: all, or numbers, GPU-... and MIG-... names, as in 0,1."),
]
MaxStepSeconds = Annotated[
    float,
    typer.Option(
        min=0,
        callback=finite,
        help="Longest engine step. After that the step counts as hung: the worker hands its tasks back and exits. "
        "0: no limit.",
    ),
]
MaxWorkerDeaths = Annotated[
    int,
    typer.Option(min=1, help="Give a task up when this many workers died on it without one new token."),
]
NoBreaker = Annotated[
    bool,
    typer.Option(
        "--no-breaker", help="Take tasks also while the engine fails them, or is far slower than other workers' are."
    ),
]
SpotProvider = Annotated[
    str | None,
    typer.Option(
        callback=_provider,
        help="Drain when this provider announces the end of the instance (spot, Auto Scaling group): aws. Unset: do "
        "not ask.",
    ),
]
SpotMetadataUrl = Annotated[
    str | None, typer.Option(help="URL of the instance's metadata service. Unset: the provider's own.")
]
MaxQueued = Annotated[
    int,
    typer.Option(
        min=0, help="Most tasks that may wait for a model. More are refused with 429, lower tiers first. 0: any."
    ),
]
MaxQueuedPerTenant = Annotated[int, typer.Option(min=0, help="Most tasks of one tenant that may wait, in all. 0: any.")]
MaxQueuedInAll = Annotated[int, typer.Option(min=0, help="As --max-queued, of all models. 0: any.")]
MaxWait = Annotated[
    float,
    typer.Option(
        min=0,
        callback=finite,
        help="Expected wait (s) of the tiers priority and default that counts as full, as --max-queued. 0: any.",
    ),
]
FilesDir = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE",
        envvar="FILES_DIR",
        callback=place,
        help="The folder for uploaded files and batches' output, or s3://BUCKET/PREFIX. All gateways and sweepers "
        "share it. Unset: files in the data directory.",
    ),
]
FilesRedirect = Annotated[
    bool,
    typer.Option(
        "--files-redirect",
        help="Send downloads to the bucket of --files-dir, by URLs that open a file for 15 minutes. Unset: files come "
        "through the gateway.",
    ),
]
MaxFile = Annotated[int, typer.Option(min=1, help="Largest uploaded file, in bytes.")]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        callback=_origins,
        help="Let web pages of this origin call the gateway: https://chat.example.org, or * for all. May be repeated. "
        "Unset: none.",
    ),
]
ProxyHeaders = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS",
        callback=_proxies,
        help="Believe X-Forwarded-For and X-Forwarded-Proto of the proxy at this address or network (10.0.0.0/8), or * "
        "for any. May be repeated. Unset: no proxy.",
    ),
]


WebhookAllow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CIDR",
        callback=_networks,
        help="Let webhooks call addresses of this network though they are not public, also by http:// and on any port: "
        "10.0.0.0/8, 127.0.0.0/8. May be repeated. Unset: none.",
    ),
]


#: An engine's settings that have an option, by name.
ENGINE: Final = {name: one for name, one in declared(EngineConfig).items() if one.option is not None}
#: Those of an engine that serves one request.
ENGINE_OF_ONE: Final = {name: one for name, one in ENGINE.items() if one.option and not one.option.serving}
#: A request's sampling parameters, by name.
SAMPLING: Final = declared(SamplingParams)
#: The types of options by the bounds of their fields; other fields are text.
_KINDS: Final[dict[type[Bound], Any]] = {
    Integer: int,
    Number: float,
    Flag: bool,
    Strings: list[str],
    TokenIds: list[int],
    Biases: list[str],
}


def takes(**groups: Collection[Declared]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of declared fields, in the place of its parameter of a group's name.

    The command gets that parameter as a dict of the fields that were given. Its Failures name options, not fields.
    """

    def taking(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        every: list[inspect.Parameter] = []
        for one in own.parameters.values():
            options = map(_parameter, groups[one.name]) if one.name in groups else [one]
            every += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]

        @wraps(command)
        def called(**given: Any) -> None:
            for name, fields in groups.items():
                asked = {field.name: _read(field, given.pop(field.name)) for field in fields}
                given[name] = {
                    field: value for field, value in asked.items() if value is not None and value is not False
                }
            try:
                command(**given)
            except Failure as failure:
                raise Failure(_as_written(str(failure), groups.values()), failure.status) from failure

        called.__signature__ = own.replace(parameters=every)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in every}
        return called

    return taking


def _as_written(message: str, groups: Iterable[Collection[Declared]]) -> str:
    """A message with the options in place of fields' names: words with `_`, or before `=`. Paths stay as they are."""
    options = {field.name: _option_of(field) for fields in groups for field in fields}
    names = "|".join(name if "_" in name else f"{name}(?==)" for name in options)
    return re.sub(rf"(?<![\w/.-])({names})(?![\w/-])(?:=True)?", lambda found: options[found[1]], message)


def _option_of(field: Declared) -> str:
    assert field.option is not None
    return field.option.name or f"--{field.name.replace('_', '-')}"


def _parameter(field: Declared) -> inspect.Parameter:
    """A declared field as a parameter that typer understands. A value out of bounds raises Failure."""
    assert field.option is not None
    bound, name = field.bound, _option_of(field)

    def within(value: Any) -> Any:
        if value is None or bound is None:
            return value
        try:
            bound.check(field.name, _read(field, value))
        except RequestError:
            raise Failure(f"{name} is {shown(value)}; it must be {bound.words}") from None
        return value

    kind = _KINDS.get(type(bound), str) if bound else str
    option = typer.Option(name, help=field.option.help, metavar=field.option.metavar, callback=within)
    default = False if kind is bool else None
    annotation: Any = Annotated[kind if kind is bool else kind | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _read(field: Declared, value: Any) -> Any:
    """A field's value, from its option's."""
    return dict(map(_bias, value)) if value is not None and isinstance(field.bound, Biases) else value


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise Failure(f"--logit-bias is {text!r}; it must be ID=NUMBER, such as 318=-100") from None


def check_spot(provider: str | None, url: str | None) -> None:
    """Checks the metadata service's URL. Raises typer.BadParameter without a provider, or for another kind of text."""
    if url is not None and (provider is None or not url.startswith(("http://", "https://"))):
        raise typer.BadParameter(
            "must be a URL (http://...), and needs --spot-provider", param_hint="--spot-metadata-url"
        )


def health_ports(first: int | None, workers: int) -> list[int | None]:
    """A port for each worker, counted up from the first one's; 0 means any free port, for all.

    Raises typer.BadParameter where the last port would be above 65535.
    """
    if first is None or first == 0:
        return [first] * workers
    if first + workers - 1 > 65535:
        raise typer.BadParameter(
            f"{workers} workers need the ports {first} to {first + workers - 1}, and 65535 is the last",
            param_hint="--health-port",
        )
    return list(range(first, first + workers))


def said_again(context: typer.Context, *, only: Sequence[str] = (), without: Sequence[str] = ()) -> list[str]:
    """The command line's options, as arguments for another command.

    Left out are options with their default, and those that an environment variable carries. `only` and `without` are
    names of parameters.
    """
    argv: list[str] = []
    for option in context.command.params:
        value = context.params.get(str(option.name))
        if value is None or value == option.default or isinstance(option.envvar, str):
            continue
        if (not only or option.name in only) and option.name not in without:
            for one in value if isinstance(value, list) else [value]:
                argv += [option.opts[0]] if one is True else [option.opts[0], str(one)]
    return argv
