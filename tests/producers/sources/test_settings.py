"""The configuration is refused by table and field before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from producers.sources.settings import BadSources, read

QUEUE = "https://sqs.us-east-1.amazonaws.com/123456789012/orders"
MESSAGES = '[m]\ntype = "messages"\nqueue = "list:orders"\n'
SCHEDULE = '[s]\ntype = "schedule"\ncron = "@daily"\n'
TASK = '[s.task]\nmodel = "tiny"\nprompt = "x"\n'


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        ("", "has no source"),
        ("[m", "is not TOML"),
        ("x = 1", "stands outside a table"),
        ('["a b"]\ntype = "messages"', "is no name for a source"),
        ("[m]", "[m] type is missing; it must be one of"),
        ('[m]\ntype = "kafka"', '[m] type is "kafka"'),
        ("[m]\ntype = 7", "[m] type is 7"),
        ('[m]\ntype = "messages"', "[m] queue is missing: an SQS queue's URL"),
        (MESSAGES + "colour = 1", "[m] has no colour; it has type, queue"),
        (MESSAGES.replace("list:orders", "orders"), '[m] queue: it is "orders"; it must be an SQS'),
        (MESSAGES.replace("orders", "penstock:tasks"), "[m] queue: it is"),
        (MESSAGES + "reply = 7", "[m] reply is 7; it must be an SQS queue's URL"),
        (MESSAGES + 'reply = "arn:aws:sqs:us-east-1:123456789012:x"', "[m] reply: it is"),
        (MESSAGES + 'reply_allow = "list:*"', "[m] reply_allow is"),
        (MESSAGES + 'reply_format = "xml"', "[m] reply_format is"),
        (MESSAGES + f'dead_letters = "{QUEUE}"', "those of a list are in orders:dead"),
        (MESSAGES + "[m.task]\nmax_tokens = -1", "[m] task: max_tokens is -1"),
        (MESSAGES + '[m.task]\nprompt = "x"', "[m] task: it has prompt"),
        (SCHEDULE, "has to have either task, or batch and folder"),
        (SCHEDULE + 'batch = "x.jsonl"', "has to have either task, or batch and folder"),
        (SCHEDULE + TASK.replace("prompt", "promt"), '[s] task: unknown field "promt"'),
        (SCHEDULE.replace("@daily", "daily") + TASK, "[s] cron is"),
        (SCHEDULE + "jitter = -1\n" + TASK, "[s] jitter is -1; it must be most seconds"),
        (SCHEDULE + 'timezone = "Berlin"\n' + TASK, "[s] timezone is"),
    ],
)
def test_refused(config: str, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "sources.toml"
    path.write_text(config)
    with pytest.raises(BadSources) as refused:
        read(path)
    assert wrong in str(refused.value)
    assert str(path) in str(refused.value)


def test_all_types_are_read(tmp_path: Path) -> None:
    path = tmp_path / "sources.toml"
    path.write_text(
        f'{MESSAGES}reply_allow = ["list:to-*"]\n{SCHEDULE}{TASK}[q]\ntype = "messages"\nqueue = "{QUEUE}"\n'
        'dead_letters = "https://sqs.us-east-1.amazonaws.com/123456789012/dead"\n[q.task]\nmodel = "tiny"\n'
    )
    assert {name: one.type for name, one in read(path).items()} == {"m": "messages", "s": "schedule", "q": "messages"}


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSources, match=r"cannot read .*none.toml: No such file"):
        read(tmp_path / "none.toml")
