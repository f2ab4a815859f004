from __future__ import annotations

import subprocess
import sys

import pytest

import producers


def loaded(code: str) -> set[str]:
    """The top-level modules that are loaded after running `code` in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "without"),
    [
        ("import producers", {"pydantic", "redis", "celery", "kombu"}),
        ("from producers import Task, InvalidTask", {"redis", "celery", "kombu"}),
        ("from producers import *; import producers.sweeper.sweeper", {"celery"}),
        ("from producers import Client; Client('redis://127.0.0.1:1').close()", {"celery"}),
    ],
)
def test_importing_the_library_loads_no_more_than_it_needs(code: str, without: set[str]) -> None:
    never = {"torch", "numpy", "fastapi", "starlette", "uvicorn", "prometheus_client", "safetensors", "tokenizers"}
    assert not (never | without) & loaded(code)


def test_everything_that_is_exported_is_there() -> None:
    for name in producers.__all__:
        assert getattr(producers, name).__module__.startswith("producers.") or name in ("Entity", "Event", "TextError")
    assert dir(producers) == sorted(producers.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        producers.nothing  # noqa: B018 - the access is the test
