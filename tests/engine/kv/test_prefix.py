from __future__ import annotations

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from engine.prefix import (
    MOST_MARKS,
    adapter_mark,
    block_hash,
    extend_hashes,
    marked_blocks,
    prompt_marks,
    root_hash,
)


def test_the_format_is_the_one_written_down():
    root = sha256(b"penstock/block/1" + b"\x02\0\0\0\xc3\xa9" + b"\0\0\0\0" + b"\x03\0\0\0v12").digest()
    assert root_hash("é", "", "v12") == root
    block = sha256(root + b"\x01\0\0\0" + b"\x00\x01\0\0" + b"\xff\xff\xff\xff").digest()
    assert block_hash(root, [1, 256, 0xFFFFFFFF]) == block


def test_known_answers():
    root = root_hash("tenant-a", "lora-7", "0123456789ab")
    assert root.hex() == "bdf81a88066dbd6b803e1a1c4fad500c7b96898405ca74ac973c8f2df3b5dd9c"
    first = block_hash(root, list(range(16)))
    assert first.hex() == "8402d518ec509bd875510132698a634b5b77a1b79a8a87f27640b54226779d73"
    assert (
        block_hash(first, list(range(16, 32))).hex()
        == "b0c6b727a6f4489e4bfa5db95d4bf85686e26c7f41f5ba9b70a1806ee29fcef8"
    )


def test_fields_do_not_run_into_each_other():
    roots = {root_hash("ab", "", ""), root_hash("a", "b", ""), root_hash("", "ab", ""), root_hash("", "a", "b")}
    assert len(roots) == 4


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 5), st.data())
def test_a_chain_can_be_extended_in_any_portions(tokens, size, data):
    root = root_hash("", "", "v")
    full = len(tokens) // size
    right = []
    for start in range(0, full * size, size):
        right.append(block_hash(right[-1] if right else root, tokens[start : start + size]))
    hashes: list[bytes] = []
    for blocks in [*sorted(data.draw(st.lists(st.integers(0, full), max_size=3))), full]:
        extend_hashes(hashes, root, tokens, size, blocks)
    assert hashes == right


def test_marks_are_those_of_the_cache_whoever_makes_them():
    """After 64 tokens, 128, 256 ..., and the last one after 16,384, whatever the length of the prompt."""
    tokens = list(range(300))
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash("t", "", "v"), tokens, 16, 18)
    made = prompt_marks(tokens, 16, salt="t", adapter="", version="v")
    assert made == [hashes[count - 1][:8].hex() for count in (4, 8, 16)]
    assert prompt_marks(tokens[:63], 16, salt="t", adapter="", version="v") == []
    assert len(prompt_marks(tokens * 200, 16, salt="t", adapter="a", version="v")) == 10
    assert {len(marked_blocks(size)) <= MOST_MARKS - 1 for size in (1, 8, 16, 100, 1024)} == {True}


def test_an_adapter_has_a_mark_for_all_tenants_and_its_prefixes_have_their_own():
    tokens = list(range(64))
    one, other = (prompt_marks(tokens, 16, salt=salt, adapter="a", version="v") for salt in ("t", "u"))
    assert one[0] == other[0] == adapter_mark("a", "v")
    assert one[1] != other[1]
    assert one[1] != prompt_marks(tokens, 16, salt="t", adapter="", version="v")[0]
    assert prompt_marks([-1] * 64, 16, salt="t", adapter="", version="v") == [], "ADMIT refuses such ids"
