"""OpenAI's Agents SDK, unmodified: an agent calls its tool on a real system, and goes on with what that returned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.conftest import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: Where the Makefile installs it: it wants another websockets than the gateway has.
INSTALLED = Path(sys.prefix) / "agents"


def test_an_agent_calls_its_tool_and_goes_on(system: System) -> None:
    """The bundled model has no tools in its template, and writes nonsense; but its calls are of the tool's schema."""
    script = Path(__file__).with_name("agents_client.py")
    environment = os.environ | {"PYTHONPATH": str(INSTALLED)}
    ran = subprocess.run(
        [sys.executable, str(script), system.url], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert len(told["calls"]) >= 3
    for city, days in told["calls"]:
        assert city in ("Bern", "Oslo")
        assert isinstance(days, int)
    for items, output in zip(told["items"], told["outputs"], strict=True):
        assert items[:2] == ["tool_call_item", "tool_call_output_item"]
        assert items[-1] == "message_output_item"
        assert isinstance(output, str)
    assert "response.function_call_arguments.delta" in told["kinds"]
    assert told["outputs"][0] == told["outputs"][1] == told["outputs"][2], "at temperature 0, whichever way"
