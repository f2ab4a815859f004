"""Renders messages to prompts, tokenises and detokenises them, with the files that a model's card names by hash.

**Templates.** Renders messages to prompts, with the chat templates that cards name by hash, each in a process of its
own.

messages ─▶ sizes: what no request may have is refused here, for every endpoint
         ─▶ small: the template's process, in turns of tenants │ large: another process of the same template ─▶ text

**Tokens.** Tokenises and detokenises prompts, with the tokenizer that the model's card names by hash.

texts ─▶ sizes: what is too long whatever its tokens are is refused here, for every endpoint
      ─▶ small: a thread of the tokenizer's │ large: a process that can be killed (`engine.confined`), one of a few for
         all models; in turns of tenants ─▶ token ids
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from redis.asyncio import Redis

from engine.confined import Stopped
from engine.errors import ErrorText
from engine.text import ConfinedTemplate, ModelError, RequestError, TemplateSource, Tokenizer
from engine.text.confined_tokenizer import ConfinedTokenizer, TextError
from producers.contract.chat import MAX_MESSAGES, too_many
from producers.contract.fields import MAX_PROMPT_BYTES
from producers.errors import InvalidTask, shown
from producers.gateway.executor import CallerLeft, Executor, ExecutorBusy, ExecutorClosed, ExecutorFull
from producers.gateway.http.errors import CLIENT_LEFT, ONCE, RETRY_AFTER, Problem, unavailable
from producers.gateway.http.request_state import Work
from producers.gateway.lru_cache import LruCache
from producers.store.fleet import cards

logger = logging.getLogger(__name__)

TOKENIZER: Final = "tokenizer.json"
#: Files that may hold a model's chat template.
TEMPLATE: Final = ("tokenizer_config.json", "chat_template.jinja")


async def read_blobs(store: Redis, card: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, bytes]:
    """Name -> content of the files that the model has. Raises Problem (503) for a missing or damaged one."""
    files = {}
    for name in names:
        digest = card["files"].get(name)
        if digest is None:
            continue
        data = await cards.get_file(store, digest)
        if data is None:
            raise _lacking(name, card["name"], "is not in the store; start a worker of it, which stores it.")
        if hashlib.sha256(data).hexdigest() != digest:
            logger.error("%s of %s (%s) does not match its hash", name, card["name"], digest)
            raise broken(card["name"], name)
        files[name] = data
    return files


def broken(model: str, name: str) -> Problem:
    return _lacking(name, model, "in the store is damaged; restart a worker of the model, which stores it again.")


def _lacking(name: str, model: str, why: str) -> Problem:
    return unavailable(f"{name} of model {shown(model)} {why}", code="model_unavailable", param="model")


#: Most loaded templates, a process each; the least recently used is evicted first.
KEPT_TEMPLATES: Final = 8
#: Most requests waiting for one template. A render takes a fraction of a millisecond; of a hostile template, only its
#: own callers wait, and not for long.
WAITING_RENDERS: Final = 64
#: Longest wait (s) of a request for its turn.
RENDER_PATIENCE_S: Final = 30.0
#: Messages, and bytes of them with the template's variables as JSON, above which a request is no small one's company.
MANY_MESSAGES, LARGE_MESSAGES = 256, 64 * 1024


class Templates:
    """Renders chats. `store`: the server with the models' files."""

    def __init__(self, store: Redis) -> None:
        self._store = store
        self._kept: LruCache[tuple[str, ...], _Renderer] = LruCache(KEPT_TEMPLATES, _Renderer.close)

    async def render(
        self, card: Mapping[str, Any], messages: Sequence[dict[str, Any]], work: Work, /, **options: Any
    ) -> str:
        """The messages as one text, see `ChatTemplate.render`.

        Raises InvalidTask if they are too large, or the template refuses them or is stopped over them, and Problem if
        it cannot be used or too many requests wait for it.
        """
        large = check_size(messages, work, options)
        try:
            while True:
                renderer = await self._renderer(card)
                with suppress(ExecutorClosed):  # it was evicted meanwhile
                    return await renderer.render(messages, work, large, **options)
        except RequestError as error:
            raise InvalidTask(error.message, param=error.param, code=error.code) from error
        except ModelError as error:
            raise _unusable(card["name"], error) from error

    async def with_tools(self, card: Mapping[str, Any]) -> str:
        """The text of the model's template for chats with tools. Raises Problem if it cannot be used."""
        source = (await self._renderer(card)).source
        return source.with_tools or source.text

    async def _renderer(self, card: Mapping[str, Any]) -> _Renderer:
        key = tuple(card["files"].get(name, "") for name in TEMPLATE)
        return await self._kept.get(key, lambda: self._load(card))

    def close(self) -> None:
        """End all processes."""
        self._kept.clear()

    async def _load(self, card: Mapping[str, Any]) -> _Renderer:
        files = await read_blobs(self._store, card, TEMPLATE)
        try:
            source = await asyncio.to_thread(TemplateSource.from_bytes, files)
        except ModelError as error:
            raise _unusable(card["name"], error) from error
        if source is None:
            raise broken(card["name"], TEMPLATE[0])  # the card says that there is one
        return _Renderer(source)


