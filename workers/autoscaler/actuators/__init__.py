"""Actuators start and end workers. A pool has one, chosen by URL.

    export                          none: another program (KEDA, say) follows `penstock_desired_workers` in /metrics
    local                           child processes of the autoscaler
    SCHEME://...                    the module of SCHEMES, whose `open_url` makes it

A new actuator is a module with `open_url`, and a line in SCHEMES. Modules are imported when a URL asks for them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final, Protocol
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

EXPORT: Final = "export"
#: Scheme -> (module with `open_url(url, model, broker, store, here) -> Actuator`, the URL's form for messages).
SCHEMES: Final[dict[str, tuple[str, str]]] = {
    "local": ("workers.autoscaler.actuators.local", "local, local:?OPTION=VALUE (of penstock worker)"),
    "kubernetes": ("workers.autoscaler.actuators.kubernetes", "kubernetes://NAMESPACE/DEPLOYMENT[?context=NAME]"),
    "ecs": ("workers.autoscaler.actuators.aws", "ecs://CLUSTER/SERVICE[?region=REGION&endpoint=URL]"),
    "ec2": ("workers.autoscaler.actuators.aws", "ec2://GROUP[?region=REGION&endpoint=URL]"),
}

#: Scheme -> the extra that it needs.
EXTRAS: Final = {"kubernetes": "kubernetes", "ecs": "aws", "ec2": "aws"}


class ActuatorError(OSError):
    """The platform refused or did not answer. The text has the reason, and what to do."""


@dataclass(frozen=True, slots=True)
class Actual:
    """A platform's state. `wanted`: the number that was last requested. `up`: workers that run or are starting."""

    wanted: int
    up: int
    failing: str = ""
    """The reason why workers do not come up (the last output of a process that died, say); empty if none is known."""
    failures: int = 0
    """Starts in a row that failed."""
    standbys: int = 0
    """Processes that have imported everything, and wait to become workers."""


class Actuator(Protocol):
    """Keeps a number of workers running. Any call may be repeated, and is cancelled after `acting.CALL_S`."""

    @property
    def name(self) -> str:
        """What it acts on, for people: `kubernetes default/worker-tiny`, say."""

    async def actual(self) -> Actual:
        """The platform's state now. Raises ActuatorError."""

    async def scale(self, target: int, first: Sequence[str]) -> None:
        """Have so many workers run; those that are too many drain. Raises ActuatorError.

        `first`: names of workers (as in their leases), in the order in which they should go. Workers that are not named
        serve nothing yet, and go before all.
        """

    async def aclose(self) -> None:
        """Close connections. Workers go on, except those of local processes, which drain."""


@dataclass(frozen=True, slots=True)
class Address:
    """`host` and `name` as the platform spells them; `name` is empty where the URL has none."""

    host: str
    name: str
    options: dict[str, str]


def read(parts: SplitResult, form: str, options: Collection[str], *, named: bool = True) -> Address:
    """A URL's parts. `form`: how it must look, for the error. Raises ValueError."""
    host, name = unquote(parts.netloc), unquote(parts.path.strip("/"))
    if not host or bool(name) != named or parts.fragment:
        raise ValueError(f"actuator is {parts.geturl()!r}; it must look like {form}")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    for option, value in query.items():
        if option not in options or not value:
            raise ValueError(
                f"actuator is {parts.geturl()!r}; {option}={value} makes no sense, it must look like {form}"
            )
    return Address(host, name, query)


def checked(url: str) -> str:
    """The URL, if its scheme is known. Raises ValueError."""
    if url != EXPORT and urlsplit(url).scheme not in SCHEMES and url not in SCHEMES:
        forms = [EXPORT, *(form for _, form in SCHEMES.values())]
        raise ValueError(f"actuator is {url!r}; it must be one of {', '.join(forms)}")
    return url


def open_actuator(url: str, *, model: str, broker: str, store: str, here: int = 1) -> Actuator | None:
    """The actuator of a pool; None for `export`. It connects at the first call.

    `model`: its reference for workers. `broker`, `store`: URLs, for workers that it starts itself. `here`: the largest
    number of workers that share this machine. Raises ValueError for a bad URL, ModuleNotFoundError if an extra is not
    installed.
    """
    if checked(url) == EXPORT:
        return None
    parts: SplitResult = urlsplit(url)
    module, _ = SCHEMES[parts.scheme or url]
    actuator: Actuator = import_module(module).open_url(parts, model=model, broker=broker, store=store, here=here)
    return actuator
