"""The edits that running sequences need, in permanent rows. A step gathers them without a loop over tokens."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels.upload import upload
from engine.sampling.edits import Allowed, Edits, Penalties
from engine.sequence import Sequence

Ids = NDArray[np.int64]

# Flags for the kinds of edits that a slot needs. A step skips kinds that none of its rows needs.
_PENALTIES, _BIAS, _ALLOWED, _BANNED, _ENDS, _BAD_WORDS, _FORM = (1 << bit for bit in range(7))
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

        biased, only, formed = rows(_BIAS), rows(_ALLOWED), rows(_FORM)
        arrays: list[NDArray[Any]] = [
            *self._penalised(sequences, slots, rows(_PENALTIES), drafts),
            *_pairs(biased, [self._biased[slot] for slot in slots[biased]]),
            np.concatenate([np.zeros(0, np.float32), *(self._biases[slot] for slot in slots[biased])]),
            only,
            *_pairs(only, [self._allowed[slot] for slot in slots[only]]),
            *self._forbidden(sequences, slots, rows(_BANNED), rows(_ENDS), rows(_BAD_WORDS), drafts),
            formed,
            self._formed(sequences, formed, drafts),
        ]
        sent = upload(arrays, self._device)
        return Edits(
            penalties=Penalties(*sent[:4]) if len(arrays[0]) else None,
            bias=(sent[4], sent[5], sent[6]) if len(biased) else None,
            allowed=Allowed(*sent[7:10]) if len(only) else None,
            banned=(sent[10], sent[11]) if len(arrays[10]) else None,
            forms=(sent[12], sent[13]) if len(formed) else None,
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
