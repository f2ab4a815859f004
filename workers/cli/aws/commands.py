"""`penstock aws`: makes and checks queues and bucket, and prints policies and a template."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from workers.cli.aws.asked import arns_of, bucket_of, needs_of, opened
from workers.cli.aws.report import show, telling
from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Exit, Failure
from workers.cli.models.references import MODEL, complete_model
from workers.cli.options import Json

Broker = Annotated[
    str, typer.Option(envvar="BROKER_URL", help="SQS: sqs://REGION?prefix=pen-, as the processes get it.")
]
Store = Annotated[
    str | None,
    typer.Option(
        envvar="STORE_URL",
        help="The Redis or Valkey server of the system; the queues' URLs are written there. Unset: processes find the "
        "queues by their names.",
    ),
]
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
Bucket = Annotated[
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


_URL = "--broker 'sqs://us-east-1?prefix=pen-'"
app = Commands("Operations", OPERATOR_STATUS, "aws", "AWS: queues, bucket and permissions of a system on SQS and S3.")


@app.shown(f"penstock aws setup {_URL} --store redis://10.0.0.5:6379/0 --model tiny")
def setup(
    broker: Broker,
    store: Store = None,
    model: Model = None,
    predefined: Predefined = None,
    bucket: Bucket = None,
    inbox: Inbox = False,
    kms_key: KmsKey = None,
    sse: Sse = None,
    tag: Tag = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Make the queues of models, and a bucket; correct those that exist. It may be run again at any time.

    Exit status 1: something is wrong that this command cannot change.
    """
    from producers.aws.account import provide

    with opened(broker, store) as (address, server):
        needs = needs_of(address, server, model, predefined, bucket, inbox, kms_key, sse, tag)
        found = provide(needs, server, apply=not dry_run)
    show(found, applied=not dry_run, as_json=as_json)
    if any(one.action == "wrong" for one in found):
        raise typer.Exit(Exit.TASK_FAILED)


@app.shown(f"penstock aws check {_URL} --store redis://10.0.0.5:6379/0 --model tiny --role worker")
def check(
    broker: Broker,
    store: Store = None,
    model: Model = None,
    predefined: Predefined = None,
    bucket: Bucket = None,
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
    from producers.aws.account import provide
    from producers.aws.probe import probe

    with opened(broker, store) as (address, server):
        needs = needs_of(address, server, model, predefined, bucket, inbox, None, None, None)
        if role is not None and server is None:
            raise Failure("--role needs --store: the process finds its queues there")
        found = probe(role, needs, server) if role and server else provide(needs, server, apply=False)
    show(found, applied=False, as_json=as_json)
    if any(one.action != "keep" for one in found):
        raise typer.Exit(Exit.TASK_FAILED)


@app.shown(f"penstock aws policy worker {_URL} --files-dir s3://my-bucket/files")
def policy(
    role: Annotated[str, typer.Argument(help="producer, gateway, worker, sweeper, sources, autoscaler or setup.")],
    broker: Broker,
    files_dir: Annotated[
        str | None, typer.Option(envvar="FILES_DIR", help="Where files are: s3://BUCKET/PREFIX.")
    ] = None,
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
    from producers.broker.sqs.queues.setup import own_account

    if role not in ROLES:
        raise Failure(f"no process is called {role!r}; there are {', '.join(ROLES)}")
    with telling(broker):
        address = read(broker)
        account = account or address.account or own_account(address)
        arns = arns_of(actuator, address.region, account)
        scope = Scope(
            address,
            account,
            files=bucket_of(files_dir) if files_dir and files_dir.startswith("s3:") else None,
            inbox=bucket_of(inbox_bucket).name if inbox_bucket else "",
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
    broker: Broker,
    store: Store = None,
    model: Model = None,
    bucket: Bucket = None,
    inbox: Inbox = False,
    kms_key: KmsKey = None,
    tag: Tag = None,
) -> None:
    """Print a CloudFormation template of what `aws setup` makes, with a role for each process. AWS is not asked."""
    from producers.aws.template import Template

    with opened(broker, store) as (address, server):
        needs = needs_of(address, server, model, None, bucket, inbox, kms_key, None, tag)
    made = Template(needs.address, needs.models, needs.bucket, needs.inbox, needs.encryption, needs.tags)
    typer.echo(str(made), nl=False)
