"""Models whose chat templates are hostile or broken: their callers are told, and nobody else notices."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest
from redis import Redis

from engine.text import confined_template as confined
from producers.contract import keys
from producers.gateway.text import prompts
from tests.producers.gateway.conftest import CARD
from tests.waiting import PATIENCE_S

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
Publish = Callable[..., str]
#: A model of its own for each test: the gateway remembers their templates.
NUMBERS = itertools.count()


@pytest.fixture
def publish(valkey: Redis, model: str) -> Publish:
    """Publishes a model like `tiny`, with another template."""

    def make(template: Any, name: str | None = None, stored: bool = True) -> str:
        name = name or f"hostile-{next(NUMBERS)}"
        data = json.dumps({"chat_template": template}).encode()
        digest = hashlib.sha256(data).hexdigest()
        if stored:
            valkey.set(keys.blob(digest), data)
        card = replace(CARD, name=name, files=CARD.files | {"tokenizer_config.json": digest})
        valkey.hset(keys.MODELS, name, json.dumps({"v": 1, **asdict(card)}))
        return name

    return make


def ask(http: httpx.Client, model: str, content: str = "x") -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return http.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize(
    ("template", "status", "code", "says"),
    [
        (ENDLESS, 400, "template_stopped", "1 s of processor time"),
        ("{{ 'x' * 10000000000 }}", 400, "template_stopped", "256 MiB"),
        ("{{ raise_exception('not like this') }}", 400, "invalid_value", "not like this"),
        ("{{ messages.__class__.__mro__ }}", 500, "model_broken", "__class__"),
        ("{% if %}", 500, "model_broken", "cannot be compiled"),
        ("{{ 1 | unheard_of }}", 500, "model_broken", "cannot be compiled"),
        (5, 500, "model_broken", "not a string"),
        (None, 503, "model_unavailable", "is damaged"),
    ],
)
def test_the_caller_is_told(
    http: httpx.Client, publish: Publish, template: Any, status: int, code: str, says: str
) -> None:
    answer = ask(http, publish(template))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert says in error["message"]


def test_a_file_that_is_not_there_yet_may_come(http: httpx.Client, publish: Publish) -> None:
    model = publish("{{ raise_exception('it came') }}", stored=False)
    answer = ask(http, model)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
    assert "retry-after" in answer.headers
    publish("{{ raise_exception('it came') }}", model)
    assert "it came" in ask(http, model).json()["error"]["message"]


def test_a_model_without_a_template_is_refused(http: httpx.Client, valkey: Redis, model: str) -> None:
    card = replace(CARD, name="plain", capabilities=("generate",))
    valkey.hset(keys.MODELS, "plain", json.dumps({"v": 1, **asdict(card)}))
    answer = ask(http, "plain")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_model")
    assert "/v1/completions" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_other_models_callers_do_not_wait_for_a_hostile_template(
    http: httpx.Client, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of its renders take as long as this says; meanwhile the other model's refusals come, one after another."""
    go, render = threading.Event(), confined.ConfinedTemplate.render

    def held_up(self: confined.ConfinedTemplate, *args: Any, **options: Any) -> str:
        if self.source.text == ENDLESS:
            go.wait(PATIENCE_S)
        return render(self, *args, **options)

    monkeypatch.setattr(confined.ConfinedTemplate, "render", held_up)
    hostile_model = publish(ENDLESS)
    publish("{{ raise_exception('prompt and pleasant') }}", name="kind")
    assert ask(http, "kind").status_code == 400  # its process has started
    with ThreadPoolExecutor(2) as threads:
        hostile = [threads.submit(ask, http, hostile_model, str(k)) for k in range(2)]
        for _ in range(20):
            assert "pleasant" in ask(http, "kind").json()["error"]["message"]
            assert http.get("/livez").status_code == 200
        assert not any(one.done() for one in hostile)
        go.set()
        assert [one.result().json()["error"]["code"] for one in hostile] == ["template_stopped"] * 2


def test_where_too_many_wait_already_the_next_is_told_to_come_back(
    http: httpx.Client, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "WAITING_RENDERS", 0)
    answer = ask(http, publish("x"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "template_busy")
    assert answer.headers["retry-after"] == "1"


def test_more_models_at_once_than_are_kept_are_all_answered(http: httpx.Client, publish: Publish) -> None:
    """One that is dropped before its first caller has come to it is loaded again."""
    names = [
        publish(f"{{{{ raise_exception('template {k}') }}}}", f"model-{k}") for k in range(prompts.KEPT_TEMPLATES + 3)
    ]
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: ask(http, name), names))
    for k, answer in enumerate(answers):
        assert f"template {k}" in answer.json()["error"]["message"]


def test_variables_may_have_any_name(http: httpx.Client, publish: Publish) -> None:
    model = publish("{{ raise_exception([self_ is defined, card, model, asked] | string) }}")
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {"self": 0, "card": 1, "model": 2, "asked": 3},
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "[False, 1, 2, 3]" in answer.json()["error"]["message"]


def test_variables_nested_too_deep_are_refused(http: httpx.Client, publish: Publish) -> None:
    deep: Any = 1
    for _ in range(600):
        deep = [deep]
    body = {"model": publish("{{ 'x' }}"), "messages": [], "chat_template_kwargs": {"x": deep}}
    body["messages"] = [{"role": "user", "content": "x"}]
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "nested too deep" in answer.json()["error"]["message"]
