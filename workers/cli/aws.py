"""`penstock aws`: makes and checks queues and bucket, and prints policies and a template.

the options -> `_needs_of`: what a system needs; no worker has to run to know a model's version -> `producers.aws`
-> findings, printed a line each. Errors of AWS and of the store become Failures (`_failing`).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Exit, Failure, needs
from workers.cli.options import MODEL, Broker, DataDir, FilesDir, Json, Store, complete_model, find_models
from workers.cli.servers import addresses
from workers.cli.terminal import say
from workers.errors import Refused

if TYPE_CHECKING:
    from redis import Redis

    from producers.aws.account import Needs
    from producers.broker.sqs.address import Address
    from producers.broker.sqs.setup import Finding
    from producers.broker.sqs.specs import Encryption
    from producers.store.blobs.bucket import Bucket

Model = Annotated[
    list[str] | None,
    typer.Option(help=f"{MODEL} NAME@VERSION needs no files. May be repeated.", autocompletion=complete_model),
]
Predefined = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TIER=ARN",
        help="Use this existing queue for a tier (or `celery`) of the model, also of another account. It is checked, "
        "and not changed. Once for each tier.",
    ),
]
BucketName = Annotated[
    str | None,
    typer.Option(metavar="BUCKET", help="Also a bucket: its name, or s3://BUCKET/PREFIX as for --files-dir."),
]
Inbox = Annotated[bool, typer.Option("--inbox", help="Let the bucket tell a queue of files in inbox/.")]
KmsKey = Annotated[
    str | None, typer.Option(help="Encrypt with this KMS key (ARN). Unset: as it is; new ones with AWS's own keys.")
]
Sse = Annotated[str | None, typer.Option(help="sqs: encrypt with AWS's own keys, also what has a KMS key now.")]
Tag = Annotated[list[str] | None, typer.Option(metavar="KEY=TEXT", help="Tag queues and bucket. May be repeated.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; show what would be done.")]


_WITH_VERSION: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)@([0-9a-f]{12})")
#: Action -> words for it, done and only looked at.
_ACTION_TEXTS: Final = {
    "create": ("created", "missing"),
    "change": ("changed", "differs"),
    "keep": ("as it is", "in order"),
    "wrong": ("wrong", "wrong"),
}

_URL = "--broker 'sqs://us-east-1?prefix=pen-'"
app = Commands("Operations", OPERATOR_STATUS, "aws", "AWS: queues, bucket and permissions of a system on SQS and S3.")


@app.shown(f"penstock aws setup {_URL} --store redis://10.0.0.5:6379/0 --model tiny")
def setup(
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    model: Model = None,
    predefined: Predefined = None,
    bucket: BucketName = None,
    inbox: Inbox = False,
    kms_key: KmsKey = None,
    sse: Sse = None,
    tag: Tag = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Make the queues of models, and a bucket; correct those that exist. It may be run again at any time.

    The queues' URLs are written into the store, if there is one; else processes find the queues by their names.
    Exit status 1: something is wrong that this command cannot change.
    """
    from producers.aws.account import provide

    with _opened(broker, store, data_dir) as (address, server):
        required = _needs_of(address, server, model, predefined, bucket, inbox, kms_key, sse, tag)
        findings = provide(required, server, apply=not dry_run)
    _show(findings, applied=not dry_run, as_json=as_json)
    if any(finding.action == "wrong" for finding in findings):
        raise typer.Exit(Exit.TASK_FAILED)


