"""The report of a rollout: as JSON, and as one HTML page that needs nothing else.

It has the state, each decision with its time and reason, each metric's figures of both versions, and how its bounds
went: from the log's rows (`producers.store.fleet.canaries`), of which the latest are kept.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from typing import Any, Final

from redis import Redis

from producers.rollouts.controller import start_trouble, waits_for
from producers.rollouts.metrics import Arm, Evidence, Finding, findings
from producers.store.fleet import canaries
from producers.store.fleet.canaries import Canary

#: Width and height of a plot, and its margins: left, right, top, bottom.
SIZE: Final = (640, 180)
INSET: Final = (56, 12, 10, 26)
#: Verdicts, in the order in which the page has them.
ORDER: Final = ("worse", "looks worse", "not found worse", "not compared")
#: What became of the tasks, by phase. `penstock` commands take the model, or the model and a version.
OUTCOMES: Final = {
    "preparing": "It has no tasks yet: all new tasks go to {before}.",
    "judging": "{percent:g}% of the new tasks go to {version}; `penstock rollout abort {model}` takes them back.",
    "paused": "It stays so until an operator resumes or aborts it; it is still rolled back if it turns out worse.",
    "promoted": "All new tasks go to {version}. `penstock models alias {model} default={before}` takes them back.",
    "rolled_back": "All new tasks go to {before} again, and the workers of {version} end.",
    "aborted": "All new tasks go to the default version.",
    "failed": "{version} never had a task: all new tasks go to {before}, as before.",
}
#: Colours of candidate, baseline and limit, which are told apart without colours, too: by dashes.
LINE, BAND, LIMIT = "#2563eb", "#93c5fd", "#b91c1c"


def report(store: Redis, state: Canary) -> dict[str, Any]:
    """The report as JSON. Raises redis.RedisError or OSError."""
    evidence = Evidence.of(canaries.read_evidence(store, state.model), state)
    rows = canaries.rows(store, state.model, state.id)
    outcomes = findings(state, evidence)
    waits = ""
    if state.under_way:
        compared, now = evidence.samples(state), canaries.now_ms(store)
        waits = waits_for(state, outcomes, compared, now, start_trouble(store, state))
    return {
        **asdict(state),
        "waits": waits,
        "tasks": {"candidate": evidence.candidate.tasks, "baseline": evidence.baseline.tasks},
        "metrics": [_metric(finding, evidence) for finding in outcomes],
        "decisions": [row for row in rows if row["what"] not in ("seen", "acted")],
        "seen": [row for row in rows if row["what"] == "seen"],
    }


def _metric(finding: Finding, evidence: Evidence) -> dict[str, Any]:
    settings = finding.settings
    return {
        "name": settings.metric.name,
        "text": settings.metric.text,
        "kind": settings.metric.kind,
        "margin": settings.margin,
        "tolerance": settings.tolerance,
        "limit": round(finding.limit),
        "verdict": "worse" if finding.worse else "looks worse" if finding.suspect else "not found worse",
        "candidate": _figures(finding, evidence.candidate),
        "baseline": _figures(finding, evidence.baseline),
        **finding.figures(),
    }


def _figures(finding: Finding, arm: Arm) -> dict[str, float | None]:
    metric = finding.settings.metric
    if metric.kind == "share":
        return {"share": arm.mean(metric.name)}
    if metric.kind in ("score", "pair"):
        score = arm.mean(metric.name)
        return {"mean": None if score is None else score / 100}
    name = "end_to_end" if metric.kind == "tail" else metric.name
    return {f"p{round(100 * part)}": arm.quantile(name, part) for part in (0.5, 0.95)}


def html(data: dict[str, Any]) -> str:
    """The report as a page. All text in it is escaped, and it loads nothing."""
    title = f"Rollout of {data['model']}: {data['before']} to {data['version']}"
    head = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="phase {escape(data["phase"])}"><b>{escape(data["phase"].replace("_", " "))}</b>{_at(data)}: '
        f"{escape(data['reason'])}.<br>{_code(OUTCOMES[data['phase']].format_map(data))}"
        f"{' It waits ' + escape(data['waits']) + '.' if data['waits'] else ''}</p>",
        f"<p>Begun {_when(data['begun'])} by {escape(data['by'])}. Compared were {data['tasks']['candidate']:,} tasks "
        f"of the candidate, {escape(data['version'])}, and {data['tasks']['baseline']:,} of the baseline, "
        f"{escape(data['before'])}. A candidate that is no worse by any metric is rolled back with a probability of at "
        f"most {data['plan']['alpha']:.2%}.</p>",
    ]
    metrics = sorted(data["metrics"], key=lambda metric: ORDER.index(_verdict(metric)))
    shown = [metric for metric in metrics if metric["verdict"] != "not found worse"]
    others = [metric for metric in metrics if metric["verdict"] == "not found worse"]
    parts = [*head, "<h2>Decisions</h2>", _decisions(data["decisions"]), _percentages(data)]
    parts += ["<h2>Metrics</h2>", _table(metrics), _KEY]
    parts += [_plot(metric, data["seen"]) for metric in shown]
    if others:
        summary = f"<summary>Plots of {len(others)} metrics by which it was not found worse</summary>"
        parts += ["<details>", summary, *(_plot(metric, data["seen"]) for metric in others), "</details>"]
    source = escape(json.dumps(data), quote=False)
    parts += ["<details><summary>All of it, as JSON</summary><pre>", source, "</pre></details>"]
    return _PAGE.format(title=escape(title), body="\n".join(parts))


def _code(text: str) -> str:
    """Text with `commands`."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _at(data: dict[str, Any]) -> str:
    """The candidate's part of the tasks: when it was ended, the last one that it had."""
    if data["phase"] == "rolled_back" and 0 <= data["step"] < len(data["plan"]["steps"]):
        return f" from {data['plan']['steps'][data['step']]:g}%"
    return f" at {data['percent']:g}%" if data["phase"] in ("preparing", "judging", "paused") else ""


