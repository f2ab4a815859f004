"""The engine as a worker uses it, whichever process it is in: `engine.Engine`, `engine.PoolingEngine`, or a process
around one of them (`workers.engine_process`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from engine.plan import StepWork
from engine.request import Event, PoolingKind, Request
from engine.scheduling.scheduler import Held
from engine.text.pooled import PooledTexts


class ServedCard(Protocol):
    """The card of the served model."""

    def to_json(self) -> str: ...


class LoadedAdapter(Protocol):
    """An adapter in the engine's memory."""

    @property
    def nbytes(self) -> int: ...
    @property
    def rank(self) -> int: ...


class ServedEngine(Protocol):
    """Facts of the model, requests, observation, adapters. Thread-safe; no method waits for a step, but for `close` and
    `load_adapter`."""

    @property
    def card(self) -> ServedCard | None: ...

    fingerprint: str
    max_num_seqs: int
    max_model_len: int
    kv_capacity: int
    kv_tokens_total: int
    step_tokens: int
    marked_block: int
    """Tokens of a block, by which prompts have marks (`engine.prefix`); 0: it caches no prefixes."""

    @property
    def tokenizer(self) -> Any:
        """`engine.text.Tokenizer`."""

    @property
    def kind(self) -> PoolingKind | Literal["generate"]: ...
    @property
    def texts(self) -> PooledTexts | None:
        """The tokenisation of texts, if it generates none."""

    @property
    def watermarks(self) -> Any:
        """`engine.watermark.Watermarks`, of which `describe` is used; None if there are none."""

    #: Called after all events of a step were delivered, on the thread that delivers events.
    on_step: Callable[[], None] | None
    #: Called on that thread, with the reason and the ids of suspect requests, when the engine is lost for good.
    on_lost: Callable[[str, set[str]], None] | None

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """Raises RequestError for a request that could never run, unless that comes as an event (`Event.refused`);
        EngineClosedError if the engine was closed or is lost."""

    def abort(self, request_id: str) -> bool: ...
    def stats(self) -> Any:
        """`engine.engine.EngineStats`."""

    def preempted(self) -> list[tuple[str, float]]: ...
    def largest(self, count: int) -> list[Held]: ...
    def draws(self, watts: float) -> None: ...
    def stepping(self) -> tuple[float, set[str]]: ...
    def marks(self) -> list[str]:
        """The marks (`engine.prefix`) of what a request finds here: loaded adapters, then cached prefixes, the newest
        last; perhaps of some tenths of a second ago."""

    @property
    def last_work(self) -> StepWork | None: ...
    @property
    def turn_wait_s(self) -> float | None: ...
    @property
    def turn_due_s(self) -> float: ...
    @property
    def adapter_bytes(self) -> int: ...
    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]: ...
    def load_adapter(self, name: str, path: str | Path) -> LoadedAdapter: ...
    def unload_adapter(self, name: str) -> bool: ...
    def close(self) -> None: ...
