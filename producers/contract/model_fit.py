"""Whether the model of a card (`engine.text.card`) can run a task, and in how many chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from engine.errors import ErrorText, FieldName
from engine.labels import MAX_ENTITIES
from engine.params import (
    MAX_PROMPT_LOGPROBS,
    NO_KEYS,
    REQUIRED,
    has_keys,
)
from producers.contract.fields import MAX_PROMPT_BYTES, bytes_of
from producers.errors import InvalidTask, shown

if TYPE_CHECKING:
    from producers.contract.task import Task

#: Most log probabilities of a task's output, alternatives included: some fifty megabytes as text.
MAX_LOGPROBS: Final = 1 << 20
#: Most output tokens of a task with best_of or beams. One call publishes them and keeps the store busy for tenths of a
#: second.
MAX_BEST_TOKENS: Final = 16_384
#: Most texts of a task that generates nothing, and the largest result of one, as stored: readers get it in one message.
#: With MAX_PROMPT_BYTES they are the limits of a chunk, too, in which a client submits a task of more texts.
MAX_INPUTS: Final = 256
MAX_RESULT_BYTES: Final = 1 << 20
MAX_TEXTS_RESULT: Final = 64 << 20


def check(task: Task, card: Mapping[str, Any], *, counted: bool = True) -> None:
    """Raise InvalidTask if the model of this card (`engine.text.card`) cannot run the task.

    `counted`: False where the prompt's tokens are yet to be counted: then its length is checked later, so that an
    error names true numbers.
    """
    context, vocabulary = int(card["context_length"]), int(card["vocab_size"])
    if task.kind not in card["capabilities"]:
        able = " and ".join(card["capabilities"]) or "nothing of this"
        raise InvalidTask(
            f"model {shown(task.model)} cannot {task.kind}; it can {able}",
            param="model",
            code="unsupported_model",
        )
    if task.kind != "generate":
        _check_texts(task, card, context, vocabulary)
        return
    current = card.get("adapter", {}).get("version")
    if task.adapter is not None and task.adapter != current:
        has = "has no adapter" if current is None else f"has the adapter version {current}"
        raise InvalidTask(
            ErrorText.of("{adapter} is {}, and model {} {}", task.adapter, shown(task.model), has), param="adapter"
        )
    if task.messages is not None and "chat" not in card["capabilities"]:
        raise InvalidTask(
            ErrorText.of("model {} has no chat template; give a prompt in place of {messages}", shown(task.model)),
            param="messages",
            code="unsupported_model",
        )
    if not isinstance(task.prompt, str) and max(task.prompt, default=0) >= vocabulary:
        raise InvalidTask(
            ErrorText.of(
                "{prompt} has token id {}; {} has ids 0 to {}", max(task.prompt), shown(task.model), vocabulary - 1
            ),
            param="prompt",
        )
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "logit_bias"):
        highest = max(getattr(task, name), default=0)
        if highest >= vocabulary:
            raise InvalidTask(
                ErrorText.of(
                    "{} has {}; {} has ids 0 to {}", FieldName(name), highest, shown(task.model), vocabulary - 1
                ),
                param=name,
            )
    if len(set(task.banned_token_ids)) >= vocabulary:
        raise InvalidTask(
            ErrorText.of("{banned_token_ids} bans all tokens of {}", shown(task.model)), param="banned_token_ids"
        )
    _check_watermark(task, card.get("watermark"))
    if counted:
        _check_length(task, card, context)


def _check_watermark(task: Task, keys: Mapping[str, Any] | None) -> None:
    """Raise InvalidTask if workers cannot, or may not, do as the task says. `keys`: the card's `watermark`."""
    if task.watermark is None:
        if task.beam_width is not None and keys is not None and keys["default"] is not None:
            raise InvalidTask(
                ErrorText.of(
                    "{beam_width} finds outputs that bear no watermark, and model {} marks its own unless "
                    "{watermark} is false",
                    shown(task.model),
                ),
                param="beam_width",
            )
        return
    if task.watermark is False:
        why = REQUIRED if keys and keys["default"] is not None and not keys["optional"] else ""
    else:
        why = NO_KEYS if keys is None else "" if task.watermark in keys["keys"] else has_keys(keys["keys"])
    if why:
        shown_value = "false" if task.watermark is False else shown(task.watermark)
        raise InvalidTask(ErrorText.of("{watermark} is {}; {}", shown_value, why), param="watermark")


