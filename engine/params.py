"""The sampling parameters of a request: how its tokens are chosen and what ends its output. Each is declared once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from engine.declared import (
    MAX_INT32,
    Biases,
    EarlyStopping,
    Flag,
    Integer,
    JsonObject,
    Number,
    Strings,
    Text,
    TokenIds,
    WatermarkName,
    checked,
    declare,
    declared,
    shown,
)
from engine.errors import ErrorText, FieldName, RequestError

FinishReason = Literal["stop", "length", "abort", "error"]

#: The limits that others need, too.
MAX_CHOICES: Final = 64
MAX_LOGPROBS: Final = 20
#: The most beams of a search: each step ranks some dozens of tokens of each on the thread of steps.
MAX_BEAMS: Final = 32
MAX_BIASES: Final = 1024
#: The most log probabilities of a prompt's tokens, alternatives included: some megabytes as text.
MAX_PROMPT_LOGPROBS: Final = 262_144
MAX_SEED: Final = (1 << 63) - 1
#: The longest JSON schema, regular expression, and grammar: work on a step's thread grows with them.
MAX_SCHEMA: Final = 65_536
MAX_REGEX: Final = 8_192
MAX_GRAMMAR: Final = 131_072
#: The longest choice, as a grammar.
MAX_CHOICE: Final = 32_768
#: The most texts of a choice, and characters of each.
MAX_TEXTS: Final = 1_000
MAX_TEXT: Final = 1_024
#: The most parts of the forms of a request's outputs, which have one each: see `parts_of_form`.
MAX_FORM_PARTS: Final = 16_384
#: The text before a JSON schema within a grammar.
_WITHIN: Final = "%json "
#: Why a request's watermark is refused.
NO_KEYS: Final = "the model is served without watermark keys (its worker's --watermark-keys)"
REQUIRED: Final = "outputs of this model are watermarked, and its operator does not let requests turn that off"
#: Temperatures below this count as 0, because dividing by them would overflow.
COLDEST: Final = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """A request's sampling parameters. Raises RequestError naming the parameter, its value and its limits.

    A token is chosen in this order: the penalties (repetition, then frequency and presence); logit_bias;
    allowed_token_ids; banned_token_ids with bad_words, min_tokens and the output's form; watermark; temperature; then
    the filters top_k, top_p, min_p, typical_p, each on the tokens that the filters before it kept. At temperature 0 the
    most likely token is taken after the penalties, lists and watermark. Fields that are tuples also accept lists,
    logit_bias and json_schema also mappings. The options are those of `penstock submit`, `run` and others.
    """

    max_tokens: int | None = declare(
        None, Integer(0, MAX_INT32), "Most output tokens. Unset: up to the end of the context."
    )
    """0 generates nothing and ends with "length", which serves requests for prompt_logprobs alone."""
    min_tokens: int = declare(0, Integer(0, MAX_INT32), "Fewest output tokens.")
    """EOS, stop tokens and stop strings cannot end the output before this many tokens."""
    temperature: float = declare(
        1.0, Number(0, 100, "greedy"), "Sampling temperature. 0: greedy. Unset: the model's default.", of_model=True
    )
    """Divides the logits. 0 means greedy: the most likely token is taken."""
    top_k: int = declare(
        0, Integer(0, MAX_INT32, "off"), "Sample among this many likeliest tokens. 0: among all.", of_model=True
    )
    top_p: float = declare(
        1.0, Number(0, 1, above=True), "Sample among the likeliest tokens up to this total probability.", of_model=True
    )
    """Keep the smallest set of most likely tokens whose probabilities add up to this."""
    min_p: float = declare(
        0.0,
        Number(0, 1, "off"),
        "Drop tokens less likely than this share of the likeliest token's probability.",
        of_model=True,
    )
    """See arXiv 2407.01082."""
    typical_p: float = declare(
        1.0,
        Number(0, 1, above=True),
        "Sample among the most typical tokens up to this total probability.",
        of_model=True,
    )
    """Keep the tokens whose surprise is nearest to the distribution's entropy, up to this sum of probabilities (locally
    typical sampling, arXiv 2202.00666)."""
    repetition_penalty: float = declare(
        1.0, Number(0.01, 10), "Above 1: makes tokens of the prompt and output less likely.", of_model=True
    )
    """Logits of tokens in prompt or output are divided by this where positive, else multiplied (arXiv 1909.05858)."""
    presence_penalty: float = declare(
        0.0, Number(-2, 2), "Above 0: makes tokens less likely once they occur in the output."
    )
    """Subtracted from the logit of every token that occurs in the output."""
    frequency_penalty: float = declare(
        0.0, Number(-2, 2), "Above 0: makes tokens less likely for each time they occur in the output."
    )
    """Subtracted from the logit of every token in the output, once for each occurrence."""
    logit_bias: tuple[tuple[int, float], ...] = declare(
        (), Biases(MAX_BIASES, 100), "Add NUMBER to the logit of token ID. May be repeated.", metavar="ID=NUMBER"
    )
    allowed_token_ids: tuple[int, ...] = declare(
        (), TokenIds(4096), "Allow only these tokens. May be repeated.", name="--allow-token", metavar="ID"
    )
    """Empty allows all."""
    banned_token_ids: tuple[int, ...] = declare(
        (), TokenIds(4096), "Never sample this token. May be repeated.", name="--ban-token", metavar="ID"
    )
    bad_words: tuple[str, ...] = declare(
        (), Strings(64, 256), "Never write this text. May be repeated.", name="--bad-word", metavar="TEXT"
    )
    """Texts that are never generated, as the tokenizer writes them at a word's start or in its middle. The last token
    of such a text is banned after its other tokens."""
    json_schema: str | None = declare(
        None, JsonObject(MAX_SCHEMA), "Write JSON that this JSON schema allows.", metavar="JSON"
    )
    """The output is JSON that this schema allows; {} allows any. A mapping, or its text; kept as text. The output is in
    the form of at most one of json_schema, regex, grammar and choice, and ends where nothing can follow."""
    regex: str | None = declare(None, Text(MAX_REGEX), "Write a text that this regular expression matches.")
    """The whole output matches this, in the syntax of Rust's regex crate."""
    grammar: str | None = declare(None, Text(MAX_GRAMMAR), "Write a text of this Lark grammar.", metavar="LARK")
    """The output is a text of this grammar, in llguidance's variant of Lark."""
    choice: tuple[str, ...] = declare(
        (),
        Strings(MAX_TEXTS, MAX_TEXT),
        "Write this text, or another such one. May be repeated.",
        metavar="TEXT",
    )
    """The output is one of these texts."""
    watermark: str | bool | None = declare(
        None,
        WatermarkName(),
        "Mark the output by this key of --watermark-keys, so that `penstock watermark detect` finds it. false: do not. "
        "Unset: as --watermark-default says.",
        metavar="NAME",
    )
    """Adds to the logits of the tokens that are green by this key (arXiv 2301.10226), after the bans: which tokens may
    be chosen stays the same."""
    seed: int | None = declare(None, Integer(0, MAX_SEED), "Random seed; the same seed repeats the output.")
    stop: tuple[str, ...] = declare(
        (), Strings(16, 256, allow_single=True), "Text that ends the output. May be repeated.", metavar="TEXT"
    )
    """Strings that end the text; they are not part of it, unless include_stop."""
    stop_token_ids: tuple[int, ...] = declare(
        (), TokenIds(64), "Token that ends the output. May be repeated.", name="--stop-token", metavar="ID"
    )
    """Tokens that end the output, like EOS: listed in token_ids, absent from text."""
    include_stop: bool = declare(False, Flag(), "Keep the stop text at the output's end.")
    ignore_eos: bool = declare(False, Flag(), "Go on after the model's end-of-sequence token.")
    n: int = declare(1, Integer(1, MAX_CHOICES), "Number of outputs.", name="-n")
    """The number of independent choices made from one prompt."""
    best_of: int | None = declare(
        None, Integer(1, MAX_CHOICES), "Make this many outputs and return the likeliest -n of them."
    )
    """Make this many choices and return the n with the highest mean log probability per token, best first, once all
    have ended. None or n makes n choices and returns their tokens as they come."""
    beam_width: int | None = declare(
        None, Integer(1, MAX_BEAMS), "Search for the likeliest outputs with this many beams, and return the best -n."
    )
    """Beam search, as transformers' `generate(num_beams=...)`: keeps so many outputs at a time, by the sum of their
    tokens' log probabilities after penalties, biases and lists. Returns the n best at its end. Nothing is drawn."""
    length_penalty: float = declare(
        1.0, Number(-10, 10), "Divide a beam's score by its number of tokens to this power. Above 0 favours long ones."
    )
    early_stopping: bool | str = declare(
        False,
        EarlyStopping(),
        "true: end the search when --beam-width outputs have ended. false: when no better one is likely. never: when "
        "no better one is possible.",
        metavar="WHEN",
    )
    logprobs: int | None = declare(
        None,
        Integer(0, MAX_LOGPROBS),
        "Return log probabilities with this many alternatives a token; needs --json.",
    )
    """k: return the log probabilities, in the model's own distribution, of each chosen token and of the k most likely
    ones. None: no log probabilities."""
    prompt_logprobs: int | None = declare(
        None, Integer(0, MAX_LOGPROBS), "The same for the prompt's tokens; needs --json."
    )
    """The same for each token of the prompt, given the tokens before it. The first token has none."""

    def __post_init__(self) -> None:
        checked(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                ErrorText.of("{min_tokens}={} is more than {max_tokens}={}", self.min_tokens, self.max_tokens),
                param="min_tokens",
            )
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(
                ErrorText.of(
                    "{best_of}={} is less than {n}={}; it must be from {n} to {}", self.best_of, self.n, MAX_CHOICES
                ),
                param="best_of",
            )
        if wrong := misused_beams({name: getattr(self, name) for name in OF_BEAMS}):
            raise RequestError(wrong[0], param=wrong[1])
        if self.allowed_token_ids and set(self.allowed_token_ids) <= set(self.banned_token_ids):
            raise RequestError(
                ErrorText.of("{allowed_token_ids} has no token that {banned_token_ids} does not ban"),
                param="allowed_token_ids",
            )
        if len(forms := self.forms) > 1:
            raise RequestError(
                ErrorText.of("{} and {} are both given; an output has one form", *map(FieldName, forms[:2])),
                param=forms[1],
            )
        if forms and (why := too_large(forms[0], getattr(self, forms[0]), self.width)):
            raise RequestError(why, param=forms[0], code="form_too_large")

    @property
    def forms(self) -> tuple[str, ...]:
        """The names of those of FORMS that are given: at most one."""
        return tuple(name for name in FORMS if getattr(self, name) not in (None, ()))

    @property
    def form(self) -> tuple[str, str]:
        """The form that is given, by its parameter's name, as text."""
        (name,) = self.forms
        return name, grammar_of(self.choice) if name == "choice" else getattr(self, name)

    @property
    def divisor(self) -> float:
        """The temperature by which logits are divided; 0 takes the most likely token."""
        return self.temperature if self.temperature >= COLDEST else 0.0

    @property
    def penalises(self) -> bool:
        """Whether a penalty changes the logits of tokens that have occurred."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def width(self) -> int:
        """The number of choices that are made, of which `n` are returned."""
        return self.beam_width or self.best_of or self.n

    @property
    def selects(self) -> bool:
        """Whether the choices are known at the end alone, because the best are then returned."""
        return self.beam_width is not None or self.width > self.n

    @property
    def listed(self) -> int:
        """The number of most likely tokens wanted beside each chosen one; -1 if no log probabilities are. Choices among
        which the best are returned are ranked by theirs."""
        if self.logprobs is not None:
            return self.logprobs
        return 0 if self.selects and self.beam_width is None else -1


#: The parameters that give the output a form.
FORMS: Final = ("json_schema", "regex", "grammar", "choice")

#: The parameters for which a model may have defaults of its own, with the defaults where it has none.
DEFAULTS: Final[Mapping[str, float]] = {
    name: declaration.default
    for name, declaration in declared(SamplingParams).items()
    if declaration.option and declaration.option.of_model
}


def filled(requested: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Those of DEFAULTS that are None or missing in `requested`: the model's own default, else everybody's. A beam
    search draws nothing, so a model's way to draw is not for it."""
    if requested.get("beam_width") is not None:
        model = {name: value for name, value in model.items() if name not in _DRAWING}
    return {name: model.get(name, usual) for name, usual in DEFAULTS.items() if requested.get(name) is None}


