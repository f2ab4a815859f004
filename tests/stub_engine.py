"""An engine without a model: tokens are a pure function of (seed, choice, index), so that any interruption shows.

Behaves like `engine.Engine` as far as the worker uses it. Environment: STUB_STEP_S (pause a step), STUB_SEQS,
STUB_TOKENS (KV tokens), STUB_FAULTS (how often each request fails before it goes well), STUB_FAULT_SEEDS (of which
requests that is true, by their seeds; unset: of all), STUB_FAULT_CHOICE (only this choice fails, and the others run on;
unset: the whole request), STUB_SHORT_CHOICE (choice 0 stops after so many tokens), STUB_EARLY (each third output ends
before its last token), STUB_STALLED (no request makes a token), STUB_HANG_AFTER (the step after so many does not end,
for STUB_HANG_S seconds), STUB_HUNG_BY (nor do those that compute a prompt with this token), STUB_LOST_AFTER (so many
steps, then the device is lost), STUB_HOLD_AT (no choice gets past so many tokens until the file STUB_GO is there;
unset: never). A prompt that contains DEADLY kills the process in its first step, one that contains STALLED makes no
token, one that contains SPOILED has NaN; the text PANIC cannot be tokenised. STUB_NAN_AFTER: after so many steps
everything has NaN, the worker's own probe too, which is no step. STUB_SICK: a file; while it says `fail`, each request
fails in its next step, also a probe; `slow S`: each step takes so many seconds longer. STUB_VERSION, STUB_FINGERPRINT:
of the model, and of how this engine computes. STUB_CACHE: it has each prompt that it took cached, in blocks of 16.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.errors import NOT_FINITE, RequestError
from engine.params import MAX_CHOICES
from engine.plan import StepWork
from engine.prefix import adapter_mark, prompt_marks
from engine.request import Event, Request, TokenLogprobs
from engine.scheduling.group import Candidates
from engine.scheduling.scheduler import Held
from workers.flow import probe

VOCABULARY = 1000
DEADLY, STALLED, SPOILED = 666, 667, 668
PANIC = "panic"
WORDS = [f" w{i}" for i in range(VOCABULARY)]


def token(seed: int, choice: int, index: int) -> int:
    """The one true token."""
    digest = hashlib.blake2b(f"{seed}:{choice}:{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def logprob(seed: int, choice: int, index: int) -> float:
    """Of the one true token; above all it differs between choices."""
    digest = hashlib.blake2b(f"{seed}:{choice}:{index}:p".encode(), digest_size=4).digest()
    return -int.from_bytes(digest, "little") / 2**32


def prompt_logprob(place: int, token_id: int) -> float | None:
    """Of a prompt's token; the first has none."""
    return -(token_id + 1) / (place + 1) if place else None


def text_of(seed: int, choice: int, count: int) -> str:
    return "".join(WORDS[token(seed, choice, i)] for i in range(count))


@dataclass
class _Card:
    name: str = "stub"
    version: str = "v1"
    files: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        import json

        return json.dumps(
            {
                "v": 1,
                "name": self.name,
                "version": self.version,
                "architecture": "Stub",
                "context_length": 4096,
                "vocab_size": VOCABULARY,
                "parameters": 0,
                "capabilities": ["generate"],
                "eos_token_ids": [],
                "bos_token_id": None,
                "defaults": {},
                "files": {},
                "created": 0,
            }
        )


class _Panic(BaseException):
    """As a tokenizer's fault is, which is Rust: no Exception."""


class _Lost(Exception):
    """The device does nothing any more."""


