"""Another tenant's id is answered as one that never was: the same words, after the same calls to the store.

Each row is an attack by `other` with an id of `acme`'s; what `acme` has stays as it is, to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from redis import Redis
from websockets.exceptions import InvalidStatus

from producers.contract import keys
from tests.aws import Aws
from tests.producers.gateway.conftest import Door, Make, Open
from tests.producers.gateway.isolation.conftest import ENDPOINT, Made, upload
from tests.producers.gateway.tasks.test_websocket import opened
from tests.producers.gateway.test_keys import as_caller
from tests.producers.store.test_s3 import bucket_of
from tests.waiting import PATIENCE_S

#: How to name something that is none, beside a thing's name in `Made`.
UNKNOWN = {
    "task": "00000000-0000-4000-8000-000000000000",
    "running": "00000000-0000-4000-8000-000000000000",
    "response": "resp_00000000-0000-4000-8000-000000000000",
    "file": "file-0123456789ab" + "0" * 20,
    "output": "file-0123456789ab" + "0" * 20,
    "batch": "batch_0123456789ab" + "0" * 20,
    "endpoint": "whe_0123456789ab" + "0" * 20,
}
KEYED = {"headers": {"idempotency-key": "k"}}
BATCH = {"endpoint": "/v1/completions", "completion_window": "24h"}
#: Method, path with the attacked id, and what is sent besides.
ATTACKS: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/v1/tasks/{task}", {}),
    ("GET", "/v1/tasks/{running}", {}),
    ("HEAD", "/v1/tasks/{task}", {}),
    ("GET", "/v1/tasks/{running}", {"headers": {"prefer": "wait=1"}}),
    ("GET", "/v1/tasks/{task}/events", {}),
    ("GET", "/v1/tasks/{running}/events?from=1", {}),
    ("GET", "/v1/tasks/{task}/events", {"headers": {"last-event-id": "1"}}),
    ("GET", "/v1/tasks/{running}/explain", {}),
    ("POST", "/v1/tasks/{task}/cancel", {}),
    ("POST", "/v1/tasks/{running}/cancel", {}),
    ("POST", "/v1/tasks/{task}/retry", {}),
    ("POST", "/v1/tasks/{running}/retry", {}),
    ("POST", "/v1/tasks/{task}/retry", KEYED),
    ("POST", "/v1/feedback", {"json": {"id": "{task}", "score": 1}}),
    ("POST", "/v1/feedback", {"json": {"id": "chatcmpl-{running}", "score": 1}}),
    ("DELETE", "/v1/tasks/{task}", {}),
    ("DELETE", "/v1/tasks/{running}", {}),
    ("GET", "/v1/tasks?after={task}", {}),
    ("GET", "/v1/tasks?after={task}&order=asc", {}),
    ("GET", "/v1/tasks/{response}", {}),
    ("GET", "/v1/responses/{response}", {}),
    ("GET", "/v1/responses/{response}?stream=true", {}),
    ("GET", "/v1/responses/{response}?stream=true&starting_after=1", {}),
    ("GET", "/v1/responses/{response}/input_items", {}),
    ("POST", "/v1/responses/{response}/cancel", {}),
    ("DELETE", "/v1/responses/{response}", {}),
    ("POST", "/v1/responses", {"json": {"model": "tiny", "input": "go on", "previous_response_id": "{response}"}}),
    ("GET", "/v1/responses/resp_{task}", {}),
    ("GET", "/v1/files/{file}", {}),
    ("GET", "/v1/files/{file}/content", {}),
    ("HEAD", "/v1/files/{file}/content", {}),
    ("GET", "/v1/files/{file}/content", {"headers": {"range": "bytes=0-3"}}),
    ("GET", "/v1/files/{file}/content", {"headers": {"range": "bytes=999-"}}),
    ("GET", "/v1/files/{output}/content", {}),
    ("GET", "/v1/files?after={file}", {}),
    ("DELETE", "/v1/files/{file}", {}),
    ("POST", "/v1/batches", {"json": BATCH | {"input_file_id": "{file}"}}),
    ("POST", "/v1/batches", {"json": BATCH | {"input_file_id": "{output}"}}),
    ("GET", "/v1/batches/{batch}", {}),
    ("GET", "/v1/batches?after={batch}", {}),
    ("POST", "/v1/batches/{batch}/cancel", {}),
    ("GET", "/v1/webhook_endpoints/{endpoint}", {}),
    ("GET", "/v1/webhook_endpoints?after={endpoint}", {}),
    ("POST", "/v1/webhook_endpoints/{endpoint}", {"json": ENDPOINT}),
    ("POST", "/v1/webhook_endpoints/{endpoint}", {"json": {"enabled": False}}),
    ("DELETE", "/v1/webhook_endpoints/{endpoint}", {}),
    ("POST", "/v1/webhook_endpoints/{endpoint}/rotate_secret", {}),
    ("POST", "/v1/webhook_endpoints/{endpoint}/test", {"json": {"event_type": "response.completed"}}),
]
#: What a gateway asks the store now and then, whoever calls.
NOW_AND_THEN = re.compile(
    "penstock:(epoch|keys|models|adapters|routing:[a-z]+|pools|readers|tenants:limits)|^(TIME|PING)|CLIENT|HELLO|SELECT|AUTH"
)
#: Headers that tell of the answer and not of what was asked.
OF_THE_ANSWER = {"x-request-id", "date", "content-length"}


def filled(of: Any, ids: dict[str, str]) -> Any:
    """The same with the ids in place of their names."""
    if isinstance(of, dict):
        return {name: filled(value, ids) for name, value in of.items()}
    return re.sub(r"\{(\w+)\}", lambda found: ids[found[1]], of) if isinstance(of, str) else of


def without(text: str, ids: dict[str, str]) -> str:
    for name in ids.values():
        text = text.replace(name, "ID").replace(name.removeprefix("resp_"), "ID")
    return text.replace("resp_ID", "ID")


def commands(valkey: Redis, ask: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What `ask` gives, and the commands that the store got meanwhile, but for those that come by themselves."""
    with valkey.monitor() as monitor:
        answer = ask()
        valkey.echo("the end")
        seen: list[str] = []
        while (said := monitor.next_command()["command"]) != "ECHO the end":
            seen.append(said)
    return answer, [said for said in seen if not NOW_AND_THEN.search(said)]