#: The parameters that only matter where tokens are drawn, and their values that ask for nothing.
_DRAWING: Final[Mapping[str, tuple[float, ...]]] = {
    "temperature": (0.0, 1.0),
    "top_k": (0,),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "typical_p": (1.0,),
}
#: Those of a beam search alone.
BEAMS: Final = ("beam_width", "length_penalty", "early_stopping")
#: The parameters that `misused_beams` compares.
OF_BEAMS: Final = (
    *BEAMS,
    *("n", "best_of", "watermark"),
    *_DRAWING,
)


def misused_beams(fields: Mapping[str, Any]) -> tuple[ErrorText, str] | None:
    """Why a request's beams cannot be had beside its other parameters, and the parameter at fault; None if they can.
    `fields`: those of OF_BEAMS; None is unset."""
    width = fields["beam_width"]
    if width is None:
        for name, unset in (("length_penalty", 1.0), ("early_stopping", False)):
            if fields[name] not in (None, unset):
                return ErrorText.of("{} is for a beam search: give {beam_width}", FieldName(name)), name
        return None
    if fields["n"] > width:
        return ErrorText.of("{beam_width} is {}, less than {n} ({})", width, fields["n"]), "beam_width"
    if fields["best_of"] is not None:
        return ErrorText.of("{best_of} goes with outputs that are drawn, and {beam_width} with none"), "best_of"
    if fields["watermark"]:
        return ErrorText.of("{watermark} marks what is drawn; with {beam_width} nothing is"), "watermark"
    for name, neutral in _DRAWING.items():
        if fields[name] is not None and fields[name] not in neutral:
            why = ErrorText.of(
                "{} is {}, and with {beam_width} nothing is drawn; leave it out", FieldName(name), shown(fields[name])
            )
            return why, name
    return None


