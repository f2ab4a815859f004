"""The configuration of pools: what makes no sense is refused by name before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workers.autoscaler.policy import Rules
from workers.autoscaler.pools import BadScaling, PoolSettings, parse, parse_rule, read


def test_a_file_with_pools(tmp_path: Path) -> None:
    path = tmp_path / "scaling.toml"
    path.write_text(
        '[[pool]]\nmodel = "tiny"\nversion = "1"\nmax = 4\ntarget_wait.priority = 1\n'
        '[[pool]]\nmodel = "other=tiny"\nactuator = "ecs://main/other?region=eu-west-1"\ntries = 3\nstart_limit = 600\n'
    )
    tiny, other = read(path)
    assert tiny == PoolSettings(
        "tiny", "1", Rules(max=4, target_wait={**Rules().target_wait, "priority": 1.0}), reference="tiny"
    )
    actuator = "ecs://main/other?region=eu-west-1"
    assert other == PoolSettings("other", None, Rules(), actuator, 3, 600.0, "other=tiny")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no pool"),
        ("[pool]\n", "has no pool"),
        ("pool = [", "is not TOML"),
        ("[[pools]]\n", "unknown key pools"),
        ("[[pool]]\nmax = 1\n", "model is missing"),
        ('[[pool]]\nmodel = "tiny"\ncooldown = 3\n', "there is no key cooldown; a pool has model, version"),
        ('[[pool]]\nmodel = "tiny"\nmin = 5\n', "min is 5 and max is 1"),
        ('[[pool]]\nmodel = "tiny"\nmax = 2.5\n', "max is 2.5: input should be a valid integer"),
        ('[[pool]]\nmodel = "tiny"\ncool_down = nan\n', "cool_down is NaN"),
        ('[[pool]]\nmodel = "tiny"\ntarget_wait.urgent = 1\n', "target_wait has no tier urgent; it has priority"),
        ('[[pool]]\nmodel = "tiny"\ntarget_wait.flex = -1\n', "target_wait.flex is -1"),
        ('[[pool]]\nmodel = "tiny"\nblind = 0\n', "blind is 0; it must be above 0"),
        ('[[pool]]\nmodel = "tiny"\nstep = -1\n', "step is -1; it must be 0 or more"),
        ('[[pool]]\nmodel = "tiny"\ntries = 0\n', "tries is 0"),
        ('[[pool]]\nmodel = "tiny"\nactuator = "k8s://x"\n', "actuator is 'k8s://x'; it must be one of export, local"),
        ('[[pool]]\nmodel = "tiny"\n' * 2, "tiny is there twice"),
        ('[[pool]]\nmodel = "tiny"\n[[pool]]\nmodel = "tiny"\nversion = "1"\n', "tiny without a version counts all"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "scaling.toml"
    path.write_text(text)
    with pytest.raises(BadScaling) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert said in str(refused.value)


def test_rules_of_a_command_line() -> None:
    assert parse_rule("duty-high=0.9") == {"duty_high": 0.9}
    assert parse_rule("target_wait.flex=60") == {"target_wait": {"flex": 60}}
    with pytest.raises(BadScaling, match="write NAME=NUMBER"):
        parse_rule("headroom")


@pytest.mark.parametrize(
    ("table", "cheap_start"),
    [
        ({}, 10.0),
        ({"actuator": "local"}, 3600.0),
        ({"actuator": "local:?threads=1", "cheap_start": 5.0}, 5.0),
        ({"actuator": "local", "patience": 0.9}, 0.0),
        ({"patience": 0.9}, 0.0),
        ({"patience": 0.9, "cheap_start": 20.0}, 20.0),
    ],
)
def test_a_start_of_local_workers_is_cheap_and_a_given_patience_holds(
    table: dict[str, Any], cheap_start: float
) -> None:
    assert parse({"model": "tiny", **table}).rules.cheap_start == cheap_start
