"""Options that several commands share, each with one meaning and one help text, and the checks of their values.

Checks are typer's callbacks, or are called after parsing; they raise typer.BadParameter. Groups of options become one
parameter of a command: takes(engine=...) -> an option for each field of EngineConfig or SamplingParams -> the command
gets one dict. `as_arguments` repeats a command line for another process.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from engine.config import EngineConfig
from engine.declared import Biases, Bound, Declared, Flag, Integer, Number, Strings, TokenIds, declared, shown
from engine.errors import RequestError, message_of, renamed
from engine.params import SamplingParams
from workers.cli.exits import Failure, needs
from workers.cli.terminal import note
from workers.errors import Refused

if TYPE_CHECKING:
    from workers.library import ResolvedModel

DEFAULT_URL: Final = "http://127.0.0.1:8000"
#: The longest time that clocks and servers can still reckon with: 30 years, in seconds.
LONGEST: Final = 1e9
#: The help text of the options and arguments that name a model.
MODEL: Final = (
    "A folder, a GGUF file, a bundled or pulled model, smollm2, hf://OWNER/NAME[/FILE.gguf][@REVISION], or "
    "s3://BUCKET/PREFIX/NAME/VERSION; NAME=MODEL gives it another name."
)
#: How commands find a system's servers: those that need broker or store take these three (`servers.addresses`).
Broker = Annotated[
    str | None,
    typer.Option(
        envvar="BROKER_URL",
        help="The server that holds the queues: Redis or Valkey (redis://HOST:PORT/DB, or "
        "redis+sentinel://HOST:PORT,.../NAME/DB), or SQS (sqs://REGION?prefix=pen-). Unset: that of --data-dir.",
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        envvar="STORE_URL",
        help="The Redis or Valkey server that holds records and token streams. Unset: the broker; with SQS, that of "
        "--data-dir.",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="The data directory of `penstock up`, with its embedded server and its files. Unset: .penstock."),
]
Prices = Annotated[
    Path | None, typer.Option(dir_okay=False, help="A table of prices (TOML or JSON): usage is shown with its cost.")
]
RequireSignature = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="KEY",
        help="Refuse models that no one has signed with this public ed25519 key (PEM): `penstock models sign`. May be "
        "repeated: one of the keys will do.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON.")]
StoredModel = Annotated[str, typer.Argument(metavar="NAME", help="A model in the store.")]
OfTenant = Annotated[str | None, typer.Option(help="Tasks of this tenant.")]
OfTier = Annotated[str | None, typer.Option(help="Tasks of this service tier.")]
HealthPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Serve /livez and /readyz on this port. 0: any free port. Unset: no port."),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on. 0: any free port.")]
Prompt = Annotated[
    str, typer.Argument(metavar="PROMPT", help="A question, or a text to continue; - reads it from standard input.")
]
AsChat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="PROMPT is a user's message, which the model's chat template takes; or a text that the model continues. "
        "Unset: --chat if the model has a template.",
    ),
]
OpenObjects = Annotated[
    bool, typer.Option("--open-objects", help="JSON objects may have members that their schema does not name.")
]
LogLevel = Annotated[str, typer.Option(help="Least severe messages to log: debug, info, warning or error.")]
#: How commands find a system's gateway.
Url = Annotated[str, typer.Option(envvar="PENSTOCK_URL", help="The gateway's URL.")]
Gpus = Annotated[
    str | None,
    typer.Option(help="Run one worker on each of these GPUs: all, or numbers, GPU-... and MIG-... names, as in 0,1."),
]
SecretsKey = Annotated[
    Path | None,
    typer.Option(
        envvar="PENSTOCK_SECRETS_KEY_FILE",
        dir_okay=False,
        help="Encrypt webhooks' secrets in the store with the keys of this file, which `penstock secrets key` makes. "
        "Unset: they are stored in plain.",
    ),
]
BackupKey = Annotated[
    Path | None,
    typer.Option(
        envvar="PENSTOCK_BACKUP_KEY_FILE",
        dir_okay=False,
        help="Encrypt backup and journal with the first key of this file, which `penstock secrets key` makes; all of "
        "its keys read. Unset: they are plain.",
    ),
]
#: Ways to place tasks (docs/how/placement.md).
PLACEMENTS: Final = ("prefix", "off")
#: An engine's settings that have an option, by name.
ENGINE: Final = {name: field for name, field in declared(EngineConfig).items() if field.option is not None}
#: Those of an engine that serves one request.
ENGINE_OF_ONE: Final = {name: field for name, field in ENGINE.items() if field.option and not field.option.serving}
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
#: A declared field, or an option as typer understands it.
Option = Declared | inspect.Parameter


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


def origins(origins: list[str] | None) -> list[str] | None:
    """Checks origins. Raises typer.BadParameter for one that no browser would send."""
    for origin in origins or ():
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):
            raise typer.BadParameter(f"{origin!r} is not an origin; it must be SCHEME://HOST, SCHEME://HOST:PORT or *")
    return origins


def proxies(proxies: list[str] | None) -> list[str] | None:
    """Checks addresses of proxies. Raises typer.BadParameter for a name: only addresses can be compared."""
    import ipaddress

    for proxy in proxies or ():
        try:
            ipaddress.ip_network("0.0.0.0/0" if proxy == "*" else proxy)
        except ValueError as error:
            raise typer.BadParameter(f"{error}; give an address, a network (10.0.0.0/8), or *") from None
    return proxies


def checked_location(location: str | None) -> str | None:
    """Checks a place for files. Raises typer.BadParameter for a bad URL."""
    from producers.store.blobs import valid_location

    try:
        return None if location is None else valid_location(location)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def checked_locations(locations: list[str]) -> list[str]:
    """Checks places for files. Raises as `checked_location` does."""
    return [location for location in map(checked_location, locations) if location is not None]


def networks(networks: list[str] | None) -> list[str] | None:
    """Checks an allow-list. Raises typer.BadParameter for what is no network."""
    import ipaddress

    for network in networks or ():
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise typer.BadParameter(f"{error}; give a network (10.0.0.0/8) or an address") from None
    return networks


def provider(notice: str | None) -> str | None:
    if notice not in (None, "aws"):
        raise typer.BadParameter(f"{notice!r} is unknown; the only provider is aws")
    return notice


def checked_placement(value: str) -> str:
    """Raise typer.BadParameter unless it is a way to place tasks."""
    if value not in PLACEMENTS:
        raise typer.BadParameter(f"it is {shown(value)}; it must be {' or '.join(PLACEMENTS)}")
    return value


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


def complete_model(incomplete: str) -> list[str]:
    """Names of models on this machine that begin with `incomplete`, for shell completion."""
    from workers.library.reference import PACKAGED, available

    return [name for name in dict.fromkeys([*available(), *PACKAGED]) if name.startswith(incomplete)]


def find_models(references: Sequence[str], say: Callable[[str], None] = note) -> tuple[ResolvedModel, ...]:
    """The named models; those on a hub are pulled first. Raises Refused, also for two models of one name.

    The command does this, not each process that serves a model: a model is downloaded once, with visible progress, and
    Ctrl-C stops the download.
    """
    from workers.library import find_model

    unique_names(references)
    with needs("worker"):
        return tuple(find_model(reference, say) for reference in references)


def unique_names(references: Sequence[str]) -> list[str]:
    """The names of these models. Raises Failure for two of one name."""
    from workers.library import name_of

    names = [name_of(reference) for reference in references]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Failure(f"two models are named {twice!r}: write NAME=MODEL to give one another name")
    return names


def shares_of(references: Sequence[str], shares: Sequence[float] | None) -> list[float]:
    """Each model's share of the device that they share: equal ones if none are given. Raises Failure."""
    if not shares:
        return [1 / len(references)] * len(references)
    for share in shares:
        if not 0 < share <= 1:  # NaN, too
            raise Failure(f"--share is {share:g}; it must be a number above 0, up to 1")
    if len(shares) != len(references):
        raise Failure(
            f"--share is given {len(shares)} times and --model {len(references)} times: give each model its share, in "
            "the order of the models"
        )
    if (total := sum(shares)) > 1 + 1e-9:
        listed = " + ".join(f"{share:g}" for share in shares)
        raise Failure(f"--share: {listed} = {total:g}; the models of one device have 1 together, or less")
    return list(shares)


