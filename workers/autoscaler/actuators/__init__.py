"""Actuators: what starts and ends workers. A pool has one, chosen by URL.

    export                          none: another program (KEDA, say) follows `penstock_desired_workers` in /metrics
    local                           child processes of the autoscaler
    SCHEME://...                    the module of SCHEMES, whose `open_url` makes it

A new actuator is a module with `open_url`, and a line in SCHEMES. Modules are imported when a URL asks for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final
from urllib.parse import SplitResult, urlsplit

from workers.autoscaler.actuators.base import Actual, Actuator, ActuatorError

__all__ = ["EXPORT", "EXTRAS", "SCHEMES", "Actual", "Actuator", "ActuatorError", "checked", "open_actuator"]

EXPORT: Final = "export"
#: Scheme -> (module with `open_url(url, model, broker, store, here) -> Actuator`, the URL's form for messages).
SCHEMES: Final[dict[str, tuple[str, str]]] = {
    "local": ("workers.autoscaler.actuators.local", "local, local:?OPTION=VALUE (of penstock worker)"),
    "kubernetes": ("workers.autoscaler.actuators.kubernetes", "kubernetes://NAMESPACE/DEPLOYMENT[?context=NAME]"),
    "ecs": ("workers.autoscaler.actuators.aws.ecs", "ecs://CLUSTER/SERVICE[?region=REGION&endpoint=URL]"),
    "ec2": ("workers.autoscaler.actuators.aws.ec2", "ec2://GROUP[?region=REGION&endpoint=URL]"),
}

#: Scheme -> the extra that it needs.
EXTRAS: Final = {"kubernetes": "kubernetes", "ecs": "aws", "ec2": "aws"}


def checked(url: str) -> str:
    """The URL, if its scheme is known. Raises ValueError."""
    if url != EXPORT and urlsplit(url).scheme not in SCHEMES and url not in SCHEMES:
        forms = [EXPORT, *(form for _, form in SCHEMES.values())]
        raise ValueError(f"actuator is {url!r}; it must be one of {', '.join(forms)}")
    return url


def open_actuator(url: str, *, model: str, broker: str, store: str, here: int = 1) -> Actuator | None:
    """The actuator of a pool; None for `export`. It connects at the first call.

    `model`: as workers are told it. `broker`, `store`: URLs, for workers that it starts itself. `here`: the most
    workers that share this machine. Raises ValueError for a URL that makes no sense, ModuleNotFoundError where an extra
    is not installed.
    """
    if checked(url) == EXPORT:
        return None
    parts: SplitResult = urlsplit(url)
    module, _ = SCHEMES[parts.scheme or url]
    made: Actuator = import_module(module).open_url(parts, model=model, broker=broker, store=store, here=here)
    return made
