"""Makes a system's SQS queues, corrects existing ones, and checks those that an operator chose.

`provide` may be repeated: it changes what differs from `wanted`, and nothing else. `make_missing` is what a worker
calls for its own queues.
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
    Wanted,
    arn,
    encrypted,
    redrive,
    wanted,
)
from producers.connection.aws import AwsError, AwsMissing, client, told
from producers.connection.trouble import Trouble

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Pauses (s) between tries of a call that AWS throttles, or fails by itself.
PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
#: Fewest receives before a chosen queue's redrive policy may move a message away: each hand-back counts as one.
MIN_RECEIVES: Final = 100
_EXISTS: Final = frozenset({"QueueNameExists", "QueueAlreadyExists"})
#: Answers about a queue that was made a moment ago.
_NOT_YET: Final = frozenset({"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"})
_ARN: Final = re.compile(r"arn:[a-z-]+:sqs:([a-z0-9-]+):([0-9]{12}):([A-Za-z0-9_-]{1,80}(?:\.fifo)?)")


@dataclass(frozen=True, slots=True)
class Finding:
    """A queue or a bucket, and what was done about it, or is to be done."""

    kind: str
    """`queue`, `bucket`, or `store` for what Penstock's store says of queues."""
    name: str
    action: str
    """`create`, `change`, `keep`; `wrong`: it cannot be changed, or not by this command."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Attribute -> what differs."""
    url: str = ""
    list: str = ""


class Setup:
    """Sets up the queues of one address. `apply`: whether to change anything at all; `pause`: waits so long (s)."""

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

    def provide(self, queues: Sequence[Wanted]) -> list[Finding]:
        """Make the queues that are missing, and correct the others. Raises AwsError, which names queue and permission.

        A queue that belongs to another name of Penstock's, or is of the other kind (FIFO or not), is found `wrong`.
        """
        return [self._provide(one) for one in queues]

    def check(self, name: str, queue_arn: str) -> Finding:
        """Check a queue that an operator chose for a list, also of another account. Nothing is changed.

        Raises ValueError for another region's ARN; AwsMissing without the queue.
        """
        read = _ARN.fullmatch(queue_arn)
        if read is None or read[1] != self._address.region:
            form = arn(self._address.region, "ACCOUNT", "NAME")
            raise ValueError(f"{queue_arn!r} is no queue of {self._address.region}: its ARN is like {form}")
        url = self.url(read[3], read[2])
        if url is None:
            raise AwsMissing(f"there is no queue {queue_arn}, or it may not be seen (sqs:GetQueueUrl)", "Missing", None)
        wrong = _unfit(self._attributes(read[3], url), is_fifo(self._address, name))
        return Finding("queue", read[3], "wrong" if wrong else "keep", wrong, url, name)

    def make(self, one: Wanted) -> str:
        """Make a queue. Returns its URL. One that someone else made meanwhile stays as it is."""
        self._may_make(one)
        asked = {**one.attributes, **self._redrive(one), **encrypted(self._encryption, {})}
        try:
            made = self._patiently(
                f"create queue {one.name} in {self._address.region}",
                "sqs:CreateQueue and sqs:TagQueue",
                lambda: self._sqs.create_queue(QueueName=one.name, Attributes=asked, tags=dict(one.tags)),
                _NOT_YET if one.dead_letters else frozenset(),
            )
            url = str(made["QueueUrl"])
            self._arns[one.name] = arn_of(self._address.region, url)
            return url
        except AwsError as error:
            there = self.url(one.name) if error.code.rpartition(".")[2] in _EXISTS else None
            if there is None:
                raise
            return there

    def _may_make(self, one: Wanted) -> None:
        account = self._address.account
        if account and account != (own := own_account(self._address)):
            raise AwsMissing(
                f"queue {one.name} is missing in account {account}, and these credentials are of account {own}: make "
                "it with the other account's credentials, or choose queues by --predefined",
                "OtherAccount",
                None,
            )

    def _provide(self, one: Wanted) -> Finding:
        url = self.url(one.name)
        if url is None:
            made = self.make(one) if self.apply else ""
            return Finding("queue", one.name, "create", url=made, list=one.list)
        existing, tags = self._attributes(one.name, url), self._tags(one.name, url)
        if wrong := _not_ours(one, existing, tags):
            return Finding("queue", one.name, "wrong", wrong, url, one.list)
        differing = self._differing(one, existing)
        new_tags = {key: value for key, value in one.tags.items() if tags.get(key) != value}
        if self.apply:
            self._correct(one.name, url, differing, new_tags)
        details = {name: _turned(existing.get(name), value) for name, value in differing.items()}
        details |= {f"tag {key}": _turned(tags.get(key), value) for key, value in new_tags.items()}
        return Finding("queue", one.name, "change" if details else "keep", details, url, one.list)

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

    def _differing(self, one: Wanted, existing: Mapping[str, str]) -> dict[str, str]:
        asked = {**one.attributes, **self._redrive(one)}
        found = {key: value for key, value in asked.items() if not _equal(existing.get(key, ""), value)}
        return {**found, **encrypted(self._encryption, existing)}

    def _redrive(self, one: Wanted) -> dict[str, str]:
        name = one.dead_letters
        if not name:
            return {}
        if name not in self._arns:
            url = self.url(name)
            missing = arn(self._address.region, "ACCOUNT", name)  # it is only said what would be done
            self._arns[name] = missing if url is None else self._attributes(name, url)["QueueArn"]
        return {"RedrivePolicy": json.dumps(redrive(self._arns[name]))}

    def url(self, name: str, account: str = "") -> str | None:
        """A queue's URL; None if it does not exist, or may not be seen. `account`: unless it is the address's."""
        owner = account or self._address.account
        of_owner = {"QueueOwnerAWSAccountId": owner} if owner else {}
        try:
            found = self._patiently(
                f"find queue {name} in {self._address.region}",
                "sqs:GetQueueUrl",
                lambda: self._sqs.get_queue_url(QueueName=name, **of_owner),
            )
        except AwsMissing:
            return None
        return str(found["QueueUrl"])

    def _attributes(self, name: str, url: str) -> dict[str, str]:
        found: dict[str, str] = self._patiently(
            f"read the settings of queue {name}",
            "sqs:GetQueueAttributes",
            lambda: self._sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"]),
        )["Attributes"]
        return found

    def _tags(self, name: str, url: str) -> dict[str, str]:
        said = self._patiently(
            f"read the tags of queue {name}", "sqs:ListQueueTags", lambda: self._sqs.list_queue_tags(QueueUrl=url)
        )
        return dict(said.get("Tags", {}))

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
    """Call AWS, as `told` says it; again where it is throttled, fails by itself, or answers one of the codes `not_yet`:
    what was made before takes a moment to be seen."""
    for seconds in PAUSES_S:
        try:
            with told(doing, permission):
                return call()
        except AwsError as error:
            if error.code not in not_yet and (error.trouble is not Trouble.AWAY or error.code == "Unreachable"):
                raise
            log.warning("%s; trying again in %g s", error, seconds)
            pause(seconds)
    with told(doing, permission):
        return call()