@app.shown(f"penstock aws check {_URL} --store redis://10.0.0.5:6379/0 --model tiny --role worker")
def check(
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    model: Model = None,
    predefined: Predefined = None,
    bucket: BucketName = None,
    inbox: Inbox = False,
    role: Annotated[
        str | None,
        typer.Option(
            help="Try what this process does, as far as that changes nothing: producer, gateway, worker, sweeper or "
            "sources. Unset: compare all settings with those of `aws setup`."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell what is missing or wrong, with the credentials of this process. Nothing is changed.

    Exit status 1: something is missing or wrong.
    """
    from producers.aws.account import probe, provide

    with _opened(broker, store, data_dir) as (address, server):
        required = _needs_of(address, server, model, predefined, bucket, inbox, None, None, None)
        if role is not None and server is None:
            raise Failure("--role needs --store: the process finds its queues there")
        findings = probe(role, required, server) if role and server else provide(required, server, apply=False)
    _show(findings, applied=False, as_json=as_json)
    if any(finding.action != "keep" for finding in findings):
        raise typer.Exit(Exit.TASK_FAILED)


@app.shown(f"penstock aws policy worker {_URL} --files-dir s3://my-bucket/files")
def policy(
    role: Annotated[str, typer.Argument(help="producer, gateway, worker, sweeper, sources, autoscaler or setup.")],
    broker: Broker = None,
    data_dir: DataDir = None,
    files_dir: FilesDir = None,
    inbox_bucket: Annotated[str | None, typer.Option(help="The bucket with inbox/, for sources.")] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(metavar="ARN", help="Instead of the queues that `aws setup` makes: these. May be repeated."),
    ] = None,
    source_queue: Annotated[
        list[str] | None, typer.Option(metavar="ARN", help="Sources take messages from this queue. May be repeated.")
    ] = None,
    reply_to: Annotated[
        list[str] | None,
        typer.Option(metavar="ARN", help="Sources send results to this queue or topic. May be repeated."),
    ] = None,
    kms_key: Annotated[
        list[str] | None, typer.Option(metavar="ARN", help="A KMS key of queues or bucket. May be repeated.")
    ] = None,
    actuator: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="What runs the workers, as `penstock autoscaler --actuator` gets it: ecs://..., ec2://.... May be "
            "repeated.",
        ),
    ] = None,
    account: Annotated[
        str | None, typer.Option(help="The account's 12 digits. Unset: the broker's URL's, or the credentials'.")
    ] = None,
) -> None:
    """Print the IAM policy of a process: what it may do, and no more."""
    from producers.aws.policies import ROLES, Scope
    from producers.aws.policies import policy as policy_of
    from producers.broker.sqs.address import read
    from producers.broker.sqs.setup import own_account

    if role not in ROLES:
        raise Failure(f"no process is called {role!r}; there are {', '.join(ROLES)}")
    broker, _ = _servers(broker, None, data_dir)
    with _failing(broker):
        address = read(broker)
        account = account or address.account or own_account(address)
        arns = arns_of(actuator, address.region, account)
        scope = Scope(
            address,
            account,
            files=_bucket_of(files_dir) if files_dir and files_dir.startswith("s3:") else None,
            inbox=_bucket_of(inbox_bucket).name if inbox_bucket else "",
            chosen=tuple(queue or ()),
            kms_keys=tuple(kms_key or ()),
            receives=tuple(source_queue or ()),
            replies=tuple(reply_to or ()),
            services=arns["services"],
            groups=arns["groups"],
        )
    typer.echo(json.dumps(policy_of(role, scope), indent=2))


@app.shown(f"penstock aws template {_URL} --model tiny --bucket my-bucket --inbox")
def template(
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    model: Model = None,
    bucket: BucketName = None,
    inbox: Inbox = False,
    kms_key: KmsKey = None,
    tag: Tag = None,
) -> None:
    """Print a CloudFormation template of what `aws setup` makes, with a role for each process. AWS is not asked."""
    from producers.aws.template import Template

    with _opened(broker, store, data_dir) as (address, server):
        required = _needs_of(address, server, model, None, bucket, inbox, kms_key, None, tag)
    rendered = Template(
        required.address, required.models, required.bucket, required.inbox, required.encryption, required.tags
    )
    typer.echo(str(rendered), nl=False)


def _servers(broker: str | None, store: str | None, data_dir: Path | None) -> tuple[str, str | None]:
    """URLs of broker and store, as `addresses` finds them. Without a store these commands work, too: None."""
    from producers.connection.local import servers

    if broker is not None and store is None and data_dir is None:
        with suppress(ValueError):
            return servers(broker, None)
        return broker, None
    return addresses(broker, store, data_dir)


@contextmanager
def _opened(broker: str | None, store: str | None, data_dir: Path | None) -> Iterator[tuple[Address, Redis | None]]:
    """The broker's address, and a client of the store, if there is one. Errors within it raise Failure."""
    from contextlib import closing

    from producers.broker.sqs.address import read
    from producers.connection.connect import connect

    broker, store = _servers(broker, store, data_dir)
    with _failing(broker):
        address = read(broker)
        if store is None:
            yield address, None
            return
        with closing(connect(store)) as server:
            yield address, server


def _needs_of(
    address: Address,
    store: Redis | None,
    model: list[str] | None,
    predefined: list[str] | None,
    bucket: str | None,
    inbox: bool,
    kms_key: str | None,
    sse: str | None,
    tag: list[str] | None,
) -> Needs:
    """The needs that the options name. Raises Failure."""
    from producers.aws.account import Needs

    if inbox and bucket is None:
        raise Failure("--inbox needs --bucket: the bucket that tells of files in inbox/")
    models = _versions(model or (), store)
    if not models and bucket is None:
        raise Failure("nothing to do: give --model, --bucket or both")
    return Needs(
        address,
        models,
        _chosen(address, store, models, predefined or []),
        None if bucket is None else _bucket_of(bucket),
        inbox,
        _encryption(kms_key, sse),
        dict(map(_tag, tag or ())),
    )


def _chosen(
    address: Address, store: Redis | None, models: list[tuple[str, str]], predefined: list[str]
) -> dict[str, str]:
    """List -> ARN. Raises Failure unless every list of one model has a queue, and a store to write it into."""
    from producers.broker.sqs.specs import lists_of

    if not predefined:
        return {}
    if store is None:
        raise Failure("--predefined needs --store: processes read there which queues were chosen")
    if len(models) != 1:
        raise Failure("--predefined is about one version of one model: give one --model, as NAME@VERSION if need be")
    arns = dict(map(_pair, predefined))
    lists = {_tier(name): name for name in lists_of(address, models)}
    if arns.keys() != lists.keys():
        raise Failure(f"--predefined names {', '.join(sorted(arns))}; it must name each of {', '.join(lists)} once")
    return {name: arns[tier] for tier, name in lists.items()}


def _tier(name: str) -> str:
    from producers.broker.sqs.address import is_celery, split

    queue, tier = split(name)
    return "celery" if is_celery(queue) else tier


def _bucket_of(name_or_url: str) -> Bucket:
    """A bucket by its name or URL. Raises ValueError."""
    from producers.store.blobs.bucket import read

    return read(name_or_url if "://" in name_or_url else f"s3://{name_or_url}")


def arns_of(actuators: list[str] | None, region: str, account: str) -> dict[str, tuple[str, ...]]:
    """Kind -> ARNs of what the actuators act on, for `Scope`. Raises ValueError."""
    from urllib.parse import urlsplit

    from workers.autoscaler.actuators.aws import group_arn, service_arn

    arns: dict[str, tuple[str, ...]] = {"services": (), "groups": ()}
    for url in actuators or ():
        parts = urlsplit(url)
        if parts.scheme not in ("ecs", "ec2"):
            raise ValueError(f"--actuator is {url!r}; it must begin with ecs:// or ec2://")
        kind, arn = ("services", service_arn) if parts.scheme == "ecs" else ("groups", group_arn)
        arns[kind] += (arn(parts, region, account),)
    return arns


def _encryption(kms_key: str | None, sse: str | None) -> Encryption:
    from producers.broker.sqs.specs import Encryption

    if sse not in (None, "sqs"):
        raise Failure(f"--sse is {sse!r}; it must be sqs, or use --kms-key")
    if sse and kms_key:
        raise Failure("--sse and --kms-key exclude each other")
    return Encryption(kms_key or "", sse is not None)


def _tag(text: str) -> tuple[str, str]:
    key, value = _pair(text)
    if key.startswith(("aws:", "penstock:")):
        raise Failure(f"the tag {key!r} cannot be set: aws: is AWS's own, penstock: is Penstock's")
    return key, value


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise Failure(f"{text!r} must be NAME=VALUE")
    return name, value


def _versions(references: Sequence[str], store: Redis | None) -> list[tuple[str, str]]:
    """Names and versions of models. Two for one name if another version is served than that on this machine.

    Raises Refused for a model that is found nowhere; redis.exceptions.RedisError.
    """
    return list(dict.fromkeys(pair for reference in references for pair in _versions_of(reference, store)))


def _versions_of(reference: str, store: Redis | None) -> list[tuple[str, str]]:
    if match := _WITH_VERSION.fullmatch(reference):
        return [(match[1], match[2])]
    from workers.library.reference import name_of, version_of

    name = name_of(reference)
    served = _served(name, store)
    if version := version_of(reference):
        return [*served, (name, version)]
    if served and reference.startswith("hf://"):  # no need to download it
        return served
    try:
        return [*served, *_local(reference)]
    except Refused as refused:
        if served:
            return served
        unserved = "; the store has no card of it" if store is not None else ""
        raise Failure(f"{refused}{unserved}; or give the version, as NAME@0123456789ab") from refused


def _served(name: str, store: Redis | None) -> list[tuple[str, str]]:
    """The version of the store's card."""
    from producers.contract import keys

    card = None if store is None else store.hget(keys.MODELS, name)
    return [] if card is None else [(name, str(json.loads(card)["version"]))]


def _local(reference: str) -> list[tuple[str, str]]:
    with needs("worker"):
        from engine.text.checkpoint import model_version
    return [(model.name, model_version(model.folder)) for model in find_models([reference])]


@contextmanager
def _failing(broker: str) -> Iterator[None]:
    """Turns errors of AWS and of the store into Failure, with advice. `broker`: its URL."""
    from redis.exceptions import RedisError

    from producers.connection.aws import AwsError, AwsNotInstalled
    from producers.connection.trouble import Trouble, error_text, trouble

    try:
        yield
    except (ValueError, AwsNotInstalled) as error:
        raise Failure(str(error)) from error
    except AwsError as error:
        away = error.trouble is Trouble.AWAY
        advice = _region_advice(urlsplit(broker).netloc) if error.code == "Unreachable" else ""
        raise Failure(f"{error}{advice}", Exit.UNREACHABLE if away else Exit.REFUSED) from error
    except (RedisError, OSError) as error:
        status = Exit.UNREACHABLE if trouble(error) is Trouble.AWAY else Exit.REFUSED
        raise Failure(f"the store: {error_text(error)}", status) from error


def _region_advice(region: str) -> str:
    """Advice where nothing answers in a region that boto3 does not know."""
    import boto3

    session = boto3.session.Session()
    regions = [
        name for kind in session.get_available_partitions() for name in session.get_available_regions("sqs", kind)
    ]
    if region in regions:
        return ""
    close = difflib.get_close_matches(region, regions, 1)
    return f" (no region {region} is known{f'; is it {close[0]}?' if close else ''})"


def _show(findings: Sequence[Finding], *, applied: bool, as_json: bool) -> None:
    """Print each finding on a line of its own."""
    for finding in findings:
        word = _ACTION_TEXTS[finding.action][0 if applied else 1]
        if as_json:
            fields = {
                "kind": finding.kind,
                "name": finding.name,
                "action": finding.action,
                "details": dict(finding.details),
            }
            typer.echo(json.dumps(fields | {"url": finding.url, "list": finding.list}))
            continue
        details = "".join(f"\n          {name}: {text}" for name, text in finding.details.items())
        say(f"{word:<8}  {finding.kind} {finding.name}{details}")
