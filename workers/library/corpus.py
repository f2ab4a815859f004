"""Texts that every Python installation has and may use: the standard library, and the prose of its documentation.

A hash of the file's name decides whether it is held out. So the split is the same on every machine and Python version,
and a test can measure perplexity on files that training has never seen.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

#: Folders that are not library text: installed packages, test suites, generated tables.
_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
#: Files with these prefixes are generated build settings and keyword tables, useless for training.
_EXCLUDED_PREFIXES = ("_sysconfigdata", "pgen2", "entities")
_HELD_OUT_ONE_IN = 20
_SHORTEST_FILE = 200


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the standard library: its path below the library's root, with `/`, and its text."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") % _HELD_OUT_ONE_IN == 0


def documentation() -> list[SourceFile]:
    """The language's documentation by topic, in English prose, as `help()` shows it; empty where it was left out."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        return []
    return [
        SourceFile(f"pydoc_data/{name}", text) for name, text in sorted(topics.items()) if len(text) >= _SHORTEST_FILE
    ]


def standard_library(root: Path | None = None) -> list[SourceFile]:
    """All usable sources below `root` (default: this interpreter's library), sorted by name.

    Raises:
        FileNotFoundError: the interpreter carries no readable library sources (a zipped or frozen one).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _EXCLUDED_FOLDERS.intersection(relative.parts) or relative.name.startswith(_EXCLUDED_PREFIXES):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few old files declare another encoding
            continue
        if len(text) >= _SHORTEST_FILE:
            files.append(SourceFile(relative.as_posix(), text))
    if not files:
        raise FileNotFoundError(f"no Python sources below {root}: run with an interpreter whose library is plain files")
    return files
