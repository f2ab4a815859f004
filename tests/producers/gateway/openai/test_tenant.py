"""Who names a tenant on OpenAI's endpoints."""

from __future__ import annotations

import httpx
import pytest
from openai import OpenAI
from redis import Redis

from tests.producers.gateway.openai.conftest import MESSAGES, Answering, nothing_written

#: A request to each endpoint.
ASKS = [("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "def f"})]


def test_the_openai_client_names_its_tenant_in_a_header(client: OpenAI, model: str, answering: Answering) -> None:
    client = client.with_options(default_headers={"Penstock-Tenant": "acme"})
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
    client.completions.create(model=model, prompt="def f", user="somebody")
    assert [record.fields["tenant"] for record in answering.records] == ["acme", "acme"]


@pytest.mark.parametrize(("path", "body"), ASKS)
def test_a_name_of_any_script_is_the_same_as_in_json(
    http: httpx.Client, model: str, answering: Answering, path: str, body: dict[str, object]
) -> None:
    answer = http.post(path, json={"model": model, **body}, headers={"penstock-tenant": "café".encode()})
    assert answer.status_code == 200, answer.text
    assert answering.records[0].task["tenant"] == "café"


@pytest.mark.parametrize(("path", "body"), ASKS)
@pytest.mark.parametrize("name", [b"", b"x" * 201, b"\xff"])
def test_what_is_no_name_is_refused(
    http: httpx.Client, model: str, valkey: Redis, path: str, body: dict[str, object], name: bytes
) -> None:
    answer = http.post(path, json={"model": model, **body}, headers={"penstock-tenant": name})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Penstock-Tenant"
    assert answer.json()["error"]["code"] == "invalid_value"
    assert nothing_written(valkey)
