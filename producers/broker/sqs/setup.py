"""Makes a system's SQS queues, corrects existing ones, and checks those that an operator chose.

`provide` may be repeated: it changes what differs from the specs, and nothing else. A worker calls `make_missing` for
its own queues.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from producers.broker.sqs.address import QUEUE_TAG, Address
from producers.broker.sqs.queues import Queue, is_fifo, unfit
from producers.broker.sqs.specs import (
    AS_IT_IS,
    MAX_RECEIVES,
    Encryption,
    QueueSpec,
    arn,
    encrypted,
    queue_specs,
    redrive,
)
from producers.connection.aws import AwsError, AwsMissing, aws_errors, client
from producers.connection.trouble import Trouble

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Pauses (s) between tries of a call that AWS throttles, or fails by itself.
PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
#: Fewest receives before a chosen queue's redrive policy may move a message away: each hand-back counts as one.
MIN_RECEIVES: Final = 100
_EXISTS: Final = frozenset({"QueueNameExists", "QueueAlreadyExists"})
#: Answers for a queue that was made a moment ago.
_NOT_YET: Final = frozenset({"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"})
_ARN: Final = re.compile(r"arn:[a-z-]+:sqs:([a-z0-9-]+):([0-9]{12}):([A-Za-z0-9_-]{1,80}(?:\.fifo)?)")


@dataclass(frozen=True, slots=True)
class Finding:
    """A queue or a bucket, and what was done to it, or is to be done."""

    kind: str
    """`queue`, `bucket`, or `store` for the URLs of queues in Penstock's store."""
    name: str
    action: str
    """`create`, `change`, `keep`; `wrong`: it cannot be changed, or not by this command."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Attribute -> what differs."""
    url: str = ""
    list: str = ""


