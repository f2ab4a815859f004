"""What the broker in memory believes of a message, as the scripts do (tests/protocol compares the two)."""

from __future__ import annotations

from itertools import product

import pytest

from producers.broker.memory.message import Unusable, read, task_id_of
from producers.contract import keys
from tests.protocol.messages import POISON, SEQS, TENANTS, TOKENS, good


@pytest.mark.parametrize(("raw", "reason"), POISON)
def test_what_cannot_be_used_says_why(raw: bytes, reason: str) -> None:
    with pytest.raises(Unusable, match=f"^{reason}$"):
        read(raw)


def test_sizes_and_tenants_are_believed_where_they_are_some() -> None:
    for seqs, tokens, tenant in product(SEQS, TOKENS, TENANTS):
        raw = good("a", keys.TASK_NAME, seqs[0], tokens[0], True, tenant[0])
        sent = read(raw)
        assert (sent.seqs, sent.tokens, sent.tenant, sent.counts) == (seqs[1], tokens[1], tenant[1], True)
        assert sent.size((8, 1000), 300) == (min(seqs[1] or 1, 8), min(tokens[1] or 300, 1000))
        assert task_id_of(raw) == "a"
