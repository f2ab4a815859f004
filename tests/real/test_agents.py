"""Agents of others finish a job with a trained model that has to call a tool in every turn."""

from __future__ import annotations

import pytest

from tests.conformance.clients import python
from tests.real.test_smollm2 import MODEL, Rig
from tests.real.test_smollm2 import file as file  # the fixtures
from tests.real.test_smollm2 import rig as rig

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(400)]


@pytest.mark.parametrize("agent", ["langgraph", "pydantic_ai", "openai_agents"])
def test_an_agent_finishes_a_job_of_two_tools(rig: Rig, agent: str) -> None:
    """A small model calls the right tool, and then the other with what the first one returned."""
    told = python("two_tools_client.py", str(rig.client.base_url).removesuffix("/v1/"), agent, MODEL)
    assert told["calls"] == [["capital_of", "Italy"], ["weather_of", "Rome"]]
    assert told["output"] == "It rains in Rome."
