"""The `penstock` command with all its subcommands, in their order."""

from __future__ import annotations

from workers.cli import batch, completion, listing, processes, sources, tasks
from workers.cli.admin import bench, chaos, dlq, drain, rollout, usage
from workers.cli.aws import commands as aws
from workers.cli.demo import command as demo
from workers.cli.keys import commands as keys
from workers.cli.keys import tenants
from workers.cli.local import chat, run, up
from workers.cli.models import commands as models
from workers.cli.models import quantize, warm
from workers.cli.root import root
from workers.cli.scale import commands as scale
from workers.cli.scale import process as autoscaler
from workers.cli.webhooks import commands as webhooks

app = root()
for group in (
    up,
    demo,
    run,
    chat,
    tasks,
    listing,
    batch,
    models,
    quantize,
    warm,
    processes,
    sources,
    autoscaler,
    scale,
    rollout,
    drain,
    dlq,
    tenants,
    keys,
    usage,
    webhooks,
    aws,
    bench,
    chaos,
    completion,
):
    group.add_to(app)