UniqueName = Annotated[
    str | None, typer.Option(callback=process_name, help="This process's name, which must be unique. Unset: made up.")
]
FilesDir = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE",
        envvar="FILES_DIR",
        callback=checked_location,
        help="The folder, or s3://BUCKET/PREFIX, for uploaded files, batches' output, and bodies of Celery messages "
        "that are too large for SQS. All processes of a system share it. Unset: files in the data directory, where the "
        "command has one.",
    ),
]
WebhookAllow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CIDR",
        callback=networks,
        help="Let webhooks call addresses of this network though they are not public, also by http:// and on any port: "
        "10.0.0.0/8, 127.0.0.0/8. May be repeated. Unset: none.",
    ),
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL, autocompletion=complete_model)]
ModelOption = Annotated[str, typer.Option(help=MODEL, autocompletion=complete_model)]
Shares = Annotated[
    list[float] | None,
    typer.Option(
        help="Each model's share of the device, in the models' order: of its memory, and of its time while others "
        "compute. At most 1 together. Unset: equal shares."
    ),
]


def takes(**groups: Collection[Option]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command a group's options, in the place of its parameter of the group's name.

    The command gets that parameter as a dict of the options that were given. Its Failures name options, not fields.
    """

    def taking(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        declared_here = (field for group in groups.values() for field in group if isinstance(field, Declared))
        options = {field.name: _option_of(field) for field in declared_here}
        every: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            taken = map(_parameter, groups[parameter.name]) if parameter.name in groups else [parameter]
            every += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in taken]

        @wraps(command)
        def called(**arguments: Any) -> None:
            for name, fields in groups.items():
                values = {field.name: _read(field, arguments.pop(field.name)) for field in fields}
                arguments[name] = {
                    field: value for field, value in values.items() if value is not None and value is not False
                }
            try:
                command(**arguments)
            except Refused as refused:
                raise Failure(renamed(message_of(refused), options), refused.status) from refused

        called.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
        return called

    return taking


def options_of(command: Callable[..., None], names: Iterable[str]) -> list[inspect.Parameter]:
    """These options of another command, for one that passes them on."""
    parameters = inspect.signature(command, eval_str=True).parameters
    return [parameters[name] for name in names]


def _option_of(field: Declared) -> str:
    assert field.option is not None
    return field.option.name or f"--{field.name.replace('_', '-')}"


def _parameter(field: Option) -> inspect.Parameter:
    """A declared field as a parameter that typer understands. A value out of bounds raises Failure."""
    if isinstance(field, inspect.Parameter):
        return field
    assert field.option is not None
    bound, name = field.bound, _option_of(field)

    def within(value: Any) -> Any:
        if value is None:
            return value
        try:
            bound.check(field.name, _read(field, value))
        except RequestError:
            raise Failure(f"{name} is {shown(value)}; it must be {bound.description}") from None
        return value

    kind = _KINDS.get(type(bound), str)
    option = typer.Option(name, help=field.option.help, metavar=field.option.metavar, callback=within)
    default = False if kind is bool else None
    annotation: Any = Annotated[kind if kind is bool else kind | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _read(field: Option, value: Any) -> Any:
    """A field's value, from its option's."""
    biases = value is not None and isinstance(field, Declared) and isinstance(field.bound, Biases)
    return dict(map(_bias, value)) if biases else value


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise Failure(f"--logit-bias is {text!r}; it must be ID=NUMBER, such as 318=-100") from None


def is_set(context: typer.Context, name: str) -> bool:
    """Whether a parameter of the command is on its line or in the environment."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def as_arguments(context: typer.Context, *, only: Sequence[str] = (), without: Sequence[str] = ()) -> list[str]:
    """The options of this command line, as arguments for another process.

    Left out are options with their default, and those that an environment variable carries. `only` and `without` are
    names of parameters.
    """
    argv: list[str] = []
    for option in context.command.params:
        value = context.params.get(str(option.name))
        if value is None or value == option.default or isinstance(option.envvar, str):
            continue
        if (not only or option.name in only) and option.name not in without:
            for item in value if isinstance(value, (list, tuple)) else [value]:
                argv += [option.opts[0]] if item is True else [option.opts[0], str(item)]
    return argv


def as_environment(context: typer.Context) -> dict[str, str]:
    """The options that environment variables carry, by variable: servers' URLs may hold passwords, so they stay off
    other processes' command lines."""
    values = {option.envvar: context.params.get(str(option.name)) for option in context.command.params}
    return {name: str(value) for name, value in values.items() if isinstance(name, str) and value is not None}
