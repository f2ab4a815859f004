"""`penstock backup` copies a running system, `penstock restore` makes a new one of the copy (docs/run/backup.md)."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from datetime import UTC, datetime
from errno import EACCES, EDQUOT, EEXIST, EFBIG, EIO, EISDIR, ENOENT, ENOSPC, ENOTDIR, EPERM, EROFS
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Exit, Failure, refusing
from workers.cli.options import BackupKey, Broker, DataDir, FilesDir, Json, Store, checked_location, checked_locations
from workers.cli.servers import addresses, files_of, system
from workers.cli.terminal import note, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from producers.backup.archive import Archive, Manifest
    from producers.backup.plan import Plan
    from producers.contract.sealing import Keyring

app = Commands("Operations", OPERATOR_STATUS)

#: Errors of a disk, as no connection has them.
DISK = {ENOSPC, EDQUOT, EROFS, EACCES, EPERM, EIO, EFBIG, EEXIST, ENOENT, ENOTDIR, EISDIR}

Location = Annotated[
    str,
    typer.Argument(
        metavar="PLACE", callback=checked_location, help="The folder of this backup alone, or s3://BUCKET/PREFIX."
    ),
]


@app.shown("penstock backup /backups/2026-11-28 --backup-key /etc/penstock/backup.key --broker redis://10.0.0.5:6379/0")
def backup(
    location: Location,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    files_dir: FilesDir = None,
    backup_key: BackupKey = None,
    as_json: Json = False,
) -> None:
    """Copy all that a running system knows to a folder or bucket. It only reads.

    Killed, it goes on where it stopped when it runs again. A place that has a whole backup is refused.
    """
    from producers.backup.archive import describe
    from producers.backup.take import Backup
    from producers.store.blobs import open_blobs

    with _archive(location, backup_key) as (archive, _), system(broker, store, data_dir) as (client, loop):
        broker_url, store_url = addresses(broker, store, data_dir)
        run = Backup(client, archive, open_blobs(files_of(files_dir, data_dir)), store_url, broker_url)
        with _disk(location):
            manifest = loop.run(run.run())
    _print_manifest(manifest, as_json)
    if as_json:
        typer.echo(json.dumps(describe(manifest)))


@app.shown(
    "penstock restore /backups/2026-11-28 --journal /backups/journal --backup-key /etc/penstock/backup.key "
    "--broker redis://10.0.0.6:6379/0 --files-dir /srv/penstock/files --old-store redis://10.0.0.5:6379/0"
)
def restore(
    location: Location,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    files_dir: FilesDir = None,
    backup_key: BackupKey = None,
    journal: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            callback=checked_location,
            help="The place of the journal that the old system's sweepers kept: what was revoked, deleted and spent "
            "since the backup stays so.",
        ),
    ] = None,
    without_journal: Annotated[
        bool,
        typer.Option("--without-journal", help="There is none: API keys are disabled until `penstock keys confirm`."),
    ] = False,
    deadlines: Annotated[
        Literal["shift", "keep"],
        typer.Option(
            help="Deadlines of what had not ended: shift moves them by the time since the backup; keep does not."
        ),
    ] = "shift",
    old_store: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="The old system's store: while a worker holds a lease there, nothing is restored."
        ),
    ] = None,
    old_stopped: Annotated[
        bool,
        typer.Option("--old-stopped", help="The old system's processes have stopped for good, and its store is gone."),
    ] = False,
    broker_kept: Annotated[
        bool,
        typer.Option(
            "--broker-kept", help="The broker was not lost: it has Celery's messages of tasks that had begun."
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Read all of the backup, and restore nothing: no server is needed.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Make a system of a backup, in an empty server. It tells before what callers will see, and asks.

    Killed, it goes on when it runs again. Until it has ended, no process starts on that store. A backup that is
    damaged, cut short or of another format is refused.
    """
    from producers.backup.archive import check as check_all
    from producers.backup.archive import describe

    with _archive(location, backup_key) as (archive, ring):
        if check:
            with _disk(location):
                manifest = check_all(archive)
            _print_manifest(manifest, as_json)
            if as_json:
                typer.echo(json.dumps(describe(manifest)))
            return
        if bool(journal) == without_journal:
            raise Failure(
                "name the journal with --journal. If none was kept, say --without-journal: what was deleted since the "
                "backup comes back then, and API keys are disabled until `penstock keys confirm`"
            )
        _restore(
            archive,
            ring,
            (broker, store, data_dir),
            files_of(files_dir, data_dir),
            (journal or "", deadlines, broker_kept, old_store, old_stopped),
            yes,
            as_json,
        )


