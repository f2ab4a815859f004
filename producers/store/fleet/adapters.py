"""The store's LoRA adapters: which there are, and their files, which the workers of their base load.

The hash `penstock:adapters` has an entry for each adapter, by its name: tasks ask for `NAME`, or `BASE:NAME`. Its files
lie in the store, too, in pieces: the hash `penstock:adapter:<version>`. The version is a hash of them, so they never
change. A task's record names the version, and workers load by it.

    add:     pieces, which expire after STALE_S ─▶ they are kept ─▶ the entry (SWAP)
    remove:  the entry goes (SWAP) ─▶ the pieces go, unless another entry has this version

    dies after     what remains                           who repairs it
    pieces         pieces that no entry names             they expire
    kept           pieces that no entry names             `add` of the same adapter; they are memory until then
    the entry goes pieces that no entry names             `add` and `rm` of the same adapter; they are memory until then

Tasks that wait when their adapter is removed fail (`adapter_not_found`), unless their worker has it loaded.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from redis import Redis

from producers.connection.script import run, text
from producers.contract import keys
from producers.errors import PenstockError, shown
from producers.store.access.audit import Change, operator
from producers.store.protocol import swap

#: The files of an adapter's folder.
FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
#: Most bytes of an adapter in the store. They are memory of the store's server.
MAX_BYTES: Final = 256 << 20
#: The default of the most bytes that all adapters of a store take.
MAX_TOTAL_BYTES: Final = 4 << 30
#: Most adapters of a store.
MAX_ADAPTERS: Final = 10_000
#: Bytes of a piece.
PIECE: Final = 1 << 20
#: Time (s) for which pieces are kept that no entry names yet.
STALE_S: Final = 3600
#: Most adapters that a refusal names.
_NAMED: Final = 10
#: Between the names of base and adapter.
SEPARATOR: Final = ":"
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class AdapterRefused(PenstockError):
    """An adapter that cannot be added or removed. The message says why, and what to do."""


class AdapterGone(PenstockError):
    """The store does not have the adapter's files, or not all of them."""


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    name: str
    base: str
    """The name of the model that it changes."""
    version: str
    """See `engine.text.adapter`."""
    rank: int
    size: int
    """The bytes of its files."""
    added: int
    """Unix seconds."""

    @classmethod
    def parse(cls, raw: str | bytes | None) -> Self | None:
        """None for what is no entry."""
        with suppress(ValueError, TypeError, KeyError):
            values = json.loads(raw or "")
            return cls(**{field.name: values[field.name] for field in fields(cls)})
        return None

    def card(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """Its card, as a model of its own: that of its base (`engine.text.card`), with `parent` and `adapter`."""
        named = {"name": self.name, "parent": self.base, "created": self.added}
        return {**base, **named, "adapter": {"version": self.version, "rank": self.rank}}


def names_of(model: str) -> tuple[str, str]:
    """The base, "" if it is not named, and the adapter that a task's model may stand for."""
    base, _, name = model.rpartition(SEPARATOR)
    return base, name


def listed(entries: Mapping[Any, Any], cards: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The cards of all adapters whose bases are among `cards`, by name. `entries`: HGETALL's answer."""
    adapters = sorted(read_all(entries).values(), key=lambda adapter: adapter.name)
    return [adapter.card(cards[adapter.base]) for adapter in adapters if adapter.base in cards]


def names(entries: Mapping[Any, Any], bases: Container[str]) -> list[str]:
    """The names, NAME and BASE:NAME, of all adapters of these bases. `entries`: HGETALL's answer."""
    adapters = [adapter for adapter in read_all(entries).values() if adapter.base in bases]
    return [name for adapter in adapters for name in (adapter.name, f"{adapter.base}{SEPARATOR}{adapter.name}")]


def read_all(entries: Mapping[Any, Any]) -> dict[str, StoredAdapter]:
    """All adapters by name, from HGETALL's answer. Unreadable ones are left out."""
    parsed = {text(name): StoredAdapter.parse(raw) for name, raw in entries.items()}
    return {name: adapter for name, adapter in parsed.items() if adapter is not None and adapter.name == name}


def all_of(store: Redis) -> dict[str, StoredAdapter]:
    """All adapters by name. Raises redis.RedisError or OSError, as all that follows."""
    return read_all(store.hgetall(keys.ADAPTERS))


def check(store: Redis, name: str, base: str) -> None:
    """Raises AdapterRefused if no adapter of the model `base` may have this name."""
    if not _NAME.fullmatch(name):
        raise AdapterRefused(
            f"An adapter's name has 1 to 100 of the characters A-Z a-z 0-9 _ . - and does not begin with . or -; "
            f"{shown(name)} is none"
        )
    card = store.hget(keys.MODELS, base)
    if card is None:
        raise AdapterRefused(
            f"There is no model {shown(base)} in this store; start a worker of it, or `penstock models publish` it"
        )
    if "generate" not in json.loads(card).get("capabilities", ()):
        raise AdapterRefused(f"The model {shown(base)} generates no text; adapters are for models that do")
    if store.hexists(keys.MODELS, name):
        raise AdapterRefused(f"There is a model named {shown(name)}; give the adapter another name")


def add(
    store: Redis, name: str, base: str, version: str, rank: int, folder: Path, total_bytes: int = MAX_TOTAL_BYTES
) -> StoredAdapter:
    """Add the adapter in `folder` for the model `base`. Raises AdapterRefused, and OSError for a file.

    `version`, `rank`: of `engine.text.adapter.AdapterFiles`. The same adapter may be added again. `total_bytes`: the
    most that the files of all adapters take. Two that are added at once may pass it by one of them.
    """
    check(store, name, base)
    size = sum((folder / file).stat().st_size for file in FILES)
    if size > MAX_BYTES:
        raise AdapterRefused(f"The adapter {folder} has {size} bytes; at most {MAX_BYTES} are kept in a store")
    adapter = StoredAdapter(name, base, version, rank, size, int(time.time()))
    raw: Any = store.hget(keys.ADAPTERS, name)
    before = StoredAdapter.parse(raw)
    if before is not None and (before.base, before.version) == (base, version) and store.exists(keys.adapter(version)):
        return before
    if raw is not None:
        raise AdapterRefused(
            f"There is an adapter named {shown(name)}, of {before.base if before else 'another model'}; remove it "
            f"first (`penstock adapters rm {name}`), or give this one another name"
        )
    _check_room(store, adapter, total_bytes)
    _put(store, version, folder)
    change = Change(operator(), "adapter.add", f"{base}{SEPARATOR}{name}@{version}")
    entry = json.dumps(asdict(adapter))
    answer = run(store, swap(keys.ADAPTERS, name, "", entry, max_fields=MAX_ADAPTERS, audit=change))
    if answer != 1:
        others = all_of(store)
        if all(other.version != version for other in others.values()):
            store.expire(keys.adapter(version), STALE_S)
        if (now := others.get(name)) is not None and (now.base, now.version) == (base, version):
            return now  # somebody has added the same meanwhile
        why = f"has {MAX_ADAPTERS} adapters" if answer == -1 else f"got another adapter named {shown(name)} meanwhile"
        raise AdapterRefused(f"The store {why}; nothing was added")
    change.say()
    return adapter


def _check_room(store: Redis, adapter: StoredAdapter, total_bytes: int) -> None:
    """Raises AdapterRefused, which names what would have to go, if the store has no room for this one."""
    names_of_version: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for other in sorted(all_of(store).values(), key=lambda other: (other.added, other.name)):
        names_of_version.setdefault(other.version, []).append(other.name)
        sizes[other.version] = other.size
    stored_bytes = sum(sizes.values())
    missing = 0 if adapter.version in sizes else stored_bytes + adapter.size - total_bytes
    if missing <= 0:
        return
    if adapter.size > total_bytes:
        raise AdapterRefused(
            f"The adapter has {adapter.size:,} bytes, and all adapters of this store may take {total_bytes:,}; allow "
            "more (--total-bytes)"
        )
    going: list[str] = []
    freed = 0
    for version, their_names in names_of_version.items():
        if freed < missing:
            going += their_names
            freed += sizes[version]
    listed_names = " ".join(going[:_NAMED]) + (f" and {len(going) - _NAMED} more" if len(going) > _NAMED else "")
    raise AdapterRefused(
        f"The adapter has {adapter.size:,} bytes; this store's adapters take {stored_bytes:,}, and may take "
        f"{total_bytes:,}. "
        f"The oldest whose removal makes room: {listed_names} (`penstock adapters rm`). Or allow more (--total-bytes)"
    )


def _put(store: Redis, version: str, folder: Path) -> None:
    key = keys.adapter(version)
    new = not store.exists(key)
    for file in FILES:
        for number, piece in enumerate(_pieces(folder / file)):
            with store.pipeline() as pipe:
                pipe.hset(key, f"{file}:{number}", piece)
                # Pieces that do not expire belong to an entry: they stay, whatever becomes of this.
                pipe.expire(key, STALE_S, xx=not new)
                pipe.execute()
            new = False
    store.persist(key)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece


def remove(store: Redis, name: str) -> StoredAdapter:
    """Remove an adapter. Tasks that run with it go on. Raises AdapterRefused if there is none of this name, or
    it is another by now."""
    raw: Any = store.hget(keys.ADAPTERS, name)
    adapter = StoredAdapter.parse(raw)
    if adapter is None:
        names = ", ".join(sorted(all_of(store))[:20])
        raise AdapterRefused(f"There is no adapter {shown(name)}" + (f"; there are {names}" if names else ""))
    change = Change(operator(), "adapter.remove", f"{adapter.base}{SEPARATOR}{name}@{adapter.version}")
    if not run(store, swap(keys.ADAPTERS, name, text(raw), "", audit=change)):
        raise AdapterRefused(f"The adapter {shown(name)} was changed meanwhile; nothing was removed")
    change.say()
    if all(other.version != adapter.version for other in all_of(store).values()):
        store.unlink(keys.adapter(adapter.version))
    return adapter


def fetch(store: Redis, version: str, folder: Path) -> None:
    """Write an adapter's files into `folder`. Raises AdapterGone; OSError also for a file."""
    key = keys.adapter(version)
    read: Any = store.hget
    for file in FILES:
        with (folder / file).open("wb") as target:
            number = 0
            while (piece := read(key, f"{file}:{number}")) is not None:
                target.write(piece)
                number += 1
        if not number:
            raise AdapterGone(f"The adapter with the version {version} was removed from the store")
