"""Messages as senders of all kinds put them into the broker's lists, and as strangers do."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from producers.contract import keys

GOOD = {"properties": {"delivery_info": {}}, "headers": {"id": "x", "task": keys.TASK_NAME}, "body": "e30="}


def bad(reason: str, **changes: Any) -> tuple[bytes, str]:
    return json.dumps({**GOOD, **changes}).encode(), reason


NOT_JSON = (b"", b"\xff\xfe\x00", b"penstock", b"{} {}", b"\xef\xbb\xbf{}", b'{"a":', b"[" * 5000, b'"\\ud800x"')
NO_TABLE: tuple[Any, ...] = (None, "text", 3)
NO_INFO: tuple[Any, ...] = ({}, [], {"delivery_info": 7})
NO_TEXT: tuple[Any, ...] = (None, {}, [1], 3.5)
#: Messages that cannot be used, and why.
POISON = [
    *((raw, "not JSON") for raw in NOT_JSON),
    *((raw, "not a JSON object") for raw in (b"null", b"7", b"NaN", b'"text"', b"true", '"é/\\u0007"'.encode())),
    *((raw, "no properties") for raw in (b"{}", b"[]", b"[[[1]]]", b'{"\xff": 1}')),
    *(bad("no properties", properties=value) for value in NO_TABLE),
    *(bad("no delivery_info", properties=value) for value in NO_INFO),
    *(
        bad("no task id and name in the headers", headers=v)
        for v in (None, "x", {}, {"id": 5, "task": "x"}, {"id": "", "task": "x"}, {"id": "x"})
    ),
    *(bad("no body", body=value) for value in NO_TEXT),
]

#: What a header may say, and what it means: 0 where it is not believed.
SEQS = [(1, 1), (2, 2), (3.9, 3), (0, 0), (-4, 0), ("3", 0), (True, 0), (None, 0), ([2], 0), (10**9, 10**9)]
TOKENS = [
    (100, 100),
    (400, 400),
    (1000, 1000),
    (float("nan"), 0),
    (float("inf"), float("inf")),
    (10**400, float("inf")),
    ({}, 0),
    (-1e300, 0),
]


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


#: Marks of prefixes.
MARKS = [f"{number:016x}" for number in range(3)]
#: What a header may say of a prompt's prefix. Most have none.
PREFIXES = [
    *(None, None, None, None),
    *("".join(MARKS[:count]) for count in (1, 2, 3)),
    *("".join(MARKS[1:]), "".join(MARKS), MARKS[2], MARKS[0][1:], MARKS[0].upper() + "G" * 16, "é" * 8, MARKS[0] * 17),
    *(7, [MARKS[0]]),
]


def good(
    id_: str,
    task: str,
    seqs: Any,
    tokens: Any,
    said: bool,
    tenant: Any = None,
    prefix: Any = None,
    order_key: Any = None,
    body: str = "é\x00\\/",
) -> bytes:
    headers: dict[str, Any] = {"id": id_, "task": task}
    if said:
        headers["penstock"] = {"n": seqs, "tokens": tokens, "tenant": tenant}
        more = {"prefix": prefix, "order_key": order_key}
        headers["penstock"] |= {name: value for name, value in more.items() if value is not None}
    return json.dumps({**GOOD, "headers": headers, "body": body}, ensure_ascii=False).encode()


#: As bytes.
messages = st.one_of(
    st.builds(
        good,
        st.sampled_from("abcde"),
        st.sampled_from([keys.TASK_NAME, keys.TASK_NAME, keys.TASK_NAME, "other.task"]),
        st.sampled_from([said for said, _ in SEQS]),
        st.sampled_from([said for said, _ in TOKENS]),
        st.sampled_from([True, True, False]),
        st.sampled_from([said for said, _ in TENANTS]),
        st.sampled_from(PREFIXES),
        st.sampled_from([None] * 8 + ["k", "", 7]),
    ),
    st.sampled_from([raw for raw, _ in POISON]),
)
