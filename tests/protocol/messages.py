"""Messages as senders of all kinds put them into the broker's lists, and as strangers do."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from producers.contract import keys
from tests.protocol.broker_reference import Sent

GOOD = {"properties": {"delivery_info": {}}, "headers": {"id": "x", "task": keys.TASK_NAME}, "body": "e30="}


def bad(reason: str, **changes: Any) -> Sent:
    return Sent(json.dumps({**GOOD, **changes}).encode(), poison=reason)


NOT_JSON = (b"", b"\xff\xfe\x00", b"penstock", b"{} {}", b"\xef\xbb\xbf{}", b'{"a":', b"[" * 5000, b'"\\ud800x"')
NO_TABLE: tuple[Any, ...] = (None, "text", 3)
NO_INFO: tuple[Any, ...] = ({}, [], {"delivery_info": 7})
NO_TEXT: tuple[Any, ...] = (None, {}, [1], 3.5)
POISON = [
    *(Sent(raw, poison="not JSON") for raw in NOT_JSON),
    *(
        Sent(raw, poison="not a JSON object")
        for raw in (b"null", b"7", b"NaN", b'"text"', b"true", '"é/\\u0007"'.encode())
    ),
    *(Sent(raw, poison="no properties") for raw in (b"{}", b"[]", b"[[[1]]]", b'{"\xff": 1}')),
    *(bad("no properties", properties=value) for value in NO_TABLE),
    *(bad("no delivery_info", properties=value) for value in NO_INFO),
    *(
        bad("no task id and name in the headers", headers=v)
        for v in (None, "x", {}, {"id": 5, "task": "x"}, {"id": "", "task": "x"}, {"id": "x"})
    ),
    *(bad("no body", body=value) for value in NO_TEXT),
]

#: What a header may say, and what it means: None where it is not believed.
SEQS = [
    (1, 1),
    (2, 2),
    (3.9, 3),
    (0, None),
    (-4, None),
    ("3", None),
    (True, None),
    (None, None),
    ([2], None),
    (10**9, 10**9),
]
TOKENS = [(100, 100), (400, 400), (1000, 1000), (float("nan"), None), (float("inf"), 10**9), ({}, None), (-1e300, None)]


#: A tenant as a header names it, and whose turn that is.
TENANTS = [
    (None, ""),
    ("", ""),
    ("t1", "t1"),
    ("t1", "t1"),
    ("t2", "t2"),
    ("é:\x00 t", "é:\x00 t"),
    (7, ""),
    (["t1"], ""),
]


def good(
    id_: str,
    task: str,
    seqs: tuple[Any, int | None],
    tokens: tuple[Any, int | None],
    said: bool,
    tenant: tuple[Any, str] = (None, ""),
) -> Sent:
    headers: dict[str, Any] = {"id": id_, "task": task}
    if said:
        headers["penstock"] = {"n": seqs[0], "tokens": tokens[0], "tenant": tenant[0]}
    raw = json.dumps({**GOOD, "headers": headers, "body": "é\x00\\/"}, ensure_ascii=False).encode()
    sized = task == keys.TASK_NAME
    return Sent(raw, id_, "", sized, *((seqs[1], tokens[1], tenant[1]) if said else (None, None, "")))


messages = st.one_of(
    st.builds(
        good,
        st.sampled_from("abcde"),
        st.sampled_from([keys.TASK_NAME, keys.TASK_NAME, keys.TASK_NAME, "other.task"]),
        st.sampled_from(SEQS),
        st.sampled_from(TOKENS),
        st.sampled_from([True, True, False]),
        st.sampled_from(TENANTS),
    ),
    st.sampled_from(POISON),
)
