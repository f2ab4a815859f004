"""A CloudFormation template of the resources that `penstock aws setup` makes, with a role for each process.

Text with `${...}` becomes `Fn::Sub`. Queues and bucket outlive their stack: they may hold tasks and files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from producers.aws.bucket import INBOX, PRIVATE, SUFFIX, encryption_rules, may_send, notification
from producers.aws.policies import OF_TIERS, Scope, policy
from producers.broker.sqs.address import Address
from producers.broker.sqs.specs import (
    AS_IT_IS,
    Encryption,
    QueueSpec,
    encrypted,
    inbox,
    inbox_name,
    lists_of,
    named_tags,
    queue_specs,
    redrive,
)
from producers.store.blobs.bucket import Bucket, lifecycle

#: The services that may run Penstock's processes.
SERVICES: Final = ("ecs-tasks.amazonaws.com", "ec2.amazonaws.com", "pods.eks.amazonaws.com")
#: Route of a bucket's notifications -> its condition's name.
ROUTES: Final = {"direct": "Direct", "sns": "BySns", "eventbridge": "ByEventBridge"}
_BUCKET: Final = "${BucketName}"
_BUCKET_ARN: Final = f"arn:${{AWS::Partition}}:s3:::{_BUCKET}"
_ACCOUNT: Final = "${AWS::AccountId}"
_PARTS: Final[dict[str, Any]] = {"account": _ACCOUNT, "region": "${AWS::Region}", "partition": "${AWS::Partition}"}
_KEPT: Final = {"DeletionPolicy": "Retain", "UpdateReplacePolicy": "Retain"}


@dataclass(frozen=True, slots=True)
class Template:
    """A CloudFormation template. `models`: names and versions; `inbox`: whether it has a queue of input files."""

    address: Address
    models: Sequence[tuple[str, str]]
    bucket: Bucket | None = None
    inbox: bool = False
    encryption: Encryption = AS_IT_IS
    tags: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The template as JSON."""
        return json.dumps(self.build(), indent=2) + "\n"

    def build(self) -> dict[str, Any]:
        """The template."""
        template: dict[str, Any] = {
            "AWSTemplateFormatVersion": "2010-09-09",
            "Description": "Penstock: queues, bucket, notifications and roles (made by: penstock aws template)",
            "Parameters": self._parameters(),
        }
        if self.inbox:
            template["Conditions"] = {
                condition: {"Fn::Equals": [{"Ref": "Notifications"}, route]} for route, condition in ROUTES.items()
            }
        return {**template, "Resources": _substituted(self._resources()), "Outputs": _substituted(self._outputs())}

    def _queues(self) -> list[QueueSpec]:
        specs = queue_specs(self.address, lists_of(self.address, self.models), self.tags)
        if self.inbox:
            specs += inbox(self.address, self.tags, {})
        return list({spec.name: spec for spec in specs}.values())

    def _resources(self) -> dict[str, Any]:
        resources = {_id(spec.name): _queue(spec, self.encryption) for spec in self._queues()}
        if self.bucket is not None:
            resources["Bucket"] = self._bucket(replace(self.bucket, name=_BUCKET))
        if self.inbox:
            resources |= self._routes()
        return resources | {f"{role.capitalize()}Role": self._role(role) for role in OF_TIERS}

    def _bucket(self, bucket: Bucket) -> dict[str, Any]:
        properties: dict[str, Any] = {
            "BucketName": _BUCKET,
            "PublicAccessBlockConfiguration": PRIVATE,
            "BucketEncryption": {"ServerSideEncryptionConfiguration": _renamed(encryption_rules(self.encryption))},
            "LifecycleConfiguration": {"Rules": _renamed(lifecycle(bucket))},
            **_tagged(self.tags),
        }
        after = {}
        if self.inbox:
            properties["NotificationConfiguration"] = self._notifications()
            after = {"DependsOn": ["InboxPolicy", "InboxTopicPolicy"]}  # S3 tries whether it may send
        return {"Type": "AWS::S3::Bucket", **_KEPT, **after, "Properties": properties}

    def _notifications(self) -> dict[str, Any]:
        to_queue = _renamed(notification(self._inbox_arn))
        del to_queue["Id"]
        to_topic = {**to_queue, "Topic": "${InboxTopic}"}
        del to_topic["Queue"]
        return _by_route(
            {"QueueConfigurations": [to_queue]},
            {"TopicConfigurations": [to_topic]},
            {"EventBridgeConfiguration": {"EventBridgeEnabled": True}},
        )

    @property
    def _inbox_arn(self) -> str:
        return f"${{{_id(inbox_name(self.address.prefix))}.Arn}}"

    def _routes(self) -> dict[str, Any]:
        """The resources that bring a bucket's notifications to the queue."""
        queue, topic = self._inbox_arn, "${InboxTopic}"
        rule = {"source": ["aws.s3"], "detail-type": ["Object Created"]}
        detail = {"bucket": {"name": [_BUCKET]}, "object": {"key": [{"wildcard": f"{INBOX}*{SUFFIX}"}]}}
        may = _by_route(
            may_send(queue, "s3", _BUCKET_ARN, _ACCOUNT),
            may_send(queue, "sns", topic, _ACCOUNT),
            may_send(queue, "events", "${InboxRule.Arn}", _ACCOUNT),
        )
        url = f"${{{_id(inbox_name(self.address.prefix))}}}"
        may_publish = may_send(topic, "s3", _BUCKET_ARN, _ACCOUNT, "sns:Publish")
        subscribed = {"Fn::If": [ROUTES["sns"], [{"Protocol": "sqs", "Endpoint": queue}], []]}
        return {
            "InboxPolicy": _resource("SQS::QueuePolicy", {"Queues": [url], "PolicyDocument": may}),
            "InboxTopic": _resource("SNS::Topic", {"Subscription": subscribed, **_tagged(self.tags)}),
            "InboxTopicPolicy": _resource("SNS::TopicPolicy", {"Topics": [topic], "PolicyDocument": may_publish}),
            "InboxRule": _resource(
                "Events::Rule",
                {"EventPattern": {**rule, "detail": detail}, "Targets": [{"Id": "inbox", "Arn": queue}]},
                Condition=ROUTES["eventbridge"],
            ),
        }

    def _role(self, role: str) -> dict[str, Any]:
        scope = Scope(
            self.address,
            **_PARTS,
            files=self.bucket and replace(self.bucket, name=_BUCKET),
            inbox=_BUCKET if self.inbox else "",
            kms_keys=(self.encryption.kms_key,) if self.encryption.kms_key else (),
        )
        trust = {
            "Effect": "Allow",
            "Principal": {"Service": {"Ref": "Service"}},
            "Action": ["sts:AssumeRole", "sts:TagSession"],
        }
        document = {"Version": "2012-10-17", "Statement": [trust]}
        allowed = {"PolicyName": f"penstock-{role}", "PolicyDocument": policy(role, scope)}
        return _resource(
            "IAM::Role", {"AssumeRolePolicyDocument": document, "Policies": [allowed], **_tagged(self.tags)}
        )

    def _parameters(self) -> dict[str, Any]:
        description = "What runs Penstock's processes, and takes their roles. Several are separated by commas."
        parameters = {"Service": _choice(description, SERVICES) | {"Type": "CommaDelimitedList"}}
        if self.bucket is not None:
            description = "The bucket's name, unique in the world."
            parameters["BucketName"] = {"Type": "String", "Description": description, "Default": self.bucket.name}
        if self.inbox:
            parameters["Notifications"] = _choice("How the bucket tells the queue of input files.", tuple(ROUTES))
        return parameters

    def _outputs(self) -> dict[str, Any]:
        options = {"visibility": str(self.address.visibility)} if self.address.visibility != 60 else {}
        options |= {name: "1" for name in ("fifo", "celery") if getattr(self.address, name)}
        query = "".join(f"&{name}={value}" for name, value in options.items())
        outputs = {"Broker": f"sqs://${{AWS::Region}}?prefix={self.address.prefix}{query}"}
        if self.bucket is not None:
            outputs["FilesDir"] = str(replace(self.bucket, name=_BUCKET))
        if self.inbox:
            outputs["InboxQueue"] = f"${{{_id(inbox_name(self.address.prefix))}}}"
        outputs |= {f"{role.capitalize()}RoleArn": f"${{{role.capitalize()}Role.Arn}}" for role in OF_TIERS}
        return {name: {"Value": value} for name, value in outputs.items()}


