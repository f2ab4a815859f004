"""`penstock doctor`: what is wrong with a system and this machine, and what to do. It writes nothing.

    this machine: open files, drain time, models, data directory, keys, GPUs   ─▶ Finding ─▶ a row, or JSON
    broker and store, fleet, webhooks (`producers.admin.checkup`); AWS

A check that cannot be made is shown with its reason, and fails nothing.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import stat
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from workers.cli.commands import Commands
from workers.cli.exits import Exit, Failure
from workers.cli.options import Broker, DataDir, FilesDir, Json, Store
from workers.cli.servers import addresses
from workers.cli.terminal import say

if TYPE_CHECKING:
    from producers.admin.checkup import Finding

#: Open files that a gateway or worker under load needs.
OPEN_FILES: Final = 4096
#: Time (s) beyond the drain time in which a worker hands its tasks back and ends.
HAND_BACK_S: Final = 30.0
#: A worker's default drain time (s).
DRAIN_S: Final = 30.0
#: Longest time (s) for systemd's answer.
SYSTEMD_S: Final = 5.0
#: Files of a data directory that hold passwords or data.
PRIVATE: Final = ("password", "port", "broker", "valkey.conf", "lock")
#: Variables that name files with keys.
KEY_FILES: Final = ("PENSTOCK_SECRETS_KEY_FILE", "PENSTOCK_BACKUP_KEY_FILE")
_SPANS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_STATUS: Final = "Exit status: 0 nothing failed, 1 a check failed (--strict: or warned), 2 refused, 130 interrupted."

app = Commands("Operations", _STATUS)


@app.shown("penstock doctor --broker redis://10.0.0.5:6379/0 --json")
def doctor(
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    files_dir: FilesDir = None,
    models: Annotated[
        bool, typer.Option("--models/--no-models", help="Read the local models' files, and compare their hashes.")
    ] = True,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as failures.")] = False,
    as_json: Json = False,
) -> None:
    """Check the servers, the fleet and this machine, and tell what to do about each finding. Nothing is written.

    A check that cannot be made is shown as `skip`, with its reason.
    """
    findings = []
    for finding in _findings(broker, store, data_dir, files_dir, models):
        findings.append(finding)
        if as_json:
            say(json.dumps(asdict(finding)))
        else:
            say(f"{finding.status:<5} {finding.check:<20} {finding.detail}")
            if finding.advice:
                say(f"      {'':<20} -> {finding.advice}")
    counts = Counter(finding.status for finding in findings)
    if not as_json:
        say(f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed, {counts['skip']} not checked")
    if counts["fail"] or (strict and counts["warn"]):
        raise typer.Exit(Exit.TASK_FAILED)


def _findings(
    broker: str | None, store: str | None, data_dir: Path | None, files_dir: str | None, models: bool
) -> Iterator[Finding]:
    from producers.admin.checkup import Finding

    yield from _open_files()
    yield from _drain()
    yield from _private_files(data_dir)
    yield from _gpus()
    if models:
        yield from _models()
    else:
        yield Finding("local models", "skip", "--no-models")
    yield from _files_place(files_dir)
    try:
        urls = addresses(broker, store, data_dir)
    except Failure as failure:
        if broker or store or data_dir:
            raise
        yield Finding("system", "skip", str(failure))
        return
    yield from _system(*urls)


def _system(broker: str, store: str) -> Iterator[Finding]:
    """Findings on broker and store, and on all that they hold. Raises Failure for a bad URL."""
    from asyncio import run

    from producers.admin.checkup import examine
    from producers.client.aio import AsyncClient
    from producers.connection.connect import connect_async, is_redis
    from workers.cli.exits import refusing

    async def examined() -> list[Finding]:
        client = AsyncClient(broker, store)
        other = connect_async(broker) if is_redis(broker) and broker != store else None
        try:
            return await examine(client, other)
        finally:
            if other is not None:
                await other.aclose()
            await client.aclose()

    with refusing(ValueError):
        findings = run(examined())
    yield from findings
    if broker.startswith("sqs://"):
        yield _sqs(broker, store)


def _sqs(broker: str, store: str) -> Finding:
    from producers.broker.connect import check_broker

    def look() -> str:
        check_broker(broker, store)
        return "the announced models' queues can be used"

    return _of_aws(
        "sqs", look, "run `penstock aws check --model MODEL --role ROLE`, which names each missing permission"
    )


def _of_aws(check: str, look: Callable[[], str], advice: str) -> Finding:
    """What a look at AWS gives. `advice`: for what is missing or denied."""
    from redis.exceptions import RedisError

    from producers.admin.checkup import Finding
    from producers.connection.aws import AwsNotInstalled

    try:
        return Finding(check, "ok", look())
    except AwsNotInstalled as error:
        return Finding(check, "skip", str(error))
    except (ValueError, RedisError, OSError) as error:
        return Finding(check, "fail", str(error), advice)


# ---- this machine ---------------------------------------------------------------------------------------------------


def _open_files() -> Iterator[Finding]:
    from producers.admin.checkup import Finding

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        advice = "raise it for Penstock's processes: ulimit -n 65536, or LimitNOFILE=65536 in systemd"
        yield Finding("open files", "warn", f"at most {soft} of a process started as this one", advice)
    else:
        yield Finding("open files", "ok", "no bound" if soft == resource.RLIM_INFINITY else f"{soft}")


def _drain() -> Iterator[Finding]:
    """Whether systemd leaves this machine's workers the time to drain. Other orchestrators do not tell a process."""
    from producers.admin.checkup import Finding

    systemctl = shutil.which("systemctl")
    why = "no systemd tells of workers here; in Kubernetes, set terminationGracePeriodSeconds to the drain time + 30 s"
    if systemctl is None:
        yield Finding("drain time", "skip", why)
        return
    argv = [systemctl, "show", "penstock-worker@*", "--property=Id,TimeoutStopUSec,ExecStart"]
    try:
        shown = subprocess.run(argv, capture_output=True, text=True, timeout=SYSTEMD_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # installed, and not running, as in most containers
        yield Finding("drain time", "skip", why)
        return
    units = [dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE)) for unit in shown.split("\n\n")]
    units = [unit for unit in units if unit.get("TimeoutStopUSec")]
    if not units:
        yield Finding("drain time", "skip", why)
    for unit in units:
        yield _drain_of(unit.get("Id", "?"), unit["TimeoutStopUSec"], unit.get("ExecStart", ""))


