"""Clients of others, unmodified, in the ways that rely on a model that does as its prompt tells it: a worker says what
such a model would. All else that they do is tried with a real model in `tests/conformance/test_clients.py`."""

from __future__ import annotations

import pytest

from tests.conformance.clients import python
from tests.producers.gateway.conftest import Open
from tests.producers.gateway.openai.conftest import Answering, says

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

ANN = {"name": "Ann", "age": 40}


def test_instructor_in_the_modes_that_tell_the_schema_in_the_prompt(open_door: Open, answering: Answering) -> None:
    answering.scripts = [
        *[says('{"name": "An', 'n", "age": 40}')] * 2,
        says('```json\n{"name": "Ann", "a', 'ge": 40}\n```'),
    ]
    told = python("instructor_client.py", open_door().url, "JSON,MD_JSON")
    for mode in told.values():
        assert (mode["whole"], mode["last"]) == (ANN, ANN)
    assert [record.task.get("json_schema") is not None for record in answering.records] == [True, True, False, False]


def test_instructor_with_calls_of_several_classes(open_door: Open, answering: Answering) -> None:
    """It leaves the model the choice whether to call."""
    person, city = (
        '{"name": "Person", "arguments": {"name": "Ann", "age": 40}}',
        '{"name": "City", "arguments": {"city": "Bern"}}',
    )
    answering.scripts = [says(f"<tool_call>\n{person}\n</tool_call>", f"\n<tool_call>\n{city}\n</tool_call>")]
    told = python("instructor_client.py", open_door().url, "PARALLEL_TOOLS")
    assert told["PARALLEL_TOOLS"]["several"] == [["Person", ANN], ["City", {"city": "Bern"}]]


@pytest.mark.parametrize("endpoint", ["responses", "chat"])
def test_an_agent_of_pydantic_ai_whose_prompt_has_the_schema(
    open_door: Open, answering: Answering, endpoint: str
) -> None:
    """An output that is not of the class goes back to the model with what is wrong."""
    answering.scripts = [says('{"town": "Bern"}'), says('{"city": ', '"Bern"}')]
    told = python("pydantic_ai_client.py", open_door().url, "prompted_output", endpoint)
    assert told["prompted_output"]["output"] == {"city": "Bern"}
    assert len(answering.records) == 2
