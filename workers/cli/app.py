"""The `penstock` command with all its subcommands."""

from __future__ import annotations

from workers.cli import app_of

app = app_of(None)
