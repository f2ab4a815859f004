"""A message that is too large for its queue arrives whole, and its body goes when nobody can need it any more."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from redis import Redis

from producers import AsyncClient
from producers.contract import keys
from producers.contract.message import BODY_HEADER, BodyGone, Message, MessageTooLarge, check_in, redeem
from producers.store.files import BODY_KEPT_S, NOTED_S, MessageBlobs
from producers.sweeper.retention import remove_files
from tests.aws import Aws
from tests.producers.store.test_s3 import bucket_of

MOST = 4096


def envelope(body: str) -> str:
    return json.dumps({**json.loads(Message("t", "q", "default", 1, 1).envelope()), "body": body})


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path)
    aws: Aws = request.getfixturevalue("aws")
    return bucket_of(aws)


def test_a_large_message_travels_by_reference_and_a_small_one_as_it_is(valkey: Redis, place: str) -> None:
    bodies = MessageBlobs(valkey, place)
    small = envelope("small")
    assert check_in(small, MOST, bodies) == redeem(small, bodies) == small
    sent = check_in(large := envelope("é" * MOST), MOST, bodies)
    assert len(sent.encode()) <= MOST
    assert json.loads(sent)["headers"]["id"] == "t", "it can be looked at without its body"
    reader = MessageBlobs(valkey, place)
    assert [json.loads(redeem(sent, reader)) for _ in range(2)] == [json.loads(large)] * 2
    said = envelope(f'"{BODY_HEADER}"')
    assert redeem(said, None) == said


async def test_a_body_is_removed_when_its_time_is_over_and_each_read_lengthens_it(
    valkey: Redis, valkey_url: str, tmp_path: Path
) -> None:
    bodies = MessageBlobs(valkey, str(tmp_path))
    sent = check_in(envelope("x" * MOST), MOST, bodies)
    ((name, due),) = valkey.zrange(keys.FILE_NOTES, 0, -1, withscores=True)
    assert abs(due - (time.time() + BODY_KEPT_S - NOTED_S)) < 600
    valkey.zadd(keys.FILE_NOTES, {name: due - 1000})
    assert redeem(sent, bodies)
    assert valkey.zscore(keys.FILE_NOTES, name) >= due
    async with AsyncClient(valkey_url) as client:
        blobs = bodies._places.at("")
        assert (await remove_files(client.store, blobs)).left == 0
        valkey.zadd(keys.FILE_NOTES, {name: int(time.time()) - NOTED_S})
        assert (await remove_files(client.store, blobs)).left == 1
    with pytest.raises(BodyGone, match=name.decode()):
        redeem(sent, bodies)
    assert not valkey.exists(keys.FILE_NOTES), "a late read notes nothing anew"


@pytest.mark.parametrize("reference", [{"place": "/etc", "name": "hostname"}, {"name": "secret"}, {}, {"name": None}])
def test_no_message_names_another_file(valkey: Redis, tmp_path: Path, reference: dict[str, str]) -> None:
    (tmp_path / "secret").write_text("x")
    headers = {"id": "t", "task": "x", BODY_HEADER: reference}
    for place in (str(tmp_path), None):
        with pytest.raises(BodyGone):
            redeem(json.dumps({"body": "", "headers": headers}), MessageBlobs(valkey, place))


def test_without_a_place_a_large_message_is_refused(valkey: Redis, tmp_path: Path) -> None:
    for bodies in (None, MessageBlobs(valkey, None)):
        with pytest.raises(MessageTooLarge, match="--files-dir"):
            check_in(envelope("x" * MOST), MOST, bodies)
    with pytest.raises(MessageTooLarge, match="without its body"):
        check_in(envelope(""), 100, MessageBlobs(valkey, str(tmp_path)))
    assert not list(tmp_path.iterdir())
