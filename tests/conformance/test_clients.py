"""Clients and agents of others, unmodified, on a real system; docs/use/clients.md says which, and what works.

The bundled model was not trained for tools and writes nonsense: what a call must be is asked for, as far as a client
can. What needs a model that does as it is told is in `tests/producers/gateway/openai/test_told_clients.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from tests.conformance.clients import javascript, python
from tests.conformance.conftest import System
from tests.exhaustive import few
from tests.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ENDPOINTS = ("responses", "chat")


def check_person(output: Mapping[str, Any]) -> None:
    assert output.keys() == {"name", "age"}
    assert isinstance(output["name"], str)
    assert 0 <= output["age"] <= 120


def check_place(place: Mapping[str, Any]) -> None:
    assert place["city"] in ("Bern", "Oslo")
    assert isinstance(place["days"], int)


def test_openai_agents_call_a_tool_and_go_on(system: System) -> None:
    told = python("openai_agents_client.py", system.url)
    assert len(told["calls"]) >= 3
    for city, days in told["calls"]:
        check_place({"city": city, "days": days})
    for items, output in zip(told["items"], told["outputs"], strict=True):
        assert items[:2] == ["tool_call_item", "tool_call_output_item"]
        assert items[-1] == "message_output_item"
        assert isinstance(output, str)
    assert "response.function_call_arguments.delta" in told["kinds"]
    assert told["outputs"][0] == told["outputs"][1] == told["outputs"][2], "at temperature 0, whichever way"


AI_SDK = {
    "loop": ("loop", "agent", "history"),
    "streamed": ("loop", "streamed"),
    "outputs": ("object", "objectStreamed", "output", "choice", "outputWithTools"),
}


@pytest.mark.parametrize(
    ("endpoint", "tried"), few([(way, tried) for way in ENDPOINTS for tried in AI_SDK], ("responses", "streamed"))
)
def test_the_ai_sdk_calls_tools_and_makes_objects(system: System, endpoint: str, tried: str) -> None:
    told = javascript("ai_sdk.mjs", system.url, endpoint, ",".join(AI_SDK[tried]))
    for name, answer in told.items():
        if "steps" in answer:
            (reason, *called), (_, *answered) = answer["steps"]
            assert (reason, called, answered) == ("tool-calls", [1, 1], [0, 0])
            check_place(answer["calls"][0])
            assert len(answer["calls"]) == (2 if name == "history" else 1)
        if name not in ("choice", *AI_SDK["loop"], "streamed"):
            check_person(answer["output"])
    if "streamed" in told:
        kinds = told["streamed"]["kinds"]
        assert told["streamed"]["text"] == told["loop"]["text"]
        assert kinds.count("tool-input-start") == kinds.count("tool-call") == 1
        assert kinds.count("tool-input-delta") > 1
        assert kinds.index("tool-call") < kinds.index("text-start"), "a step that only calls has no text, not even none"
    if tried == "outputs":
        assert told["choice"]["output"] in ("rain", "sun")
        assert told["objectStreamed"]["pieces"] > 1


LANGCHAIN = {"loop": ("loop", "streamed"), "more": ("by_id", "structured", "beside_tools", "asynchronous")}


@pytest.mark.parametrize(
    ("endpoint", "tried"), few([(way, tried) for way in ENDPOINTS for tried in LANGCHAIN], ("responses", "loop"))
)
def test_langchain_calls_tools_and_makes_objects(system: System, endpoint: str, tried: str) -> None:
    told = python("langchain_openai_client.py", system.url, ",".join(LANGCHAIN[tried]), endpoint)
    for name in ("loop", "streamed", "by_id"):
        if name in told:
            (place,) = told[name]["calls"]
            check_place(place)
    if tried == "loop":
        assert told["loop"]["answer"] == told["streamed"]["answer"]
        assert told["streamed"]["pieces"] > 2
        return
    for outputs in told["structured"].values():
        for output in outputs:
            check_person(output)
    check_person(told["beside_tools"]["parsed"])
    assert told["asynchronous"]["answers"] == told["asynchronous"]["alone"]


PYDANTIC_AI = {
    "loop": ("loop",),
    "outputs": ("tool_output", "one_of_several", "native_output", "some_tools", "streamed", "text"),
}


@pytest.mark.parametrize(
    ("endpoint", "tried"), few([(way, tried) for way in ENDPOINTS for tried in PYDANTIC_AI], ("responses", "loop"))
)
def test_pydantic_ai_calls_tools_and_makes_objects(system: System, endpoint: str, tried: str) -> None:
    told = python("pydantic_ai_client.py", system.url, ",".join(PYDANTIC_AI[tried]), endpoint)
    if tried == "loop":
        assert told["loop"]["kinds"] == ["user-prompt", *["tool-call", "tool-return"] * 2]
        check_person(told["loop"]["output"])
        check_person(told["loop"]["again"])
        return
    check_person(told["tool_output"]["output"])
    check_person(told["native_output"]["output"])
    check_person(told["some_tools"]["output"])
    check_person(told["streamed"]["output"])
    assert told["one_of_several"]["type"] in ("Person", "City")
    assert told["text"]["whole"] == told["text"]["streamed"]


@pytest.mark.parametrize(
    "modes",
    few(
        ["TOOLS", "TOOLS_STRICT,FUNCTIONS,JSON_O1,JSON_SCHEMA,RESPONSES_TOOLS,RESPONSES_TOOLS_WITH_INBUILT_TOOLS"],
        "TOOLS",
    ),
)
def test_instructor_makes_objects(system: System, modes: str) -> None:
    told = python("instructor_client.py", system.url, modes)
    assert told.keys() == {*modes.split(",")}
    for mode in told.values():
        check_person(mode["whole"])
        assert mode["last"] == mode["whole"]
        assert mode["pieces"] > 1


@pytest.mark.exhaustive
def test_litellm_speaks_to_all_of_openais_endpoints(system: System) -> None:
    told = python("litellm_client.py", system.url)
    chats, responses = told["chats"], told["responses"]
    assert chats["whole"] == chats["streamed"] == chats["routed"] == responses["whole"] == responses["streamed"]
    assert chats["pieces"] > 2
    assert chats["tokens"][0] == chats["tokens"][1] > 0
    for name, place in (chats["call"], responses["call"]):
        assert name == "weather"
        check_place(place)
    assert isinstance(chats["answer"], str)
    check_person(chats["person"])
    assert told["texts"]["tokens"] == 8
    assert told["refused"].endswith("temperature is -1; temperature must be a number from 0 (greedy) to 100")


def test_ollamas_client_chats_and_generates(system: System) -> None:
    told = python("ollama_client.py", system.url)
    assert told["listed"] == ["tiny:latest", ["completion", "tools"], ["tiny:latest"]]
    assert (told["loads"], told["goes on"]) == ("load", True)
    assert told["texts"][0] == told["texts"][1] == told["awaited"] == told["generated"][0] == told["generated"][1]
    assert told["reasons"] == ["length"] * 4
    assert told["counts"][:2] == [12, 12]
    assert told["counts"][2] == told["counts"][3] > 0
    assert told["place"]["city"] in ("Bern", "Oslo")
    assert told["scored"] == [2] * 12
    (unknown, wrong, deleted) = told["refused"]
    assert (unknown[0], wrong[0], deleted[0]) == (404, 400, 501)
    assert wrong[1].startswith("options.top_p is 2; ")


@pytest.mark.exhaustive
def test_langchains_ollama_chats_and_makes_objects(system: System) -> None:
    told = python("langchain_ollama_client.py", system.url)
    assert len(set(told["texts"])) == 1
    assert (told["usage"]["output_tokens"], told["reason"], told["with tools"]) == (60, "length", True)
    check_person(told["person"])
    assert told["llm"][0] == told["llm"][1]


def test_the_page_has_the_versions_that_are_tried() -> None:
    page = (ROOT / "docs" / "use" / "clients.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*`.*?) \| ([\d., ]+) \| .* \|$", page, re.MULTILINE)
    told = {client: versions.split(", ") for client, versions in rows}
    locks = [(ROOT / "requirements" / f"{name}.txt").read_text("utf-8") for name in ("clients", "dev", "lm-eval")]
    ours, dev, harness = [dict(re.findall(r"^([\w-]+)==(\S+) ", lock, re.MULTILINE)) for lock in locks]
    packages = json.loads((ROOT / "tests/conformance/js/package.json").read_text("utf-8"))["dependencies"]
    assert told == {
        "`openai` (Python)": [dev["openai"]],
        "`openai` (JavaScript)": [packages["openai"]],
        "`openai-agents`": [ours["openai-agents"]],
        "`@ai-sdk/openai` with `ai`": [packages["@ai-sdk/openai"], packages["ai"]],
        "`langchain-openai`": [ours["langchain-openai"]],
        "`langgraph`": [ours["langgraph"]],
        "`pydantic-ai`": [ours["pydantic-ai-slim"]],
        "`instructor`": [ours["instructor"]],
        "`litellm`": [ours["litellm"]],
        "`anthropic` (Python)": [ours["anthropic"]],
        "`langchain-anthropic`": [ours["langchain-anthropic"]],
        "`cohere`": [ours["cohere"]],
        "`llama-index-embeddings-openai-like`": [ours["llama-index-embeddings-openai-like"]],
        "`infinity_client`": [ours["infinity-client"]],
        "`lm_eval`": [harness["lm-eval"]],
        "`ollama` (Python)": [ours["ollama"]],
        "`langchain-ollama`": [ours["langchain-ollama"]],
        "`flower`": [ours["flower"]],
    }
    assert f"`openai` {ours['openai']}, the newest" in page