class _Renderer:
    """A confined template and the threads that talk to its processes. That for large messages starts with the first."""

    def __init__(self, source: TemplateSource) -> None:
        self.source = source
        self._small, self._large = (
            (ConfinedTemplate(source), Executor(name)) for name in ("penstock-template", "penstock-template-large")
        )

    async def render(self, messages: Sequence[dict[str, Any]], work: Work, large: bool, /, **options: Any) -> str:
        template, executor = self._large if large else self._small
        render = partial(template.render, messages, **options)
        turn: dict[str, Any] = {"tenant": work.tenant, "max_jobs": WAITING_RENDERS, "patience": RENDER_PATIENCE_S}
        try:
            if large:
                text = await executor.run_killable(render, template.kill, work.caller_left, **turn)
            else:
                text = await executor.run(render, **turn)
        except ExecutorFull:
            raise _template_busy(f"{WAITING_RENDERS} requests wait for this model's chat template already") from None
        except ExecutorBusy:
            raise _template_busy(
                f"this model's chat template was busy with others' messages for {RENDER_PATIENCE_S:g} s"
            ) from None
        except ExecutorClosed:
            raise
        except BaseException as error:
            work.done = True
            if isinstance(error, CallerLeft):
                raise Problem(CLIENT_LEFT, "The client left before its chat was read.", code="client_left") from None
            raise
        work.done = True
        return text

    def close(self) -> None:
        """Does not wait: a render that runs is ended by its limits, and the process then."""
        for template, executor in (self._small, self._large):
            executor.close(template.close)


