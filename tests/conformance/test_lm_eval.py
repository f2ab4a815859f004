"""EleutherAI's evaluation harness against a real system: its client `local-completions`, unmodified, on local items.

transformers says what the log-likelihoods are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conformance.conftest import TINY, System
from tests.exhaustive import few

if TYPE_CHECKING:  # it takes half a second to import: only the process that runs these tests does
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ITEMS = [
    ("import", " os"),
    ("import", " zebra"),
    ("def __init__(", "self"),
    ("def __init__(", "self, name=None):\n        self.name = name"),
    ("class Error(", "Exception):\n    pass"),
    ("class Error(", "Exceptional"),
    ("for i in range(", "10):"),
    ("if __name__ ==", " '__main__':\n"),
    ("return", " None"),
    ("    raise", " ValueError('bad é 🙂')"),
    ("try:\n    import ssl\nexcept", " ImportError:\n    ssl = None"),
    ("#" + " a long comment" * 30, "\nx = 1"),
]


def client_for(system: System, **options: Any) -> LocalCompletionsAPI:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=f"{system.url}/v1/completions", model="tiny", tokenizer=str(TINY), max_retries=1, **options
    )


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=k) for k, one in enumerate(arguments)]


@pytest.fixture(scope="module")
def oracle() -> list[tuple[float, bool, float]]:
    """Of each item: the continuation's log-likelihood, whether it is the greedy one, and by how much that is sure."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    found = []
    for context, continuation in ITEMS:
        # As the harness cuts: the whole is encoded, and the context counts as many tokens as it has by itself.
        whole, length = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
        with torch.inference_mode():
            logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        rows = logprobs[length - 1 : len(whole) - 1]
        chosen = rows.gather(1, torch.tensor(whole[length:])[:, None])[:, 0]
        top = rows.topk(2).values
        sure = float((top[:, 0] - top[:, 1]).min())
        found.append((float(chosen.sum()), bool((chosen == top[:, 0]).all()), sure))
    return found


@pytest.mark.parametrize("batch_size", few([1, 5], 5))
def test_loglikelihoods_are_those_of_transformers(
    system: System, oracle: list[tuple[float, bool, float]], batch_size: int
) -> None:
    harness = client_for(system, batch_size=batch_size)
    answers = harness.loglikelihood(instances("loglikelihood", list(ITEMS)), disable_tqdm=True)
    assert [value for value, _ in answers] == pytest.approx([value for value, _, _ in oracle], abs=2e-3)
    sure = [(greedy, right) for (_, greedy), (_, right, gap) in zip(answers, oracle, strict=True) if gap > 1e-3]
    assert [greedy for greedy, _ in sure] == [right for _, right in sure]
    assert {right for _, right in sure} == {True, False}


def test_rolling_loglikelihoods_are_sums_over_the_text(system: System) -> None:
    text = "def read(path):\n    with open(path) as f:\n        return f.read()\n"
    (value,) = client_for(system).loglikelihood_rolling(
        instances("loglikelihood_rolling", [(text,)]), disable_tqdm=True
    )
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = [tokenizer.eos_token_id, *tokenizer.encode(text)]
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    right = sum(float(logprobs[k, token]) for k, token in enumerate(ids[1:]))
    assert value == pytest.approx(right, abs=5e-3)


@pytest.mark.parametrize("tokenized", [True, False])
def test_generations_end_where_they_are_told_to(system: System, tokenized: bool) -> None:
    contexts = [context for context, _ in ITEMS[:6]]
    options = {"until": ["\n\n", "):"], "max_gen_toks": 24, "temperature": 0}
    harness = client_for(system, tokenized_requests=tokenized)
    answers = harness.generate_until(
        instances("generate_until", [(context, dict(options)) for context in contexts]), disable_tqdm=True
    )
    client = OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)
    plain = client.completions.create(model="tiny", prompt=contexts, max_tokens=24, temperature=0)
    for answer, choice in zip(answers, plain.choices, strict=True):
        ends = [choice.text.find(stop) for stop in ("\n\n", "):", "<|endoftext|>") if stop in choice.text]
        assert answer == (choice.text[: min(ends)] if ends else choice.text)
    assert any(answer for answer in answers)
