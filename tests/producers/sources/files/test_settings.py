"""Tables of folders and buckets that are wrong are refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from producers.sources.settings import BadSources, parse

QUEUE = "https://sqs.us-east-1.amazonaws.com/123456789012/uploads"
FOLDER = {"type": "folder", "folder": "/srv/batches"}
BUCKET = {"type": "bucket", "bucket": "s3://my-bucket/some/prefix?region=eu-west-1", "queue": QUEUE}


@pytest.mark.parametrize("table", [FOLDER, BUCKET, BUCKET | {"after": "leave", "inbox": "in/", "dead_letters": QUEUE}])
def test_good_tables(table: dict[str, Any]) -> None:
    settings = parse("files", table)
    assert settings.model_dump()["completion_window"] == "24h"


@pytest.mark.parametrize(
    ("table", "wrong"),
    [
        ({"type": "folder"}, "folder is missing"),
        (FOLDER | {"folder": ""}, "folder is"),
        (FOLDER | {"settled_seconds": -1}, "settled_seconds is -1; it must be seconds, 0 or more"),
        (FOLDER | {"completion_window": "8d"}, 'completion_window: it is "8d"; it must be minutes'),
        (FOLDER | {"endpoint": "/v1/images"}, 'endpoint: it is "/v1/images"; it must be one of'),
        (FOLDER | {"tenant": ""}, "tenant is"),
        (FOLDER | {"metadata": {"a": 1}}, "metadata: it is"),
        (FOLDER | {"metadata": {"source": "x"}}, "metadata: it is"),
        (FOLDER | {"metadata": {str(k): "" for k in range(16)}}, "metadata: it is"),
        (FOLDER | {"after": "delete"}, 'after is "delete"; it must be "move"'),
        (FOLDER | {"max_file": 0}, "max_file is 0"),
        (FOLDER | {"queue": QUEUE}, "has no queue"),
        ({"type": "bucket", "bucket": "s3://my-bucket"}, "queue is missing"),
        (BUCKET | {"bucket": "my-bucket"}, "bucket: 'my-bucket' names no bucket"),
        (BUCKET | {"queue": "uploads"}, "queue is"),
        (BUCKET | {"inbox": "in"}, 'inbox: it is "in"; it must be what keys begin with'),
        (BUCKET | {"outbox": "/out/"}, "outbox: it is"),
        (BUCKET | {"outbox": "inbox/out/"}, "neither may begin with the other"),
        (BUCKET | {"inbox": "a/in/", "outbox": "a/"}, 'outbox is "a/" and inbox is "a/in/"'),
        (BUCKET | {"done": "outbox/"}, 'done is "outbox/" and outbox is "outbox/"'),
    ],
)
def test_refused(table: dict[str, Any], wrong: str) -> None:
    with pytest.raises(BadSources) as refused:
        parse("files", table)
    assert wrong in str(refused.value)
