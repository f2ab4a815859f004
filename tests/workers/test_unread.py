"""A worker cancels what nobody reads any more, also where no gateway is left to do it."""

from __future__ import annotations

from pathlib import Path

import pytest

from producers.client.leases import hold
from producers.connection.script import run
from producers.contract import keys
from tests.workers.rig import Rig


@pytest.mark.slow
def test_a_task_whose_readers_lease_lapsed_is_cancelled_and_its_room_is_free(rig: Rig, tmp_path: Path) -> None:
    rig.worker(reader_lease=0.3, STUB_HOLD_AT=20, STUB_GO=tmp_path / "go")
    running, read, unread = rig.fill(3, max_tokens=150)
    waiting = rig.fill(1, max_tokens=4, tier="batch")
    run(rig.store, hold([running], 600_000))
    rig.until(lambda: all(rig.tokens(task_id) > 2 for task_id in (running, read, unread)))
    rig.store.zadd(keys.READERS, {unread: 1, "never admitted": 1})
    rig.check([unread], "cancelled")
    assert rig.tokens(unread) < 150
    rig.until(lambda: rig.store.zrange(keys.READERS, 0, -1) == [running])
    (tmp_path / "go").touch()
    rig.check([running, read, *waiting])
    rig.until(lambda: rig.leases()[0]["kv_blocks_used"] == 0)
