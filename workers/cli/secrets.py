"""`penstock secrets`: a deployment's passwords and TLS, and the keys that encrypt webhooks' secrets in the store."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Exit, Failure, refusing, touching
from workers.cli.options import Broker, DataDir, Json, SecretsKey, Store
from workers.cli.servers import records, use_secrets_key
from workers.cli.terminal import note, say

app = Commands(
    "Operations", OPERATOR_STATUS, "secrets", "A deployment's passwords and TLS, and keys that encrypt in the store."
)


@app.shown("penstock secrets key /etc/penstock/secrets.key")
def key(file: Annotated[Path, typer.Argument(help="The key file, which is made unless it is there.")]) -> None:
    """Put a new key at the beginning of a key file. It encrypts from now on, and the others still decrypt."""
    from producers.contract.sealing import new_key, parse
    from producers.errors import SecretUnreadable

    path = file.resolve()
    with touching(file, "write"):
        old, mode = (path.read_text("ascii"), path.stat().st_mode & 0o777) if path.exists() else ("", 0o600)
        draft = path.with_name(f".{path.name}.new")
        draft.unlink(missing_ok=True)
        with refusing(SecretUnreadable, UnicodeDecodeError):
            text = f"{new_key()}\n{old}"
            ring = parse(text, str(file))
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as written:
            written.write(text)
            os.fchmod(written.fileno(), mode)
            written.flush()
            os.fsync(written.fileno())
        draft.replace(path)
    first, *others = ring.keys
    typer.echo(f"{first} encrypts; {', '.join(others) if others else 'no other'} decrypts")


@app.shown("penstock secrets encrypt --secrets-key /etc/penstock/secrets.key")
def encrypt(
    secrets_key: SecretsKey = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Encrypt the secrets that are stored already, plain or with an older key, with the first key of the file.

    Exit status 1: some are encrypted with a key that the file lacks.
    """
    from dataclasses import asdict

    from producers.admin.secrets import seal_all
    from producers.contract.sealing import keyring

    use_secrets_key(secrets_key)
    ring = keyring()
    if not ring.keys:
        raise Failure("there is no key: name the key file with --secrets-key or PENSTOCK_SECRETS_KEY_FILE")
    with records(broker, store, data_dir) as (client, loop):
        done = loop.run(seal_all(client, ring))
    if as_json:
        typer.echo(json.dumps(asdict(done)))
    else:
        say(
            f"encrypted with {next(iter(ring.keys))}: the secrets of {done.endpoints} endpoints, {done.tenants} "
            f"tenants, {done.tasks} tasks, {done.deliveries} deliveries"
        )
    if done.unreadable:
        note(f"{done.unreadable} secrets stay as they were: their key is not in the file")
        raise typer.Exit(Exit.TASK_FAILED)


@app.shown("penstock secrets make infra/compose/secrets")
def make(
    folder: Annotated[Path, typer.Argument(help="The folder, which is made for its owner alone.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="The server's name or address; more for its certificate. Unset: valkey, as in Compose."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The server's port, which takes TLS alone.")] = 6379,
    force: Annotated[
        bool, typer.Option("--force", help="Make all anew: what runs with the old ones is let in no more.")
    ] = False,
) -> None:
    """Make what a deployment's server and processes need to know each other; what is there stays."""
    from producers.admin import deployment

    with refusing(deployment.CannotMake):
        created = deployment.make(folder, host or ["valkey"], port, force=force)
    for name in created:
        typer.echo(folder / name)
    if not created:
        typer.echo(f"Nothing is missing in {folder}.")


@app.shown("penstock secrets users")
def users() -> None:
    """Print the rules of the server's users by role, without passwords."""
    from producers.admin.roles import ROLES

    for role, rights in ROLES.items():
        typer.echo(f"{role}: resetchannels -@all {rights.rules()}")
