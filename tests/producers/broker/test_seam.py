"""Nobody but the brokers knows how they keep messages: others would have to be told of each new broker."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
#: Commands on lists, which nothing but a queue is made of here; and the broker's keys.
KNOWS = re.compile(
    r"\b(?:LPUSH|RPUSH|LPOP|RPOP|LLEN|LRANGE|LREM|LMOVE)\b"
    r"|penstock:(?:incarnations|dead|reaped|returned|deliveries|arrivals|weights|unserved"
    r"|inflight|delayed|sorted|turns|rested|turn|sqs)\b",
    re.IGNORECASE,
)
FILES = sorted(
    file for room in ("producers", "workers") for kind in ("*.py", "*.lua") for file in (ROOT / room).rglob(kind)
)
#: The checker judges what the servers hold, and must not believe the product. Sources take messages of other programs
#: from lists that are no queues of a broker. Rights name every key and command of a server's users.
OTHERS = (
    ROOT / "producers" / "admin" / "roles.py",
    ROOT / "workers" / "trials" / "chaos" / "checker",
    ROOT / "producers" / "sources",
    ROOT / "producers" / "backup",  # copies keys of the store and puts them back, whatever they are
    *(ROOT / "producers" / "store" / "scripts" / f"list_{name}.lua" for name in ("take", "bury")),
)


def test_the_pattern_finds_what_it_looks_for() -> None:
    inside = [file for file in FILES if "broker" in file.parts and KNOWS.search(file.read_text())]
    assert {file.name for file in inside} >= {"keys.py", "fetch.lua", "broker.py"}


def test_no_command_on_a_list_and_no_key_of_the_broker_is_named_elsewhere() -> None:
    outside = [file for file in FILES if "broker" not in file.parts and not {file, *file.parents} & set(OTHERS)]
    assert len(outside) > 100
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in outside
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if KNOWS.search(line) and "shadow" not in line.lower()  # what is to be copied is a list of ids, of no broker
    ]
    assert not found