def everything(valkey: Redis) -> dict[bytes, Any]:
    """All that is stored, but for entries of `other`'s own Idempotency-Keys, and a look at the store's memory, which
    lapses by itself."""
    names = [name for name in valkey.keys("*") if b":idempoten" not in name and name != keys.WAITING_MEMORY.encode()]
    # A hash's dump has its fields in any order, and another one while it grows.
    return {name: valkey.hgetall(name) if valkey.type(name) == b"hash" else valkey.dump(name) for name in names}


def said(answer: httpx.Response, ids: dict[str, str]) -> tuple[int, str, dict[str, str]]:
    headers = {name: value for name, value in answer.headers.items() if name not in OF_THE_ANSWER}
    return answer.status_code, without(answer.text, ids), headers


def test_every_endpoint_that_takes_an_id_is_attacked(other: httpx.Client) -> None:
    """Those of models, keys and tenants are no tenant's: `test_between.py` has them. Pools, workers and
    deliveries are for admins."""
    paths = other.get("/openapi.json").json()["paths"]
    taken = {
        (method.upper(), path)
        for path in paths
        for method in paths[path]
        if re.search(r"\{(?!name|model|key|tenant|pool|worker|delivery)", path)
    }
    known = {(method, re.sub(r"\{\w+\}", "{}", path.partition("?")[0])) for method, path, _ in ATTACKS}
    assert {(method, re.sub(r"\{\w+\}", "{}", path)) for method, path in taken} <= known


