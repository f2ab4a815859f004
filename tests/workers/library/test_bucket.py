"""Models in a bucket: what was pulled once needs no bucket, a broken pull goes on, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from producers.store.blobs.s3 import Objects
from tests.aws import Aws
from tests.aws_faults import Fault, faulty
from workers.errors import Refused
from workers.library import bucket
from workers.library.local_models import MANIFEST, LocalModels
from workers.library.reference import BUNDLED, find_model
from workers.library.signatures import SIGNATURES


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalModels:
    monkeypatch.setenv("PENSTOCK_MODELS", str(tmp_path / "here"))
    monkeypatch.setattr(bucket, "LONGEST_PAUSE_S", 0.0)
    return LocalModels.default()


@pytest.fixture
def stored(aws: Aws, tmp_path: Path, models: LocalModels) -> str:
    """The path of a version of `mine` in the bucket `models`."""
    aws.client("s3").create_bucket(Bucket="models")
    version = LocalModels(tmp_path / "there").copy("mine", BUNDLED / "tiny")
    for file in version.folder.iterdir():
        aws.client("s3").upload_file(str(file), "models", f"all/mine/{version.version}/{file.name}")
    return f"models/all/mine/{version.version}"


def url(aws: Aws, stored: str) -> str:
    return f"s3://{stored}?region=us-east-1&endpoint_url={aws.url}"


def test_a_version_is_pulled_once_and_served_without_its_bucket(aws: Aws, stored: str, models: LocalModels) -> None:
    told: list[str] = []
    model = find_model(url(aws, stored), told.append, quiet=True)
    assert (model.name, model.folder) == ("mine", models.root / "mine" / stored.rpartition("/")[2])
    assert (model.folder / "model.safetensors").read_bytes() == (BUNDLED / "tiny/model.safetensors").read_bytes()
    aws.client("s3").delete_object(Bucket="models", Key=f"{stored.partition('/')[2]}/{MANIFEST}")
    assert find_model(f"mine={url(aws, stored)}").folder == model.folder


def test_a_bucket_that_goes_away_in_the_middle_is_tried_again_and_the_rest_comes_later(
    aws: Aws, stored: str, models: LocalModels
) -> None:
    with faulty(aws) as (proxy, faults):
        faults.put(Fault("error", "GET", times=3))
        find_model(f"one={url(proxy, stored)}", quiet=True)
        assert faults.done["error"] == 3

        folder = models.root / "mine" / f".{stored.rpartition('/')[2]}.partial"
        folder.mkdir(parents=True)
        whole = (BUNDLED / "tiny/model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[:1000])
        faults.put(Fault("reset", "GET"))
        with pytest.raises(Refused, match=r"cannot get object manifest.json in s3://models/all.* run this again later"):
            find_model(url(proxy, stored), quiet=True)
        faults.calm()
        model = find_model(url(proxy, stored), quiet=True)
    assert (model.folder / "model.safetensors").read_bytes() == whole


def test_who_may_only_read_objects_pulls_what_nobody_signed(
    aws: Aws, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without s3:ListBucket, S3 denies an object that is not there."""
    with faulty(aws) as (proxy, faults):
        read = Objects.read

        def denied(objects: Objects, name: str, start: int, size: int) -> bytes:
            if name == SIGNATURES:
                faults.put(Fault("denied", "GET", times=1))
            return read(objects, name, start, size)

        monkeypatch.setattr(Objects, "read", denied)
        said: list[str] = []
        folder = find_model(url(proxy, stored), said.append, quiet=True).folder
    assert (folder / "model.safetensors").is_file()
    assert not (folder / SIGNATURES).exists()
    assert any("s3:ListBucket" in line for line in said), said


def test_what_is_damaged_or_missing_or_no_models_is_refused_by_name(aws: Aws, stored: str) -> None:
    s3, key = aws.client("s3"), stored.partition("/")[2]
    manifest = json.loads(s3.get_object(Bucket="models", Key=f"{key}/{MANIFEST}")["Body"].read())

    def refusal(name: str, data: bytes | None) -> str:
        before = s3.get_object(Bucket="models", Key=f"{key}/{name}")["Body"].read()
        if data is None:
            s3.delete_object(Bucket="models", Key=f"{key}/{name}")
        else:
            s3.put_object(Bucket="models", Key=f"{key}/{name}", Body=data)
        with pytest.raises(Refused) as refused:
            find_model(url(aws, stored), quiet=True)
        s3.put_object(Bucket="models", Key=f"{key}/{name}", Body=before)
        return str(refused.value)

    assert "config.json of s3://models/all/mine" in refusal("config.json", b"{}")
    assert "there is no blob tokenizer.json" in refusal("tokenizer.json", None)
    assert "there is no blob manifest.json" in refusal(MANIFEST, None)
    assert "cannot be read" in refusal(MANIFEST, b"[")
    files = manifest["files"] | {"../../x.json": {"size": 1, "sha256": "0"}}
    assert "names ['../../x.json']" in refusal(MANIFEST, json.dumps({"v": 1, "files": files}).encode())
    for size in ("Infinity", "1" + 400 * "0", "-1"):
        huge = f'{{"v": 1, "files": {{"config.json": {{"size": {size}, "sha256": "0"}}}}}}'
        assert f"the {MANIFEST} of s3://models/all/mine" in refusal(MANIFEST, huge.encode())
    other = {**manifest["files"], "README": {"size": 1, "sha256": "0" * 64}}
    assert "is of version" in refusal(MANIFEST, json.dumps({"v": 1, "files": other}).encode())
    with pytest.raises(Refused, match="names no model"):
        find_model(f"s3://models?endpoint_url={aws.url}")
    with pytest.raises(Refused, match=r"there is no bucket|NoSuchBucket"):
        find_model(url(aws, "elsewhere/mine"))
