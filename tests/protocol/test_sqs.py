"""Consumers on SQS do with every message what the model says, whatever SQS and its books do between two steps."""

from __future__ import annotations

import pytest
from redis import Redis

from tests.aws import Aws
from tests.aws_faults import Fault, faulty
from tests.exhaustive import few
from tests.histories import SEED, seeds
from tests.protocol.sqs_histories import History

#: What SQS does now and then, and its network.
FAULTS = (
    Fault("error", chance=0.05),
    Fault("throttle", chance=0.05),
    Fault("lost", chance=0.03),
    Fault("reset", chance=0.03),
    Fault("partial", chance=0.1),
    Fault("hidden", chance=0.05),
    Fault("twice", chance=0.3),
    Fault("kept", chance=0.2),
    Fault("stale", chance=0.5),
)


@pytest.mark.parametrize("seed", few(seeds(40), SEED))
def test_no_message_is_lost_or_given_to_two(seed: int, aws: Aws, valkey_url: str, valkey: Redis) -> None:
    history = History(aws, valkey_url, valkey, seed)
    try:
        history.run(40)
    finally:
        history.close()


@pytest.mark.parametrize(("seed", "steps"), few([(0, 12), *((seed, 30) for seed in seeds(40))], (0, 12)))
def test_no_message_is_lost_whatever_sqs_does(seed: int, steps: int, aws: Aws, valkey_url: str, valkey: Redis) -> None:
    with faulty(aws, seed) as (proxy, faults):
        history = History(proxy, valkey_url, valkey, seed, faults)
        faults.put(*FAULTS)
        try:
            history.run(steps)
        finally:
            history.close()
        assert faults.done.total() > 0