@pytest.mark.parametrize("thing", ["tasks|feedback", "responses", "files", "batches", "webhook_endpoints"])
def test_a_foreign_id_is_as_an_unknown_one(other: httpx.Client, theirs: Made, valkey: Redis, thing: str) -> None:
    attacks = [one for one in ATTACKS if re.match(rf"/v1/(?:{thing})\b", one[1])]
    assert len(attacks) >= 5
    other.get("/v1/webhook_endpoints")  # the store keeps the script that it calls from now on
    for method, path, sent in attacks:
        before = everything(valkey)
        known, unknown = (attacked(other, valkey, ids, method, path, sent) for ids in (vars(theirs), UNKNOWN))
        assert known == unknown
        assert everything(valkey) == before, (method, path)
        (status, text, _), got = known
        assert status in (400, 404) or ("after=" in path and '"data":[]' in text and '"has_more":false' in text)
        assert got, f"{path} was looked up"
        assert not [one for one in got if one.startswith("HGETALL")], "nothing was read of it but whose it is"


def attacked(
    client: httpx.Client, valkey: Redis, ids: dict[str, str], method: str, path: str, sent: dict[str, Any]
) -> tuple[tuple[int, str, dict[str, str]], list[str]]:
    """What is answered to an attack, and the commands that the store got; with ID in place of the ids."""
    client.get("/v1/models")  # the key is looked up before we look
    answer, got = commands(valkey, lambda: client.request(method, **filled({"url": path, **sent}, ids)))
    return said(answer, ids), [without(one, ids) for one in got]


def test_a_foreign_id_opens_no_websocket(door: Door, other: httpx.Client, theirs: Made, valkey: Redis) -> None:
    before = everything(valkey)
    refused = []
    for task_id in (theirs.running, UNKNOWN["task"]):
        for headers in ({"authorization": other.headers["authorization"]}, {}):
            with pytest.raises(InvalidStatus) as error:
                opened(door, f"/v1/tasks/{task_id}/events", additional_headers=headers)
            body = bytes(error.value.response.body or b"").replace(task_id.encode(), b"ID")
            refused.append((error.value.response.status_code, body))
    assert [status for status, _ in refused] == [404, 401, 404, 401]
    assert refused[:2] == refused[2:]
    assert everything(valkey) == before


def test_a_response_goes_on_with_ones_own_items_alone(other: httpx.Client, theirs: Made) -> None:
    """A cursor within a list of items names an item of that list, or nothing."""
    mine = other.post("/v1/responses", json={"model": "tiny", "input": "hi", "background": True}).json()["id"]
    foreign = f"msg_{theirs.response.removeprefix('resp_')}"
    asked = [
        other.get(f"/v1/responses/{mine}/input_items", params={"after": after}) for after in (foreign, "msg_unknown")
    ]
    assert asked[0].status_code == asked[1].status_code
    assert asked[0].text.replace(foreign, "ID") == asked[1].text.replace("msg_unknown", "ID")


@pytest.mark.parametrize("path", ["", "/content"])
def test_a_bucket_signs_no_url_of_a_foreign_file(open_door: Open, make: Make, model: str, aws: Aws, path: str) -> None:
    url = open_door(auth="keys", files_dir=bucket_of(aws), files_redirect=True).url
    with httpx.Client(base_url=url, headers=as_caller(make("acme")), timeout=PATIENCE_S) as acme:
        theirs = upload(acme)
        assert acme.get(f"/v1/files/{theirs}{path}").status_code == (307 if path else 200)
    with httpx.Client(base_url=url, headers=as_caller(make("other")), timeout=PATIENCE_S) as other:
        refused = [other.get(f"/v1/files/{one}{path}") for one in (theirs, UNKNOWN["file"])]
    assert [answer.status_code for answer in refused] == [404, 404]
    assert refused[0].text.replace(theirs, UNKNOWN["file"]) == refused[1].text
    assert "location" not in refused[0].headers
