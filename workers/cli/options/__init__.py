"""Options that several commands share, each with one meaning and one help text.

a command's parameter: Broker -> its option here -> `checks` -> the command
takes(engine=...) in `declared` -> an option for each field of EngineConfig or SamplingParams
argv -> `names`, which know former names -> typer
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workers.cli.options.checks import finite, networks, origins, place, process_name, provider, proxies

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

MaxStepSeconds = Annotated[
    float,
    typer.Option(
        min=0,
        callback=finite,
        help="Longest engine step. After that the step counts as hung: the worker hands its tasks back and exits. "
        "0: no limit.",
    ),
]

MaxWorkerDeaths = Annotated[
    int, typer.Option(min=1, help="Give a task up when this many workers died on it without one new token.")
]

NoBreaker = Annotated[
    bool,
    typer.Option(
        "--no-breaker", help="Take tasks also while the engine fails them, or is far slower than other workers' are."
    ),
]

SpotProvider = Annotated[
    str | None,
    typer.Option(
        callback=provider,
        help="Drain when this provider announces the end of the instance (spot, Auto Scaling group): aws. Unset: do "
        "not ask.",
    ),
]

SpotMetadataUrl = Annotated[
    str | None, typer.Option(help="URL of the instance's metadata service. Unset: the provider's own.")
]

MaxQueued = Annotated[
    int,
    typer.Option(
        min=0, help="Most tasks that may wait for a model. More are refused with 429, lower tiers first. 0: any."
    ),
]

MaxQueuedPerTenant = Annotated[int, typer.Option(min=0, help="Most tasks of one tenant that may wait, in all. 0: any.")]

MaxQueuedInAll = Annotated[int, typer.Option(min=0, help="As --max-queued, of all models. 0: any.")]

MaxWait = Annotated[
    float,
    typer.Option(
        min=0,
        callback=finite,
        help="Expected wait (s) of the tiers priority and default that counts as full, as --max-queued. 0: any.",
    ),
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

FilesRedirect = Annotated[
    bool,
    typer.Option(
        "--files-redirect",
        help="Send downloads to the bucket of --files-dir, by URLs that open a file for 15 minutes. Unset: files come "
        "through the gateway.",
    ),
]

MaxFile = Annotated[int, typer.Option(min=1, help="Largest uploaded file, in bytes.")]

CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        callback=origins,
        help="Let web pages of this origin call the gateway: https://chat.example.org, or * for all. May be repeated. "
        "Unset: none.",
    ),
]

ProxyHeaders = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS",
        callback=proxies,
        help="Believe X-Forwarded-For and X-Forwarded-Proto of the proxy at this address or network (10.0.0.0/8), or * "
        "for any. May be repeated. Unset: no proxy.",
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
