"""What every request passes: its id, its errors, and what the whole application says of itself."""

from __future__ import annotations

import httpx
import pytest
from fastapi.testclient import TestClient
from starlette.requests import HTTPConnection

from producers.contract.task import Task
from producers.gateway import GatewaySettings, create_app
from producers.gateway.http.edge import MAX_PARAMETERS
from tests.producers.gateway.conftest import Door


class TestEveryAnswer:
    @pytest.mark.parametrize(
        ("method", "path", "status", "code"),
        [
            ("POST", "/", 405, "method_not_allowed"),
            ("GET", "/v1/nothing", 404, "not_found"),
            ("GET", "/v1/tasks/", 404, "not_found"),
            ("PUT", "/v1/tasks", 405, "method_not_allowed"),
            ("PUT", "/v1/tasks/x", 405, "method_not_allowed"),
            ("PUT", "/v1/tasks/x/events", 405, "method_not_allowed"),
        ],
    )
    def test_unknown_urls_and_methods_have_the_shape_of_all_errors(
        self, http: httpx.Client, method: str, path: str, status: int, code: str
    ) -> None:
        answer = http.request(method, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
        assert (status == 405) == ("allow" in answer.headers)

    def test_the_callers_request_id_is_echoed(self, http: httpx.Client) -> None:
        for path in ("/livez", "/v1/tasks/nobody", "/nowhere"):
            assert http.get(path, headers={"x-request-id": "abc-123"}).headers["x-request-id"] == "abc-123"

    @pytest.mark.parametrize("given", ["", "a b", "x" * 129, 'quo"te'])
    def test_a_request_id_is_made_where_none_of_use_came(self, http: httpx.Client, given: str) -> None:
        made = {http.get("/livez", headers={"x-request-id": given}).headers["x-request-id"] for _ in range(2)}
        assert given not in made
        assert len(made) == 2

    def test_the_openapi_document_has_the_fields_of_a_task_and_all_routes(self, http: httpx.Client) -> None:
        document = http.get("/openapi.json").json()
        body = document["paths"]["/v1/tasks"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(body["properties"]) == set(Task.model_fields)
        assert body["required"] == ["model"]
        assert body["oneOf"] == [
            {"required": ["prompt"]},
            {"required": ["messages"]},
            {"required": ["kind", "input"]},
        ]
        assert "$defs" not in body
        assert {path for path in document["paths"] if path.startswith("/v1/tasks/")} == {
            "/v1/tasks/{task_id}",
            "/v1/tasks/{task_id}/events",
            "/v1/tasks/{task_id}/cancel",
            "/v1/tasks/{task_id}/explain",
            "/v1/tasks/{task_id}/retry",
        }

    def test_a_fault_of_ours_shows_nothing_of_our_insides(
        self, door: Door, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken() -> None:
            raise RuntimeError("secret")

        monkeypatch.setattr(door.app.state.gateway.client, "models", broken)
        answer = http.get("/v1/models")
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "secret" not in answer.text
        assert answer.headers["x-request-id"]


def test_a_parameter_that_fastapi_refuses_is_refused_as_every_other() -> None:
    app = create_app(GatewaySettings("redis://127.0.0.1:1", "redis://127.0.0.1:1"))

    @app.get("/many")
    async def many(limit: int) -> None: ...

    assert "422" not in app.openapi()["paths"]["/many"]["get"]["responses"]
    http = TestClient(app)
    for query, said in (("?limit=x", 'limit is "x"; '), ("", "limit is missing")):
        answer = http.get(f"/many{query}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
        assert answer.json()["error"]["message"].startswith(said)
        assert answer.json()["error"]["param"] == "limit"


@pytest.mark.parametrize("path", ["/livez", "/v1/tasks", "/nowhere"])
def test_a_query_has_no_thousands_of_parameters(http: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """To read them takes long, before anybody knows whose request it is."""
    monkeypatch.setattr(HTTPConnection, "query_params", property(lambda _: pytest.fail("the query was read")))
    answer = http.get(f"{path}?{'a=1&' * MAX_PARAMETERS}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_parts")
    monkeypatch.undo()
    assert http.get(f"/livez?{'a=1&' * (MAX_PARAMETERS - 1)}").status_code == 200
