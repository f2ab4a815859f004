"""Answers with vectors, scores and labels, from what a task's workers made."""

from __future__ import annotations

import json
from array import array

import pytest

from producers.errors import InvalidTask
from producers.gateway.openai.pooling import EMBEDDINGS, ENDPOINTS, PooledRows


def test_a_vectors_digits_are_its_fp32_numbers_to_the_bit() -> None:
    largest, smallest = 3.4028234663852886e38, 1.401298464324817e-45
    row = array("f", [1 / 3, -1 / 3, 0.1, 1.0, 0.0, 16777216.0, 16777215.0, largest, smallest, 1.0000001192092896])
    pooled = PooledRows("0", {"name": 'a "name"'}, [row, row[:1]], 7, 0)
    answer = json.loads(ENDPOINTS[EMBEDDINGS].answer({}, pooled))
    vectors = [array("f", entry["embedding"]) for entry in answer["data"]]
    assert [vector.tobytes() for vector in vectors] == [row.tobytes(), row[:1].tobytes()]
    assert (answer["model"], answer["usage"]["total_tokens"]) == ('a "name"', 7)
    assert [entry["index"] for entry in answer["data"]] == [0, 1]


def test_texts_are_cut_to_the_models_length_in_vllms_words() -> None:
    endpoint = ENDPOINTS[EMBEDDINGS]
    asked = {"model": "m", "input": "a"}
    assert endpoint.task(endpoint.fields(asked | {"truncate_prompt_tokens": -1})).truncate
    assert not endpoint.task(endpoint.fields(asked)).truncate
    for wrong in ({"truncate_prompt_tokens": 5}, {"truncate_prompt_tokens": -1, "truncate": False}):
        with pytest.raises(InvalidTask) as caught:
            endpoint.task(endpoint.fields(asked | wrong))
        assert caught.value.param == "truncate_prompt_tokens"
