"""The demo's closing summary, made of the records and the worker's lease."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from producers.admin.fleet import Fleet
from producers.contract import keys
from workers.bench import percentile
from workers.cli.demo.load import Task


class KvUse:
    """The highest use of any worker's KV cache, in blocks, as leases report it."""

    def __init__(self) -> None:
        self.used = 0
        self.total = 0

    def note(self, fleet: Fleet) -> int:
        """Note the leases' figures. Returns the number of tokens that the workers have made."""
        workers = [worker for pool in fleet.pools for worker in pool.workers]
        for worker in workers:
            self.used = max(self.used, worker["kv_blocks_most"])
            self.total = worker["kv_blocks_total"]
        return sum(worker["generated_tokens"] for worker in workers)


def report(console: Console, tasks: Sequence[Task], kv: KvUse) -> None:
    """Print tasks, speed, times to the first token by tier, KV use."""
    results = [task.result for task in tasks]
    output = sum(result["usage"]["output_tokens"] for result in results)
    prompt = sum(result["usage"]["prompt_tokens"] for result in results)
    cached = sum(result["usage"]["cached_tokens"] for result in results)
    took = max(result["finished_at"] for result in results) - min(result["created_at"] for result in results)
    table = Table("tier", title="summary", title_justify="left")
    for heading in ("tasks", "tokens", "TTFT p50", "TTFT p95"):
        table.add_column(heading, justify="right")
    for tier in keys.TIERS:
        mine = [result for result in results if result["tier"] == tier]
        if not mine:
            continue
        waits = [result["first_token_at"] - result["created_at"] for result in mine]
        tokens = sum(result["usage"]["output_tokens"] for result in mine)
        shown = [f"{1000 * percentile(waits, share):,.0f} ms" for share in (0.5, 0.95)]
        table.add_row(tier, str(len(mine)), str(tokens), *shown)
    console.print(table)
    console.print(
        f"{len(results)} tasks, {output} tokens in {took:.2f} s: {output / took:,.0f} tokens/s", highlight=False
    )
    console.print(
        f"KV cache: at most {kv.used} of {kv.total} blocks in use; {cached} of {prompt} prompt tokens came from the "
        "prefix cache",
        highlight=False,
    )
