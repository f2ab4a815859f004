"""Counts of the tasks that wait, exact whichever process dies, and the bounds on them by which ADMIT refuses.

    ADMIT, BATCH_EXPAND: counted ─▶ CLAIM starts it, or any end: counted no more ─▶ RELEASE: counted again

A record's `waits` says that the task is counted, and as what: `<kind> <tokens> <queue>`. The script that changes the
record changes the counts (`scripts/_waiting.lua`). A kind is a tier, or `line`: a line of a batch, which is counted
apart. A plain Celery task has no record before its first CLAIM, so it is counted only after a worker gave it back. A
task whose worker died is not counted: it was started, and the next CLAIM starts it again.

| hash | what it counts |
| --- | --- |
| `penstock:waiting` | tasks, by kind, and by kind and queue |
| `penstock:waiting:tokens` | KV tokens that they may need, by kind and queue |
| `penstock:waiting:tenants`, `:keys` | tasks by tenant and by key, without lines |
| `penstock:drain:<queue>` | `started`: KV tokens of tasks that waited there and were started; kept for an idle hour |
"""

from __future__ import annotations