def check_size(messages: Sequence[Mapping[str, Any]], work: Work, variables: Mapping[str, Any]) -> bool:
    """Whether these are large messages. Raises InvalidTask for more of them than any request may have.

    A plain chat costs no look at its text: its body is small.
    """
    if len(messages) > MAX_MESSAGES:
        raise too_many(len(messages))
    if work.size is not None and work.size <= LARGE_MESSAGES:
        return len(messages) > MANY_MESSAGES
    try:
        size = len(json.dumps({"messages": messages, **variables}, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError:
        message = "the messages or the template's variables are nested too deep"
        raise InvalidTask(message, param="messages", code="too_deep") from None
    if size > MAX_PROMPT_BYTES:
        raise InvalidTask(
            ErrorText.of(
                "{messages}, tools and the template's variables have {} bytes as JSON; at most {} are taken",
                size,
                MAX_PROMPT_BYTES,
            ),
            param="messages",
        )
    return size > LARGE_MESSAGES or len(messages) > MANY_MESSAGES


def _unusable(model: str, error: ModelError) -> Problem:
    """The model's own files are at fault; trying again does not help."""
    logger.error("the chat template of %s cannot be used: %s", model, error)
    return Problem(500, str(error), code="model_broken", param="model", headers=ONCE)


def _template_busy(why: str) -> Problem:
    return Problem(429, f"{why}; try again in a moment.", code="template_busy", headers=RETRY_AFTER)


P = TypeVar("P", bound=Sized)
T = TypeVar("T")

#: Most loaded tokenizers.
KEPT: Final = 16
#: Threads of one tokenizer. It releases the GIL, but a model's own patterns may be arbitrarily slow.
THREADS: Final = 2
#: Most requests waiting for one tokenizer, which takes a millisecond for some thousand characters. If more come, the
#: last ones of the tenant that has most of them are refused.
WAITING: Final = 256
#: Characters of a request's texts. Up to the first, they are tokenised without a look at their size; above the second,
#: they are no small request's company.
SHORT, LARGE = 4096, 64 * 1024
#: Longest wait (s) of a request for its turn.
PATIENCE_S: Final = 10.0
#: Time limit (s) for all texts of a request, from the start of the first.
LIMIT_S: Final = 10.0
#: The same for large texts of all models, which `engine.text.confined_tokenizer` limits; and the most processes.
WAITING_LARGE, PATIENCE_LARGE_S = 64, 30.0
KEPT_LARGE: Final = 2


class InvalidPrompt(InvalidTask):
    """A prompt that the tokenizer refuses. `at`: its index in the request."""

    def __init__(self, message: str, at: int, *, param: str | None = "prompt", code: str = "invalid_value") -> None:
        super().__init__(message, param=param, code=code)
        self.at = at


class Prompts:
    """Encodes and decodes prompts. `store`: the server with the models' files."""

    def __init__(self, store: Redis) -> None:
        self._store = store
        self._encoders: LruCache[str, _Encoder] = LruCache(KEPT, _Encoder.close)
        self._large = _LargeTexts(self._file)

    async def encode(
        self, card: Mapping[str, Any], text: str, work: Work, *, special: bool = True, whole: bool = True
    ) -> tuple[int, ...]:
        """Token ids of a prompt; with `special`, including the tokenizer's special tokens around it. `whole`: False
        where a part of them will do, so that a text may have more than the model takes.

        Raises InvalidTask, Problem if the tokenizer is unavailable or too many requests wait for it, and
        redis.exceptions.RedisError or OSError.
        """
        return (await self.encode_all(card, (text,), work, special=special, whole=whole))[0]

    async def encode_all(
        self, card: Mapping[str, Any], texts: Sequence[str], work: Work, *, special: bool = True, whole: bool = True
    ) -> list[tuple[int, ...]]:
        """Token ids of each of a request's prompts. Raises as `encode`, and InvalidPrompt for a refused text."""
        if whole and any(len(text) > SHORT for text in texts):
            await self._check_sizes(card, texts, work)
        encoded = await self._each(
            card,
            texts,
            work,
            lambda tokenizer, text: tuple(tokenizer.encode(text, special)),
            lambda confined: confined.encode_all(texts, special),
        )
        for at, ids in enumerate(encoded):
            if not ids:
                raise InvalidPrompt(ErrorText.of("{prompt} has no token: the model's tokenizer drops all of it"), at)
        return encoded

    async def decode_all(self, card: Mapping[str, Any], prompts: Sequence[Sequence[int]], work: Work) -> list[str]:
        """The text of each of a request's prompts, without special tokens. Raises as `encode_all` does."""
        return await self._each(card, prompts, work, Tokenizer.decode, lambda confined: confined.decode_all(prompts))

    async def tokenizer(self, card: Mapping[str, Any]) -> Tokenizer:
        """The model's tokenizer. Raises as `encode` does."""
        return (await self._encoder(card)).tokenizer

    def close(self) -> None:
        self._encoders.clear()
        self._large.close()

    async def _check_sizes(self, card: Mapping[str, Any], texts: Sequence[str], work: Work) -> None:
        """Refuse texts that have too many tokens by their size alone, with the errors of those that were counted.

        Raises InvalidPrompt, also for more than a key or tenant may have.
        """
        tokenizer, context = await self.tokenizer(card), int(card["context_length"])
        fewest = [tokenizer.fewest_tokens(text) if len(text) > SHORT else 0 for text in texts]
        for at, tokens in enumerate(fewest):
            if tokens > context:
                message = (
                    f"This model's maximum context length is {context} tokens. However, you requested at least "
                    f"{tokens} tokens in the prompt: it has {len(texts[at].encode())} bytes of UTF-8, and no token of "
                    f"{shown(card['name'])} stands for more than {tokenizer.bytes_per_token}. Shorten the prompt, or "
                    "use a model with more context."
                )
                raise InvalidPrompt(message, at, code="context_length_exceeded")
        for account in await work.limited():
            max_prompt = account.limits.max_prompt
            if max_prompt is not None and max(fewest) > max_prompt:
                message = (
                    f"The prompt has at least {max(fewest)} tokens; with this {account.whose} it may have {max_prompt}."
                )
                raise InvalidPrompt(message, fewest.index(max(fewest)), code="prompt_too_long")

    async def _each(
        self,
        card: Mapping[str, Any],
        prompts: Sequence[P],
        work: Work,
        small: Callable[[Tokenizer, P], T],
        large: Callable[[ConfinedTokenizer], list[T]],
    ) -> list[T]:
        """`small`: processes one prompt. `large`: processes all of them, where those are large."""
        if not prompts:
            return []
        encoder = await self._encoder(card)
        if sum(map(len, prompts)) > LARGE:
            return await self._large.all(card, len(prompts), large, work)
        while True:
            with suppress(ExecutorClosed):  # it was evicted meanwhile
                return await encoder.each(prompts, small, work)
            encoder = await self._encoder(card)

    async def _encoder(self, card: Mapping[str, Any]) -> _Encoder:
        return await self._encoders.get(_digest(card), lambda: self._load(card))

    async def _load(self, card: Mapping[str, Any]) -> _Encoder:
        files = {TOKENIZER: await self._file(card)}
        try:
            return _Encoder(await asyncio.to_thread(Tokenizer, files))
        except ModelError as error:
            logger.error("the tokenizer of %s cannot be used: %s", card["name"], error)
            raise broken(card["name"], TOKENIZER) from error

    async def _file(self, card: Mapping[str, Any]) -> bytes:
        return (await read_blobs(self._store, card, (TOKENIZER,)))[TOKENIZER]


class _Encoder:
    """A tokenizer and its threads, for small texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._executor = Executor("penstock-tokenize", THREADS)

    async def each(self, prompts: Sequence[P], do: Callable[[Tokenizer, P], T], work: Work) -> list[T]:
        given_up = threading.Event()
        turn: dict[str, Any] = {"tenant": work.tenant, "max_jobs": WAITING, "patience": PATIENCE_S, "limit": LIMIT_S}
        with _translated_errors(work, "this model's tokenizer", WAITING, PATIENCE_S):
            try:
                return await self._executor.run(partial(self._each, prompts, do, given_up), **turn)
            except TimeoutError:
                raise InvalidTask(
                    f"the model's tokenizer did not finish {_described(len(prompts))} within {LIMIT_S:g} s; send less",
                    param="prompt",
                ) from None
            finally:
                given_up.set()

    def _each(self, prompts: Sequence[P], do: Callable[[Tokenizer, P], T], given_up: threading.Event) -> list[T]:
        """Process prompts one by one on a thread of the executor; stop between two if the caller has given up."""
        done: list[T] = []
        for at, prompt in enumerate(prompts):
            if given_up.is_set():
                break
            try:
                done.append(do(self.tokenizer, prompt))
            except RequestError as error:
                raise InvalidPrompt(error.message, at, param=error.param, code=error.code) from error
        return done

    def close(self) -> None:
        self._executor.close()


class _Process:
    """A tokenizer's process for large texts. `tenant`: whose text it was started for."""

    __slots__ = ("confined", "digest", "tenant")

    def __init__(self, tokenizer: bytes, digest: str, tenant: str) -> None:
        self.confined = ConfinedTokenizer(tokenizer)
        self.digest = digest
        self.tenant = tenant


class _LargeTexts:
    """Tokenizers' processes for large texts, KEPT_LARGE of them, and as many threads that talk to them: so one is free
    for the text whose turn it is.

    A text takes a free process of its tokenizer, or starts one. That ends a free one which its own tenant had started,
    if there is one, else the one that is free for longest: who goes from model to model waits for processes to start,
    and makes few others wait for them.
    """

    def __init__(self, read: Callable[[Mapping[str, Any]], Coroutine[Any, Any, bytes]]) -> None:
        """`read`: the tokenizer.json of a card, on the event loop."""
        self._read = read
        self._executor = Executor("penstock-tokenize-large", KEPT_LARGE)
        #: Guards the below, and that no process is killed for a text which it does not work on.
        self._lock = threading.Lock()
        self._free: list[_Process] = []
        """The one that is free for longest is the first."""
        self._working = 0
        self._closed = False

    async def all(
        self, card: Mapping[str, Any], count: int, do: Callable[[ConfinedTokenizer], list[T]], work: Work
    ) -> list[T]:
        loop, request = asyncio.get_running_loop(), _Request()

        def read() -> bytes:
            return asyncio.run_coroutine_threadsafe(self._read(card), loop).result()

        turn: dict[str, Any] = {"tenant": work.tenant, "max_jobs": WAITING_LARGE, "patience": PATIENCE_LARGE_S}
        with _translated_errors(work, "the tokenizer of large texts", WAITING_LARGE, PATIENCE_LARGE_S):
            try:
                return await self._executor.run_killable(
                    partial(self._work, do, _digest(card), work.tenant, read, request),
                    partial(self._kill, request),
                    work.caller_left,
                    **turn,
                )
            except CallerLeft:
                raise Problem(CLIENT_LEFT, "The client left before its text was read.", code="client_left") from None
            except Stopped as error:
                raise InvalidTask(
                    f"the model's tokenizer was stopped on {_described(count)}: {error}",
                    param="prompt",
                    code="tokenizer_stopped",
                ) from None
            except TextError as error:
                raise InvalidPrompt(error.message, error.at, param=error.param, code=error.code) from error
            except ExecutorClosed:
                raise unavailable("This gateway is stopping; send the request again.", code="stopping") from None

    def close(self) -> None:
        """Does not wait: what runs is ended by its limits, and the processes then."""
        with self._lock:
            self._closed = True
        self._executor.close(self._end_free)

    # ---- on the threads

    def _work(
        self,
        do: Callable[[ConfinedTokenizer], list[T]],
        digest: str,
        tenant: str,
        read: Callable[[], bytes],
        request: _Request,
    ) -> list[T]:
        with self._lock:
            self._working += 1
            process = self._take(digest)
            ended = None if process is not None else self._make_room(tenant)
        try:
            if ended is not None:
                ended.confined.close()
            if process is None:
                process = _Process(read(), digest, tenant)
            with self._lock:
                if request.given_up:
                    raise Stopped("nobody waits for it any more")
                request.process = process
            return do(process.confined)
        finally:
            with self._lock:
                request.process = None
                self._working -= 1
                if process is not None:
                    self._free.append(process)
                closed = self._closed
            if closed:
                self._end_free()

    def _take(self, digest: str) -> _Process | None:
        """The last free process of a tokenizer, which is not free then; under the lock."""
        process = next((candidate for candidate in reversed(self._free) if candidate.digest == digest), None)
        if process is not None:
            self._free.remove(process)
        return process

    def _make_room(self, tenant: str) -> _Process | None:
        """The process that is to end before another one starts for this tenant, which is not free then; under the
        lock."""
        if len(self._free) + self._working <= KEPT_LARGE:
            return None
        process = next((candidate for candidate in self._free if candidate.tenant == tenant), self._free[0])
        self._free.remove(process)
        return process

    def _end_free(self) -> None:
        with self._lock:
            free, self._free = self._free, []
        for process in free:
            process.confined.close()

    # ---- on the event loop

    def _kill(self, request: _Request) -> None:
        with self._lock:
            request.given_up = True
            if request.process is not None:
                request.process.confined.kill()


@dataclass(slots=True)
class _Request:
    """One request's large texts. `process`: the process that works on them now. `given_up`: nobody waits for them."""

    process: _Process | None = None
    given_up: bool = False


@contextmanager
def _translated_errors(work: Work, subject: str, waiting: int, patience_s: float) -> Iterator[None]:
    """Translate errors of an executor into those that callers see. Work that began is noted as done."""
    try:
        yield
    except ExecutorFull:
        raise _busy(f"{waiting} requests wait for {subject} already") from None
    except ExecutorBusy:
        raise _busy(f"{subject} was busy with others' prompts for {patience_s:g} s") from None
    except ExecutorClosed:
        raise
    except BaseException:
        work.done = True
        raise
    work.done = True


def _digest(card: Mapping[str, Any]) -> str:
    """The hash of a model's tokenizer. Raises InvalidTask if it has none."""
    digest: str | None = card["files"].get(TOKENIZER)
    if digest is None:
        raise InvalidTask(f"model {shown(card['name'])} has no tokenizer; give the prompt as token ids", param="prompt")
    return digest


def _described(count: int) -> str:
    return "the prompt" if count == 1 else f"the {count} prompts"


def _busy(why: str) -> Problem:
    return Problem(429, f"{why}; try again in a moment.", code="tokenizer_busy", headers=RETRY_AFTER)
