"""The sampling parameters of running sequences, in permanent rows. A step gathers them without a loop.

**Edits** change a step's logits before sampling: penalties, biases, allowed and banned tokens, forms, watermarks.

The order is that of transformers and vLLM: repetition penalty, frequency and presence penalties, logit_bias,
allowed_token_ids, banned_token_ids (with bad words, and with the end tokens before min_tokens), the output's form,
the watermark. Each edit but the last two is a list of (row, token) pairs, so that its cost is proportional to the
request's lists, not to the vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.upload import upload
from engine.sampling.draws import Filters, Ranked, row_keys
from engine.sampling.watermark import Marks, mark
from engine.sequence import Sequence
from engine.watermark import WatermarkKey


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of a step, by pairs of row and token id. No pair occurs twice."""

    rows: Tensor
    """int64 [pairs]."""
    ids: Tensor
    """int64 [pairs]."""
    repetition: Tensor
    """fp32 [pairs]: divides a positive logit, multiplies a negative one (CTRL, arXiv 1909.05858)."""
    minus: Tensor
    """fp32 [pairs]: subtracted after that."""


@dataclass(frozen=True, slots=True)
class Allowed:
    only: Tensor
    """int64: the rows that may only choose the tokens below."""
    rows: Tensor
    """int64 [pairs]."""
    ids: Tensor
    """int64 [pairs]."""


@dataclass(frozen=True, slots=True)
class Edits:
    """The edits of one step. A field is None if no row needs it."""

    penalties: Penalties | None = None
    bias: tuple[Tensor, Tensor, Tensor] | None = None
    """(rows, ids, values). No pair occurs twice."""
    allowed: Allowed | None = None
    banned: tuple[Tensor, Tensor] | None = None
    """(rows, ids)."""
    forms: tuple[Tensor, Tensor] | None = None
    """(rows, in their order; the tokens that would leave an output's form, bool [these rows, vocabulary])."""

    marks: Marks | None = None
    """The watermark, of which no token that is forbidden takes notice."""

    @property
    def forbids(self) -> bool:
        """Whether a row may have no token left to choose."""
        return self.allowed is not None or self.banned is not None or self.forms is not None


def edit(logits: Tensor, edits: Edits) -> None:
    """Apply the edits to `logits`, fp32 [rows, vocabulary], in place."""
    penalties = edits.penalties
    if penalties is not None:
        index = (penalties.rows, penalties.ids)
        values = logits[index]
        values = (values / penalties.repetition).where(values > 0, values * penalties.repetition)
        logits.index_put_(index, values - penalties.minus)
    if edits.bias is not None:
        rows, ids, values = edits.bias
        logits.index_put_((rows, ids), logits[rows, ids] + values)
    forbidden = logits.new_full((), float("-inf"))
    if edits.allowed is not None:
        index = (edits.allowed.rows, edits.allowed.ids)
        values = logits[index]
        logits.index_fill_(0, edits.allowed.only, float("-inf"))
        logits.index_put_(index, values)
    if edits.banned is not None:
        logits.index_put_(edits.banned, forbidden)
    if edits.forms is not None:
        rows, leaving = edits.forms
        if len(rows) == len(logits):
            logits.masked_fill_(leaving, float("-inf"))
        else:
            logits[rows] = logits[rows].masked_fill_(leaving, float("-inf"))
    if edits.marks is not None:
        mark(logits, edits.marks)


Ids = NDArray[np.int64]

# Flags for the kinds of edits that a slot needs. A step skips kinds that none of its rows needs.
_PENALTIES, _BIAS, _ALLOWED, _BANNED, _ENDS, _BAD_WORDS, _FORM, _MARKED = (1 << bit for bit in range(8))
_EMPTY: Ids = np.zeros(0, np.int64)

#: For each row of a step's logits, the draft tokens assumed after its sequence's tokens.
Drafts = list[tuple[int, ...]]
#: Pairs of row and token id, as (rows, ids).
Pairs = tuple[Ids, Ids]
#: Bad words, each as (all tokens but the last, the last token), by the last token but one.
BadWords = dict[int, list[tuple[list[int], int]]]
#: The least capacity of a slot's list, in tokens.
_ROOM = 64


