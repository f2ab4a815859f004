"""A worker's engine, by the reference of its model."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from engine import SamplingParams
from engine.text.checkpoint import model_version
from tests.engine.gguf_files import write_gguf
from tests.engine.random_models import write_model
from workers.runtime.worker import load_engine


def test_a_gguf_file_has_the_name_that_it_is_given_and_a_tokenizers_files(tmp_path: Path) -> None:
    file = write_gguf(write_model(tmp_path / "model"), tmp_path / "a.gguf", "Q4_0")
    engine, files = load_engine(f"told={file}", {"device": "cpu", "threads": 1, "kv_cache_bytes": 1 << 20})
    with engine:
        assert (engine.card.name, engine.card.version) == ("told", model_version(file))
        assert engine.card.files == {name: sha256(content).hexdigest() for name, content in files.items()}
        assert engine.generate(["a prompt"], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids
