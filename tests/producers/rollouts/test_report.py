"""The report of a rollout: all decisions and figures, and a page that loads nothing and runs nothing."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

from redis import Redis

from producers.rollouts import operations
from producers.rollouts.report import html, report
from tests.producers.rollouts.test_controller import PLAN, ended, look, started, state_of, store

__all__ = ["store"]  # the fixture


class Tags(HTMLParser):
    """Counts tags, and checks that they are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in ("meta", "br", "line", "polyline", "polygon"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "polyline", "polygon"):
            assert self.open.pop() == tag


def test_it_has_each_decision_and_each_metrics_figures_and_bounds(store: Redis) -> None:
    started(store, replace(PLAN, min_samples=50))
    look(store)
    for count in (3, 3, 12):
        ended(store, count, status="failed", first="")
        look(store)
    data = report(store, state_of(store))
    assert [row["what"] for row in data["decisions"]] == ["start", "raise", "roll_back"]
    (failed,) = [metric for metric in data["metrics"] if metric["name"] == "failed"]
    assert (failed["verdict"], failed["baseline"], failed["candidate"]) == ("worse", {"share": 0.0}, {"share": 1.0})
    assert -1 <= failed["lower"] < failed["mean"] == 1 <= failed["upper"]
    assert failed["odds"] >= failed["limit"] == 700
    assert [row["metrics"]["failed"]["n"] for row in data["seen"]] == [3, 6, 18]
    (first_token,) = [metric for metric in data["metrics"] if metric["name"] == "first_token"]
    assert (first_token["n"], first_token["candidate"]) == (0, {"p50": None, "p95": None})
    page, tags = html(data), Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.counts["svg"] == 3, "parts, and two metrics with comparisons: failed and abandoned"
    assert failed["text"] in page
    assert "<b>rolled back</b> from 10%: failed: tasks that failed" in page
    assert "All new tasks go to a again" in page
    assert page.index("<td>failed</td>") < page.index("<td>abandoned</td>") < page.index("<td>empty</td>"), (
        "worst first"
    )
    plots, folded = page.index("<h2>Metrics"), page.index("<details>")
    assert page[plots:folded].count("<svg") == 1, "of what it was rolled back for; the others are folded"


def test_a_promoted_candidate_has_all_tasks(store: Redis) -> None:
    started(store)
    operations.promote(store, "m", full=True)
    page = html(report(store, state_of(store)))
    assert "<td>promote</td><td>100%</td>" in page
    assert "<code>penstock models alias m default=a</code> takes them back" in page


def test_a_page_shows_names_and_reasons_as_they_are_and_runs_and_loads_nothing(store: Redis) -> None:
    started(store)
    state = replace(state_of(store), version="<script>alert(1)</script>", reason='"><img src="http://example.com/">')
    page, tags = html(report(store, state)), Tags()
    tags.feed(page)
    assert not {"script", "img", "link", "iframe"} & tags.counts.keys()
    assert "&lt;script&gt;" in page
