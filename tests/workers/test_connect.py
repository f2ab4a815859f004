"""Servers that cannot serve are refused when the worker starts, with what to do instead."""

from __future__ import annotations

import asyncio
import re
import ssl
from pathlib import Path

import pytest
from celery import Celery
from redis import Redis

from producers.admin.roles import ROLES
from producers.contract import keys
from tests.processes import ROOT, Worker, valkey
from tests.waiting import PATIENCE_S
from tests.workers.rig import MODEL, Rig
from workers.cli.local_pools import Plan
from workers.cli.system import System
from workers.connect import check_server, check_servers
from workers.errors import Refused
from workers.pool.app import make_app
from workers.settings import WorkerSettings


def test_a_cluster_is_refused() -> None:
    with valkey(**{"cluster-enabled": "yes"}) as (url, _):
        with pytest.raises(Refused, match=r"the store at .* is a Redis Cluster.*Use a single primary"):
            check_server(url, "store")
        worker = Worker(url)
        assert worker.process.wait(PATIENCE_S) != 0
        assert "is a Redis Cluster" in worker.log.read_text()
        worker.log.unlink()


@pytest.mark.parametrize("url", ["redis://ann:secret@127.0.0.1:1/0?password=secret", "redis//:secret@nonsense"])
def test_no_password_is_shown(url: str) -> None:
    with pytest.raises(Refused) as refused:
        check_server(url, "broker")
    assert "secret" not in str(refused.value)


def test_no_password_of_a_cluster_is_shown() -> None:
    with valkey(**{"cluster-enabled": "yes"}) as (url, redis):
        redis.acl_setuser("ann", enabled=True, passwords=["+secret"], categories=["+@all"], keys=["*"])
        with pytest.raises(Refused, match="is a Redis Cluster") as refused:
            check_server(url.replace("//", "//ann:secret@"), "store")
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["rediss://h:1/2", "rediss://h:1/2?ssl_ca_certs=/ca.pem"])
def test_tls_asks_for_a_certificate_on_both_sides_of_celery(url: str) -> None:
    app = make_app(WorkerSettings(broker=url, store=url, model="m"))
    assert app.backend.connparams["ssl_cert_reqs"] == ssl.CERT_REQUIRED
    connection = app.connection_for_write()
    assert connection.ssl["ssl_cert_reqs"] == ssl.CERT_REQUIRED
    assert (connection.hostname, connection.virtual_host) == ("h", "2")


def test_over_a_unix_socket_tasks_run_and_waiting_senders_hear(tmp_path: Path) -> None:
    path = tmp_path / "valkey.sock"
    with valkey(unixsocket=str(path)) as (_, redis):
        url = f"unix://{path}?db=0"
        rig = Rig(url, redis)
        try:
            worker = rig.worker(WORKER_PLUGINS="tests.workers.plugins:ordinary_tasks")
            ids = rig.submit(3)
            rig.check(ids)
            local = f"redis+socket://{path}?virtual_host=0"
            app = Celery("sender", broker=local, backend=local, set_as_current=False)
            app.conf.task_default_queue = MODEL
            sent = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 4})
            assert sent.get(timeout=PATIENCE_S)["status"] == "completed"
            assert app.send_task("app.add", (1, 2)).get(timeout=PATIENCE_S) == 3
            assert worker.stop() == 0
        finally:
            rig.close()


def test_the_least_rights_of_the_docs_suffice_and_a_worker_asks_for_each(caplog: pytest.LogCaptureFixture) -> None:
    row = re.search(r"broker and store in one \| `(.*)`", (ROOT / "docs/run/servers.md").read_text())
    assert row is not None
    least = row[1].split()
    with valkey() as (url, redis):
        anns = url.replace("//", "//ann:pw@")

        def may(*rights: str) -> None:
            commands = "+@all", "-@admin", "-@dangerous", "+info"
            redis.execute_command("ACL", "SETUSER", "ann", "reset", "on", ">pw", *rights, *commands)

        for lacking in least:
            may(*(right for right in least if right != lacking))
            if "celery-task" in lacking:
                caplog.clear()
                check_servers(anns, anns, worker=True)
                assert "may not store Celery's results" in caplog.text
                continue
            with pytest.raises(Refused, match=rf"user 'ann': No permissions .*{re.escape(lacking.strip('~&*'))}"):
                check_servers(anns, anns, worker=True)
        may("~penstock:*", "&penstock:*")
        check_servers(anns, anns)  # as a gateway does, which has nothing of Celery's
        may(*least)
        redis.acl_log_reset()
        rig = Rig(anns, redis)
        try:
            rig.worker()
            rig.check(rig.submit(1))
            app = Celery("sender", broker=url, backend=url, set_as_current=False)
            sent = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 4}, queue=MODEL)
            assert sent.get(timeout=PATIENCE_S)["status"] == "completed"
            assert app.control.ping(timeout=60, limit=1)
            assert redis.acl_log() == []
        finally:
            rig.close()


def test_a_process_whose_user_lacks_a_right_of_its_role_is_refused_by_name(
    valkey: Redis, valkey_url: str, tmp_path: Path
) -> None:
    """As with the users' file of an earlier release: a script that is denied a command breaks off there."""
    anns = valkey_url.replace("//", "//ann:pw@")

    def may(rules: list[str]) -> None:
        valkey.execute_command("ACL", "SETUSER", "ann", "reset", "on", ">pw", "-@all", *rules)

    try:
        for process in ("gateway", "worker", "sweeper", "webhooks", "autoscaler", "workers", "sources"):
            may(ROLES[process].rules().split())
            check_servers(anns, anns, process=process)
        rules = ROLES["worker"].rules().split()
        for lacking, named in (
            ("~penstock:ledger", "SET penstock:ledger, GET penstock:ledger"),
            ("%R~penstock:revoked", "GET penstock:revoked"),
            ("&penstock:control:*", "PUBLISH penstock:control:probe"),
            ("+hvals", "HVALS"),
        ):
            may([rule for rule in rules if rule != lacking])
            with pytest.raises(Refused, match=rf"user 'ann': No permissions for {named}"):
                check_servers(anns, anns, process="worker")
        up = System(Plan((), tmp_path, broker=anns), lambda name, line: None)
        with pytest.raises(Refused, match="user 'ann': No permissions for HVALS"):
            asyncio.run(up._begin_servers())  # before it starts any process
    finally:
        valkey.execute_command("ACL", "DELUSER", "ann")


def test_a_single_server_is_taken(valkey_url: str) -> None:
    check_server(valkey_url, "broker")


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "nonsense", "redis://[bad"])
def test_a_server_that_is_not_there_is_refused(url: str) -> None:
    with pytest.raises(Refused, match=r"cannot (reach|use) the broker at"):
        check_server(url, "broker")