class _Tokenizer:
    def encode(self, text: str, limit: int | None = None) -> list[int]:
        if text == PANIC:
            raise _Panic("a panic of the stub")
        return [1] * max(1, len(text) // 4)


@dataclass
class _Running:
    request: Request
    on_event: Any
    done: list[int]
    target: int
    candidates: Candidates | None
    scored: bool = False
    failed: set[int] = field(default_factory=set)


class StubEngine:
    on_step: Any = None
    on_lost: Any = None
    on_under_way: Any = None
    last_work: StepWork | None = None
    max_model_len = 4096
    step_tokens = 512
    kv_capacity = 1 << 20
    turn_wait_s: float | None = None
    kind = "generate"
    texts: Any = None
    watermarks = None
    adapter_bytes = 1

    def __init__(self, name: str = "stub") -> None:
        self.card = _Card(name, os.environ.get("STUB_VERSION", "v1"))
        self.fingerprint = os.environ.get("STUB_FINGERPRINT", "stub")
        self.tokenizer = _Tokenizer()
        self.max_num_seqs = int(os.environ.get("STUB_SEQS", "64"))
        self.kv_tokens_total = int(os.environ.get("STUB_TOKENS", "1000000"))
        self.step_s = float(os.environ.get("STUB_STEP_S", "0"))
        self.faults = int(os.environ.get("STUB_FAULTS", "0"))
        self.stalled = "STUB_STALLED" in os.environ
        self.fault_seeds = os.environ.get("STUB_FAULT_SEEDS")
        self.fault_choice = os.environ.get("STUB_FAULT_CHOICE")
        self.short = int(os.environ.get("STUB_SHORT_CHOICE", "0"))
        self.early = "STUB_EARLY" in os.environ
        self.hang_after = int(os.environ.get("STUB_HANG_AFTER", "-1"))
        self.hang_s = float(os.environ.get("STUB_HANG_S", "600"))
        self.lost_after = int(os.environ.get("STUB_LOST_AFTER", "-1"))
        self.nan_after = float(os.environ.get("STUB_NAN_AFTER", "inf"))
        self.hung_by = int(os.environ.get("STUB_HUNG_BY", "0"))
        self.hold_at = int(os.environ.get("STUB_HOLD_AT", "0"))
        self.go = os.environ.get("STUB_GO", "")
        self.sick = os.environ.get("STUB_SICK", "")
        self.marked_block = 16 if "STUB_CACHE" in os.environ else 0
        self._marks: dict[str, None] = {}
        self.adapters: dict[str, Any] = {}
        self._failed: dict[str, int] = {}
        self._inbox: deque[tuple[Request, Any]] = deque()
        self._aborts: deque[str] = deque()
        self._wake = threading.Event()
        self._running: dict[str, _Running] = {}
        self._closed = False
        self._since: float | None = None
        self._generated = self._steps = self._aborted = self._not_finite = 0
        self._recompute_s = 0.0
        self._thread = threading.Thread(target=self._loop, name="stub-engine", daemon=True)
        self._thread.start()

    def load_adapter(self, name: str, path: str) -> Any:
        """Loads any adapter, once the file STUB_ADAPTERS is there."""
        while not Path(os.environ.get("STUB_ADAPTERS", "/")).exists():
            time.sleep(0.01)
        self.adapters[name] = SimpleNamespace(nbytes=1, rank=1, version=name)
        return self.adapters[name]

    def marks(self) -> list[str]:
        return [*(adapter_mark(name, self.card.version) for name in list(self.adapters)), *list(self._marks)]

    def submit(self, request: Request, on_event: Any) -> None:
        if len(request.prompt_ids) + (request.params.max_tokens or 1) > self.max_model_len:
            raise RequestError("too long for the context", param="prompt", code="context_length_exceeded")
        if self.marked_block and request.id != probe.ID:
            names = {"salt": request.salt, "adapter": request.adapter, "version": self.card.version}
            self._marks |= dict.fromkeys(prompt_marks(request.prompt_ids, self.marked_block, **names))
        self._inbox.append((request, on_event))
        self._wake.set()

    def abort(self, request_id: str) -> None:
        self._aborts.append(request_id)
        self._wake.set()

    @property
    def turn_due_s(self) -> float:
        """Long, while there is the file that STUB_NEIGHBOUR names."""
        return 100.0 if os.path.exists(os.environ.get("STUB_NEIGHBOUR", "")) else 0.0

    def draws(self, watts: float) -> None:
        """Its steps take too little time to tell of energy."""

    def stepping(self) -> tuple[float, set[str]]:
        since = self._since
        return (0.0, set()) if since is None else (time.monotonic() - since, set(self._running))

    def preempted(self) -> list[tuple[str, float]]:
        return []

    def largest(self, count: int) -> list[Held]:
        return [
            Held(name, choice=0, tier=1, prompt_tokens=1, tokens=1, blocks=1) for name in list(self._running)[:count]
        ]

    def stats(self) -> Any:
        return SimpleNamespace(
            running=len(self._running),
            waiting=len(self._inbox),
            kv_blocks_used=len(self._running),
            kv_blocks_cached=0,
            kv_blocks_most=self.max_num_seqs,
            kv_blocks_total=self.max_num_seqs,
            steps=self._steps,
            prompt_tokens=0,
            cached_tokens=0,
            generated_tokens=self._generated,
            preemptions=0,
            put_off_s=0.0,
            recompute_s=self._recompute_s,
            out_of_memory=0,
            not_finite=self._not_finite,
            drafted=0,
            draft_accepted=0,
            device="cpu",
        )

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._closed:
            while self._inbox:
                request, on_event = self._inbox.popleft()
                if request.id == probe.ID:
                    on_event(self._answer(request))
                    continue
                params = request.params
                target = 16 if params.max_tokens is None else params.max_tokens
                if self.early and (params.seed or 0) % 3 == 0:
                    target = max(1, target * (1 + (params.seed or 0) % 10) // 10)
                selects = params.selects and target > 0
                resume = request.resume or [[] for _ in range(params.width if selects else params.n)]
                for choice, tokens in enumerate(resume):
                    # A whole output may be any candidate's that best_of chose; half of one is the choice's own.
                    made = range(MAX_CHOICES) if len(tokens) == target else [choice]
                    true = ([token(params.seed or 0, one, i) for i in range(len(tokens))] for one in made)
                    assert tokens in true, "resumed from tokens that are not this task's"
                request.course.admit(time.monotonic(), 0)
                request.course.chunks += 1
                if request.taken_over:
                    self._recompute_s += 1e-3
                self._running[request.id] = _Running(
                    request,
                    on_event,
                    [len(r) for r in resume],
                    target,
                    Candidates(params.width, params.n, False) if selects else None,
                )
            while self._aborts:
                if self._running.pop(self._aborts.popleft(), None):
                    self._aborted += 1
            if not self._running:
                self._wake.wait(1.0)
                self._wake.clear()
                continue
            made, self._since = self._generated, time.monotonic()
            if self.on_under_way:
                self.on_under_way([*self._running])
            try:
                self._step()
            except _Lost:
                self.on_lost("a fault of the stub's device", set(self._running))
                return
            self.last_work = StepWork(
                time.monotonic(),
                time.monotonic() - self._since,
                len(self._running),
                0,
                self._generated - made,
                self._generated - made,
                sum(sum(running.done) for running in self._running.values()),
            )
            self._since = None
            if self.on_step:
                self.on_step()
            if self.on_under_way:
                self.on_under_way([])
            if self.step_s or made == self._generated:  # what only waits is not to take a processor
                time.sleep(self.step_s or 0.002)

    def _sick(self) -> str:
        if not self.sick:
            return ""
        try:
            with open(self.sick, encoding="ascii") as file:
                return file.read()
        except OSError:
            return ""

    def _answer(self, request: Request) -> Event:
        """The worker's probe: one token, or NaN."""
        spoiled = self._steps >= self.nan_after
        return Event(
            request_id=request.id,
            choice=0,
            index=0,
            token_ids=[] if spoiled else [0],
            texts=[] if spoiled else [WORDS[0]],
            logprobs=None,
            finish_reason="error" if spoiled else "length",
            stop_match=None,
            done=True,
            error=NOT_FINITE if spoiled else None,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=0,
        )

    def _step(self) -> None:
        if self._steps == self.hang_after:
            threading.Event().wait(self.hang_s)
        if self._steps == self.lost_after:
            raise _Lost
        if self.hung_by and any(self.hung_by in r.request.prompt_ids for r in self._running.values()):
            threading.Event().wait(self.hang_s)
        self._steps += 1
        sick, _, slow = self._sick().partition(" ")
        time.sleep(float(slow or 0))
        holds = self.hold_at and not os.path.exists(self.go)
        for key, running in list(self._running.items()):
            request = running.request
            if DEADLY in request.prompt_ids:
                os._exit(9)
            if self.stalled or STALLED in request.prompt_ids:
                continue
            if request.params.prompt_logprobs is not None and not running.scored:
                running.scored = True
                running.on_event(_prompt_event(request))
                continue
            seed = request.params.seed or 0
            faulty = self.fault_seeds is None or str(seed) in self.fault_seeds.split(",")
            faulty = faulty and key != probe.TIMED
            spoiled = self._steps > self.nan_after or SPOILED in request.prompt_ids
            fault = faulty and self._failed.get(str(seed), 0) < self.faults
            targets = [running.target] * len(running.done)
            if self.short:
                targets[0] = self.short
            for choice, target in enumerate(targets):
                if choice in running.failed:
                    continue
                index = running.done[choice]
                if holds and self.hold_at <= index < target:
                    continue
                finished = index >= target
                if finished and any(done < of for done, of in zip(running.done, targets, strict=True)):
                    continue
                tokens = [] if finished or spoiled else [token(seed, choice, index)]
                running.done[choice] += len(tokens)
                self._generated += len(tokens)
                last = running.done[choice] >= target
                half = fault and self.fault_choice in (None, str(choice)) and running.done[choice] > running.target // 2
                self._not_finite += spoiled
                half = half or spoiled or sick == "fail"
                if half:
                    alone = self.fault_choice or spoiled
                    running.failed |= {choice} if alone else set(range(len(running.done)))
                done = all(d >= targets[c] or c in running.failed for c, d in enumerate(running.done))
                event = Event(
                    request_id=key,
                    choice=choice,
                    index=index,
                    token_ids=tokens,
                    texts=[WORDS[t] for t in tokens],
                    logprobs=None,
                    finish_reason="error"
                    if half
                    else ("stop" if self.short and choice == 0 else "length")
                    if last
                    else None,
                    stop_match=None,
                    done=done,
                    error=NOT_FINITE if spoiled else "a fault of the stub" if half else None,
                    prompt_tokens=len(request.prompt_ids),
                    cached_tokens=0,
                )
                if running.candidates is None:
                    running.on_event(event)
                else:
                    event.logprobs = [TokenLogprobs(t, logprob(seed, choice, index), ()) for t in tokens]
                    for told in running.candidates.failed(event) if half else running.candidates.take(event):
                        running.on_event(told)
                if half:
                    self._failed[str(seed)] = self._failed.get(str(seed), 0) + 1
                if done:
                    self._running.pop(key, None)
                    break


def _prompt_event(request: Request) -> Event:
    ids = request.prompt_ids
    return Event(
        request_id=request.id,
        choice=0,
        index=0,
        token_ids=[],
        texts=[],
        logprobs=None,
        finish_reason=None,
        stop_match=None,
        done=False,
        error=None,
        prompt_tokens=len(ids),
        cached_tokens=0,
        prompt_logprobs=[
            None if (value := prompt_logprob(place, token_id)) is None else TokenLogprobs(token_id, value, ())
            for place, token_id in enumerate(ids)
        ],
    )


def load(model: str, options: dict[str, Any]) -> tuple[StubEngine, dict[str, bytes]]:
    """What `WorkerSettings.engine_factory` names."""
    return StubEngine(model), {}
