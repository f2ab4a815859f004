"""Reads what S3 says of an object, whichever way it came.

    S3 itself        {"Records": [{"eventName": "ObjectCreated:Put", "s3": {...}}]}; keys are URL-encoded
    through SNS      {"Type": "Notification", "Message": "<the same, as text>"}, or the same as it is (raw delivery)
    EventBridge      {"source": "aws.s3", "detail-type": "Object Created", "detail": {...}}; keys are as they are
    a test           {"Event": "s3:TestEvent", ...}, once, when notifications are set up

Sources: docs.aws.amazon.com/AmazonS3/latest/userguide, "Event message structure" and "Using EventBridge".
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote_plus

from producers.errors import shown
from producers.sources.inbox import BadMessage

#: Envelopes around a message: EventBridge may send to SNS, which sends to SQS.
MAX_ENVELOPES: Final = 3
_CREATED: Final = ("ObjectCreated:", "s3:ObjectCreated:")


@dataclass(frozen=True, slots=True)
class Created:
    """An object was written. `version`: empty where its bucket has none."""

    bucket: str
    key: str
    version: str = ""


def read_notification(body: str) -> list[Created]:
    """The objects that a message says were written; none for a test, or for other events. Raises BadMessage."""
    found = _object(body)
    for _ in range(MAX_ENVELOPES):
        if found.get("Type") != "Notification" or not isinstance(found.get("Message"), str):
            break
        found = _object(found["Message"])
    if found.get("Event") == "s3:TestEvent":
        return []
    try:
        if isinstance(found.get("Records"), list):
            return [_record(each) for each in found["Records"] if each["eventName"].startswith(_CREATED)]
        if found.get("source") == "aws.s3":
            return [_event(found["detail"])] if found["detail-type"] == "Object Created" else []
    except (KeyError, TypeError, AttributeError) as error:
        raise BadMessage(f"it is no notification of S3 as documented: {type(error).__name__} {error}") from None
    raise BadMessage(f"it is no notification of S3: it has neither Records nor the source aws.s3: {shown(body)}")


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadMessage(f"it is {shown(found)}; a notification of S3 is a JSON object")
    return found


def _record(record: Any) -> Created:
    about = record["s3"]
    key, version = about["object"]["key"], about["object"].get("versionId")
    return Created(str(about["bucket"]["name"]), unquote_plus(key), str(version or ""))


def _event(detail: Any) -> Created:
    about = detail["object"]
    return Created(str(detail["bucket"]["name"]), str(about["key"]), str(about.get("version-id") or ""))
