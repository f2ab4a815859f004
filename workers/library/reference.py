"""What a user may write for a model, and the folder that it means."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workers.errors import Refused
from workers.library.local_models import Shelf

#: What a model may be called: its name is part of queues' names.
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Models that come with Penstock.
BUNDLED: Final = Path(__file__).resolve().parents[1] / "models"
HUB: Final = "hf://"


@dataclass(frozen=True, slots=True)
class Found:
    """A model on this machine, and what it is called."""

    name: str
    folder: Path
    """Absolute."""

    @property
    def reference(self) -> str:
        """It again, for another process: nothing is left to be looked up or downloaded."""
        return f"{self.name}={self.folder}"


def find_model(reference: str, say: Callable[[str], None] = lambda line: None) -> Found:
    """The model that a reference means; one on a hub is pulled first, if it is not there. `say` is told of that.

    A reference is a folder with a config.json, the name of a bundled or pulled model, or hf://OWNER/NAME[@REVISION];
    NAME= before it gives the model another name. Raises Refused.
    """
    name, place = _split(reference)
    if place.startswith(HUB):
        from workers.library.hub import HubModel, pull

        wanted = HubModel.parse(place)
        name = checked_name(name or wanted.name, reference)
        return Found(name, pull(wanted, Shelf.default(), name, say).folder)
    folder = _local(place)
    return Found(checked_name(name or folder.name, reference), folder)


def name_of(reference: str) -> str:
    """What a model will be called, without a look at what there is."""
    name, place = _split(reference)
    if not name and place.startswith(HUB):
        from workers.library.hub import HubModel

        name = HubModel.parse(place).name
    return name or Path(place).resolve().name


def known() -> dict[str, Path]:
    """Folders of bundled and pulled models by name; of a pulled one, its last version."""
    pulled = {pulled.name: pulled.folder for pulled in reversed(Shelf.default().all())}
    return bundled() | {name: pulled[name] for name in sorted(pulled.keys() - bundled().keys())}


def bundled() -> dict[str, Path]:
    """Folders of the models that come with Penstock, by name."""
    return {path.parent.name: path.parent for path in sorted(BUNDLED.glob("*/config.json"))}


def _split(reference: str) -> tuple[str, str]:
    name, equals, place = reference.partition("=")
    if equals and NAME.fullmatch(name) and not os.path.exists(reference):
        return name, place
    return "", reference


def _local(place: str) -> Path:
    # os.path rather than Path: a name that is too long is no file, and no error.
    if os.path.isfile(Path(place) / "config.json"):
        return Path(place).resolve()
    models = known()
    if place in models:
        return models[place]
    shown = place if len(place) <= 200 else f"{place[:200]}..."
    raise Refused(
        f"no model {shown!r}: give a folder that holds a config.json, hf://OWNER/NAME, or one of: {', '.join(models)}"
    )


def checked_name(name: str, reference: str) -> str:
    """The name, if a model may be called so. Raises Refused."""
    if not NAME.fullmatch(name):
        raise Refused(
            f"a model is called as its folder, and {name!r} cannot name a queue: write NAME={reference}, with a name "
            "of letters, digits, '.', '_' and '-'"
        )
    return name
