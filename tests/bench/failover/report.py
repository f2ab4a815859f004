"""Percentiles of the waits, by phase."""

from __future__ import annotations

from typing import Any

Row = tuple[str, list[float]]


def share(values: list[float], part: float) -> float:
    """The nearest-rank percentile."""
    ranked = sorted(values)
    return ranked[max(0, -(-int(len(ranked) * part * 1000) // 1000) - 1)] if ranked else float("nan")


def table(rows: list[Row]) -> str:
    """A Markdown table of p50, p95 and max, in s."""
    lines = ["| | n | p50 s | p95 s | max s |", "| --- | --- | --- | --- | --- |"]
    for name, values in rows:
        p50, p95, most = share(values, 0.5), share(values, 0.95), max(values, default=float("nan"))
        lines.append(f"| {name} | {len(values)} | {p50:.3f} | {p95:.3f} | {most:.3f} |")
    return "\n".join(lines)


def of_rounds(rounds: list[dict[str, Any]], how: str) -> list[Row]:
    """The phases of rounds of one kind."""
    streams = [(one, *times) for one in rounds for times in one["streams"]]
    rows: list[Row] = [
        ("signal to the lease's end", [one["lease"] for one in rounds]),
        ("signal to REAP (detection)", [one["reaped"] for one in rounds]),
        ("REAP to CLAIM elsewhere", [claimed - one["reaped"] for one, _, claimed, _ in streams]),
        ("CLAIM to the next token", [after - claimed for _, _, claimed, after in streams]),
    ]
    if how == "drain":
        rows[2] = ("last token to CLAIM elsewhere", [claimed - last for _, last, claimed, _ in streams])
        return [*rows, ("**last token to the next token**", [after - last for _, last, _, after in streams])]
    return [*rows, ("**signal to the next token**", [after for *_, after in streams])]