class Setup:
    """Sets up the queues of one address. `apply`: whether to change anything; `pause`: sleeps for so long (s)."""

    def __init__(
        self,
        address: Address,
        encryption: Encryption = AS_IT_IS,
        apply: bool = True,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises AwsNotInstalled and AwsError, as `producers.connection.aws.client`."""
        self._sqs = client("sqs", address.region, address.endpoint_url)
        self._address, self._encryption, self.apply, self._pause = address, encryption, apply, pause
        self._arns: dict[str, str] = {}

    def provide(self, queues: Sequence[QueueSpec]) -> list[Finding]:
        """Make the queues that are missing, and correct the others. Raises AwsError, which names queue and permission.

        A queue that belongs to another name of Penstock's, or is of the other kind (FIFO or not), is found `wrong`.
        """
        return [self._provide(spec) for spec in queues]

    def check(self, name: str, queue_arn: str) -> Finding:
        """Check a queue that an operator chose for a list, also of another account. Nothing is changed.

        Raises ValueError for another region's ARN; AwsMissing without the queue.
        """
        parts = _ARN.fullmatch(queue_arn)
        if parts is None or parts[1] != self._address.region:
            form = arn(self._address.region, "ACCOUNT", "NAME")
            raise ValueError(f"{queue_arn!r} is no queue of {self._address.region}: its ARN is like {form}")
        url = self.url(parts[3], parts[2])
        if url is None:
            raise AwsMissing(f"there is no queue {queue_arn}, or it may not be seen (sqs:GetQueueUrl)", "Missing", None)
        wrong = _unfit(self._attributes(parts[3], url), is_fifo(self._address, name))
        return Finding("queue", parts[3], "wrong" if wrong else "keep", wrong, url, name)

    def make(self, spec: QueueSpec) -> str:
        """Make a queue. Returns its URL. A queue that another process made meanwhile stays as it is."""
        self._check_account(spec)
        attributes = {**spec.attributes, **self._redrive(spec), **encrypted(self._encryption, {})}
        try:
            answer = self._patiently(
                f"create queue {spec.name} in {self._address.region}",
                "sqs:CreateQueue and sqs:TagQueue",
                lambda: self._sqs.create_queue(QueueName=spec.name, Attributes=attributes, tags=dict(spec.tags)),
                _NOT_YET if spec.dead_letters else frozenset(),
            )
            url = str(answer["QueueUrl"])
            self._arns[spec.name] = arn_of(self._address.region, url)
            return url
        except AwsError as error:
            existing = self.url(spec.name) if error.code.rpartition(".")[2] in _EXISTS else None
            if existing is None:
                raise
            return existing

    def _check_account(self, spec: QueueSpec) -> None:
        """Raise AwsMissing if the queue belongs to another account than the credentials."""
        account = self._address.account
        if account and account != (ours := own_account(self._address)):
            raise AwsMissing(
                f"queue {spec.name} is missing in account {account}, and these credentials are of account {ours}: make "
                "it with the other account's credentials, or choose queues by --predefined",
                "OtherAccount",
                None,
            )

    def _provide(self, spec: QueueSpec) -> Finding:
        url = self.url(spec.name)
        if url is None:
            new_url = self.make(spec) if self.apply else ""
            return Finding("queue", spec.name, "create", url=new_url, list=spec.list)
        existing, tags = self._attributes(spec.name, url), self._tags(spec.name, url)
        if wrong := _not_ours(spec, existing, tags):
            return Finding("queue", spec.name, "wrong", wrong, url, spec.list)
        differing = self._differing(spec, existing)
        new_tags = {key: value for key, value in spec.tags.items() if tags.get(key) != value}
        if self.apply:
            self._correct(spec.name, url, differing, new_tags)
        details = {name: _turned(existing.get(name), value) for name, value in differing.items()}
        details |= {f"tag {key}": _turned(tags.get(key), value) for key, value in new_tags.items()}
        return Finding("queue", spec.name, "change" if details else "keep", details, url, spec.list)

    def _correct(self, name: str, url: str, attributes: Mapping[str, str], tags: Mapping[str, str]) -> None:
        if attributes:
            self._patiently(
                f"change {', '.join(attributes)} of queue {name}",
                "sqs:SetQueueAttributes",
                lambda: self._sqs.set_queue_attributes(QueueUrl=url, Attributes=dict(attributes)),
            )
        if tags:
            self._patiently(
                f"tag queue {name}", "sqs:TagQueue", lambda: self._sqs.tag_queue(QueueUrl=url, Tags=dict(tags))
            )

    def _differing(self, spec: QueueSpec, existing: Mapping[str, str]) -> dict[str, str]:
        attributes = {**spec.attributes, **self._redrive(spec)}
        differing = {key: value for key, value in attributes.items() if not _equal(existing.get(key, ""), value)}
        return {**differing, **encrypted(self._encryption, existing)}

    def _redrive(self, spec: QueueSpec) -> dict[str, str]:
        name = spec.dead_letters
        if not name:
            return {}
        if name not in self._arns:
            url = self.url(name)
            missing = arn(self._address.region, "ACCOUNT", name)  # the caller only reports what would be done
            self._arns[name] = missing if url is None else self._attributes(name, url)["QueueArn"]
        return {"RedrivePolicy": json.dumps(redrive(self._arns[name]))}

    def url(self, name: str, account: str = "") -> str | None:
        """A queue's URL; None if it does not exist, or may not be seen. `account`: by default the address's."""
        owner = account or self._address.account
        of_owner = {"QueueOwnerAWSAccountId": owner} if owner else {}
        try:
            answer = self._patiently(
                f"find queue {name} in {self._address.region}",
                "sqs:GetQueueUrl",
                lambda: self._sqs.get_queue_url(QueueName=name, **of_owner),
            )
        except AwsMissing:
            return None
        return str(answer["QueueUrl"])

    def _attributes(self, name: str, url: str) -> dict[str, str]:
        attributes: dict[str, str] = self._patiently(
            f"read the settings of queue {name}",
            "sqs:GetQueueAttributes",
            lambda: self._sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"]),
        )["Attributes"]
        return attributes

    def _tags(self, name: str, url: str) -> dict[str, str]:
        answer = self._patiently(
            f"read the tags of queue {name}", "sqs:ListQueueTags", lambda: self._sqs.list_queue_tags(QueueUrl=url)
        )
        return dict(answer.get("Tags", {}))

    def _patiently(
        self, doing: str, permission: str, call: Callable[[], T], not_yet: Collection[str] = frozenset()
    ) -> T:
        return patiently(doing, permission, call, self._pause, not_yet)


def patiently(
    doing: str,
    permission: str,
    call: Callable[[], T],
    pause: Callable[[float], None] = time.sleep,
    not_yet: Collection[str] = frozenset(),
) -> T:
    """Call AWS within `aws_errors`; again if it is throttled, fails by itself, or answers one of the codes `not_yet`:
    new resources take a moment to be seen."""
    for seconds in PAUSES_S:
        try:
            with aws_errors(doing, permission):
                return call()
        except AwsError as error:
            if error.code not in not_yet and (error.trouble is not Trouble.AWAY or error.code == "Unreachable"):
                raise
            log.warning("%s; trying again in %g s", error, seconds)
            pause(seconds)
    with aws_errors(doing, permission):
        return call()


def arn_of(region: str, url: str) -> str:
    """A queue's ARN, by its URL."""
    account, name = url.split("/")[-2:]
    return arn(region, account, name)


def make_missing(address: Address, names: Sequence[str]) -> list[str]:
    """Make those of a worker's lists that have no queue, and the queues for their dead letters.

    Existing queues stay as they are. Returns SQS's names of the new ones. Raises AwsError, whose text names a missing
    permission.
    """
    setup = Setup(address)
    missing = [spec for spec in queue_specs(address, names, {}) if setup.url(spec.name) is None]
    for spec in missing:
        setup.make(spec)
    return [spec.name for spec in missing]


def own_account(address: Address) -> str:
    """The account of the credentials. Raises AwsError. STS requires no permission for that."""
    elsewhere = "" if ".amazonaws." in address.endpoint_url else address.endpoint_url  # SQS's own endpoint is not STS's
    sts = client("sts", address.region, elsewhere)
    identity = patiently("ask whose the credentials are", "valid credentials", sts.get_caller_identity)
    return str(identity["Account"])


def _not_ours(spec: QueueSpec, existing: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, str]:
    """The reasons why an existing queue cannot be changed to its spec; empty if it can."""
    reasons = {}
    owner, ours = tags.get(QUEUE_TAG), spec.tags.get(QUEUE_TAG)
    if owner is not None and owner != ours:
        reasons[f"tag {QUEUE_TAG}"] = f"it is the queue of {owner}, which has the same name here: use another prefix"
    if (existing.get("FifoQueue", "false") == "true") != spec.fifo:
        kind = "no FIFO queue" if spec.fifo else "a FIFO queue"
        reasons["FifoQueue"] = f"it is {kind}, which cannot be changed: delete it, or use another prefix"
    return reasons


def _unfit(existing: Mapping[str, str], fifo: bool) -> dict[str, str]:
    """The settings of a chosen queue that its owner has to change."""
    wrong = unfit(Queue.of("", existing), fifo)
    faults = {"settings": f"it {wrong}"} if wrong else {}
    receives = _read(existing.get("RedrivePolicy") or "{}").get("maxReceiveCount", MAX_RECEIVES)
    if receives < MIN_RECEIVES:
        faults["RedrivePolicy"] = (
            f"maxReceiveCount is {receives}; it must be {MIN_RECEIVES} or more ({MAX_RECEIVES} is best): SQS counts "
            "every hand-back as a receive, and would move away messages that nothing is wrong with"
        )
    if int(existing.get("DelaySeconds", 0)):
        faults["DelaySeconds"] = f"it is {existing['DelaySeconds']}, and delays every task; it must be 0"
    return faults


def _equal(existing: str, expected: str) -> bool:
    """Whether an attribute has the expected value, however it is written."""
    if expected.startswith("{"):
        return bool(existing) and _read(existing) == _read(expected)
    return existing.lower() == expected.lower()


def _read(policy: str) -> Any:
    value = json.loads(policy)
    if "maxReceiveCount" in value:
        value["maxReceiveCount"] = int(value["maxReceiveCount"])
    return value


def _turned(before: str | None, after: str) -> str:
    return f"{before or 'unset'} -> {after or 'unset'}"