class TokenCounts:
    """Counts the tokens that running sequences have generated: a sparse list for each slot, kept from step to step.

    With sparse lists the cost of a penalty is proportional to a sequence's tokens, not to the vocabulary. Of 128k
    tokens a context has some hundred different ones. The lists lie in one pool, each with room to grow. A list that
    outgrows its place moves to the pool's end, so a long list costs only its own size, whatever the number of slots.
    Nothing is allocated before the first `start`.
    """

    def __init__(self, slots: int, vocab_size: int) -> None:
        self._shape = (slots, vocab_size)
        # 0: not listed; else the number of times generated plus one. Untouched pages of this array take no memory.
        self._generated: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self._pool: Ids = np.zeros(0, np.int64)
        self._end = 0
        self._starts = np.zeros(slots, np.int64)
        self._rooms = np.zeros(slots, np.int64)
        self._lengths = np.zeros(slots, np.int64)

    def start(self, slot: int, prompt: Ids, output: Ids) -> None:
        """Count a slot's tokens from the start. Tokens of `prompt` are listed too, as generated 0 times."""
        if not len(self._generated):
            self._generated = np.zeros(self._shape, np.int32)
        slots = np.array([slot])
        self._generated[slot, self._pool[self._places(slots)]] = 0
        self._lengths[slot] = 0
        listed = np.unique(np.concatenate((prompt, output)))
        room = _room(np.array([len(listed)]))
        if not len(listed) <= self._rooms[slot] <= 2 * room[0]:
            self._move(slots, room)
        self._lengths[slot] = len(listed)
        self._pool[self._places(slots)] = listed
        self._generated[slot, listed] = 1
        ids, counts = np.unique(output, return_counts=True)
        self._generated[slot, ids] += counts.astype(np.int32)

    def grow(self, slots: Ids, tokens: Ids) -> None:
        """Count one more generated token for each of the slots, which must all be different."""
        counts = self._generated[slots, tokens]
        fresh = counts == 0
        if fresh.any():
            fresh_slots = slots[fresh]
            full = fresh_slots[self._lengths[fresh_slots] == self._rooms[fresh_slots]]
            if len(full):
                self._move(full, _room(self._lengths[full]))
            self._pool[self._starts[fresh_slots] + self._lengths[fresh_slots]] = tokens[fresh]
            self._lengths[fresh_slots] += 1
        self._generated[slots, tokens] = np.maximum(counts, 1) + 1

    def pairs(self, slots: Ids) -> tuple[Ids, Ids, NDArray[np.int32]]:
        """Returns (the number of tokens that each slot lists, their ids slot after slot, the times each was
        generated)."""
        lengths = self._lengths[slots]
        ids = self._pool[self._places(slots)]
        return lengths, ids, self._generated[slots.repeat(lengths), ids] - 1

    def _places(self, slots: Ids) -> Ids:
        """The pool indexes of all tokens that these slots list, slot after slot."""
        lengths = self._lengths[slots]
        before: Ids = lengths.cumsum() - lengths
        places: Ids = np.arange(lengths.sum()) + (self._starts[slots] - before).repeat(lengths)
        return places

    def _move(self, slots: Ids, rooms: Ids) -> None:
        """Move the lists of these slots to new places of the given capacities."""
        more = int(rooms.sum())
        if self._end + more > len(self._pool):
            self._close_gaps(more)
        listed = self._pool[self._places(slots)]
        self._starts[slots] = self._end + rooms.cumsum() - rooms
        self._rooms[slots] = rooms
        self._pool[self._places(slots)] = listed
        self._end += more

    def _close_gaps(self, more: int) -> None:
        """Copy the lists without gaps into a new pool that has room for `more` and is twice as large as needed."""
        every = np.arange(len(self._rooms))
        listed = self._pool[self._places(every)]
        self._starts = self._rooms.cumsum() - self._rooms
        self._end = int(self._rooms.sum())
        self._pool = np.zeros(2 * (self._end + more), np.int64)
        self._pool[self._places(every)] = listed


