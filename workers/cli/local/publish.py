"""What `penstock up` publishes at its start: its models, but for one whose rolling update has switched and drains.

An `up` that ends in the middle of an update is started again with the folder of before. It must not turn the update
back: the new version's tasks would wait for workers that nobody starts.
"""

from __future__ import annotations

from engine.text.checkpoint import model_version
from producers.connection.trouble import said
from producers.store.fleet import cards, rollouts
from workers.cli.exits import Exit, Failure
from workers.cli.models.publish import publish_to
from workers.connect import LOST, connect
from workers.library import Found


def publish_own(broker: str, store: str, found: Found) -> str:
    """Publish a model. Returns what the operator should know of it, or "". Raises Failure, and Refused."""
    own = model_version(found.folder)
    try:
        with connect(store) as client:
            rollout, card = rollouts.read(client, found.name), cards.read(client, found.name)
    except LOST as error:
        raise Failure(f"the store does not answer: {said(error)}", Exit.UNREACHABLE) from error
    standing = None if card is None else str(card["version"])
    switched = rollout is not None and rollout.phase in rollouts.UNDER_WAY and rollout.version == standing
    if rollout is not None and switched and rollout.before == own:
        return f"new tasks of {found.name} go to version {standing}: its rollout goes on with `penstock rollout`"
    publish_to(broker, store, found, over=standing)
    if standing in (None, own):
        return ""
    return f"new tasks of {found.name} go to version {own} from now on; until now, they went to version {standing}"
