"""`penstock gateway`: serves the HTTP API, by one process or several (`--processes`), which have the socket in common
and are supervised by this one. Whether it asks for API keys:

--auth      on loopback      on any other address
unset       none             keys
keys        keys             keys
none        none             refused, unless --insecure is given, too
"""

from __future__ import annotations

import ipaddress
import logging
import signal
import socket
from typing import Annotated, Final, Literal

import typer

from workers.cli.commands import Commands
from workers.cli.exits import PROCESS_STATUS, Failure, needs, refusing
from workers.cli.options import (
    Broker,
    DataDir,
    FilesDir,
    LogLevel,
    Port,
    Prices,
    SecretsKey,
    Store,
    WebhookAllow,
    as_arguments,
    as_environment,
    finite,
    origins,
    proxies,
)
from workers.cli.servers import (
    addresses,
    files_of,
    look_at_files,
    look_at_servers,
    open_port,
    set_up_logging,
    use_secrets_key,
)
from workers.cli.terminal import relayed
from workers.processes import PENSTOCK

Auth = Literal["keys", "none"]
#: Most processes of one gateway.
MAX_PROCESSES: Final = 64


def _checked_auth(auth: str | None) -> str | None:
    if auth not in (None, "keys", "none"):
        raise typer.BadParameter(f"{auth!r} is unknown; it must be keys or none")
    return auth


AskFor = Annotated[
    str | None,
    typer.Option(
        "--auth",
        callback=_checked_auth,
        help="keys: requests need an API key (penstock keys). none: callers name their tenant themselves. Unset: none "
        "on loopback, else keys.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="With --auth none: take requests without keys from other machines, too, and under any name."
    ),
]


app = Commands("Processes", PROCESS_STATUS)


@app.shown("penstock gateway --broker redis://10.0.0.5:6379/0 --host 0.0.0.0 --port 8000")
def gateway(
    context: typer.Context,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Port = 8000,
    processes: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_PROCESSES,
            help="Serve by so many processes, each on a core. All take callers from one socket, and one that ends is "
            "started again. The bounds on connections and streams are each one's own.",
        ),
    ] = 1,
    drain_timeout: Annotated[
        float, typer.Option(min=0, callback=finite, help="Seconds that open streams may go on after SIGTERM.")
    ] = 30.0,
    reader_lease: Annotated[
        float,
        typer.Option(
            min=1, callback=finite, help="Seconds after a gateway died at which its open requests are cancelled."
        ),
    ] = 15.0,
    auth: AskFor = None,
    insecure: Insecure = False,
    max_queued: Annotated[
        int,
        typer.Option(
            min=0, help="Most tasks that may wait for a model. More are refused with 429, lower tiers first. 0: any."
        ),
    ] = 50_000,
    max_queued_per_tenant: Annotated[
        int, typer.Option(min=0, help="Most tasks of one tenant that may wait, in all. 0: any.")
    ] = 25_000,
    max_queued_in_all: Annotated[int, typer.Option(min=0, help="As --max-queued, of all models. 0: any.")] = 100_000,
    max_wait: Annotated[
        float,
        typer.Option(
            min=0,
            callback=finite,
            help="Expected wait (s) of the tiers priority and default that counts as full, as --max-queued. 0: any.",
        ),
    ] = 0.0,
    max_streams: Annotated[
        int,
        typer.Option(
            min=0,
            help="Most event streams, waiting requests and downloads that this process has open; more are refused with "
            "503. 0: three quarters of its connections.",
        ),
    ] = 4096,
    max_streams_per_tenant: Annotated[
        int,
        typer.Option(
            min=0,
            help="Those of one tenant, or of one address where no keys are asked for; more are refused with 429. At "
            "most half of --max-streams. 0: that half.",
        ),
    ] = 1024,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            callback=origins,
            help="Let web pages of this origin call the gateway: https://chat.example.org, or * for all. May be "
            "repeated. Unset: none.",
        ),
    ] = None,
    proxy_headers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            callback=proxies,
            help="Believe X-Forwarded-For and X-Forwarded-Proto of the proxy at this address or network (10.0.0.0/8), "
            "or * for any. May be repeated. Unset: no proxy.",
        ),
    ] = None,
    connections_per_address: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Most open connections of one address, of IPv6 of 64 bits. 0: any number. Unset: a quarter of all. "
            "Loopback, and whom --proxy-headers names, may have any number.",
        ),
    ] = None,
    files_dir: FilesDir = None,
    files_redirect: Annotated[
        bool,
        typer.Option(
            "--files-redirect",
            help="Send downloads to the bucket of --files-dir, by URLs that open a file for 15 minutes. Unset: files "
            "come through the gateway.",
        ),
    ] = False,
    max_body: Annotated[
        int,
        typer.Option(min=1 << 16, max=64 << 20, help="Largest body of a request that uploads no file, in bytes."),
    ] = 4 << 20,
    max_file: Annotated[int, typer.Option(min=1, help="Largest uploaded file, in bytes.")] = 2 << 30,
    max_file_bytes: Annotated[
        int,
        typer.Option(min=0, help="Most bytes of one tenant's files; `penstock tenants limit` goes before it. 0: any."),
    ] = 100 << 30,
    max_files: Annotated[
        int, typer.Option(min=0, help="Most files of one tenant, as --max-file-bytes. 0: any.")
    ] = 10_000,
    max_batches: Annotated[
        int, typer.Option(min=0, help="Most batches of one tenant that have not ended, as --max-file-bytes. 0: any.")
    ] = 100,
    max_endpoints: Annotated[
        int, typer.Option(min=0, help="Most webhook endpoints of one tenant, as --max-file-bytes. 0: any.")
    ] = 20,
    max_task_bytes: Annotated[
        int, typer.Option(min=0, help="Most bytes of one tenant's tasks and results in the store. 0: any.")
    ] = 4 << 30,
    max_idempotency_keys: Annotated[
        int, typer.Option(min=0, help="Most idempotency keys of one tenant that begin within a day. 0: any.")
    ] = 1_000_000,
    webhook_allow: WebhookAllow = None,
    secrets_key: SecretsKey = None,
    prices: Prices = None,
    await_model: Annotated[
        list[str] | None,
        typer.Option(
            help="Answer /readyz with 503 until this model is published or a worker serves it, and its tokenizer and "
            "chat template are loaded. May be repeated."
        ),
    ] = None,
    log_level: LogLevel = "info",
    fd: Annotated[int | None, typer.Option(hidden=True, help="File descriptor of a listening socket.")] = None,
    process: Annotated[str, typer.Option(hidden=True, help="This one's name among several.")] = "",
) -> None:
    """Serve the HTTP API: OpenAI's endpoints, tasks and metrics."""
    if processes > 1:
        raise typer.Exit(_several(context, processes, fd, drain_timeout))
    with needs("gateway"):
        from producers.gateway import GatewaySettings, serve
        from workers.processes.notify import notify_ready
    set_up_logging(log_level)
    use_secrets_key(secrets_key)
    listener = socket.socket(fileno=fd) if fd is not None else open_port(host, port, listens=False)
    address = listener.getsockname()[0]
    asks = effective_auth(auth, insecure, address)
    logging.getLogger("penstock").info("API keys: %s", describe_auth(asks, address))
    broker, store = addresses(broker, store, data_dir)
    settings = GatewaySettings(
        broker,
        store,
        host,
        port,
        asks,
        insecure,
        drain=drain_timeout,
        reader_lease=reader_lease,
        max_queued=max_queued,
        max_queued_per_tenant=max_queued_per_tenant,
        max_queued_in_all=max_queued_in_all,
        max_wait=max_wait,
        max_streams=max_streams,
        max_streams_per_tenant=max_streams_per_tenant,
        cors_origins=tuple(cors_origin or ()),
        proxy_headers=tuple(proxy_headers or ()),
        connections_per_address=connections_per_address,
        awaited=tuple(await_model or ()),
        files_dir=files_of(files_dir, data_dir),
        files_redirect=files_redirect,
        max_body=max_body,
        max_file=max_file,
        max_file_bytes=max_file_bytes,
        max_files=max_files,
        max_batches=max_batches,
        max_endpoints=max_endpoints,
        max_task_bytes=max_task_bytes,
        max_idempotency_keys=max_idempotency_keys,
        webhook_allow=tuple(webhook_allow or ()),
        prices=None if prices is None else str(prices),
        process=process,
    )
    with refusing(ValueError):
        look_at_servers(broker, store, "gateway")
        look_at_files(settings.files_dir)
        serve(settings, listener, notify_ready if process else lambda: None)  # to the one that supervises it


