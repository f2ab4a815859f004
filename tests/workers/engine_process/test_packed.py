"""What a step made passes as bytes and is the same again."""

from __future__ import annotations

from dataclasses import replace

from engine.errors import ErrorText, TextError
from engine.labels import Entity
from engine.plan import StepWork
from engine.request import Course, Event, TokenLogprobs
from workers.engine_process.packed import Run, pack, unpack, update_course

LIKELY = TokenLogprobs(7, -0.25, ((7, -0.25), (9, float("-inf"))))
EVENTS = [
    (1, Event("", 0, 5, [11], [" a"])),
    (2, Event("", 3, 2**31, [12], [""])),
    (1, Event("", prompt_logprobs=[None, LIKELY, TokenLogprobs(3, -1e-300, ())], prompt_tokens=3)),
    (1, Event("", 0, 6, [13], ["ü\U0001f30a"])),
    (2, Event("", 0, 7, [14, 15], ["b", "\udc80c"], [LIKELY, TokenLogprobs(15, -2.0, ())])),
    (3, Event("", 1, 8, [16], ["."], finish_reason="stop", stop_match="END.", cached_tokens=16, discarded=40)),
    (3, Event("", 0, 9, [2], [""], finish_reason="stop", stop_match=2, done=True, prompt_tokens=20)),
    (4, Event("", finish_reason="length", done=True)),
    (5, Event("", finish_reason="error", done=True, error="the device failed")),
    (6, Event("", finish_reason="error", done=True, error=ErrorText.of("{top_k}=9"), refused=True, param="top_k")),
    (7, Event("", finish_reason="error", done=True, error="long", refused=True, code="context_length_exceeded")),
    (8, Event("", finish_reason="stop", done=True, rows=[[1.0, 0.1], TextError("empty_prompt", "none"), [3.5, -0.0]])),
    (8, Event("", finish_reason="stop", done=True, rows=[(Entity("PER", 0.1, 2, 5),), (), TextError("a", "b")])),
    (9, Event("", 0, 1, [17], ["x"])),
]
WORK = StepWork(12.5, 0.25, 3, 4, 5, 6, 7, 8)


def unpacked(segments: list[Run | tuple[int, Event]]) -> list[tuple[int, Event]]:
    events: list[tuple[int, Event]] = []
    for segment in segments:
        if isinstance(segment, Run):
            columns = zip(segment.numbers, segment.choices, segment.indices, segment.tokens, segment.texts, strict=True)
            events += [(n, Event("", choice, index, [token], [text])) for n, choice, index, token, text in columns]
        else:
            events.append(segment)
    return events


def test_a_step_is_the_same_after_it_was_bytes() -> None:
    course = Course(0.1, 16, 1, 2, [(1.5, "kv_room"), (2.5, "memory")], 3, 0.75, 2.5, 0.0, None, 40)
    work, courses, segments = unpack(pack(EVENTS, WORK, [(1, course), (9, Course())]))
    assert unpacked(segments) == EVENTS
    assert work == WORK
    for (number, values), expected in zip(courses, [(1, course), (9, Course())], strict=True):
        copy = Course()
        update_course(copy, values)
        assert (number, copy) == expected
    error = next(event.error for number, event in unpacked(segments) if number == 6)
    assert isinstance(error, ErrorText)
    assert error.renamed({"top_k": "k"}) == "k=9"


def test_nothing_and_plain_tokens_alone_pass_too() -> None:
    assert unpack(pack([], None)) == (None, [], [])
    plain = [(n, replace(EVENTS[0][1], index=n, token_ids=[n], texts=[str(n)])) for n in range(300)]
    work, courses, segments = unpack(pack(plain, None))
    assert (work, courses, len(segments)) == (None, [], 1)
    assert unpacked(segments) == plain