def has_keys(names: Iterable[str]) -> str:
    """Says which watermark keys there are."""
    return f"the model's watermark keys are {', '.join(sorted(names)) or 'none'}"


def grammar_of(choice: Sequence[str]) -> str:
    """The Lark grammar of one of these texts."""
    texts = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in dict.fromkeys(choice))
    return f"start: CHOICE\nCHOICE: {' | '.join(texts)}"


def too_large(name: str, form: str | Mapping[str, Any] | Sequence[str], outputs: int) -> str | None:
    """Why a request may not have this form `name`; None if it may. Each of its outputs has the form read for it."""
    if name == "choice":
        form = grammar_of(form)  # type: ignore[arg-type]
        if len(form) > MAX_CHOICE:
            return ErrorText.of(
                "{choice} has {} characters with what separates its texts; at most {} are taken", len(form), MAX_CHOICE
            )
    parts = parts_of_form(name, form)  # type: ignore[arg-type]
    if parts * outputs <= MAX_FORM_PARTS:
        return None
    outputs_limit = MAX_FORM_PARTS // parts
    advice = f"at most {outputs_limit} outputs may have it" if outputs_limit else "make it smaller"
    return ErrorText.of(
        "{} has {} parts, and with {} outputs that is {}; at most {} are taken: {}",
        FieldName(name),
        parts,
        outputs,
        parts * outputs,
        MAX_FORM_PARTS,
        advice,
    )


