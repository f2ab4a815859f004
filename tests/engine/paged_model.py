"""A stand-in for the model that computes strictly what a plan says: its tokens show what is in the KV cache."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from engine.kv import KvSpace
from engine.params import SamplingParams
from engine.plan import Sampled, ScheduledSeq, StepPlan, accepted
from engine.request import Request
from engine.sequence import Sequence

EOS = 0
VOCAB = 7
MAX_MODEL_LEN = 40

Entry = bytes
#: Of each KV group, how far back a query sees.
Windows = tuple[int | None, ...]


def first_seen(window: int | None, i: int) -> int:
    return 0 if window is None else max(0, i - window + 1)


def entry(seen: list[list[Entry]], i: int, token: int, long: bool) -> Entry:
    """The K/V of token i: it depends on all that attention reads in each group, and on how the sequence's keys turn."""
    return blake2b(b"/".join(map(b"".join, seen)) + bytes([i, token, long]), digest_size=8).digest()


def computed_plainly(tokens: list[int], windows: Windows, long: bool) -> list[Entry]:
    entries: list[Entry] = []
    for i, token in enumerate(tokens):
        entries.append(entry([entries[first_seen(window, i) :] for window in windows], i, token, long))
    return entries


def choose(last: Entry, seed: int, choice: int, banned: tuple[int, ...]) -> int:
    noise = blake2b(last + f"{seed}/{choice}".encode(), digest_size=16).digest()
    ranking = sorted(range(VOCAB), key=lambda token: (noise[token], token))
    return next(token for token in ranking if token not in banned)


def expected(request: Request, choice: int, windows: Windows, switch: int) -> tuple[list[int], str]:
    """What a choice is to be, computed with no cache, no batch and no interruption."""
    output, reason = _expected(tuple(request.prompt_ids), request.params, choice, windows, switch)
    return list(output), reason


@lru_cache(maxsize=4096)
def _expected(
    prompt: tuple[int, ...], params: SamplingParams, choice: int, windows: Windows, switch: int
) -> tuple[list[int], str]:
    """Once for all events of a choice, each of which is compared with it."""
    tokens = list(prompt)
    ends = {EOS, *params.stop_token_ids}
    limit = MAX_MODEL_LEN - len(tokens) if params.max_tokens is None else params.max_tokens
    output: list[int] = []
    while True:
        last = computed_plainly(tokens, windows, len(tokens) > switch)[-1]
        banned = tuple(ends) if len(output) < params.min_tokens else ()
        token = choose(last, params.seed, choice, banned)
        output.append(token)
        tokens.append(token)
        if token in ends and len(output) > params.min_tokens:
            return output, "stop"
        if len(output) == limit:
            return output, "length"


class PagedModel:
    """Computes strictly what a plan says, on blocks that hold whatever was last written to them."""

    def __init__(self, spaces: list[KvSpace], block_size: int, switch: int, copies_at_once: bool) -> None:
        self.size = block_size
        self.switch = switch
        self.windows = tuple(space.window for space in spaces)
        self.groups: list[list[list[Entry]]] = [
            [[b"garbage!"] * block_size for _ in range(space.num_blocks)] for space in spaces
        ]
        self.copies_at_once = copies_at_once

    def execute(self, plan: StepPlan) -> list[Sampled]:
        self.copy(plan.copies)
        assert plan.num_tokens == sum(row.count for row in plan.rows)
        for g, window in enumerate(self.windows):
            spans = [(row.seq, row.start, row.start + row.count) for row in plan.rows]
            written = [self.place(seq, g, i) for seq, start, end in spans for i in range(start, end)]
            assert len(written) == len(set(written)), "two sequences write to one place"
            read = {self.place(seq, g, i) for seq, start, _ in spans for i in range(first_seen(window, start), start)}
            assert read.isdisjoint(written), "a sequence writes where another reads"
        for row in plan.rows:
            self.compute(row)
        return [self.choose(row) for row in plan.rows if row.samples]

    def choose(self, row: ScheduledSeq) -> Sampled:
        """After the last token, and after each of the draft as if it had come."""
        tokens = row.seq.tokens
        length = len(tokens)
        chosen = []
        for guessed in range(1 + len(row.draft)):
            tokens[length:] = row.draft[:guessed]
            chosen.append(self.sample(row.seq))
        del tokens[length:]
        return accepted(row.draft, chosen)

    def copy(self, copies: list[tuple[int, int, int]]) -> None:
        before = [[list(block) for block in blocks] for blocks in self.groups]
        for g, source, destination in copies:
            source_block = (before if self.copies_at_once else self.groups)[g][source]
            self.groups[g][destination] = list(source_block)

    def compute(self, row: ScheduledSeq) -> None:
        seq = row.seq
        assert row.count > 0
        assert row.samples == (row.known_tokens == len(seq.tokens))
        assert len(row.draft) <= row.max_draft
        tokens = [*seq.tokens, *row.draft]
        for i in range(row.start, row.start + row.count):
            seen = [
                [self.read(seq, g, j) for j in range(first_seen(window, i), i)] for g, window in enumerate(self.windows)
            ]
            new = entry(seen, i, tokens[i], len(seq.tokens) > self.switch)
            for g, blocks in enumerate(self.groups):
                block, offset = self.place(seq, g, i)
                blocks[block][offset] = new

    def sample(self, seq: Sequence) -> Sampled:
        last = self.read(seq, len(self.groups) - 1, len(seq.tokens) - 1)
        made = len(seq.tokens) - seq.prompt_len
        banned = sorted(seq.output.ends) if made < seq.request.params.min_tokens else ()
        return Sampled(choose(last, seq.seed, seq.choice, banned))

    def read(self, seq: Sequence, group: int, i: int) -> Entry:
        block, offset = self.place(seq, group, i)
        return self.groups[group][block][offset]

    def place(self, seq: Sequence, group: int, i: int) -> tuple[int, int]:
        table = seq.tables[group]
        index = i // self.size - table.first
        assert index >= 0, "a query sees a block that was let go"
        return table.blocks[index], i % self.size

    def ruin(self, row: ScheduledSeq, plan: StepPlan) -> None:
        """Leave rubbish in all that only this row's sequence holds."""
        for g, blocks in enumerate(self.groups):
            others = {block for other in plan.rows if other is not row for block in other.seq.tables[g].blocks}
            for block in set(row.seq.tables[g].blocks) - others:
                blocks[block] = [b"ruined!!"] * self.size
