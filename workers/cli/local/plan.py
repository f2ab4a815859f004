"""The plan of a system on one machine: which processes, with which options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from producers.connection.connect import is_redis
from workers.autoscaler.policy.rules import Rules
from workers.cli.gpus.choice import Chosen
from workers.library import Found


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes to run.

    `rules`: the number of each model's workers. `scaled`: whether an autoscaler runs here; else it is the least number.
    `gpus`: each worker gets one, and each model as many as its most workers. `standby_s`: the time (s) for which a
    standby process is kept; None: there is none.
    """

    models: tuple[Found, ...]
    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    broker: str | None = None
    store: str | None = None
    rules: Rules = Rules(min=1)  # noqa: RUF009 - frozen
    scaled: bool = False
    standby_s: float | None = None
    gpus: tuple[Chosen, ...] = ()
    drain: float = 30.0
    log_level: str = "warning"
    worker_options: tuple[str, ...] = ()
    gateway_options: tuple[str, ...] = ()
    webhooks_options: tuple[str, ...] = ()
    health_ports: tuple[int | None, ...] = ()
    """A port for each worker, in the order of models and their most workers; empty: no ports."""
    files_dir: str | None = None
    sources: Path | None = None
    """The configuration of event sources; None: there are none."""

    @property
    def embedded(self) -> bool:
        """Whether it has a server of its own in `data_dir`: as both, or as the store of a broker on SQS."""
        return self.store is None and (self.broker is None or not is_redis(self.broker))

    @property
    def files(self) -> tuple[str, str]:
        """The option with the place of files, which all processes share."""
        return "--files-dir", str(self.files_dir or self.data_dir / "files")