def arn_of(region: str, url: str) -> str:
    """A queue's ARN, by its URL."""
    account, name = url.split("/")[-2:]
    return arn(region, account, name)


def make_missing(address: Address, names: Sequence[str]) -> list[str]:
    """Make those of a worker's lists that have no queue, and the queues for their dead letters.

    Existing queues stay as they are. Returns SQS's names of those that were made. Raises AwsError; denied, its text
    says which permission is missing.
    """
    setup = Setup(address)
    missing = [one for one in wanted(address, names, {}) if setup.url(one.name) is None]
    for one in missing:
        setup.make(one)
    return [one.name for one in missing]


def own_account(address: Address) -> str:
    """The account of the credentials. Raises AwsError; STS lets everyone ask."""
    elsewhere = "" if ".amazonaws." in address.endpoint_url else address.endpoint_url  # SQS's own endpoint is not STS's
    sts = client("sts", address.region, elsewhere)
    said = patiently("ask whose the credentials are", "valid credentials", sts.get_caller_identity)
    return str(said["Account"])


def _not_ours(one: Wanted, existing: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, str]:
    """Why an existing queue cannot be made the wanted one; empty if it can."""
    found = {}
    owner, ours = tags.get(QUEUE_TAG), one.tags.get(QUEUE_TAG)
    if owner is not None and owner != ours:
        found[f"tag {QUEUE_TAG}"] = f"it is the queue of {owner}, which has the same name here: use another prefix"
    if (existing.get("FifoQueue", "false") == "true") != one.fifo:
        kind = "no FIFO queue" if one.fifo else "a FIFO queue"
        found["FifoQueue"] = f"it is {kind}, which cannot be changed: delete it, or use another prefix"
    return found


def _unfit(existing: Mapping[str, str], fifo: bool) -> dict[str, str]:
    """The settings of a chosen queue that its owner has to change."""
    wrong = unfit(Queue.of("", existing), fifo)
    found = {"settings": f"it {wrong}"} if wrong else {}
    receives = _read(existing.get("RedrivePolicy") or "{}").get("maxReceiveCount", MAX_RECEIVES)
    if receives < MIN_RECEIVES:
        found["RedrivePolicy"] = (
            f"maxReceiveCount is {receives}; it must be {MIN_RECEIVES} or more ({MAX_RECEIVES} is best): SQS counts "
            "every hand-back as a receive, and would move away messages that nothing is wrong with"
        )
    if int(existing.get("DelaySeconds", 0)):
        found["DelaySeconds"] = f"it is {existing['DelaySeconds']}, and delays every task; it must be 0"
    return found


def _equal(existing: str, asked: str) -> bool:
    """Whether an attribute is as it should be, whatever way it is written."""
    if asked.startswith("{"):
        return bool(existing) and _read(existing) == _read(asked)
    return existing.lower() == asked.lower()


def _read(policy: str) -> Any:
    read = json.loads(policy)
    if "maxReceiveCount" in read:
        read["maxReceiveCount"] = int(read["maxReceiveCount"])
    return read


def _turned(before: str | None, after: str) -> str:
    return f"{before or 'unset'} -> {after or 'unset'}"