def _several(context: typer.Context, processes: int, fd: int | None, drain: float) -> int:
    """Run this command in several processes, with the other options unchanged. Returns the exit status.

    Callers that wait to be taken wait on the socket, which this process keeps: they lose nothing while a process is
    started again.
    """
    import asyncio

    from workers.cli.supervised import Kind, supervise
    from workers.processes.supervisor import Program

    values = context.params
    listener = socket.socket(fileno=fd) if fd is not None else open_port(values["host"], values["port"], listens=False)
    effective_auth(values["auth"], values["insecure"], listener.getsockname()[0])  # before processes are started
    argv = [*PENSTOCK, str(context.info_name), *as_arguments(context, without=("host", "port", "processes", "fd"))]
    number = listener.fileno()
    programs = [
        Program(
            f"gateway.{k}",
            [*argv, "--fd", str(number), "--process", str(k)],
            as_environment(context),
            pass_fds=(number,),
            last=signal.SIGTERM,
        )
        for k in range(1, processes + 1)
    ]
    # Once all are to stop, nobody is to wait on the socket.
    kind = Kind("gateway", signal.SIGTERM, "end their streams, and stop", returns=True, stopping=listener.close)
    return asyncio.run(supervise(programs, relayed, drain, kind))


def is_loopback(host: str) -> bool:
    """Whether a gateway that listens there is reached from this machine alone. False if that is not known."""
    try:
        addresses = socket.getaddrinfo(host or "0.0.0.0", None)  # noqa: S104 - compared: an empty name binds all addresses
        return all(ipaddress.ip_address(str(address[0])).is_loopback for *_, address in addresses)
    except (OSError, ValueError):
        return False


def effective_auth(auth: str | None, insecure: bool, host: str) -> Auth:
    """Whether a gateway that listens on this address asks for keys. Raises Failure, see the module's head."""
    if insecure and auth != "none":
        raise Failure("--insecure is for --auth none alone: with keys, other machines may ask anyway")
    here = is_loopback(host)
    if auth == "none" and not here and not insecure:
        raise Failure(
            f"--auth none on {host or 'all addresses'} would let anybody who reaches it in, as any tenant: leave it "
            "out and make keys with `penstock keys create`, or add --insecure"
        )
    if auth is None:
        return "none" if here else "keys"
    return "none" if auth == "none" else "keys"


def describe_auth(auth: Auth, host: str, command: str = "penstock", where: str = "") -> str:
    """The words for it. `command`: what to type for this program; `where`: the options that name the store."""
    if auth == "keys":
        return f"keys: {command} keys create --tenant NAME{where} makes one"
    if is_loopback(host):
        return (
            "none: this machine alone reaches it, and callers name their tenant themselves; --auth keys asks for keys"
        )
    return "none, though other machines reach it: callers name their tenant themselves (--insecure)"