def _room(lengths: Ids) -> Ids:
    """The capacities for lists that have that many tokens now."""
    rooms: Ids = np.maximum(_ROOM, lengths + lengths // 2)
    return rooms


class EditRows:
    """The edits of running sequences. Row `slot` belongs to the running sequence with that slot."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._flags = np.zeros(slots, np.uint8)
        self._repetition = np.ones(slots, np.float32)
        self._presence = np.zeros(slots, np.float32)
        self._frequency = np.zeros(slots, np.float32)
        self._counts = TokenCounts(slots, vocab_size)
        self._counted = np.zeros(slots, np.int64)
        self._biased: list[Ids] = [_EMPTY] * slots
        self._biases: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * slots
        self._allowed: list[Ids] = [_EMPTY] * slots
        self._banned: list[Ids] = [_EMPTY] * slots
        self._ends: list[Ids] = [_EMPTY] * slots
        self._armed_at = np.zeros(slots, np.int64)
        self._bad_words: list[BadWords] = [{} for _ in range(slots)]
        self._watermarks: list[WatermarkKey | None] = [None] * slots

    def admit(self, sequence: Sequence) -> None:
        """Fill the row of the sequence's slot."""
        slot, params = sequence.slot, sequence.request.params
        self._repetition[slot] = params.repetition_penalty
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        self._biased[slot] = np.array([token_id for token_id, _ in params.logit_bias], np.int64)
        self._biases[slot] = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._allowed[slot] = np.array(params.allowed_token_ids, np.int64)
        single = [word[0] for word in sequence.bad_words if len(word) == 1]
        self._banned[slot] = self._in_vocabulary([*params.banned_token_ids, *single])
        self._ends[slot] = self._in_vocabulary(sequence.output.ends)
        self._armed_at[slot] = sequence.prompt_len + params.min_tokens
        self._bad_words[slot] = by_last_but_one(sequence.bad_words)
        self._watermarks[slot] = sequence.watermark
        if params.penalises:
            self._count(sequence)
        self._flags[slot] = (
            params.penalises * _PENALTIES
            | (len(params.logit_bias) > 0) * _BIAS
            | (len(params.allowed_token_ids) > 0) * _ALLOWED
            | (len(self._banned[slot]) > 0) * _BANNED
            | (params.min_tokens > 0 and len(self._ends[slot]) > 0) * _ENDS
            | (len(self._bad_words[slot]) > 0) * _BAD_WORDS
            | (sequence.matcher is not None) * _FORM
            | (sequence.watermark is not None) * _MARKED
        )

    def gather(self, sequences: list[Sequence], slots: Ids, drafts: Drafts | None = None) -> Edits | None:
        """The edits of a step whose logits have a row for each of the sequences. None if no row needs any. `drafts`:
        see SamplingRows.gather."""
        flags = self._flags[slots]
        requested = int(np.bitwise_or.reduce(flags, initial=0))
        if not requested:
            return None

        def rows(flag: int) -> Ids:
            return (flags & flag).nonzero()[0] if requested & flag else _EMPTY

        biased, only, formed, marked = rows(_BIAS), rows(_ALLOWED), rows(_FORM), rows(_MARKED)
        keys = [key for slot in slots[marked] if (key := self._watermarks[slot]) is not None]
        arrays: list[NDArray[Any]] = [
            *self._penalised(sequences, slots, rows(_PENALTIES), drafts),
            *_pairs(biased, [self._biased[slot] for slot in slots[biased]]),
            np.concatenate([np.zeros(0, np.float32), *(self._biases[slot] for slot in slots[biased])]),
            only,
            *_pairs(only, [self._allowed[slot] for slot in slots[only]]),
            *self._forbidden(sequences, slots, rows(_BANNED), rows(_ENDS), rows(_BAD_WORDS), drafts),
            formed,
            self._formed(sequences, formed, drafts),
            self._row_keys(sequences, marked, keys, drafts),
        ]
        sent = upload(arrays, self._device)
        return Edits(
            penalties=Penalties(*sent[:4]) if len(arrays[0]) else None,
            bias=(sent[4], sent[5], sent[6]) if len(biased) else None,
            allowed=Allowed(*sent[7:10]) if len(only) else None,
            banned=(sent[10], sent[11]) if len(arrays[10]) else None,
            forms=(sent[12], sent[13]) if len(formed) else None,
            marks=Marks(marked.tolist(), sent[14], [key.limit for key in keys], [key.delta for key in keys])
            if keys
            else None,
        )

    def _penalised(self, sequences: list[Sequence], slots: Ids, rows: Ids, drafts: Drafts | None) -> list[NDArray[Any]]:
        """All penalised pairs, as (rows, ids, repetition penalties, numbers to subtract)."""
        if not len(rows):
            return [_EMPTY, _EMPTY, np.zeros(0, np.float32), np.zeros(0, np.float32)]
        self._recount(
            sequences, slots, rows if drafts is None else np.array([i for i in rows if not drafts[i]], np.int64)
        )
        row_slots = slots[rows]
        listed, ids, generated = self._counts.pairs(row_slots)
        places, counts = rows.repeat(listed), generated.astype(np.int64)
        if drafts is not None:
            places, ids, counts = self._with_drafts(places, ids, counts, rows, drafts)
        by = slots[places]
        minus = self._frequency[by] * counts + self._presence[by] * (counts > 0)
        return [places, ids, self._repetition[by], minus.astype(np.float32)]

    def _with_drafts(self, rows: Ids, ids: Ids, counts: Ids, penalised: Ids, drafts: Drafts) -> tuple[Ids, Ids, Ids]:
        """Add the tokens of drafts to the counts of these pairs."""
        lengths = [len(drafts[row]) for row in penalised]
        guessed = np.fromiter((token for row in penalised for token in drafts[row]), np.int64, sum(lengths))
        keys = np.concatenate((rows, penalised.repeat(lengths))) * self._vocab_size + np.concatenate((ids, guessed))
        pairs, inverse = np.unique(keys, return_inverse=True)
        total = np.zeros(len(pairs), np.int64)
        np.add.at(total, inverse, np.concatenate((counts, np.ones(len(guessed), np.int64))))
        return pairs // self._vocab_size, pairs % self._vocab_size, total

    def _recount(self, sequences: list[Sequence], slots: Ids, rows: Ids) -> None:
        """Count the tokens generated since the last count by the sequences of `rows`, which must all be different."""
        row_slots = slots[rows]
        lengths = np.fromiter((len(sequences[row].tokens) for row in rows), np.int64, len(rows))
        grown = lengths - self._counted[row_slots]
        by_one = (grown == 1).nonzero()[0]
        last = np.fromiter((sequences[rows[i]].tokens[-1] for i in by_one), np.int64, len(by_one))
        self._counts.grow(row_slots[by_one], last)
        self._counted[row_slots] = lengths
        for i in (grown > 1).nonzero()[0]:
            self._count(sequences[rows[i]])

    def _count(self, sequence: Sequence) -> None:
        """Count a sequence's tokens from the start. The prompt's tokens count only for the repetition penalty."""
        tokens = np.array(sequence.tokens, np.int64)
        prompt = tokens[: sequence.prompt_len] if self._repetition[sequence.slot] != 1 else _EMPTY
        self._counts.start(sequence.slot, prompt, tokens[sequence.prompt_len :])
        self._counted[sequence.slot] = len(tokens)

    def _forbidden(
        self, sequences: list[Sequence], slots: Ids, banned: Ids, ends: Ids, worded_rows: Ids, drafts: Drafts | None
    ) -> Pairs:
        def tokens(row: int) -> list[int]:
            generated = sequences[row].tokens
            return generated if drafts is None or not drafts[row] else [*generated, *drafts[row]]

        if len(ends):
            lengths = np.fromiter((len(sequences[row].tokens) for row in ends), np.int64, len(ends))
            if drafts is not None:
                lengths += np.fromiter((len(drafts[row]) for row in ends), np.int64, len(ends))
            ends = ends[lengths < self._armed_at[slots[ends]]]
        spelled = [(row, last) for row in worded_rows for last in spelled_out(self._bad_words[slots[row]], tokens(row))]
        return _pairs(
            np.concatenate((banned, ends, np.array([row for row, _ in spelled], np.int64))),
            [
                *(self._banned[slot] for slot in slots[banned]),
                *(self._ends[slot] for slot in slots[ends]),
                *(np.array([last], np.int64) for _, last in spelled),
            ],
        )

    def _formed(self, sequences: list[Sequence], rows: Ids, drafts: Drafts | None) -> NDArray[np.bool_]:
        """The tokens that would leave the forms of these rows' outputs: bool [rows, vocabulary]."""
        masks = np.zeros((len(rows), -(-self._vocab_size // 32)), np.int32)
        for mask, row in zip(masks, rows, strict=True):
            allow(mask, sequences[row], () if drafts is None else drafts[row])
        leaving = np.unpackbits(np.invert(masks).view(np.uint8), axis=1, bitorder="little", count=self._vocab_size)
        return leaving.view(np.bool_)

    @staticmethod
    def _row_keys(
        sequences: list[Sequence], rows: Ids, keys: list[WatermarkKey], drafts: Drafts | None
    ) -> NDArray[np.int32]:
        """The seeds that decide which tokens are green in these rows: int32 [rows, 2]."""
        hashes = [
            key.row_key([*sequences[row].tokens[-key.context :], *(() if drafts is None else drafts[row])])
            for row, key in zip(rows, keys, strict=True)
        ]
        return np.frombuffer(b"".join(hashes), np.int32).reshape(-1, 2).copy()

    def _in_vocabulary(self, ids: Any) -> Ids:
        """The ids that are in the model's vocabulary. A tokenizer may have others."""
        unique = np.unique(np.array(tuple(ids), np.int64))
        return unique[unique < self._vocab_size]


def allow(mask: NDArray[np.int32], sequence: Sequence, draft: tuple[int, ...] = ()) -> None:
    """Fill the mask with the tokens that the form of the sequence's output allows after its tokens and `draft`."""
    assert sequence.matcher is not None
    # A copy of a sequence, in the draft model, has tokens more than the matcher, and so may a step in flight.
    sequence.matcher.allow(mask, (*sequence.tokens[sequence.prompt_len + sequence.matcher.count :], *draft))


def _pairs(rows: Ids, ids: list[Ids]) -> Pairs:
    """All pairs of a row and one of its ids."""
    if not len(rows):
        return _EMPTY, _EMPTY
    return rows.repeat([len(row_ids) for row_ids in ids]), np.concatenate(ids)


def spelled_out(bad_words: BadWords, tokens: list[int]) -> list[int]:
    """The last tokens of the bad words whose other tokens are at the end of `tokens`."""
    return [last for before, last in bad_words.get(tokens[-1], ()) if tokens[-len(before) :] == before]


def by_last_but_one(bad_words: tuple[tuple[int, ...], ...]) -> BadWords:
    """Index the words of more than one token by their last token but one."""
    by_token: BadWords = defaultdict(list)
    for *before, last in bad_words:
        if before:
            by_token[before[-1]].append((before, last))
    return dict(by_token)


@dataclass(frozen=True, slots=True)
class BeamRows:
    """The rows of a step that are beams."""

    rows: Tensor
    """int64 [beams]: the rows of the logits."""
    on_host: list[int]
    """The same on the host."""
    counts: list[int]
    """The number of continuations wanted of each."""
    listed: list[int]
    """The number of most likely tokens wanted beside each continuation; -1 if no log probabilities are."""


def continuations_of(sequence: Sequence, vocab_size: int) -> int:
    """The number of next tokens that a beam's search wants of it: so many that those which end it leave one for each
    beam. 0 for a sequence that is no beam."""
    if sequence.beam is None:
        return 0
    return min(vocab_size, sequence.request.params.width + len(sequence.output.ends))


@dataclass(frozen=True, slots=True)
class Draws:
    """The rows of a step that are sampled at a temperature."""

    rows: Tensor
    """int64 [draws]: the rows of the logits."""
    temperature: Tensor
    """fp32 [draws, 1]."""
    keys: Tensor
    """int32 [draws, 1, 2]: see noise.row_keys."""
    filters: Filters | None


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of a step's rows. A field is None if no row needs it."""

    draws: Draws | None
    edits: Edits | None
    logprob_rows: Tensor | None
    """int64: the rows whose log probabilities are wanted."""
    logprob_counts: dict[int, int]
    """Maps a row to the number of most likely tokens wanted, on the host."""
    beams: BeamRows | None = None

    @property
    def plain(self) -> bool:
        """Whether every row takes the most likely token of the unchanged logits, without log probabilities."""
        return self.draws is None and self.edits is None and self.logprob_rows is None and self.beams is None


class SamplingRows:
    """The sampling parameters of running sequences. Row `slot` belongs to the running sequence with that slot."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._temperature = np.zeros(slots, np.float32)
        self._top_k = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self._typical = np.ones(slots, np.float32)
        self._filtered = np.zeros(slots, np.bool_)
        self._seed = np.zeros(slots, np.uint64)
        self._choice = np.zeros(slots, np.uint64)
        self._edits = EditRows(slots, vocab_size, device)
        self._logprobs = np.full(slots, -1, np.int64)
        self._continuations = np.zeros(slots, np.int64)

    def admit(self, sequence: Sequence) -> None:
        """Fill the row of the sequence's slot."""
        slot, params = sequence.slot, sequence.request.params
        self._continuations[slot] = continuations_of(sequence, self._vocab_size)
        self._temperature[slot] = 0.0 if sequence.beam is not None else params.divisor
        # A filter that keeps all tokens is the same as none.
        self._top_k[slot] = params.top_k if params.top_k < self._vocab_size else 0
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._typical[slot] = params.typical_p
        self._filtered[slot] = self._top_k[slot] > 0 or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1
        self._seed[slot] = sequence.seed
        self._choice[slot] = sequence.choice
        self._edits.admit(sequence)
        self._logprobs[slot] = params.listed

    def gather(self, sequences: list[Sequence], drafts: Drafts | None = None) -> SamplingBatch:
        """The parameters for sampling the next tokens of `sequences`, in the order of the logits' rows.

        `drafts`: for each row, the draft tokens assumed after its sequence's tokens. The rows of one sequence are
        adjacent, and the first of them has none.
        """
        slots = np.fromiter((s.slot for s in sequences), np.int64, len(sequences))
        counts = self._continuations[slots]
        wants_logprobs = ((self._logprobs[slots] >= 0) & (counts == 0)).nonzero()[0]
        drawn = self._temperature[slots].nonzero()[0]
        draws = self._draws(sequences, slots, drawn, drafts) if len(drawn) else None
        return SamplingBatch(
            draws=draws,
            edits=self._edits.gather(sequences, slots, drafts),
            logprob_rows=upload([wants_logprobs], self._device)[0] if len(wants_logprobs) else None,
            logprob_counts={int(row): int(self._logprobs[slots[row]]) for row in wants_logprobs},
            beams=self._beams(slots, counts) if counts.any() else None,
        )

    def _beams(self, slots: Ids, counts: Ids) -> BeamRows:
        rows = counts.nonzero()[0]
        (sent,) = upload([rows], self._device)
        return BeamRows(sent, rows.tolist(), counts[rows].tolist(), self._logprobs[slots[rows]].tolist())

    def _draws(
        self, sequences: list[Sequence], slots: NDArray[np.int64], drawn: NDArray[np.int64], drafts: Drafts | None
    ) -> Draws:
        drawn_slots = slots[drawn]
        positions = np.fromiter((len(sequences[i].tokens) for i in drawn), np.uint64, len(drawn))
        if drafts is not None:
            positions += np.fromiter((len(drafts[i]) for i in drawn), np.uint64, len(drawn))
        keys = row_keys(self._seed[drawn_slots], self._choice[drawn_slots], positions)
        sent = upload([drawn, self._temperature[drawn_slots][:, None], keys[:, None]], self._device)
        filters = self._filters(drawn_slots) if self._filtered[drawn_slots].any() else None
        return Draws(rows=sent[0], temperature=sent[1], keys=sent[2], filters=filters)

    def _filters(self, slots: NDArray[np.int64]) -> Filters:
        """The filters of the drawn rows, by their slots. Rows without a filter add no cost."""
        top_k, top_p = self._top_k[slots], self._top_p[slots]
        min_p, mass = self._min_p[slots], self._typical[slots]
        ranked = ((top_k > 0) | (top_p < 1)).nonzero()[0]
        strange = (mass < 1).nonzero()[0]
        with np.errstate(divide="ignore"):
            distance = np.log(min_p)
        sent = upload(
            [ranked, top_k[ranked], top_p[ranked], distance[:, None], strange, mass[strange][:, None]], self._device
        )
        return Filters(
            ranked=Ranked(
                rows=sent[0] if len(ranked) < len(slots) else None,
                top_k=sent[1],
                top_p=sent[2],
                largest_k=int(top_k.max()),
                any_top_p=bool((top_p < 1).any()),
            )
            if len(ranked)
            else None,
            min_p=sent[3] if min_p.any() else None,
            typical=(sent[4], sent[5]) if len(strange) else None,
        )
