"""Layers whose keys and values live together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that see equally far back: they have blocks, tables and memory of their own."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    """How many tokens a query sees, its own included; None for all before it."""