def _check_texts(task: Task, card: Mapping[str, Any], context: int, vocabulary: int) -> None:
    """Raise InvalidTask if the model of this card cannot make what is asked of the texts."""
    for at, item in enumerate(task.input):
        if isinstance(item, str) or task.on_error == "item":
            continue
        if (highest := max(item)) >= vocabulary:
            raise InvalidTask(
                ErrorText.of(
                    "{input}[{}] has token id {}; {} has ids 0 to {}",
                    at,
                    highest,
                    shown(task.model),
                    vocabulary - 1,
                ),
                param="input",
            )
        if len(item) > context and not task.truncate:
            raise InvalidTask(
                ErrorText.of(
                    "{input}[{}] has {} tokens; {} takes {}; shorten it, or give truncate: true",
                    at,
                    len(item),
                    shown(task.model),
                    context,
                ),
                param="input",
                code="context_length_exceeded",
            )
    pooling = card.get("pooling") or {}
    width = _width(card)
    if task.dimensions is not None:
        _check_dimensions(task, width, pooling.get("matryoshka") or False)
        width = task.dimensions
    if task.prompt_name is not None and task.prompt_name not in (prompts := pooling.get("prompts") or {}):
        raise InvalidTask(
            ErrorText.of(
                "{prompt_name} is {}; {} has the prompts {}",
                shown(task.prompt_name),
                shown(task.model),
                ", ".join(map(shown, prompts)) or "none",
            ),
            param="prompt_name",
        )
    if task.kind == "token_classify" and result_bytes(task, card) > MAX_TEXTS_RESULT:
        raise InvalidTask(
            ErrorText.of(
                "{input} has {} texts, whose labelled parts may take {} bytes; at most {} are taken in one request",
                len(task.input),
                result_bytes(task, card),
                MAX_TEXTS_RESULT,
            ),
            param="input",
            code="array_above_max_length",
        )
    if result_bytes(task, card) > MAX_TEXTS_RESULT:
        max_texts = MAX_TEXTS_RESULT * 3 // (16 * width)
        raise InvalidTask(
            ErrorText.of(
                "{input} has {} texts: with {} numbers each, at most {} are taken in one request",
                len(task.input),
                width,
                max_texts,
            ),
            param="input",
            code="array_above_max_length",
        )


def _width(card: Mapping[str, Any]) -> int:
    """The numbers that the model of this card makes of a text."""
    pooling = card.get("pooling") or {}
    return int(pooling.get("dimensions") or len(pooling.get("labels") or ()) or 1)


def result_bytes(task: Task, card: Mapping[str, Any]) -> int:
    """The bytes of a result of the model of this card, as stored: numbers of 4 bytes in base64. Of labelled parts
    the most that there may be, one a token."""
    if task.kind != "token_classify":
        return len(task.input) * (task.dimensions or _width(card)) * 4 * 4 // 3
    return sum(_label_bytes(item, card) for item in task.input)


def _label_bytes(item: str | tuple[int, ...], card: Mapping[str, Any]) -> int:
    """The same of one text's labelled parts, each with 4 numbers. A token has at least one byte of text."""
    pooling = card.get("pooling") or {}
    labels = len(pooling.get("labels") or ()) if pooling.get("several_labels") else 1
    return min(MAX_ENTITIES, labels * min(int(card["context_length"]), bytes_of(item))) * 4 * 4 * 4 // 3


