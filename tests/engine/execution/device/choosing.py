"""Steps of a device sampler over running sequences, and its choices compared with those of engine.sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from engine.execution.device.sampler import Choose, DeviceSampler
from engine.plan import Sampled
from engine.sampling import SamplingRows, sample
from engine.sampling.draws import gumbel, row_keys
from engine.sampling.rows import edit
from engine.sequence import Sequence
from tests.engine.sampling.sequences import sequence


def step(sampler: DeviceSampler, logits: torch.Tensor, sequences: list[Sequence], padding: int = 0) -> list[Sampled]:
    """One step of these sequences, admitted, launched, fetched and collected; with rows of padding after theirs."""
    device = logits.device
    kind = torch.int64 if padding % 2 else torch.int32
    slots = torch.tensor([one.slot for one in sequences] + [-1] * padding, dtype=kind, device=device)
    positions = torch.tensor([len(one.tokens) - 1 for one in sequences] + [0] * padding, device=device)
    rows = torch.cat((logits, logits[:1].expand(padding, -1) * float("nan"))) if padding else logits
    features = sampler.admit(sequences)
    chosen = sampler.launch(rows, slots, positions, features)
    assert chosen.shape == (2, len(slots))
    return sampler.collect(sampler.fetch(rows, sequences))


def random_logits(rows: int, vocab: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def new_sampler(slots: int, vocab: int, device: torch.device | str, choose: Choose) -> DeviceSampler:
    return DeviceSampler(slots, vocab, torch.device(device), choose)


def expected(logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
    """The step by engine.sampling, on the CPU, from the sequences' tokens alone."""
    rows = SamplingRows(max(one.slot for one in sequences) + 1, logits.shape[-1], torch.device("cpu"))
    for one in sequences:
        rows.admit(one)
    return sample(logits.cpu().clone(), rows.gather(sequences))


def assert_agree(logits: torch.Tensor, sequences: list[Sequence], found: list[Sampled]) -> None:
    """That `found` is what engine.sampling chooses; another token only where both's noisy logits are within 1e-5."""
    for row, (ours, theirs) in enumerate(zip(found, expected(logits, sequences), strict=True)):
        assert (ours.error, ours.refused) == (theirs.error, theirs.refused), row
        if ours.error is None and ours.token_id != theirs.token_id:
            noisy = noisy_logits(logits[row : row + 1].cpu(), sequences[row])
            a, b = float(noisy[ours.token_id]), float(noisy[theirs.token_id])
            assert abs(a - b) <= 1e-5 * max(abs(a), abs(b)), (row, ours.token_id, theirs.token_id, a, b)


def check_steps_and_slots(
    data: st.DataObject, sampler: DeviceSampler, slots: int, vocab: int, steps: int, times: int
) -> None:
    """Sequences grow, leave, come back after a preemption, and take over each other's rows; each step is done so many
    times. The sampler has two slots more, for padding."""
    present: dict[int, Sequence] = {}
    for number in range(steps):
        for slot in range(slots):
            if slot not in present or data.draw(st.integers(0, 4)) == 0:
                present[slot] = data.draw(running(slot, vocab))
        batch = [present[slot] for slot in data.draw(st.permutations(range(slots)))[: data.draw(st.integers(1, slots))]]
        logits = random_logits(len(batch), vocab, number).to(sampler.state.table.device)
        for _ in range(times):
            found = step(sampler, logits, batch, padding=data.draw(st.integers(0, 2)))
            assert_agree(logits, batch, found)
        for one, result in zip(batch, found, strict=True):
            assert int(sampler.state.last_tokens[one.slot]) == result.token_id
            one.tokens.append(result.token_id)


def check_penalties_of_what_is_not_known(sampler: DeviceSampler, steps: list[torch.Tensor]) -> None:
    """All steps are launched before the first is collected; a placeholder stands for what is not known."""
    params: dict[str, Any] = {"seed": 3, "frequency_penalty": 2.0, "repetition_penalty": 1.5, "temperature": 0.7}
    ahead, behind = [sequence(1, prompt=(5, 6, 7), **params) for _ in range(2)]
    drawn = []
    for logits in steps:
        features, own = sampler.admit([ahead]), logits.clone()
        slots, positions = (torch.tensor([n], device=logits.device) for n in (1, len(ahead.tokens) - 1))
        sampler.launch(own, slots, positions, features)
        drawn.append(sampler.fetch(own, [ahead]))
        ahead.tokens.append(-1)
    for logits, one in zip(steps, drawn, strict=True):
        found = sampler.collect(one)
        assert_agree(logits, [behind], found)
        behind.tokens.append(found[0].token_id)
    edits = sampler.state.edits
    assert edits is not None
    assert int((edits.counts[1] >> 1).sum()) == len(steps)
    assert [int(edits.counts[1, token]) & 1 for token in (5, 6, 7, 8)] == [1, 1, 1, 0]
    assert not edits.counts[0].any()


