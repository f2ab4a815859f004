"""Commands for models in a bucket: `penstock models publish --to`, and `ls`, `verify`, `rm` and `gc` of it."""

from __future__ import annotations

import json

import pytest
from redis import Redis

from producers.contract import keys
from producers.store.fleet import rollouts
from tests.aws import Aws
from tests.workers.cli.conftest import Run
from workers.library import bucket
from workers.library.local_models import MANIFEST

OPTIONS = "?region=us-east-1&endpoint_url="


@pytest.fixture
def place(aws: Aws) -> str:
    """The URL of a bucket's prefix."""
    aws.client("s3").create_bucket(Bucket="models")
    return f"s3://models/all{OPTIONS}{aws.url}"


def of_version(place: str, model: str, version: str) -> str:
    return place.replace("/all?", f"/all/{model}/{version}?")


def test_a_version_is_published_listed_verified_used_and_removed(
    operate: Run, place: str, aws: Aws, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = json.loads(operate("models", "publish", "tiny-v2", "--as", "tiny", "--to", place, "--json").out)
    url = of_version(place, "tiny", sent["version"])
    assert bucket.BucketModel.parse(sent["url"]) == bucket.BucketModel.parse(url)
    row = json.loads(operate("models", "ls", place, "--json").out)
    assert (row["name"], row["version"], row["url"], row["whole"]) == ("tiny", sent["version"], sent["url"], True)
    assert f"tiny  {sent['version']}" in operate("models", "ls", place).out
    assert "are as its manifest.json says" in operate("models", "verify", url).out

    operate("models", "publish", "tiny")
    operate("models", "publish", url, "--as", "tiny@candidate")
    assert "the alias 'candidate' leads to it" in operate("models", "rm", url).err
    operate("models", "alias", "tiny", "--rm", "candidate")
    assert "tasks may wait for it" in operate("models", "rm", url).err
    valkey.delete(keys.POOLS)  # as a sweeper does once it saw that none do
    assert "objects" in operate("models", "rm", url).out
    ((_, entry),) = valkey.xrevrange(keys.AUDIT, count=1)
    removed = json.loads(next(iter(entry.values())))
    assert removed["did"] == "bucket.remove"
    assert removed["what"].partition("?")[0] == url.partition("?")[0]
    assert "there are no versions of models in s3://models/all" in operate("models", "ls", place, "--json").err

    operate("models", "publish", "tiny", "--to", place)
    left = json.loads(operate("models", "ls", place, "--json").out)["version"]
    aws.client("s3").delete_object(Bucket="models", Key=f"all/tiny/{left}/{MANIFEST}")
    assert "incomplete" in operate("models", "ls", place).out
    assert left not in operate("models", "gc", "--bucket", place).out
    monkeypatch.setattr(bucket, "ABANDONED_S", -60.0)
    assert f"s3://models/all/tiny/{left} is unused" in operate("models", "gc", "--bucket", place).out
    assert f"s3://models/all/tiny/{left} removed" in operate("models", "gc", "--bucket", place, "--yes").out
    assert "Nothing is unused." in operate("models", "gc", "--bucket", place).err


def test_workers_of_a_candidate_from_a_bucket_take_it_from_there(operate: Run, place: str, valkey: Redis) -> None:
    url = json.loads(operate("models", "publish", "tiny-v2", "--as", "tiny", "--to", place, "--json").out)["url"]
    operate("models", "publish", "tiny")
    state = json.loads(operate("rollout", "start", "tiny", "--to", url, "--json").out)
    record = rollouts.read(valkey, "tiny")
    assert record is not None
    assert record.reference == state["reference"] == f"tiny={url}"
    assert "a rollout is under way" in operate("models", "rm", url).err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("publish", "tiny", "--to", "models/all"), "names no bucket"),
        (("publish", "tiny", "--as", "tiny@x", "--to", "PLACE"), "an alias is in the store"),
        (("publish", "tiny", "--to", "s3://nowhere/x?region=us-east-1&endpoint_url=URL"), "NoSuchBucket"),
        (("ls", "s3://nowhere/x?region=us-east-1&endpoint_url=URL"), "NoSuchBucket"),
        (("rm", "PLACE"), "names no version"),
        (("rm", "s3://models/all/tiny/000000000000?region=us-east-1&endpoint_url=URL"), "there is nothing in"),
        (
            ("verify", "s3://models/all/tiny/000000000000?region=us-east-1&endpoint_url=URL"),
            "no blob manifest",
        ),
        (("gc", "--bucket", "elsewhere"), "names no bucket"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    operate: Run, place: str, aws: Aws, command: tuple[str, ...], message: str
) -> None:
    ran = operate("models", *(part.replace("PLACE", place).replace("URL", aws.url) for part in command))
    assert ran.status == 2
    assert message in " ".join(ran.err.split())