@app.shown(
    "penstock prune-journal /backups/journal /backups/2026-11-27 /backups/2026-11-28 "
    "--backup-key /etc/penstock/backup.key",
    "prune-journal",
)
def prune_journal(
    journal: Annotated[
        str, typer.Argument(metavar="JOURNAL", callback=checked_location, help="The place of the journal.")
    ],
    backups: Annotated[
        list[str],
        typer.Argument(
            metavar="BACKUP",
            callback=checked_locations,
            help="The places of all backups that you keep, unfinished ones, too.",
        ),
    ],
    backup_key: BackupKey = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, and tell what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the files of a journal that no backup needs any more. It needs no server.

    A backup needs what was written since it began. So name all that you keep: without what a forgotten one needs, its
    restore disables API keys, and what was deleted comes back. A place that has no backup is refused, and nothing is
    removed. Killed, it goes on when it runs again.
    """
    from producers.backup import journal as journals
    from producers.store.blobs import open_blobs

    with _disk(journal, *backups), refusing(ValueError):
        pruned = journals.prune(open_blobs(journal), _kept(backups, backup_key), dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps({"removed": pruned.removed, "left": pruned.remaining, "first": pruned.first}))
        return
    first = "" if pruned.first is None else f", the first of {_when(pruned.first)}"
    say(f"{pruned.removed} files {'would go' if dry_run else 'are removed'}; {pruned.remaining} are left{first}")


def _kept(backups: list[str], backup_key: object) -> list[Manifest]:
    """The manifests of the backups that are there, and the notes of progress of those that have not ended."""
    from producers.backup.archive import MANIFEST, PROGRESS

    manifests = []
    for location in backups:
        with _archive(location, backup_key) as (archive, _):
            manifest = archive.look(MANIFEST) or archive.look(PROGRESS)
            if manifest is None:
                raise Failure(f"there is no backup in {location}: name those that are there, and no others")
            manifests.append(manifest)
    return manifests


def _restore(
    archive: Archive,
    ring: Keyring,
    target: tuple[str | None, str | None, Path | None],
    files_dir: str,
    chosen: tuple[str, str, bool, str | None, bool],
    yes: bool,
    as_json: bool,
) -> None:
    from producers.backup.restore import Choices, Servers, begin
    from producers.store.blobs import open_blobs

    journal, deadlines, broker_kept, old_store, old_stopped = chosen
    with system(*target) as (client, loop):
        broker_url, store_url = addresses(*target)
        urls = Servers(store_url, broker_url, old_store, old_stopped)
        choices = Choices(deadlines, journal, broker_kept)
        with _disk(archive.location, files_dir):
            run = loop.run(begin(client, archive, open_blobs(files_dir), urls, choices, ring))
        texts = effects(run.plan, choices.broker_kept)
        for line in texts:
            note(line)
        if not yes:
            if not sys.stdin.isatty():
                raise Failure("nothing was restored yet; say --yes")
            typer.confirm("Restore this?", abort=True, err=True)
        with _disk(archive.location, files_dir):
            loop.run(run.run())
    if as_json:
        typer.echo(json.dumps({"backup": run.plan.manifest.id, "epoch": run.epoch, "effects": texts}))
    else:
        say(f"restored; the epoch is {run.epoch}. Start the processes, a sweeper among them")


def effects(plan: Plan, broker_kept: bool) -> list[str]:
    """The effects that callers will see, a line each."""
    manifest, open_tasks = plan.manifest, [task for task in plan.tasks.values() if not task.final]
    plain = sum(task.plain for task in open_tasks)
    waited_for = sum(not task.origin and not task.plain for task in open_tasks)
    lines = sum(bool(task.batch) for task in open_tasks)
    late = sum(task.deadline is not None and task.deadline + plan.shift <= plan.now for task in open_tasks)
    batches = sum(not batch.ended for batch in plan.batches.values())
    due = sum(row.state == "due" for row in plan.rows.values())
    age_s = (plan.now - manifest.began) // 1000
    texts = [
        f"The backup began at {_when(manifest.began)}, {_length(age_s)} ago: what was accepted since is not there.",
        f"{len(open_tasks) - plain - waited_for} tasks that had not ended are queued again, {lines} of them lines of "
        f"{batches} batches; {late} of all are late, and end as expired.",
        f"{waited_for} tasks whose callers waited are cancelled.",
        f"{sum(task.final for task in plan.tasks.values())} results and {len(plan.files)} files are there; "
        f"{plan.counts['over']} results have had their time.",
        f"{due} events are delivered, again where they were since, with the header penstock-restored: 1.",
    ]
    if manifest.celery and not broker_kept:
        waiting = sum(manifest.celery.values())
        texts.append(f"{waiting} plain Celery tasks waited in the broker alone: their senders must send them again.")
    if plain:
        how = "wait for their messages" if broker_kept else "fail with the code restored"
        texts.append(f"{plain} plain Celery tasks that had begun {how}.")
    texts += [f"The backup: {text}." for text in manifest.notes]
    return texts + _of_journal(plan)


def _of_journal(plan: Plan) -> list[str]:
    since = plan.since
    if since is None:
        return [
            "There is no journal: what was deleted since is there again, budgets are as they were at the backup, and "
            "API keys are disabled until `penstock keys confirm`."
        ]
    texts = [
        f"The journal ends at {_when(since.until) if since.until else 'no time: it has nothing of this system'}: "
        f"{plan.counts['erased']} deleted tasks stay so."
    ]
    if not since.covers:
        why = "; ".join(dict.fromkeys(since.gaps)) or "it was not kept when the backup began"
        texts.append(f"The journal has gaps ({why}): API keys are disabled until `penstock keys confirm`.")
    return texts


@contextmanager
def _disk(*places: str) -> Iterator[None]:
    """Turns errors of a disk that is full, or may not be used, into Failure, which names the places."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        where = error.filename or " or ".join(places)
        raise Failure(f"cannot use {where}: {error.strerror}", Exit.TASK_FAILED) from error


@contextmanager
def _archive(location: str, key_file: object) -> Iterator[tuple[Archive, Keyring]]:
    """The files of a backup, and the keys to read them. What is refused of either raises Failure."""
    from pathlib import Path

    from producers.backup.archive import Archive
    from producers.backup.sealed import read_keys
    from producers.connection.aws import AwsNotInstalled
    from producers.errors import PenstockError

    with refusing(ValueError, AwsNotInstalled, PenstockError):
        ring = read_keys(key_file if isinstance(key_file, Path) else None)
        yield Archive(location, ring), ring


def _print_manifest(manifest: Manifest, as_json: bool) -> None:
    from producers.backup.archive import describe

    if as_json:
        return
    description = describe(manifest)
    counted = ", ".join(f"{count} {kind}" for kind, count in manifest.counts.items()) or "nothing"
    say(f"{description['id']} of {description['from']}, {_when(manifest.began)} to {_when(manifest.ended)}")
    say(f"{counted}; {description['blobs']} blobs; {description['bytes']} bytes")
    if manifest.celery:
        say(f"{sum(manifest.celery.values())} plain Celery tasks wait in the broker, and are not in the backup")
    for text in manifest.notes:
        note(text)


def _when(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")


def _length(seconds: int) -> str:
    minutes, hours = seconds // 60, seconds // 3600
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min" if minutes else f"{seconds} s"