def _queue(spec: QueueSpec, encryption: Encryption) -> dict[str, Any]:
    attributes = {key: value for key, value in spec.attributes.items() if key != "Policy"}  # a resource of its own
    properties: dict[str, Any] = {key: _typed(value) for key, value in (attributes | encrypted(encryption, {})).items()}
    if spec.dead_letters:
        properties["RedrivePolicy"] = redrive(f"${{{_id(spec.dead_letters)}.Arn}}")
    return _resource("SQS::Queue", {"QueueName": spec.name, **properties, **_tagged(spec.tags)}, **_KEPT)


def _resource(kind: str, properties: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"Type": f"AWS::{kind}", **more, "Properties": dict(properties)}


def _choice(description: str, values: Iterable[str]) -> dict[str, Any]:
    """A parameter; the first value is its default."""
    allowed = list(values)
    return {"Type": "String", "Description": description, "AllowedValues": allowed, "Default": allowed[0]}


def _by_route(direct: Any, by_sns: Any, by_eventbridge: Any) -> dict[str, Any]:
    return {"Fn::If": [ROUTES["direct"], direct, {"Fn::If": [ROUTES["sns"], by_sns, by_eventbridge]}]}


def _tagged(tags: Mapping[str, str]) -> dict[str, Any]:
    return {"Tags": named_tags(tags)} if tags else {}


def _typed(value: str) -> bool | int | str:
    return value == "true" if value in ("true", "false") else int(value) if value.isdecimal() else value


def _id(name: str) -> str:
    """A resource's id within the template: letters and digits alone."""
    return "".join(part[:1].upper() + part[1:] for part in re.split("[^A-Za-z0-9]+", name))


#: S3's names in its API -> CloudFormation's.
_NAMES: Final = {
    "ID": "Id",
    "ApplyServerSideEncryptionByDefault": "ServerSideEncryptionByDefault",
    "QueueArn": "Queue",
    "Events": "Event",
    "Key": "S3Key",
    "FilterRules": "Rules",
}


def _renamed(setting: Any) -> Any:
    """A setting of S3's API as CloudFormation writes it."""
    if isinstance(setting, list):
        return [_renamed(item) for item in setting]
    if not isinstance(setting, Mapping):
        return setting
    renamed = {_NAMES.get(key, key): _renamed(value) for key, value in setting.items()}
    if "Event" in renamed:
        (renamed["Event"],) = renamed["Event"]
    if "Prefix" in renamed.get("Filter", {}):  # of a lifecycle rule
        renamed["Prefix"] = renamed.pop("Filter")["Prefix"]
    return renamed


def _substituted(value: Any) -> Any:
    """`value` with `Fn::Sub` around each text that has a placeholder."""
    if isinstance(value, Mapping):
        return {key: _substituted(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_substituted(item) for item in value]
    return {"Fn::Sub": value} if isinstance(value, str) and "${" in value else value
