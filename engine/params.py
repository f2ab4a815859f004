"""The sampling parameters of a request: how its tokens are chosen and what ends its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.bounds import biases, flag, integer, number, strings, token_ids
from engine.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]

#: The limits of a request's parameters. Error messages show them.
MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_TEMPERATURE = 100.0
MAX_INT32 = (1 << 31) - 1
MAX_SEED = (1 << 63) - 1
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_LISTED_IDS = 4096
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """A request's sampling parameters. Raises RequestError naming the parameter, its value and its limits.

    A token is chosen in this order: the penalties (repetition, then frequency and presence); logit_bias;
    allowed_token_ids; banned_token_ids with bad_words and min_tokens; temperature; then the filters top_k, top_p,
    min_p, typical_p, each on the tokens that the filters before it kept. At temperature 0 the most likely token is
    taken after the penalties and lists. Fields that are tuples also accept lists, and logit_bias also accepts a
    mapping.
    """

    max_tokens: int | None = None
    """The most tokens to generate; None goes up to the end of the context. 0 generates nothing and ends with "length",
    which serves requests for prompt_logprobs alone."""
    min_tokens: int = 0
    """EOS, stop tokens and stop strings cannot end the output before this many tokens."""
    temperature: float = 1.0
    """Divides the logits. 0 means greedy: the most likely token is taken."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities add up to this."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least this fraction of the most likely token's (arXiv 2407.01082)."""
    typical_p: float = 1.0
    """Keep the tokens whose surprise is nearest to the distribution's entropy, up to this sum of probabilities (locally
    typical sampling, arXiv 2202.00666)."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by this where positive, else multiplied (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that occurs in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of every token in the output, once for each occurrence."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias added to its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these tokens are generated; empty allows all."""
    banned_token_ids: tuple[int, ...] = ()
    """These tokens are never generated."""
    bad_words: tuple[str, ...] = ()
    """Texts that are never generated, as the tokenizer writes them at a word's start or in its middle. The last token
    of such a text is banned after its other tokens."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it, unless include_stop."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, like EOS: listed in token_ids, absent from text."""
    include_stop: bool = False
    """Keep the stop string that ended the text."""
    ignore_eos: bool = False
    n: int = 1
    """The number of independent choices made from one prompt."""
    best_of: int | None = None
    """Make this many choices and return the n with the highest mean log probability per token, best first, once all
    have ended. None or n makes n choices and returns their tokens as they come."""
    logprobs: int | None = None
    """k: return the log probabilities, in the model's own distribution, of each chosen token and of the k most likely
    ones. None: no log probabilities."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt, given the tokens before it. The first token has none."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 0, MAX_INT32)
        integer("min_tokens", self.min_tokens, 0, MAX_INT32)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}", param="min_tokens"
            )
        number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        integer("top_k", self.top_k, 0, MAX_INT32)
        number("top_p", self.top_p, 0.0, 1.0, above=True)
        number("min_p", self.min_p, 0.0, 1.0)
        number("typical_p", self.typical_p, 0.0, 1.0, above=True)
        number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        self._check_lists()
        if self.seed is not None:
            integer("seed", self.seed, 0, MAX_SEED)
        flag("include_stop", self.include_stop)
        flag("ignore_eos", self.ignore_eos)
        integer("n", self.n, 1, MAX_CHOICES)
        if self.best_of is not None:
            integer("best_of", self.best_of, 1, MAX_CHOICES)
            if self.best_of < self.n:
                raise RequestError(
                    f"best_of={self.best_of} is less than n={self.n}; it must be from n to {MAX_CHOICES}",
                    param="best_of",
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _check_lists(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("stop", strings("stop", self.stop, MAX_STOPS, MAX_STOP_CHARS))
        put("bad_words", strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS))
        put("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, MAX_INT32))
        for name in ("allowed_token_ids", "banned_token_ids"):
            put(name, token_ids(name, getattr(self, name), MAX_LISTED_IDS, MAX_INT32))
        put("logit_bias", biases("logit_bias", self.logit_bias, MAX_BIASES, MAX_INT32, MAX_BIAS))
        if self.allowed_token_ids and set(self.allowed_token_ids) <= set(self.banned_token_ids):
            raise RequestError(
                "allowed_token_ids has no token that banned_token_ids does not ban", param="allowed_token_ids"
            )

    @property
    def width(self) -> int:
        """The number of choices that are made, of which `n` are returned."""
        return self.best_of or self.n

    @property
    def selects(self) -> bool:
        """Whether more choices are made than returned."""
        return self.width > self.n