def check_faults_of_one_row_alone(sampler: DeviceSampler, logits: torch.Tensor) -> None:
    """Checks that a fault harms its own row alone: four of seven have logits not finite, one has no choice left."""
    logits[1, 150] = logits[6, 199] = torch.nan
    logits[4, 7], logits[5, 0] = torch.inf, -torch.inf
    rows = [sequence(i, seed=i, top_p=0.9) for i in range(3)]
    rows += [sequence(3, allowed_token_ids=[7], eos=(7,), min_tokens=3)]
    rows += [sequence(i, temperature=0.0) for i in range(4, 7)]
    found = step(sampler, logits, rows)
    assert_agree(logits, rows, found)
    assert [one.error is None for one in found] == [True, False, True, False, False, False, False]
    assert [one.refused for one in found] == [False, False, False, True, False, False, False]
    assert all(0 <= token < logits.shape[1] for token in sampler.state.last_tokens.tolist())


def noisy_logits(logits: torch.Tensor, one: Sequence) -> torch.Tensor:
    """fp32 [vocabulary]: what the largest is chosen of, before filters."""
    rows = SamplingRows(one.slot + 1, logits.shape[-1], torch.device("cpu"))
    rows.admit(one)
    batch, x = rows.gather([one]), logits.float().clone()
    if batch.edits is not None:
        edit(x, batch.edits)
    if batch.draws is None:
        return x[0]
    place = [np.array([value], np.uint64) for value in (one.seed, one.choice, len(one.tokens))]
    keys = torch.from_numpy(row_keys(*place))[:, None]
    return (x / batch.draws.temperature + gumbel(keys, torch.arange(x.shape[-1], dtype=torch.int32)[None]))[0]


@st.composite
def parameters(draw: st.DrawFn, vocab: int) -> dict[str, Any]:
    """Any mix of what a request may ask for; about half of the fields are left out."""
    ids = st.integers(0, vocab - 1)
    fields: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9, 30.0]),
        "top_k": st.integers(1, vocab + 3),
        "top_p": st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999]),
        "min_p": st.sampled_from([0.01, 0.2, 1.0]),
        "typical_p": st.sampled_from([0.1, 0.5, 0.9, 0.99]),
        "repetition_penalty": st.sampled_from([0.5, 1.1, 3.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.3]),
        "frequency_penalty": st.sampled_from([-0.4, 1.5]),
        "logit_bias": st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=12),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=40, unique=True),
        "banned_token_ids": st.lists(ids, max_size=20, unique=True),
        "min_tokens": st.integers(1, 6),
        "logprobs": st.integers(0, 20),
        "seed": st.integers(0, (1 << 63) - 1),
    }
    chosen = {name: draw(values) for name, values in fields.items() if draw(st.booleans())}
    if set(chosen.get("allowed_token_ids", [])) <= set(chosen.get("banned_token_ids", [])):
        chosen.pop("allowed_token_ids", None)
    return chosen


@st.composite
def running(draw: st.DrawFn, slot: int, vocab: int) -> Sequence:
    """A sequence in a slot, with some of its output."""
    params = draw(parameters(vocab))
    tokens = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=12)
    ends = tuple(draw(st.lists(st.integers(0, vocab + 2), max_size=3)))
    seed = params.pop("seed", 0)
    one = sequence(slot, seed=seed, choice=draw(st.integers(0, 63)), eos=ends, prompt=tuple(draw(tokens)), **params)
    one.tokens += draw(st.lists(st.integers(0, vocab - 1), max_size=8))
    words = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=3).map(tuple)
    one.bad_words = tuple(draw(st.lists(words, max_size=3))) if draw(st.booleans()) else ()
    return one
