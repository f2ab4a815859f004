"""Makes a system's bucket, corrects its settings, and lets it notify a queue of new input files.

Settings of others stay: lifecycle rules, notifications and tags are added to theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from producers.broker.sqs.setup import Finding, patiently
from producers.broker.sqs.specs import AS_IT_IS, Encryption, named_tags
from producers.connection.aws import AwsError, AwsMissing, client
from producers.connection.trouble import Trouble
from producers.store.blobs.bucket import Bucket, lifecycle

#: Begin and end of keys of input files.
INBOX: Final = "inbox/"
SUFFIX: Final = ".jsonl"
#: Begins of keys: of results, and of inputs that are done.
OUTBOX: Final = "outbox/"
DONE: Final = "done/"
EVENTS: Final = "s3:ObjectCreated:*"
PRIVATE: Final = dict.fromkeys(
    ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets"), True
)
#: Id of our notification among a bucket's.
_NOTIFICATION: Final = "penstock-inbox"
#: Codes that S3 answers where a bucket has no such setting.
_UNSET: Final = frozenset(
    {
        *("NoSuchLifecycleConfiguration", "NoSuchPublicAccessBlockConfiguration", "NoSuchTagSet"),
        "ServerSideEncryptionConfigurationNotFoundError",
    }
)

#: S3's answer if it may not send to the queue yet, whose policy may be new.
_NOT_YET: Final = frozenset({"InvalidArgument"})


@dataclass(frozen=True, slots=True)
class BucketSetup:
    """Sets up one bucket. `region`: of a new one; `queue`: ARN of the queue that is notified of input files, or empty;
    `apply`: whether to change anything."""

    bucket: Bucket
    region: str
    queue: str = ""
    encryption: Encryption = AS_IT_IS
    tags: Mapping[str, str] = field(default_factory=dict)
    apply: bool = True

    def provide(self) -> Finding:
        """Make the bucket if it is missing, and correct its settings. Raises AwsError, which names bucket and
        permission."""
        s3 = client("s3", self.region, self.bucket.endpoint_url)
        name = self.bucket.name
        where = self._where(s3)
        if self.queue and (there := where or self.region) != (region := self.queue.split(":")[3]):
            reason = f"it is in {there}, and tells only queues there; the broker's URL says {region}"
            return Finding("bucket", name, "wrong", {"region": reason})
        if not where and self.apply:
            self._make(s3)
        details = self._correct(s3) if where or self.apply else {}
        return Finding("bucket", name, "create" if not where else "change" if details else "keep", details)

    def _where(self, s3: Any) -> str:
        """The bucket's region; empty if it does not exist."""
        name = self.bucket.name
        try:
            head = patiently(f"look at bucket {name}", "s3:ListBucket", lambda: s3.head_bucket(Bucket=name))
        except AwsMissing:
            return ""
        except AwsError as error:
            if error.trouble is not Trouble.DENIED:
                raise
            text = f"{error}; or it is another account's bucket: choose another name"
            raise AwsError(text, error.code, error.trouble) from error
        return str(head.get("BucketRegion") or self.region)

    def _make(self, s3: Any) -> None:
        name = self.bucket.name
        constraint = {"CreateBucketConfiguration": {"LocationConstraint": self.region}}
        more = {} if self.region == "us-east-1" else constraint
        doing = f"create bucket {name} in {self.region}"
        patiently(doing, "s3:CreateBucket", lambda: s3.create_bucket(Bucket=name, **more))

    def _correct(self, s3: Any) -> dict[str, str]:
        """Correct the settings that differ. Returns setting -> what is done to it."""
        corrections = {}
        for call, (argument, permission, expect) in self._settings().items():
            existing = self._existing(s3, call, argument, permission)
            expected = expect(existing)
            if _plain({key: existing.get(key) for key in expected}) == _plain(expected):
                continue
            if self.apply:
                self._call(s3, f"put_{call}", permission, {argument: expected})
            corrections[call] = "corrected" if existing else "set"
        return corrections

    def _existing(self, s3: Any, call: str, argument: str, permission: str) -> dict[str, Any]:
        """A setting as `put_...` takes it; empty if it is not set."""
        try:
            answer: dict[str, Any] = self._call(s3, f"get_{call}", permission.replace("s3:Put", "s3:Get"), {})
        except AwsError as error:
            if error.code in _UNSET:
                return {}
            raise
        answer.pop("ResponseMetadata", None)
        return dict(answer.get(argument, answer))

    def _call(self, s3: Any, call: str, permission: str, arguments: Mapping[str, Any]) -> Any:
        doing = f"{call.replace('_', ' ')} of bucket {self.bucket.name}"
        not_yet = _NOT_YET if call == "put_bucket_notification_configuration" else frozenset()
        method = getattr(s3, call)
        return patiently(doing, permission, lambda: method(Bucket=self.bucket.name, **arguments), not_yet=not_yet)

    def _settings(self) -> dict[str, tuple[str, str, Callable[[dict[str, Any]], dict[str, Any]]]]:
        """S3's name of each setting -> its argument, permission, and expected value by its existing one."""
        settings: dict[str, tuple[str, str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
            "public_access_block": (
                *("PublicAccessBlockConfiguration", "s3:PutBucketPublicAccessBlock"),
                lambda existing: PRIVATE,
            ),
            "bucket_encryption": (
                *("ServerSideEncryptionConfiguration", "s3:PutEncryptionConfiguration"),
                lambda existing: {"Rules": encryption_rules(self.encryption, existing.get("Rules", ()))},
            ),
            "bucket_lifecycle_configuration": (
                *("LifecycleConfiguration", "s3:PutLifecycleConfiguration"),
                lambda existing: {"Rules": _merged(existing.get("Rules", ()), lifecycle(self.bucket), "ID")},
            ),
        }
        if self.tags:
            settings["bucket_tagging"] = (
                *("Tagging", "s3:PutBucketTagging"),
                lambda existing: {"TagSet": _merged(existing.get("TagSet", ()), named_tags(self.tags), "Key")},
            )
        if self.queue:
            settings["bucket_notification_configuration"] = (
                *("NotificationConfiguration", "s3:PutBucketNotification"),
                lambda existing: {
                    **existing,
                    "QueueConfigurations": _merged(
                        existing.get("QueueConfigurations", ()), [notification(self.queue)], "Id"
                    ),
                },
            )
        return settings


def encryption_rules(choice: Encryption, existing: Sequence[Mapping[str, Any]] = ()) -> list[Mapping[str, Any]]:
    """Rules of a bucket's encryption; the existing ones, unless another encryption is chosen."""
    by_default = existing[0].get("ApplyServerSideEncryptionByDefault", {}) if existing else {}
    if choice.kms_key and by_default.get("KMSMasterKeyID") != choice.kms_key:
        key = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": choice.kms_key}
        return [{"ApplyServerSideEncryptionByDefault": key, "BucketKeyEnabled": True}]
    if not existing or (choice.aws_keys and by_default.get("SSEAlgorithm") != "AES256"):
        return [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]
    return list(existing)


def notification(queue: str) -> dict[str, Any]:
    """The notification of new input files to a queue (ARN)."""
    rules = [{"Name": "prefix", "Value": INBOX}, {"Name": "suffix", "Value": SUFFIX}]
    return {"Id": _NOTIFICATION, "QueueArn": queue, "Events": [EVENTS], "Filter": {"Key": {"FilterRules": rules}}}


def may_send(target: str, service: str, source: str, account: str, action: str = "sqs:SendMessage") -> dict[str, Any]:
    """A queue's or topic's policy by which one service may send to it for one bucket, topic or rule of the account."""
    of_account = {"StringEquals": {"aws:SourceAccount": account}} if service == "s3" else {}  # a bucket's ARN has none
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Sid": "Notifications",
                "Effect": "Allow",
                "Principal": {"Service": f"{service}.amazonaws.com"},
                "Action": action,
                "Resource": target,
                "Condition": {"ArnEquals": {"aws:SourceArn": source}, **of_account},
            }
        ],
    }


def _merged(
    existing: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]], key: str
) -> list[Mapping[str, Any]]:
    """Others' settings with ours, which replace earlier ones of the same key."""
    by_key = {setting[key]: setting for setting in ours}
    kept = [by_key.pop(setting[key], setting) if key in setting else setting for setting in existing]
    return [*kept, *by_key.values()]


def _plain(setting: Any) -> Any:
    """A setting without what S3 itself adds, and without the letter case that it changes."""
    if isinstance(setting, Mapping):
        return {key: _plain(value) for key, value in setting.items() if value not in (None, False, [], {})}
    if isinstance(setting, Sequence) and not isinstance(setting, str):
        return [_plain(item) for item in setting]
    return setting.lower() if isinstance(setting, str) else setting
