"""Resolves a model reference, as users write it, to a folder, and describes the model in it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workers.errors import Refused
from workers.library.local_models import LocalModels, verify

#: Valid model names; they are part of queues' names.
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: The folder of models that come with Penstock.
BUNDLED: Final = Path(__file__).resolve().parents[1] / "models"
HUB: Final = "hf://"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine and its name."""

    name: str
    folder: Path
    """Absolute path."""

    @property
    def reference(self) -> str:
        """A reference to it for another process, which needs no look-up and no download."""
        return f"{self.name}={self.folder}"


#: How a GGUF file begins.
GGUF: Final = b"GGUF"


def find_model(reference: str, say: Callable[[str], None] = lambda line: None, *, quiet: bool = False) -> ResolvedModel:
    """The model that a reference names; a hub's model is pulled first if needed. `say` gets messages about that;
    `quiet`: no progress is shown.

    A reference is a folder with a config.json, the name of a bundled or pulled model, or hf://OWNER/NAME[@REVISION];
    NAME= before it gives the model another name. Raises Refused.
    """
    name, location = _split(reference)
    if location.startswith(HUB):
        from workers.library.hub import HubModel, pull

        hub_model = HubModel.parse(location)
        name = checked_name(name or hub_model.name, reference)
        return ResolvedModel(name, pull(hub_model, LocalModels.default(), name, say, quiet=quiet).folder)
    folder = _local(location)
    return ResolvedModel(checked_name(name or folder.name, reference), folder)


def name_of(reference: str) -> str:
    """The name that a referenced model will have, without looking for the model."""
    name, location = _split(reference)
    if not name and location.startswith(HUB):
        from workers.library.hub import HubModel

        name = HubModel.parse(location).name
    return name or Path(location).resolve().name


def available() -> dict[str, Path]:
    """Name -> folder of bundled and pulled models; for a pulled one, its last version."""
    pulled = {pulled.name: pulled.folder for pulled in reversed(LocalModels.default().all())}
    return bundled() | {name: pulled[name] for name in sorted(pulled.keys() - bundled().keys())}


def bundled() -> dict[str, Path]:
    """Folders of the models that come with Penstock, by name."""
    return {path.parent.name: path.parent for path in sorted(BUNDLED.glob("*/config.json"))}


def _split(reference: str) -> tuple[str, str]:
    name, equals, location = reference.partition("=")
    if equals and NAME.fullmatch(name) and not os.path.exists(reference):
        return name, location
    return "", reference


def _local(location: str) -> Path:
    # os.path rather than Path: it answers False for a name that is too long, where Path raises.
    if os.path.isfile(Path(location) / "config.json"):
        return Path(location).resolve()
    models = available()
    if location in models:
        return models[location]
    shown = location if len(location) <= 200 else f"{location[:200]}..."
    if gguf := _gguf(location):
        raise Refused(
            f"{gguf} is a GGUF file, which Penstock does not read: give a folder as Hugging Face has it (config.json, "
            "*.safetensors, tokenizer.json), or hf://OWNER/NAME of the model that the file was made from"
        )
    name, equals, other = location.partition("=")
    if equals and (other in models or os.path.isdir(other)):
        raise Refused(f"{name[:200]!r} cannot be a model's name: use letters, digits, '.', '_' and '-' alone")
    raise Refused(
        f"no model {shown!r}: give a folder that holds a config.json, hf://OWNER/NAME, or one of: {', '.join(models)}"
    )


def _gguf(location: str) -> str | None:
    """The path of a GGUF file, or of one in a folder without a config.json; None for anything else."""
    try:
        folder = os.path.isdir(location)
        paths = (
            sorted(Path(location).glob("*.gguf")) if folder else [Path(location)] if os.path.isfile(location) else []
        )
        for path in paths:
            with open(path, "rb") as file:
                if file.read(len(GGUF)) == GGUF:
                    return str(path)
    except (OSError, ValueError):  # it cannot be read, or is no path
        return None
    return None


def checked_name(name: str, reference: str) -> str:
    """Returns a valid model name. Raises Refused for another."""
    if not NAME.fullmatch(name):
        raise Refused(
            f"a model gets its folder's name, and {name!r} cannot be part of a queue's name: write NAME={reference}, "
            "with a NAME of letters, digits, '.', '_' and '-'"
        )
    return name


def described(
    model: ResolvedModel, say: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A model's card and tokenizer files, once its files are checked. Raises Refused."""
    from engine.errors import ModelError
    from engine.text import ModelCard

    verify(model.folder, say=say)
    try:
        card = ModelCard.from_folder(model.folder, model.name)
        return json.loads(card.to_json()), ModelCard.tokenizer_files(model.folder)
    except ModelError as error:
        raise Refused(f"cannot serve {model.folder}: {error}") from error