def _verdict(metric: dict[str, Any]) -> str:
    return str(metric["verdict"]) if metric["n"] else "not compared"


def _decisions(rows: Iterable[dict[str, Any]]) -> str:
    cells = [
        f"<tr><td>{_when(row['at'])}</td><td>{escape(row['what'].replace('_', ' '))}</td><td>{_part(row):g}%</td>"
        f"<td>{escape(row['by'])}</td><td>{escape(row['reason'])}</td></tr>"
        for row in rows
    ]
    head = "<tr><th>when</th><th>decision</th><th>part</th><th>by</th><th>why</th></tr>"
    return f"<table>{head}{''.join(cells)}</table>"


def _table(metrics: Iterable[dict[str, Any]]) -> str:
    rows = []
    for metric in metrics:
        figures = [_texts(metric[arm], metric["text"]) for arm in ("baseline", "candidate")]
        difference = f"{100 * metric['mean']:+.1f} ({100 * metric['lower']:+.1f} to {100 * metric['upper']:+.1f})"
        odds = f"{_odds(metric['odds'])} to 1 (of {metric['limit']:,})"
        compared = (metric["n"], difference, f"{100 * metric['margin']:g}", odds) if metric["n"] else (0, "", "", "")
        row = "".join(
            f"<td>{escape(str(cell))}</td>" for cell in (metric["name"], *figures, *compared, _verdict(metric))
        )
        rows.append(f"<tr{' class=worse' if metric['verdict'] == 'worse' else ''}>{row}</tr>")
    names = (
        "metric",
        "baseline",
        "candidate",
        "comparisons",
        "difference",
        "allowed",
        "odds that it is worse",
        "verdict",
    )
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _odds(odds: float) -> str:
    return "over 1,000,000,000" if odds > 1e9 else f"{odds:,.0f}" if odds >= 10 else f"{odds:.1f}"


def _texts(figures: dict[str, float | None], text: str) -> str:
    """An arm's figures. `text`: the metric's, which says whether they are tokens, or else times (s)."""
    numbers = {name: value for name, value in figures.items() if value is not None}
    if "share" in numbers:
        return f"{numbers['share']:.1%}"
    if "mean" in numbers:
        return f"mean {numbers['mean']:.3g}"
    values = {name: f"{value:,.0f}" if "tokens" in text else _seconds(value) for name, value in numbers.items()}
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "none"


def _seconds(value: float) -> str:
    return f"{value:,.3g} s" if value >= 1 else f"{1000 * value:,.3g} ms"


def _plot(metric: dict[str, Any], seen: Sequence[dict[str, Any]]) -> str:
    return f"<h3>{escape(metric['name'])}: {_code(metric['text'])}</h3>{_bounds(metric, seen)}"


def _bounds(metric: dict[str, Any], seen: Sequence[dict[str, Any]]) -> str:
    """The mean difference and its bounds by comparisons, with the margin."""
    points = [row["metrics"][metric["name"]] for row in seen if metric["name"] in row["metrics"]]
    if metric["n"]:
        points.append(metric)
    if len(points) < 2:
        return "<p>Too few comparisons for a plot.</p>" if metric["n"] else "<p>Nothing was compared.</p>"
    plot = _Plot([math.log10(max(1, point["n"])) for point in points], (-1.0, 1.0))
    band = [*(point["upper"] for point in points), *(point["lower"] for point in reversed(points))]
    shape = " ".join(plot.point(x, y) for x, y in zip([*plot.xs, *reversed(plot.xs)], band, strict=True))
    body = f'<polygon points="{shape}" fill="{BAND}" fill-opacity=".5"/>'
    body += plot.line([point["mean"] for point in points], LINE) + plot.level(metric["margin"], LIMIT, "allowed")
    body += plot.level(0.0, "#888", "")
    first, last = points[0]["n"], points[-1]["n"]
    ends = f"after {first:,} comparison{'s' if first > 1 else ''}", f"after {last:,} (logarithmic)"
    label = f"{metric['name']}: mean difference with bounds, by comparisons"
    return plot.svg(body, label, [(-1.0, "-100"), (0.0, "0"), (1.0, "+100")], ends)


def _part(row: dict[str, Any]) -> float:
    """The candidate's part of new tasks (percent) after a decision, or at a look."""
    return 100.0 if row.get("phase") == "promoted" else float(row["percent"])


def _percentages(data: dict[str, Any]) -> str:
    """The candidate's part over time."""
    rows = [*data["decisions"], *data["seen"]]
    rows.sort(key=lambda row: row["at"])
    if len(rows) < 2:
        return ""
    top = max(1.0, *(_part(row) for row in rows))
    plot = _Plot([float(row["at"]) for row in rows], (0.0, top))
    path = [plot.point(plot.xs[0], _part(rows[0]))]
    for x, before, row in zip(plot.xs[1:], rows, rows[1:], strict=False):
        path += [plot.point(x, _part(before)), plot.point(x, _part(row))]
    body = f'<polyline points="{" ".join(path)}" fill="none" stroke="{LINE}" stroke-width="2"/>'
    ends = _when(rows[0]["at"]), _when(rows[-1]["at"])
    return plot.svg(body, "The candidate's part of new tasks, in percent", [(0.0, "0%"), (top, f"{top:g}%")], ends)


class _Plot:
    """Scales of one plot. `xs`: of its points; `span`: lowest and highest y."""

    def __init__(self, xs: list[float], span: tuple[float, float]) -> None:
        self.xs, self._span = xs, span

    def point(self, x: float, y: float) -> str:
        """`x,y` in pixels."""
        left, right, top, bottom = INSET
        low, high = min(self.xs), max(self.xs)
        across = (x - low) / (high - low) if high > low else 0.5
        up = (min(max(y, self._span[0]), self._span[1]) - self._span[0]) / (self._span[1] - self._span[0])
        width, height = SIZE[0] - left - right, SIZE[1] - top - bottom
        return f"{left + across * width:.1f},{top + (1 - up) * height:.1f}"

    def line(self, ys: Sequence[float], colour: str) -> str:
        """A line through all points."""
        points = " ".join(self.point(x, y) for x, y in zip(self.xs, ys, strict=True))
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'

    def level(self, y: float, colour: str, label: str) -> str:
        """A dashed horizontal line."""
        (x1, y1), (x2, y2) = (self.point(x, y).split(",") for x in (min(self.xs), max(self.xs)))
        text = (
            f'<text x="{x2}" y="{float(y2) - 4:.1f}" text-anchor="end" fill="{colour}">{label}</text>' if label else ""
        )
        return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-dasharray="5 4"/>{text}'

    def svg(self, body: str, label: str, ticks: Sequence[tuple[float, str]], ends: tuple[str, str]) -> str:
        """The plot with its axes' texts."""
        heights = [float(self.point(0.0, y).split(",")[1]) + 4 for y, _ in ticks]
        texts = [
            f'<text x="{INSET[0] - 6}" y="{y:.1f}" text-anchor="end">{text}</text>'
            for y, (_, text) in zip(heights, ticks, strict=True)
        ]
        below = SIZE[1] - 8
        texts += [f'<text x="{INSET[0]}" y="{below}">{escape(ends[0])}</text>']
        texts += [f'<text x="{SIZE[0] - INSET[1]}" y="{below}" text-anchor="end">{escape(ends[1])}</text>']
        size = f'viewBox="0 0 {SIZE[0]} {SIZE[1]}" width="{SIZE[0]}" height="{SIZE[1]}"'
        return f'<svg {size} role="img" aria-label="{escape(label)}">{body}{"".join(texts)}</svg>'


def _when(ms: float) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


_KEY: Final = """<p>The <b>difference</b> is the candidate's figure less the baseline's, in points: of 100 tasks, or, of
times, lengths and scores, of 100 pairs of like tasks, those in which it was worse less those in which it was not. In
brackets are its bounds, which hold at all looks together. The candidate is rolled back once the <b>odds</b> that it is
worse by more than what is <b>allowed</b> reach the number in brackets; from 10 to 1 on it looks worse, and is held at
its step. In the plots the line is the difference, the area its bounds, and the dashed line what is allowed.</p>"""

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; padding: 0 1rem; color: #111 }}
table {{ border-collapse: collapse; display: block; overflow-x: auto }}
td, th {{ border-bottom: 1px solid #ddd; padding: .3rem .6rem; text-align: left; vertical-align: top }}
.phase {{ padding: .6rem .8rem; background: #eef2ff }}
.phase.rolled_back, .phase.failed, .phase.aborted, tr.worse {{ background: #fee2e2 }}
.phase.promoted {{ background: #dcfce7 }}
svg {{ max-width: 100%; height: auto }} svg text {{ font: 11px system-ui, sans-serif; fill: #444 }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere }}
</style></head><body>
{body}
</body></html>
"""
