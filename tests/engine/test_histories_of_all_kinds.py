"""The same histories with requests of every kind: prompts that are scored, best_of, nothing to generate, and a flood.

What is scored, and which candidates are chosen, is compared with a computation without cache, batch or interruption.
"""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from engine.params import SamplingParams
from engine.plan import Sampled, ScheduledSeq
from engine.request import Event, Request, ScoredPart, TokenLogprobs
from engine.sequence import Sequence
from tests.engine.paged_model import VOCAB, Entry, PagedModel, Windows, computed_plainly, expected
from tests.engine.test_overlap_histories import CLOCK, Device, Overlapping
from tests.engine.test_scheduler_histories import Histories, Seen, run_in
from tests.exhaustive import few

#: Steps in which whoever waits has its turn, though two requests of a higher tier come with each: its tier falls to
#: theirs in 30 s, and each step takes one.
PATIENCE = 120


def logprob(last: Entry, token: int) -> float:
    """Of a token that follows the one with this K/V."""
    return -int.from_bytes(blake2b(last + bytes([token]), digest_size=4).digest(), "little") / 2**32


class Scoring:
    """What a model does beside: log probabilities of what was asked for."""

    def compute(self, row: ScheduledSeq) -> None:
        super().compute(row)  # type: ignore[misc]
        places = row.scored_span()
        tokens = row.seq.tokens
        row.scored = ScoredPart(
            places.start + 1, [TokenLogprobs(tokens[p + 1], self._logprob(row.seq, p), ()) for p in places]
        )

    def sample(self, seq: Sequence) -> Sampled:
        found: Sampled = super().sample(seq)  # type: ignore[misc]
        found.logprobs = TokenLogprobs(found.token_id, self._logprob(seq, len(seq.tokens) - 1, found.token_id), ())
        return found

    def _logprob(self, seq: Sequence, place: int, token: int | None = None) -> float:
        last = self.read(seq, len(self.groups) - 1, place)  # type: ignore[attr-defined]
        return logprob(last, seq.tokens[place + 1] if token is None else token)


class ScoringModel(Scoring, PagedModel):
    pass


class ScoringDevice(Scoring, Device):
    pass


def chosen(request: Request, windows: Windows, switch: int) -> list[tuple[list[int], str]]:
    """Of all candidates those with the highest mean log probability, best first."""
    ranked = []
    for choice in range(request.params.width):
        output, reason = expected(request, choice, windows, switch)
        tokens, total = list(request.prompt_ids), 0.0
        for token in output:
            total += logprob(computed_plainly(tokens, windows, len(tokens) > switch)[-1], token)
            tokens.append(token)
        ranked.append((-total / len(output), choice, output, reason))
    return [(output, reason) for _, _, output, reason in sorted(ranked)[: request.params.n]]


class OfAllKinds:
    """Rules beside those of a machine. `scored`: runs of a request whose prompt's scores were told."""

    def make_model(self) -> PagedModel:
        return ScoringModel(self.spaces, self.block_size, self.switch, copies_at_once=self.caching)

    @rule(
        chunks=st.lists(st.sampled_from([(1, 2, 3, 4), (1, 2, 3, 5)]), max_size=3),
        tail=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=4),
        tier=st.integers(0, 3),
        tenant=st.sampled_from(["", "a"]),
        n=st.integers(1, 2),
        more=st.sampled_from([0, 1, 2, 2]),
        max_tokens=st.sampled_from([0, 1, 7, 7, 7]),
        scores=st.booleans(),
        seed=st.integers(0, 3),
    )
    def add_other_kind(self, chunks, tail, tier, tenant, n, more, max_tokens, scores, seed):
        prompt = [token for chunk in chunks for token in chunk] + tail
        for one in (seed, seed + 1):
            params = SamplingParams(
                n=n,
                best_of=n + more,
                max_tokens=max_tokens,
                seed=one,
                prompt_logprobs=0 if scores else None,
            )
            self.enter(prompt, params, tier, tenant)

    def enter(self, prompt: list[int], params: SamplingParams, tier: int, tenant: str = "") -> str:
        self.serial += 1
        request = Request(f"r{self.serial}", prompt, params, tier, tenant=tenant, arrival=self.now)
        self.seen[request.id] = Seen(request, [[] for _ in range(params.n)], [None] * params.n)
        self.take(self.scheduler.add(request))
        return request.id

    @rule(tier=st.integers(1, 3), length=st.integers(1, 12))
    def wait_in_a_flood(self, tier, length):
        """More comes of the highest tier than can be done, for as long as it takes one of a lower tier to be done."""
        name = self.enter([1] * length, SamplingParams(max_tokens=2, seed=1), tier)
        came = []
        for _ in range(PATIENCE):
            for seed in range(2):
                came.append(self.enter([2, 3, 4, 5, 6], SamplingParams(max_tokens=2, seed=seed), 0))
            self.now += 1.0
            self.step()
            if self.seen[name].done:
                break
        else:
            raise AssertionError(f"a request of tier {tier} starves: {self.seen[name]}")
        for one in came:
            if not self.seen[one].done:
                self.scheduler.abort(one)
                del self.seen[one]

    def take(self, events: list[Event]) -> None:
        for event in events:
            seen = self.seen[event.request_id]
            params = seen.request.params
            if event.prompt_logprobs is not None:
                self.check_scores(event, seen)
            elif event.finish_reason == "error" or (params.max_tokens != 0 and not params.selects):
                super().take([event])
            else:
                self.check_whole(event, seen)

    def check_scores(self, event: Event, seen: Seen) -> None:
        assert event.token_ids == []
        # Whoever goes on from published tokens asks for the scores no more, unless they were not published.
        assert seen.request.resume or not any(seen.tokens), "a prompt's scores come before the first token"
        prompt = seen.request.prompt_ids
        entries = computed_plainly(prompt, self.model.windows, len(prompt) > self.switch)
        right = [None, *(logprob(entries[p], prompt[p + 1]) for p in range(len(prompt) - 1))]
        assert [one and one.logprob for one in event.prompt_logprobs] == right

    def check_whole(self, event: Event, seen: Seen) -> None:
        """A choice that is told in one piece: of best_of, or with nothing in it."""
        assert seen.reasons[event.choice] is None
        assert event.finish_reason is not None
        if seen.request.params.max_tokens == 0:
            assert (event.token_ids, event.finish_reason) == ([], "length")
        else:
            right = chosen(seen.request, self.model.windows, self.switch)
            assert (event.token_ids, event.finish_reason) == right[event.choice]
        seen.tokens[event.choice] = event.token_ids
        seen.reasons[event.choice] = event.finish_reason
        assert event.done == all(seen.reasons)
        seen.done = event.done


class HistoriesOfAllKinds(OfAllKinds, Histories):
    pass


class OverlappingOfAllKinds(OfAllKinds, Overlapping):
    def make_model(self) -> PagedModel:
        return ScoringDevice(self.scheduler, type(self))


class InStepOfAllKinds(OverlappingOfAllKinds):
    overlap = 0


CASES = [
    *((HistoriesOfAllKinds, world) for world in ("plain", "tight", "window")),
    *((OverlappingOfAllKinds, world) for world in ("plain", "window")),
    (InStepOfAllKinds, "plain"),
]


@pytest.mark.parametrize(
    ("machine", "world"), few(CASES, (HistoriesOfAllKinds, "tight"), (OverlappingOfAllKinds, "window"))
)
def test_requests_of_every_kind_end_once_and_as_undisturbed(machine, world, monkeypatch):
    monkeypatch.setattr("engine.execution.pipeline.time", CLOCK)
    run_in(world, machine, 5)
