"""README.md says what the code does: its tables and its examples, compared with the code."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from engine.models.families import FAMILIES
from engine.params import SamplingParams
from engine.text.checkpoint import count_parameters
from producers.contract import keys
from producers.gateway import GatewaySettings, create_app
from producers.gateway.openai import parameters
from producers.gateway.openai.completions import PARAMETERS
from tests.engine.text.well_known import KNOWN
from tests.in_process import app, unchanged
from tests.test_commands import PAGES
from workers.library.reference import bundled

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
#: What the README calls the families, and the architectures that it means.
CALLED = {
    "Llama": ["LlamaForCausalLM"],
    "Mistral": ["MistralForCausalLM"],
    "Qwen2 and 2.5": ["Qwen2ForCausalLM"],
    "Qwen3": ["Qwen3ForCausalLM"],
    "Mixtral": ["MixtralForCausalLM"],
    "Qwen3-MoE": ["Qwen3MoeForCausalLM"],
    "Phi-3 and 4": ["Phi3ForCausalLM"],
    "Gemma 2 and 3 (text)": ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
}


def row(name: str) -> str:
    """What the table says under this name."""
    (found,) = re.findall(rf"^\| {name} \| (.*) \|$", README, re.MULTILINE)
    return str(found)


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_families_are_those_of_the_engine() -> None:
    assert row("Models").startswith(", ".join(CALLED))
    assert sorted(name for names in CALLED.values() for name in names) == sorted(FAMILIES)


def test_the_parameters_are_those_of_the_engine() -> None:
    rows = ("Sampling", "Penalties", "Bans", "Structured output", "Log probabilities", "Ends")
    assert sorted(name for one in rows for name in code(row(one))) == sorted(f.name for f in fields(SamplingParams))


def test_what_openai_clients_may_send_is_taken() -> None:
    taken = {*parameters.SAME, *PARAMETERS.endpoint_schemas, *PARAMETERS.renamed, "service_tier"}
    assert {*code(row("OpenAI"))} <= taken


def test_the_tiers_are_those_of_the_queue() -> None:
    assert code(row("Tiers")) == list(keys.TIERS)


def test_the_templates_are_counted() -> None:
    assert f"; {len(KNOWN)} well-known ones" in row("Chat templates")


def test_what_there_is_to_watch_is_served() -> None:
    paths = create_app(GatewaySettings("redis://127.0.0.1:1", "redis://127.0.0.1:1")).openapi()["paths"]
    assert set(code(row("Watch"))) <= paths.keys()


def test_the_bundled_models_are_as_large_and_as_good_as_it_says() -> None:
    models = bundled()
    assert f"a {count_parameters(models['tiny']) / 1e6:.1f}-million-parameter Llama" in README
    for name in ("tiny", "tiny-v2", "tiny-draft"):
        assert f"`{name}`" in README
        (measured,) = re.findall(r"perplexity (\d+\.\d+)", (models[name] / "README.md").read_text("utf-8"))
        assert f"{float(measured):.1f}" in README


@pytest.mark.parametrize("source", [source for source in blocks("python") if "import" in source])
def test_what_an_example_imports_is_there(source: str) -> None:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in (
            "engine",
            "producers",
            "workers",
        ):
            module = import_module(str(node.module))
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_the_engines_example_runs_in_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = [source for source in blocks("python") if "Engine.load" in source]
    monkeypatch.chdir(tmp_path)
    with unchanged():
        exec(example, {})
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count(" length\n") == 2


def test_every_command_is_on_its_page() -> None:
    page = (ROOT / "docs" / "run" / "commands.md").read_text("utf-8")
    known: Any = typer.main.get_command(app)
    listed = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    for name, command in known.commands.items():
        for path in (f"{name} {one}" for one in command.commands) if hasattr(command, "commands") else (name,):
            assert re.search(rf"`{path.partition(' ')[0]}\b", listed), path
            assert re.search(rf"\b{path.rpartition(' ')[2]}\b", listed), path


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_page_that_it_links_to_is_there(page: Path) -> None:
    for name, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text("utf-8")):
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_ours_that_it_names_is_there(page: Path) -> None:
    named = re.findall(r"`((?:engine|producers|workers|infra|tests|docs)/[\w./-]+)`", page.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_list_of_pages_has_every_page() -> None:
    docs = ROOT / "docs"
    listed = re.findall(r"^\| \[[\w-]+\.md\]\(([\w/-]+\.md)\) \|", (docs / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*/*.md"))


def test_the_processes_are_those_of_the_procfile() -> None:
    named = {line.partition(":")[0] for line in (ROOT / "Procfile").read_text("utf-8").splitlines() if line}
    (said,) = re.findall(r"The `Procfile` names them: (.*?)\n\n", README, re.DOTALL)
    assert set(code(said.partition("`penstock COMMAND")[0])) == named
