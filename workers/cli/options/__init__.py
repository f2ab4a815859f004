"""Options that several commands share, each with one meaning and one help text.

a command's parameter: Broker -> its option here -> `checks` -> the command
takes(engine=...) in `declared` -> an option for each field of EngineConfig or SamplingParams
argv -> `names`, which know former names -> typer
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workers.cli.options.checks import networks, place, process_name

DEFAULT_URL = "http://127.0.0.1:8000"

Broker = Annotated[
    str,
    typer.Option(
        envvar="BROKER_URL",
        help="The server that holds the queues: Redis or Valkey (redis://HOST:PORT/DB, or "
        "redis+sentinel://HOST:PORT,.../NAME/DB), or SQS (sqs://REGION?prefix=pen-), which also needs --store.",
    ),
]

#: The broker in operators' commands. Unset, it is the server of the `penstock up` in this directory.
AnyBroker = Annotated[
    str | None,
    typer.Option(
        envvar="BROKER_URL",
        help="What holds the queues: a Redis or Valkey, or SQS (sqs://REGION?prefix=pen-). Unset: the server of "
        "`penstock up` in this directory.",
    ),
]

Prices = Annotated[
    Path | None, typer.Option(dir_okay=False, help="A table of prices (TOML or JSON): usage is shown with its cost.")
]

Store = Annotated[
    str | None,
    typer.Option(
        envvar="STORE_URL",
        help="The Redis or Valkey server that holds records and token streams. Unset: the broker, if it is one.",
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
HealthPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Serve /livez and /readyz on this port. 0: any free port. Unset: no port."),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on. 0: any free port.")]
UniqueName = Annotated[
    str | None, typer.Option(callback=process_name, help="This process's name, which must be unique. Unset: made up.")
]
Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from standard input.")]
AsChat = Annotated[bool, typer.Option("--chat", help="PROMPT is a user's message: apply the model's chat template.")]
LogLevel = Annotated[str, typer.Option(help="Least severe messages to log: debug, info, warning or error.")]

Url = Annotated[str, typer.Option(envvar="PENSTOCK_URL", help="The gateway's URL.")]

Gpus = Annotated[
    str | None,
    typer.Option(help="Run one worker on each of these GPUs: all, or numbers, GPU-... and MIG-... names, as in 0,1."),
]

FilesDir = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE",
        envvar="FILES_DIR",
        callback=place,
        help="The folder for uploaded files and batches' output, or s3://BUCKET/PREFIX. All gateways and sweepers "
        "share it. Unset: files in the data directory.",
    ),
]

SecretsKey = Annotated[
    Path | None,
    typer.Option(
        envvar="PENSTOCK_SECRETS_KEY_FILE",
        dir_okay=False,
        help="Encrypt webhooks' secrets in the store with the keys of this file, which `penstock secrets key` makes. "
        "Unset: they are stored in plain.",
    ),
]

BackupKey = Annotated[
    Path | None,
    typer.Option(
        envvar="PENSTOCK_BACKUP_KEY_FILE",
        dir_okay=False,
        help="Encrypt backup and journal with the first key of this file, which `penstock secrets key` makes; all of "
        "its keys read. Unset: they are plain.",
    ),
]

WebhookAllow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CIDR",
        callback=networks,
        help="Let webhooks call addresses of this network though they are not public, also by http:// and on any port: "
        "10.0.0.0/8, 127.0.0.0/8. May be repeated. Unset: none.",
    ),
]
