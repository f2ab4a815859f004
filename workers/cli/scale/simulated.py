"""The output of `penstock scale simulate`, and its files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from workers.cli.terminal.show import aligned

if TYPE_CHECKING:
    from workers.autoscaler.simulate.compare import Compared


HEADS: Final = (
    *("", "in time", "priority p99", "default p95", "worker-hours", "of clairvoyant", "cost", "most", "turns"),
)


@contextmanager
def progress(last: float) -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error, if that is a terminal, for the scaler that is simulated."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        row = bar.add_task("", total=last)
        yield lambda name, at: bar.update(row, description=name, completed=at)


def report(found: Compared, name: str, plot: Path | None, out: Path | None, as_json: bool) -> None:
    """Print the figures; draw and write them."""
    from workers.autoscaler.simulate.plot import plot as draw

    said = {"trace": name, **found.to_dict()}
    if plot is not None:
        plot.write_text(draw(found.outcomes, f"{name}: {said['tasks']:,} tasks", found.settings.price))
    if out is not None:
        samples = {scaler: [asdict(one) for one in its.samples] for scaler, its in found.outcomes.items()}
        out.write_text(json.dumps({**said, "samples": samples}) + "\n")
    if as_json:
        typer.echo(json.dumps(said))
    else:
        _table(said, found)


def _table(said: dict[str, Any], found: Compared) -> None:
    settings = found.settings
    model, rules = settings.model, settings.rules
    typer.echo(
        f"{said['trace']}: {said['tasks']:,} tasks; a worker: knee {model.knee}, {model.tokens_per_s:g} tokens/s, "
        f"cold start {model.cold_start:g} s; {rules.min} to {rules.max} workers, cool-down {rules.cool_down:g} s"
    )
    for line in aligned([HEADS, *(_row(scaler, its) for scaler, its in said["scalers"].items())]):
        typer.echo(line)
    typer.echo(
        f"in time: priority's first token within {settings.objective.ttft:g} s; the objective is "
        f"{settings.objective.share:.0%}. most: with workers that drain."
    )
    typer.echo(f"All work is {said['scalers']['policy']['work_hours']:,.1f} worker-hours: no schedule needs fewer.")


def _row(scaler: str, its: dict[str, Any]) -> tuple[object, ...]:
    ratio = its["of_clairvoyant"]
    return (
        scaler,
        f"{its['priority_in_time']:.2%}",
        _seconds(its["ttft_s"], "priority", "p99"),
        _seconds(its["ttft_s"], "default", "p95"),
        f"{its['worker_hours']:,.1f}",
        "-" if ratio is None else f"{ratio:.2f}",
        f"{its['cost']:,.2f}",
        its["most_workers"],
        its["turns"],
    )


def _seconds(times: dict[str, Any], tier: str, quantile: str) -> str:
    value = times.get(tier, {}).get(quantile)
    return "-" if value is None else f"{value:,.1f} s"