def parts_of_form(name: str, form: str | Mapping[str, Any]) -> int:
    """A form's size, to which the time to read it is nearly proportional: of a schema, the members of all objects and
    the entries of all lists; of a regular expression, grammar or choice, a quarter of its characters, but for schemas
    within a grammar, which are counted as such."""
    if name != "json_schema":
        text = str(form)
        schemas = [] if name == "regex" else [*_schemas_in(text)]
        outside = len(text) - sum(length for _, length in schemas)
        return -(-outside // 4) + sum(_parts_of_schema(schema) for schema, _ in schemas)
    return _parts_of_schema(json.loads(form) if isinstance(form, str) else form)


def _schemas_in(grammar: str) -> Iterator[tuple[Any, int]]:
    """The JSON schemas within a Lark grammar, with the characters of each. A text that only looks like one may be
    among them: it is counted by its parts, too."""
    at = grammar.find(_WITHIN)
    while at >= 0:
        start, at = at + len(_WITHIN), at + 1
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, start)
        except (ValueError, RecursionError):
            pass
        else:
            yield schema, end - start
            at = end
        at = grammar.find(_WITHIN, at)


def _parts_of_schema(schema: Any) -> int:
    parts = 0
    todo: list[Any] = [schema] if isinstance(schema, Mapping | list) else []
    while todo:
        node = todo.pop()
        parts += len(node)
        inner = node.values() if isinstance(node, Mapping) else node
        todo += [value for value in inner if isinstance(value, dict | list | tuple)]
    return parts


def greedy(max_tokens: int) -> SamplingParams:
    """The parameters of benches and probes: always as many tokens, and always the same."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
