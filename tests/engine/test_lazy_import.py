"""A gateway imports engine.text, and must not pay for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import engine


@pytest.mark.parametrize(
    ("module", "without"),
    [
        *((name, "torch numpy") for name in ("engine", "engine.text", "engine.params", "engine.execution.threads")),
        ("engine.kv", "torch numpy"),
        ("engine.scheduling.scheduler", "torch"),
    ],
)
def test_importing_what_needs_no_weights_imports_no_torch(module, without):
    code = f"import sys, {module}; sys.exit(bool({{*sys.modules}} & {{*'{without}'.split()}}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there_and_no_other():
    for name in engine.__all__:
        assert getattr(engine, name).__name__ == name
    assert dir(engine) == sorted(engine.__all__)
    with pytest.raises(AttributeError, match="'engine' has no attribute 'Nonsense'"):
        getattr(engine, "Nonsense")  # noqa: B009
