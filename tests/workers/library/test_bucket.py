"""Models in a bucket: what was pulled once needs no bucket, a broken pull goes on, and damage is named."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from producers.connection.aws import refusal as aws_refusal
from producers.store.blobs import bucket as bucket_urls
from producers.store.blobs.bucket import Bucket
from producers.store.blobs.s3 import Objects
from tests.aws import Aws
from tests.aws_faults import Fault, faulty
from tests.engine.gguf_files import write_gguf
from tests.engine.random_models import write_model
from tests.waiting import PATIENCE_S
from tests.workers.library.test_signatures import key_pair
from workers.errors import Refused
from workers.library import bucket
from workers.library.bucket import BucketModel, publish
from workers.library.local_models import MANIFEST, LocalModels, sha256_of, write_manifest
from workers.library.reference import BUNDLED, find_model
from workers.library.signatures import SIGNATURES, sign


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


@pytest.fixture
def place(aws: Aws) -> Bucket:
    aws.client("s3").create_bucket(Bucket="models")
    return bucket_urls.read(url(aws, "models/all"))


def through(proxy: Aws, place: Bucket) -> Bucket:
    return replace(place, endpoint_url=proxy.url)


class TestPublished:
    @pytest.fixture(autouse=True)
    def _no_pause(self, models: LocalModels) -> None:
        pass

    def test_a_version_is_pulled_verified_and_published_again_without_sending_it(
        self, aws: Aws, place: Bucket, models: LocalModels
    ) -> None:
        with faulty(aws) as (proxy, faults):
            stored = publish(BUNDLED / "tiny", "mine", through(proxy, place), note, quiet=True)
            assert stored.model.bucket.prefix == f"all/mine/{stored.model.version}"
            puts = faults.asked["PUT"]
            again = publish(BUNDLED / "tiny", "mine", through(proxy, place), note, quiet=True)
            assert (again.model, faults.asked["PUT"]) == (stored.model, puts)
        here = bucket_urls.read(url(aws, f"models/{stored.model.bucket.prefix}"))
        assert bucket.check(BucketModel(here, "mine", stored.model.version)).files == stored.files
        folder = find_model(here.url, quiet=True).folder
        assert folder == models.root / "mine" / stored.model.version
        assert publish(folder, "mine", place, note, quiet=True).model.version == stored.model.version

    def test_one_that_was_cut_off_is_nobodys_and_goes_on_with_what_is_missing(self, aws: Aws, place: Bucket) -> None:
        with faulty(aws) as (proxy, faults):
            faults.put(Fault("error", "PUT", times=4))
            faults.put(Fault("lost", "PUT", times=1))
            whole = publish(BUNDLED / "tiny", "one", through(proxy, place), note, quiet=True)
            assert faults.done == {"error": 4, "lost": 1}
            key = f"{whole.model.bucket.prefix}/"
            for name in (MANIFEST, "config.json"):
                aws.client("s3").delete_object(Bucket="models", Key=key + name)
            faults.put(Fault("reset", "PUT"))
            with pytest.raises(Refused, match=r"what came so far is kept: run this again later"):
                publish(BUNDLED / "tiny", "one", through(proxy, place), note, quiet=True)
            (left,) = bucket.stored(place)
            assert (left.whole, left.model.version) == (False, whole.model.version)
            faults.calm()
            puts = faults.asked["PUT"]
            publish(BUNDLED / "tiny", "one", through(proxy, place), note, quiet=True)
            assert faults.asked["PUT"] == puts + 2, "config.json and the manifest"
        (now,) = bucket.stored(place)
        assert (now.whole, now.files, now.size) == (True, whole.files, whole.size)

    def test_a_large_file_goes_in_parts_and_is_known_by_its_hash(
        self, aws: Aws, place: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("producers.store.blobs.s3.PART", 5 << 20)
        folder = large(tmp_path, 6 << 20)
        with faulty(aws) as (proxy, faults):
            faults.put(Fault("denied", "GET", path="?uploads"))
            said: list[str] = []
            stored = publish(folder, "large", through(proxy, place), said.append, quiet=True)
            assert faults.asked["POST"] == 2, "a multipart upload began and ended"
            assert any("from their beginning" in line and "s3:ListBucketMultipartUploads" in line for line in said)
            faults.calm()
            bucket.remove(stored.model)
            faults.put(Fault("lost", "POST", times=2))
            publish(folder, "large", through(proxy, place), note, quiet=True)
        head = aws.client("s3").head_object(Bucket="models", Key=f"{stored.model.bucket.prefix}/LICENSE")
        assert (head["ContentLength"], head["Metadata"]["sha256"]) == (6 << 20, sha256(bytes(6 << 20)).hexdigest())

    def test_a_file_that_another_version_has_is_copied_there_unless_it_is_damaged(
        self, aws: Aws, place: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = large(tmp_path, 5 << 20)
        one = publish(folder, "one", place, note, quiet=True)
        with faulty(aws) as (proxy, faults):
            said: list[str] = []
            two = publish(folder, "two", through(proxy, place), said.append, quiet=True)
            assert (said, faults.sent["PUT"] < 5 << 20) == (["7 files: 6 sent, 1 copied in the bucket"], True)
            bucket.remove(one.model)
            bucket.check(two.model)
            faults.put(Fault("denied", "GET", path="prefix=all%2F&"))
            bucket.remove(publish(folder, "new", through(proxy, place), said.append, quiet=True).model)
            assert "files of other versions are sent again" in said[-2]
            assert "s3:ListBucket" in said[-2]
            faults.put(Fault("denied", "GET", path="list-type=2"))
            with pytest.raises(Refused, match="s3:ListBucket"):
                publish(folder, "new", through(proxy, place), note, quiet=True)
            faults.calm()
            aws.client("s3").put_object(Bucket="models", Key="all/last/0123456789ab/manifest.json", Body=b"{")
            sent = faults.sent["PUT"]
            with monkeypatch.context() as little_is_read:
                little_is_read.setattr(bucket, "MOST_READ", 0)
                bucket.remove(publish(folder, "new", through(proxy, place), note, quiet=True).model)
            assert faults.sent["PUT"] - sent > 5 << 20
        key = f"{two.model.bucket.prefix}/LICENSE"
        aws.client("s3").put_object(Bucket="models", Key=key, Body=b"x" * (5 << 20))
        bucket.check(publish(folder, "three", place, note, quiet=True).model)

    def test_a_large_file_that_was_cut_off_goes_on_with_the_parts_that_are_missing(
        self, aws: Aws, place: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("producers.store.blobs.s3.PART", 5 << 20)
        folder, s3 = large(tmp_path, 11 << 20), aws.client("s3")
        version = sha256(write_manifest(folder)).hexdigest()[:12]
        upload = {"Bucket": "models", "Key": f"all/large/{version}/LICENSE"}
        metadata = {"sha256": sha256_of(folder / "LICENSE")}
        upload |= {"UploadId": s3.create_multipart_upload(**upload, Metadata=metadata)["UploadId"]}
        for number, part in enumerate((bytes(5 << 20), b"x" * (5 << 20)), 1):
            s3.upload_part(**upload, PartNumber=number, Body=part)
        with faulty(aws) as (proxy, faults):
            faults.put(Fault("error", "POST"))
            with pytest.raises(Refused, match="run this again later"):
                publish(folder, "large", through(proxy, place), note, quiet=True)
            assert faults.sent["PUT"] < 11 << 20, "the first part stayed"
            faults.calm()
            puts = faults.asked["PUT"]
            stored = publish(folder, "large", through(proxy, place), note, quiet=True)
            assert faults.asked["PUT"] == puts + 1, "the manifest"
            bucket.check(stored.model)

    def test_where_a_file_is_refused_the_others_are_not_copied_to_their_end_first(
        self, aws: Aws, place: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, copied, publishes = large(tmp_path, 11 << 20), list[str](), list[Any]()
        publish(folder, "one", place, note, quiet=True)
        monkeypatch.setattr("producers.store.blobs.s3.MAX_COPY", 5 << 20)
        request, begin, copying = Objects.request, bucket._Publish, threading.Event()

        def begun(*args: Any) -> Any:
            publishes.append(begin(*args))
            return publishes[-1]

        def refusing(objects: Objects, call: str, permission: str, name: str, **more: Any) -> dict[str, Any]:
            if call == "upload_part_copy":
                copied.append(name)
                copying.set()
                assert publishes[0].stopped.wait(PATIENCE_S)
            if (call, name) == ("put_object", "config.json"):
                assert copying.wait(PATIENCE_S)
                raise aws_refusal("put config.json", permission, "AccessDenied", "")
            return request(objects, call, permission, name, **more)

        monkeypatch.setattr(bucket, "_Publish", begun)
        monkeypatch.setattr(Objects, "request", refusing)
        with pytest.raises(Refused, match=r"cannot put config\.json.*s3:PutObject"):
            publish(folder, "two", place, note, quiet=True)
        assert copied == ["LICENSE"], "one part of three"
        assert "Uploads" not in aws.client("s3").list_multipart_uploads(Bucket="models")

    def test_an_upload_that_does_not_fit_is_not_gone_on_with(
        self, aws: Aws, place: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without the encryption that is asked for; or for other checksums, which S3 refuses."""
        monkeypatch.setattr("producers.store.blobs.s3.PART", 5 << 20)
        folder, s3, request, refused = large(tmp_path, 6 << 20), aws.client("s3"), Objects.request, list[str]()
        version = sha256(write_manifest(folder)).hexdigest()[:12]
        metadata = {"sha256": sha256_of(folder / "LICENSE")}

        def begun(name: str) -> dict[str, str]:
            upload = {"Bucket": "models", "Key": f"all/{name}/{version}/LICENSE"}
            upload["UploadId"] = s3.create_multipart_upload(**upload, Metadata=metadata)["UploadId"]
            s3.upload_part(**upload, PartNumber=1, Body=bytes(5 << 20))
            return upload

        begun("plain")
        stored = publish(folder, "plain", replace(place, sse="AES256"), note, quiet=True)
        head = s3.head_object(Bucket="models", Key=f"{stored.model.bucket.prefix}/LICENSE")
        assert head.get("ServerSideEncryption") == "AES256"
        bucket.remove(stored.model)
        with monkeypatch.context() as server_that_tells_no_encryption, faulty(aws) as (proxy, faults):
            server_that_tells_no_encryption.setattr(
                bucket, "_is_same", lambda objects, file, encryption="": not encryption
            )
            publish(folder, "plain", replace(through(proxy, place), sse="AES256"), note, quiet=True)
            assert faults.sent["PUT"] < 12 << 20, "it is sent once"
        bucket.remove(stored.model)
        upload = begun("foreign")

        def checking(objects: Objects, call: str, permission: str, name: str, **more: Any) -> dict[str, Any]:
            if call == "upload_part" and more["UploadId"] == upload["UploadId"]:
                refused.append(name)
                raise aws_refusal("upload part", permission, "InvalidRequest", "Checksum Type mismatch occurred")
            return request(objects, call, permission, name, **more)

        monkeypatch.setattr(Objects, "request", checking)
        bucket.check(publish(folder, "foreign", place, note, quiet=True).model)
        assert refused == ["LICENSE"]

    def test_a_gguf_file_keeps_a_name_with_spaces_and_signs(self, place: Bucket, tmp_path: Path) -> None:
        path = tmp_path / "my model + v2 (Q4).gguf"
        write_gguf(write_model(tmp_path / "model"), path)
        stored = publish(path, "mine", place, note, quiet=True)
        bucket.check(stored.model)
        assert (find_model(stored.model.bucket.url, quiet=True).folder / path.name).read_bytes() == path.read_bytes()
        odd = path.rename(tmp_path / "a\tb.gguf")
        with pytest.raises(Refused, match="cannot be published under this name: rename it"):
            publish(odd, "odd", place, note, quiet=True)

    def test_damage_in_the_bucket_is_named_and_mended_by_publishing_again(self, aws: Aws, place: Bucket) -> None:
        stored = publish(BUNDLED / "tiny", "mine", place, note, quiet=True)
        key = f"{stored.model.bucket.prefix}/config.json"
        size = aws.client("s3").head_object(Bucket="models", Key=key)["ContentLength"]
        aws.client("s3").put_object(Bucket="models", Key=key, Body=bytes(size))
        with pytest.raises(Refused, match=r"is damaged: config\.json is not what"):
            bucket.check(stored.model)
        publish(BUNDLED / "tiny", "mine", place, note, quiet=True)
        bucket.check(stored.model)

    def test_signatures_come_along_beside_those_of_other_keys(self, aws: Aws, place: Bucket, tmp_path: Path) -> None:
        version = LocalModels(tmp_path / "there").copy("mine", BUNDLED / "tiny")
        (one, first), (two, second) = (key_pair(tmp_path, name) for name in ("one", "two"))
        sign(version.folder, one)
        publish(version.folder, "mine", place, note, quiet=True)
        (version.folder / SIGNATURES).unlink()
        sign(version.folder, two)
        stored = publish(version.folder, "mine", place, note, quiet=True)
        for public in (first, second):
            bucket.check(stored.model, [public])
        with pytest.raises(Refused, match="is not signed by"):
            bucket.check(stored.model, [key_pair(tmp_path, "three")[1]])

    def test_what_no_worker_would_pull_is_refused(self, place: Bucket, tmp_path: Path) -> None:
        folder = tmp_path / "odd"
        shutil.copytree(BUNDLED / "tiny", folder)
        (folder / "merges.txt").write_text("a b\n")
        sign(folder, key_pair(tmp_path, "key")[0])
        with pytest.raises(Refused, match=r"merges\.txt is nothing that workers pull: `penstock models pull"):
            publish(folder, "odd", place, note)
        assert bucket.stored(place) == []

    def test_what_has_no_manifest_for_a_day_is_abandoned(
        self, aws: Aws, place: Bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored = publish(BUNDLED / "tiny", "mine", place, note, quiet=True)
        assert bucket.abandoned(place) == []
        aws.client("s3").delete_object(Bucket="models", Key=f"{stored.model.bucket.prefix}/{MANIFEST}")
        assert bucket.abandoned(place) == []
        monkeypatch.setattr(bucket, "ABANDONED_S", -60.0)
        (left,) = bucket.abandoned(place)
        assert left.model == stored.model
        for key in (f"{stored.model.bucket.prefix}/x", "all/others"):
            aws.client("s3").create_multipart_upload(Bucket="models", Key=key)
        assert (bucket.end_uploads(place), bucket.end_uploads(place)) == (1, 0), "others' go on"
        publish(BUNDLED / "tiny", "mine", place, note, quiet=True)
        assert not bucket.remove_abandoned(left), "somebody went on with it"
        bucket.remove(left.model)
        with pytest.raises(Refused, match="there is nothing in"):
            bucket.remove(left.model)

    def test_what_is_still_being_sent_is_not_abandoned(
        self, aws: Aws, place: Bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files that were sent a day ago stay, while a part of another one came lately."""
        stored = publish(BUNDLED / "tiny", "mine", place, note, quiet=True)
        key, s3 = stored.model.bucket.prefix, aws.client("s3")
        s3.delete_object(Bucket="models", Key=f"{key}/{MANIFEST}")
        old = [replace(version, at=0.0) for version in bucket.stored(place)]
        monkeypatch.setattr(bucket, "stored", Mock(return_value=old))
        upload = {"Bucket": "models", "Key": f"{key}/model.safetensors"}
        upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]
        s3.upload_part(**upload, PartNumber=1, Body=b"x")
        assert bucket.abandoned(place) == []
        s3.abort_multipart_upload(**upload)
        assert bucket.abandoned(place) == old

    def test_a_version_that_a_route_takes_while_it_is_removed_stays(self, place: Bucket) -> None:
        stored = publish(BUNDLED / "tiny", "mine", place, note, quiet=True)

        def route_taken() -> None:
            assert [version.whole for version in bucket.stored(place)] == [False], "no new pull begins"
            raise Refused("it is in use")

        with pytest.raises(Refused, match="it is in use"):
            bucket.remove(stored.model, route_taken)
        bucket.check(stored.model)

    def test_folders_of_others_that_are_named_alike_are_no_broken_publishes(
        self, aws: Aws, place: Bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Such as checkpoints of a training, by commits."""
        monkeypatch.setattr(bucket, "ABANDONED_S", -60.0)
        stored = publish(BUNDLED / "tiny", "mine", place, note, quiet=True)
        names = "all/run/0123456789ab/model.safetensors", f"{stored.model.bucket.prefix}/notes.txt"
        for name in (*names, "all/a\x1b[2J/mine/0123456789ab/config.json"):
            aws.client("s3").put_object(Bucket="models", Key=name, Body=b"x")
        aws.client("s3").delete_object(Bucket="models", Key=f"{stored.model.bucket.prefix}/{MANIFEST}")
        assert [version.model.name for version in bucket.stored(place)] == ["mine", "run"]
        assert bucket.abandoned(place) == []
        aws.client("s3").delete_object(Bucket="models", Key=names[1])
        assert [version.model.name for version in bucket.abandoned(place)] == ["mine"]

    def test_signatures_that_cannot_be_read_are_refused(self, place: Bucket, tmp_path: Path) -> None:
        version = LocalModels(tmp_path / "there").copy("mine", BUNDLED / "tiny")
        (version.folder / SIGNATURES).write_bytes(b"{")
        with pytest.raises(Refused, match=r"manifest\.sig cannot be read"):
            publish(version.folder, "mine", place, note, quiet=True)


def note(line: str) -> None:
    pass


def large(tmp_path: Path, size: int) -> Path:
    """A model's folder whose file LICENSE has so many bytes."""
    folder = tmp_path / "large"
    shutil.copytree(BUNDLED / "tiny", folder)
    (folder / "LICENSE").write_bytes(bytes(size))
    return folder
