from __future__ import annotations

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from engine.kv import block_hash, extend_hashes, root_hash


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