def chunks(task: Task, card: Mapping[str, Any]) -> list[range]:
    """The texts' numbers in chunks that a worker of this card's model takes at once: one if it takes all of them.

    Each has up to MAX_INPUTS texts of MAX_PROMPT_BYTES, also with the query that is read with each, and a result of
    up to MAX_RESULT_BYTES.
    """
    if task.kind == "generate":
        return [range(0)]
    labels = task.kind == "token_classify"
    limit = MAX_INPUTS
    if not labels:
        limit = min(limit, max(1, MAX_RESULT_BYTES * len(task.input) // result_bytes(task, card)))
    if query := len((task.query or "").encode()):
        limit = min(limit, max(1, MAX_PROMPT_BYTES // query))
    ranges, start, size, result = [], 0, 0, 0
    for at, item in enumerate(task.input):
        item_bytes, label_bytes = bytes_of(item), _label_bytes(item, card) if labels else 0
        full = size + item_bytes > MAX_PROMPT_BYTES or result + label_bytes > MAX_RESULT_BYTES
        if at - start == limit or (at > start and full):
            ranges.append(range(start, at))
            start, size, result = at, 0, 0
        size, result = size + item_bytes, result + label_bytes
    return [*ranges, range(start, len(task.input))]


def check_at_once(task: Task, card: Mapping[str, Any]) -> None:
    """Raise InvalidTask if it has more texts than a worker takes at once: for senders that make no chunks."""
    if len(ranges := chunks(task, card)) > 1:
        raise InvalidTask(
            ErrorText.of(
                "{input} has {} texts; here at most {} are taken at once, with {} bytes and a result of {} bytes: "
                "give the first {}",
                len(task.input),
                MAX_INPUTS,
                MAX_PROMPT_BYTES,
                MAX_RESULT_BYTES,
                len(ranges[0]),
            ),
            param="input",
            code="array_above_max_length",
        )


def _check_dimensions(task: Task, width: int, matryoshka: Any) -> None:
    """Raise InvalidTask if vectors of `width` dimensions may not be cut to those that are asked for."""
    requested = task.dimensions or width
    if requested == width or (requested < width and matryoshka is True):
        return
    if isinstance(matryoshka, list) and requested in matryoshka:
        return
    may = (
        f"be cut to {', '.join(map(str, matryoshka))}"
        if isinstance(matryoshka, list)
        else f"be cut to 1 to {width}"
        if matryoshka
        else "not be cut (no Matryoshka)"
    )
    raise InvalidTask(
        ErrorText.of("{dimensions} is {}; vectors of {} have {} and may {}", requested, shown(task.model), width, may),
        param="dimensions",
    )


def room(card: Mapping[str, Any]) -> int:
    """The most tokens of a prompt and its output together. The last one needs no place in the KV cache."""
    context = int(card["context_length"])
    return min(context, int(card.get("kv_capacity", context)) + 1)


def longest_prompt(task: Task, card: Mapping[str, Any]) -> int:
    """The most tokens of a prompt that leave room for the task's output, as `check` counts; below 1 if none does."""
    context, output = int(card["context_length"]), _least_output(task)
    return min(context - output, int(card.get("kv_capacity", context)) - max(0, output - 1))


def _least_output(task: Task) -> int:
    """The output tokens for which there must be room."""
    return max(task.min_tokens, 1) if task.max_tokens is None else task.max_tokens


def _check_length(task: Task, card: Mapping[str, Any], context: int) -> None:
    """Raise InvalidTask if prompt and output do not fit. A text's tokens are not counted: it has one at least."""
    prompt, least = task.prompt_tokens or 1, "" if task.prompt_tokens else "at least "
    output = _least_output(task)
    _check_size(task, prompt, context)
    if prompt + output > context:
        # OpenAI's words: clients recognise an overflow by the message's beginning and shorten the conversation.
        raise InvalidTask(
            ErrorText.of(
                "This model's maximum context length is {} tokens. However, you requested {}{} tokens "
                "({}{} in the prompt, {} in the completion). Shorten the prompt, lower {max_tokens}, or use a "
                "model with more context than {}.",
                context,
                least,
                prompt + output,
                least,
                prompt,
                output,
                shown(task.model),
            ),
            param="prompt" if prompt >= context else "max_tokens",
            code="context_length_exceeded",
        )
    # The last token of an output needs no place in the KV cache.
    capacity, needed = int(card.get("kv_capacity", context)), max(prompt, prompt + output - 1)
    if needed > capacity:
        raise InvalidTask(
            ErrorText.of(
                "prompt and output need {} tokens of KV cache; the workers of {} have room for {}; shorten the "
                "prompt, lower {max_tokens} or serve with a larger KV cache",
                needed,
                shown(task.model),
                capacity,
            ),
            param="prompt" if prompt > capacity else "max_tokens",
            code="kv_capacity_exceeded",
        )


def _check_size(task: Task, prompt: int, context: int) -> None:
    """Raise InvalidTask if the task would store too much at once."""
    if task.prompt_logprobs is not None and (count := (task.prompt_logprobs + 1) * prompt) > MAX_PROMPT_LOGPROBS:
        raise InvalidTask(
            ErrorText.of(
                "{prompt_logprobs} is {}: with {} prompt tokens these are {} log probabilities; at most {} are given",
                task.prompt_logprobs,
                prompt,
                count,
                MAX_PROMPT_LOGPROBS,
            ),
            param="prompt_logprobs",
        )
    # Without max_tokens, `resolved` sets the most that is allowed.
    output = task.min_tokens if task.max_tokens is None else task.max_tokens
    if task.logprobs is not None and (count := (task.logprobs + 1) * output * task.n) > MAX_LOGPROBS:
        raise InvalidTask(
            ErrorText.of(
                "{logprobs} is {}: with {n} = {} and up to {} output tokens these are {} log probabilities; at "
                "most {} are given; lower {max_tokens}, {n} or {logprobs}",
                task.logprobs,
                task.n,
                output,
                count,
                MAX_LOGPROBS,
            ),
            param="logprobs",
        )
    output = context - prompt if task.max_tokens is None else task.max_tokens
    if (task.beam_width or task.width > task.n) and task.n * output > MAX_BEST_TOKENS:
        name = "best_of" if task.beam_width is None else "beam_width"
        raise InvalidTask(
            ErrorText.of(
                "{} is {}: {} choices of up to {} tokens are more than the {} tokens that are given at "
                "once; lower {max_tokens} or {n}",
                FieldName(name),
                task.width,
                task.n,
                output,
                MAX_BEST_TOKENS,
            ),
            param=name,
        )