def _drain_of(name: str, timeout: str, command: str) -> Finding:
    from producers.admin.checkup import Finding

    option = re.search(r"--drain-timeout[ =]([\d.]+)", command)
    drain = float(option[1]) if option else DRAIN_S
    spans = re.findall(r"([\d.]+)(us|ms|min|s|h|d)\b", timeout)
    grace = float("inf") if timeout == "infinity" else sum(float(number) * _SPANS[unit] for number, unit in spans)
    if grace >= drain + HAND_BACK_S:
        return Finding("drain time", "ok", f"{name}: drains {drain:g} s, killed after {timeout}")
    advice = f"set TimeoutStopSec={drain + HAND_BACK_S:g} or more in the unit, or a shorter --drain-timeout"
    detail = f"{name}: drains {drain:g} s, and systemd kills it after {timeout}"
    return Finding("drain time", "fail" if grace < drain else "warn", detail, advice)


def _private_files(data_dir: Path | None) -> Iterator[Finding]:
    """Whether others may read the embedded server's files, or the files of keys that the environment names."""
    from producers.admin.checkup import Finding
    from producers.connection.local import DATA_DIR

    folder = data_dir or DATA_DIR
    check = "private files"
    if folder.is_dir():
        yield from _modes(check, [folder, *(folder / name for name in PRIVATE)])
    else:
        yield Finding(check, "skip", f"there is no data directory {folder}")
    for name in KEY_FILES:
        if path := os.environ.get(name):
            yield from _modes("key file", [Path(path)], missing=True)


def _modes(check: str, paths: list[Path], *, missing: bool = False) -> Iterator[Finding]:
    from producers.admin.checkup import Finding

    exposed = []
    for path in paths:
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except FileNotFoundError:
            if missing:
                yield Finding(check, "fail", f"{path} is missing", "restore the file, or correct the variable")
                return
            continue
        except OSError as error:
            yield Finding(check, "skip", f"cannot look at {path}: {error.strerror}")
            return
        if mode & 0o077:
            exposed.append(f"{path} ({mode:04o})")
    if exposed:
        advice = "take others' rights away: chmod -R go-rwx on it; change a password that they may have read"
        yield Finding(check, "fail", f"others may use {', '.join(exposed)}", advice)
    else:
        yield Finding(check, "ok", f"{paths[0]} is its user's alone")


def _gpus() -> Iterator[Finding]:
    from producers.admin.checkup import Finding
    from workers.cli.gpus import gpus_here

    if not Path("/proc/driver/nvidia/version").exists():
        yield Finding("gpus", "skip", "no NVIDIA driver is loaded here")
        return
    try:
        gpus = gpus_here()
    except Failure as failure:
        yield Finding("gpus", "fail", str(failure), "see nvidia-smi, and install a driver that this CUDA works with")
        return
    yield Finding("gpus", "ok", ", ".join(gpu.name for gpu in gpus) or "none is visible")


def _models() -> Iterator[Finding]:
    """Each local model's files beside the hashes in its manifest."""
    from producers.admin.checkup import Finding
    from workers.errors import Refused
    from workers.library.local_models import LocalModels, verify

    local: list[Any] = LocalModels.default().all()
    damaged = 0
    for model in local:
        try:
            verify(model.folder)
        except Refused as refused:
            damaged += 1
            yield Finding(
                "local models", "fail", str(refused), "remove the folder, and `penstock models pull` it again"
            )
    if not damaged:
        yield Finding("local models", "ok", f"{len(local)} pulled, all as their manifests say")


def _files_place(location: str | None) -> Iterator[Finding]:
    from producers.admin.checkup import Finding
    from producers.store.blobs import open_blobs
    from producers.store.blobs.bucket import is_s3

    if location is None or not is_s3(location):
        yield Finding("bucket", "skip", "--files-dir names no bucket (s3://...)")
        return

    def look() -> str:
        open_blobs(location).check()
        return f"{location} lets us in"

    yield _of_aws("bucket", look, "run `penstock aws check --bucket BUCKET --role ROLE`, which names each permission")
