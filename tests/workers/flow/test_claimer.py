"""What the engine is asked for of tasks that others have begun."""

from __future__ import annotations

from engine.request import Request
from producers.contract.task import Task
from tests.engine.stepping import scheduler
from workers.flow.claimer import Claimer
from workers.state.delivery import Delivery, Incarnation


def test_of_a_search_that_was_published_nothing_is_left_to_do() -> None:
    """Its outputs ended where so many beams had no more room. There are no beams any more, and so more room."""
    task = Task(model="m", prompt=[1, 2, 3, 4], beam_width=4, n=2, min_tokens=20)
    delivery = Delivery("uuid", "id", Incarnation("w"), base=[7, 7])
    made = scheduler()
    asked = Request("uuid", [1, 2, 3, 4], Claimer._params(task, delivery, []))
    made.check(asked)
    limit = made._limits.output_limit(asked)
    whole = [[1] * limit, [1] * (limit - 1) + [2]]
    resumed = Request("uuid", [1, 2, 3, 4], Claimer._params(task, delivery, whole), resume=whole)
    made.check(resumed)
    events = made.add(resumed)
    assert [(event.choice, event.finish_reason) for event in events] == [(0, "length"), (1, "length")]
    assert not made.has_work
