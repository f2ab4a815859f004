"""What `penstock up` publishes at its start."""

from __future__ import annotations

from redis import Redis

from engine.text import ModelCard
from producers.store.fleet import cards, rollouts
from workers.cli.publication import publish_own
from workers.library import find_model
from workers.library.reference import BUNDLED, described
from workers.rollout import New, begin

UP = "up:here.1.ab"
OLD, NEW = (ModelCard.from_folder(BUNDLED / name).version for name in ("tiny", "tiny-v2"))


def test_a_start_with_the_version_that_a_rollout_goes_back_to_leaves_the_card_to_it(
    valkey: Redis, valkey_url: str
) -> None:
    old, new = find_model("tiny"), find_model("tiny=tiny-v2")
    publish_own(valkey_url, valkey_url, old, UP)
    begun = begin(valkey, New(new, *described(new)), None, 1)
    assert begun.before_reference == ""
    cards.publish(valkey, *described(new))
    draining = begun.to("draining", 1.0)
    assert rollouts.change(valkey, begun, draining)
    back = begin(valkey, New(old, *described(old)), None, 1)
    assert (back.phase, back.before, back.before_reference) == ("starting", NEW, new.reference)
    assert f"new tasks of tiny go to version {NEW}: its rollout goes on" in publish_own(valkey_url, valkey_url, old, UP)
    assert (cards.read(valkey, "tiny") or {})["version"] == NEW
    assert rollouts.change(valkey, back, back.to("done", 2.0)), "it is stored as it is read"


def test_a_rollout_that_has_switched_is_turned_back_only_once_it_is_done(valkey: Redis, valkey_url: str) -> None:
    def start() -> str:
        return publish_own(valkey_url, valkey_url, find_model("tiny"), UP)

    def standing() -> str:
        card = cards.read(valkey, "tiny")
        assert card is not None
        return str(card["version"])

    new = find_model("tiny=tiny-v2")
    assert start() == ""
    begun = begin(valkey, New(new, *described(new)), None, 1)
    assert (start(), standing()) == ("", OLD)
    cards.publish(valkey, *described(new))
    assert f"new tasks of tiny go to version {NEW}: its rollout goes on" in start()
    draining = begun.to("draining", 1.0)
    assert rollouts.change(valkey, begun, draining)
    start()
    assert standing() == NEW
    assert rollouts.change(valkey, draining, draining.to("done", 2.0))
    assert f"until now, they went to version {NEW}" in start()
    assert standing() == OLD
