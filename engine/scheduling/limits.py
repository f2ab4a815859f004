"""Refuses requests that could never run, before they are queued.

`ModelTraits` are what a scheduler has to know of its model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from engine.declared import Number, shown, wrong_type
from engine.errors import ErrorText, FieldName, RequestError
from engine.grammar.matcher import Grammars
from engine.grammar.source import check_installed
from engine.params import MAX_PROMPT_LOGPROBS, NO_KEYS, SamplingParams
from engine.request import LoadedAdapter, Request
from engine.scheduling.adapters import AdapterTable
from engine.scheduling.policy import TIERS
from engine.text import Tokenizer
from engine.text.detokenizer import Detokenizer
from engine.watermark import WatermarkKey, Watermarks

#: Text put before the word, so that a tokenizer that marks the beginning of a text does not mark the word.
_BEFORE = "\n"
_CACHED_WORDS = 4096


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Without a tokenizer, there is no text: only token ids go in and out."""

    version: str = ""
    """The model's version, which separates the cached blocks of different models."""
    vocab_size: int | None = None
    """None: not known."""
    eos_token_ids: Sequence[int] = ()
    rope_switch: int | None = None
    """A sequence of more tokens has other keys than a shorter one, so it is computed anew when it grows past that."""
    new_detokenizer: Callable[[], Detokenizer | None] = lambda: None
    spellings: Callable[[str], tuple[tuple[int, ...], ...]] | None = None
    """A word's ways to be written in tokens."""
    grammars: Grammars | None = None
    """Makes the matchers of outputs that are to have a form."""
    adapters: AdapterTable[Any] | None = None
    """The adapters that requests may name. None: there are none."""
    watermarks: Watermarks | None = None
    """The watermark keys that requests may name. None: there are none."""

    def spelled(self, bad_words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All token sequences that write these words and that the model can write: a tokenizer may have more tokens.
        Raises RequestError for a word that the tokenizer drops."""
        if bad_words and self.spellings is None:
            raise RequestError(
                ErrorText.of("the model has no tokenizer.json: bad_words must be {banned_token_ids}"), param="bad_words"
            )
        spellings: dict[tuple[int, ...], None] = {}
        size = self.vocab_size or 1 << 31
        for word in bad_words:
            ways = self.spellings(word) if self.spellings else ()
            if not ways:
                raise RequestError(f"bad_words has {word!r}, of which the tokenizer drops all", param="bad_words")
            spellings |= dict.fromkeys(spelling for spelling in ways if max(spelling) < size)
        return tuple(spellings)

    def check_form(self, params: SamplingParams) -> None:
        """Raise RequestError for a form that no output of this model could follow, as far as that is told at once."""
        if not params.forms:
            return
        (name,) = params.forms
        if self.grammars is None:
            raise RequestError(
                ErrorText.of("the model has no tokenizer.json: it cannot follow {}", FieldName(name)), param=name
            )
        check_installed(name)

    def adapter(self, name: str) -> LoadedAdapter | None:
        """The loaded adapter of this name; None for "". Raises RequestError if it is not loaded."""
        if not name:
            return None
        if self.adapters is None:
            text = ErrorText.of("{adapter}={}: the model is served without adapters", shown(name))
            raise RequestError(text, param="adapter")
        adapter: LoadedAdapter = self.adapters.find(name)
        return adapter

    def watermark(self, requested: str | bool | None) -> WatermarkKey | None:
        """The key of a request's `watermark`; None for none. Raises RequestError for one that there is not."""
        if self.watermarks is not None:
            return self.watermarks.key_of(requested)
        if requested:
            raise RequestError(ErrorText.of("{watermark}={}: {}", shown(requested), NO_KEYS), param="watermark")
        return None

    def with_text(self, tokenizer: Tokenizer) -> ModelTraits:
        """The same with a tokenizer, which knows better than config.json which tokens end an output."""
        size = tokenizer.vocab_size if self.vocab_size is None else self.vocab_size
        return replace(
            self,
            eos_token_ids=tokenizer.eos_token_ids,
            new_detokenizer=tokenizer.new_detokenizer,
            spellings=Spellings(tokenizer).of,
            grammars=Grammars(tokenizer.to_json, size, tokenizer.eos_token_ids),
        )


class Spellings:
    """Finds all token sequences that write a word: at the beginning of a word, and as a continuation. With a cache;
    thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode(_BEFORE, add_special_tokens=False)
        self.of = lru_cache(_CACHED_WORDS)(self._of)

    def _of(self, word: str) -> tuple[tuple[int, ...], ...]:
        """The different token sequences that write a word. Empty if the tokenizer drops the word altogether.

        The word is written with and without a space before it (unless it begins with one), within a text and at its
        beginning.
        """
        forms = [word] if word[0].isspace() else [word, f" {word}"]
        encodings = [self._encode(form) for form in forms] + [self._within(form) for form in forms]
        return tuple(dict.fromkeys(ids for ids in encodings if ids))

    def _within(self, text: str) -> tuple[int, ...]:
        ids = self._encode(_BEFORE + text)
        prefix = len(self._before)
        # If the tokenizer merged the two, the word has no tokens of its own there.
        return ids[prefix:] if list(ids[:prefix]) == self._before else ()

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


#: The range of a tenant's weight, by which its share of a tier is multiplied.
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
_WEIGHT, _ARRIVAL = Number(MIN_WEIGHT, MAX_WEIGHT), Number(-(2.0**62), 2.0**62)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    max_model_len: int
    """The most tokens of prompt and output together."""
    kv_capacity: int
    """The tokens of the longest sequence that the KV cache can hold."""
    vocab_size: int | None
    """The size of the vocabulary; None if it is not known."""
    max_num_seqs: int = 1 << 20
    """The most sequences that run at one time."""
    block_size: int = 1
    """The tokens of a KV block."""

    def output_limit(self, request: Request) -> int:
        """The most tokens of the output: max_tokens, or what the context and the KV cache allow.

        The last token of an output is never computed and needs no place in the KV cache.
        """
        room = min(self.max_model_len, self._kv_of_one(request.params, len(request.prompt_ids)) + 1)
        room -= len(request.prompt_ids)
        return room if request.params.max_tokens is None else min(room, request.params.max_tokens)

    def _kv_of_one(self, params: SamplingParams, prompt: int) -> int:
        """The tokens of the longest sequence that the KV cache can hold. All beams of a search fit at one time, with
        the prompt that they share."""
        if params.beam_width is None:
            return self.kv_capacity
        return min(self.kv_capacity, prompt + max(0, self.kv_capacity - prompt) // params.beam_width - self.block_size)

    def check(self, request: Request) -> None:
        """Raise RequestError naming the field at fault and its value."""
        if request.pooling is not None:
            raise RequestError(f"the model generates text; it cannot {request.pooling.kind}", param="model")
        if not isinstance(request.params, SamplingParams):
            raise wrong_type("params", request.params, "SamplingParams")
        for name in ("id", "salt", "tenant", "adapter"):
            if not isinstance(getattr(request, name), str):
                raise wrong_type(name, getattr(request, name), "a string")
        if not request.id:
            raise RequestError("id is empty", param="id")
        if isinstance(request.tier, bool) or request.tier not in range(TIERS):
            raise RequestError(f"tier={shown(request.tier)} must be from 0 to {TIERS - 1}", param="tier")
        _ARRIVAL.check("arrival", request.arrival)
        _WEIGHT.check("weight", request.weight)
        if not request.prompt_ids:
            raise RequestError("the prompt is empty; it needs at least one token", param="prompt_ids")
        self._check_ids("prompt_ids", request.prompt_ids)
        if len(request.resume) > request.params.n:
            raise RequestError(
                ErrorText.of("resume has {} choices, more than {n}={}", len(request.resume), request.params.n),
                param="resume",
            )
        if any(request.resume) and request.params.selects:
            chooses = FieldName("best_of" if request.params.beam_width is None else "beam_width")
            raise RequestError(
                ErrorText.of("resume has tokens, but {} chooses among outputs that are whole", chooses), param="resume"
            )
        for token_ids in request.resume:
            self._check_ids("resume", token_ids)
        self._check_params(request.params, len(request.prompt_ids))
        self._check_length(len(request.prompt_ids), request.params.max_tokens)
        self._check_beams(request.params, len(request.prompt_ids))

    def _check_beams(self, params: SamplingParams, prompt: int) -> None:
        """Raise RequestError if a search's beams could not run at one time."""
        width = params.beam_width
        if width is None or params.max_tokens == 0:
            return
        if width > self.max_num_seqs:
            raise RequestError(
                ErrorText.of("{beam_width}={}, and at most {} sequences run at one time", width, self.max_num_seqs),
                param="beam_width",
            )
        longest = prompt + (1 if params.max_tokens is None else params.max_tokens) - 1
        if longest > self._kv_of_one(params, prompt):
            raise RequestError(
                ErrorText.of(
                    "{beam_width}={} beams with {} tokens of prompt and up to {} of output each do not fit the KV "
                    "cache of {} tokens; lower {beam_width} or {max_tokens}",
                    width,
                    prompt,
                    longest + 1 - prompt,
                    self.kv_capacity,
                ),
                param="beam_width",
                code="kv_capacity_exceeded",
            )

    def _check_params(self, params: SamplingParams, prompt: int) -> None:
        """Check the parameters against limits that depend on the model or the prompt."""
        for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
            self._check_ids(name, getattr(params, name))
        self._check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias])
        if self.vocab_size is not None and len(set(params.banned_token_ids)) >= self.vocab_size:
            raise RequestError(
                ErrorText.of("{banned_token_ids} bans all {} tokens of the vocabulary", self.vocab_size),
                param="banned_token_ids",
            )
        if params.prompt_logprobs is not None:
            requested = (params.prompt_logprobs + 1) * prompt
            if requested > MAX_PROMPT_LOGPROBS:
                raise RequestError(
                    ErrorText.of(
                        "{prompt_logprobs}={} of {} prompt tokens are {} log probabilities; at most {} are given",
                        params.prompt_logprobs,
                        prompt,
                        requested,
                        MAX_PROMPT_LOGPROBS,
                    ),
                    param="prompt_logprobs",
                )

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        if not set(map(type, token_ids)) <= {int}:
            wrong = next(token_id for token_id in token_ids if type(token_id) is not int)
            raise RequestError(
                ErrorText.of("{} has {}, which is not a token id", FieldName(name), shown(wrong)),
                param=name,
                code="invalid_type",
            )
        size = (1 << 31) if self.vocab_size is None else self.vocab_size
        for extreme in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= extreme < size:
                raise RequestError(
                    ErrorText.of("{} has token id {}; ids are from 0 to {}", FieldName(name), shown(extreme), size - 1),
                    param=name,
                )

    def _check_length(self, prompt: int, max_tokens: int | None) -> None:
        requested = prompt + (1 if max_tokens is None else max_tokens)
        computed = max(requested - 1, prompt)
        needs = f"{prompt} tokens of prompt"
        if max_tokens is not None:
            needs = ErrorText.of("{} + {max_tokens}={}", needs, max_tokens)
        if requested > self.max_model_len:
            # The text is OpenAI's: clients that shorten a conversation recognise an overflow by how the message begins.
            raise RequestError(
                ErrorText.of(
                    "This model's maximum context length is {} tokens. However, you requested {} tokens ({} in the "
                    "prompt, {} in the completion). Shorten the prompt or lower {max_tokens}.",
                    self.max_model_len,
                    requested,
                    prompt,
                    requested - prompt,
                ),
                param="prompt_ids" if prompt >= self.max_model_len else "max_tokens",
                code="context_length_exceeded",
            )
        if computed > self.kv_capacity:
            raise RequestError(
                ErrorText.of(
                    "{} do not fit the KV cache of {} tokens; shorten the prompt, lower {max_tokens} or "
                    "serve with a larger kv_cache_bytes",
                    needs,
                    self.kv_capacity,
                ),
                param="prompt_ids" if prompt > self.kv_capacity else "max_tokens",
                code="kv_capacity_exceeded",
            )
