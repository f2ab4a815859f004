"""Messages from outside become tasks, once each, and their results go back."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from cloudevents.core.bindings.http import to_binary_event, to_structured_event
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from redis import Redis

from producers.connection.script import run, text
from producers.contract import keys
from producers.sources.messages.replies import TRIES, Reply
from producers.store import outbox, protocol
from tests.aws import Aws
from tests.aws_faults import Fault, faulty
from tests.chaos.sourcing import SourcesProcess
from tests.exhaustive import few
from tests.producers.sources.conftest import Serving, Sqs, send_unsent

TASK = {"model": "tiny", "prompt": "def main():", "max_tokens": 3}
LIST = '[orders]\ntype = "messages"\nqueue = "list:orders"\nreply = "list:answers"\nreply_allow = ["list:to-*"]\n'


def pushed(valkey: Redis, *messages: Any) -> None:
    valkey.rpush("orders", *(one if isinstance(one, (str, bytes)) else json.dumps(one) for one in messages))


def popped(valkey: Redis, name: str = "answers") -> Any:
    found = valkey.lpop(name)
    return None if found is None else json.loads(found)  # type: ignore[arg-type]


def event(**attributes: str) -> CloudEvent:
    usual = {"id": "e1", "source": "/orders", "type": "order.placed", "datacontenttype": "application/json"}
    return CloudEvent(attributes=usual | attributes, data=TASK)


@pytest.mark.usefixtures("model")
class TestLists:
    def test_a_message_becomes_a_task_whose_result_is_pushed_back(
        self, valkey_url: str, valkey: Redis, serving: Serving, tmp_path: Path
    ) -> None:
        with SourcesProcess(valkey_url, tmp_path, LIST) as process:
            pushed(valkey, TASK | {"id": "order-7", "metadata": {"user": "7"}})
            answer = process.until(lambda: popped(valkey))
            assert answer["correlation_id"] == "order-7"
            assert (answer["id"], answer["status"]) == (serving.served[0], "completed")
            assert answer["choices"][0]["text"] == "Hello, world"
            assert answer["metadata"] == {"user": "7"}
            process.until(lambda: not valkey.exists("orders", "orders:taken", "orders:hidden"))

    def test_a_message_chooses_among_the_targets_that_the_settings_allow(
        self, valkey_url: str, valkey: Redis, serving: Serving, tmp_path: Path
    ) -> None:
        def counts() -> dict[bytes, int]:
            """How /metrics counts them."""
            return {name.split()[2]: int(n) for name, n in valkey.hgetall(keys.METRICS_SOURCES).items()}  # type: ignore[union-attr]

        with SourcesProcess(valkey_url, tmp_path, LIST) as process:
            pushed(valkey, TASK | {"id": "a", "reply_to": "list:to-me"}, TASK | {"id": "b", "reply_to": "list:other"})
            assert process.until(lambda: popped(valkey, "to-me"))["status"] == "completed"
            refused = process.until(lambda: popped(valkey))
            assert (refused["correlation_id"], refused["id"], refused["error"]["param"]) == ("b", None, "reply_to")
            assert not valkey.exists("other")
            assert len(serving.served) == 1
            process.until(lambda: counts() == {b"done": 1, b"refused": 1, b"missed": 0})

    def test_a_target_that_is_allowed_no_more_is_a_dead_row_that_may_be_replayed(
        self, valkey_url: str, valkey: Redis, serving: Serving, tmp_path: Path
    ) -> None:
        config = '[orders]\ntype = "messages"\nqueue = "list:orders"\n'
        with SourcesProcess(valkey_url, tmp_path, config + 'reply = "list:answers"\n') as process:
            pushed(valkey, TASK | {"id": "kept"})
            process.until(lambda: popped(valkey))
            process.until(lambda: valkey.exists(keys.WEBHOOKS_DELIVERED))  # noted after it is sent
        (name,) = (text(one) for one in valkey.zrange(keys.WEBHOOKS_DELIVERED, 0, -1))  # type: ignore[union-attr]
        with SourcesProcess(valkey_url, tmp_path, config) as process:
            assert run(valkey, outbox.replay(name)) == b"replayed"
            process.until(lambda: valkey.zscore(keys.WEBHOOKS_DEAD, name))
        with SourcesProcess(valkey_url, tmp_path, config + 'reply_allow = ["list:*"]\n') as process:
            assert run(valkey, outbox.replay(name)) == b"replayed"
            assert process.until(lambda: popped(valkey))["correlation_id"] == "kept"

    def test_a_reply_has_all_its_tries_however_old_it_is_and_again_when_it_is_replayed(
        self, valkey_url: str, valkey: Redis, tmp_path: Path
    ) -> None:
        reply, name = Reply("orders", "list:answers", "old", "json", {"message": "no JSON"}), "evt_1.reply"
        fields = {"webhook_id": "evt_1", "type": "response.failed", "object": "", "source": "orders", "at": "1"}
        run(valkey, outbox.put(name, fields | {"url": reply.url, "reply": reply.to_json()}))
        valkey.set("answers", "of a type that takes no reply")

        def told() -> tuple[str, int]:
            state, tries = valkey.hmget(keys.webhook_row(name), "state", "tries")
            return text(state), int(tries)

        with SourcesProcess(valkey_url, tmp_path, LIST) as process:
            process.until(lambda: told()[1] > 0)
            assert told()[0] == "due"
        valkey.hset(keys.webhook_row(name), "tries", TRIES - 1)
        valkey.zadd(keys.replies("orders"), {name: 1}, xx=True)
        with SourcesProcess(valkey_url, tmp_path, LIST) as process:
            process.until(lambda: told() == ("dead", TRIES))
            process.until(lambda: f"reply {name} is given up after {TRIES} tries" in process.log.read_text())
            assert run(valkey, outbox.replay(name)) == b"replayed"
            process.until(lambda: told()[1] > 0)
            assert told()[0] == "due"

    def test_a_message_whose_task_was_deleted_does_not_make_it_again(
        self, valkey_url: str, valkey: Redis, serving: Serving, tmp_path: Path
    ) -> None:
        """It comes once more, as after a kill: nothing is made of it, kept of it, or answered."""
        with SourcesProcess(valkey_url, tmp_path, LIST) as process:
            pushed(valkey, TASK | {"id": "gone"})
            task_id = process.until(lambda: popped(valkey))["id"]
            process.until(lambda: valkey.hget(keys.task(task_id), "settled"))
            run(valkey, protocol.delete(task_id, "x"))
            pushed(valkey, TASK | {"id": "gone"}, TASK | {"id": "next"})
            assert process.until(lambda: popped(valkey))["correlation_id"] == "next"
            process.until(lambda: not valkey.exists("orders", "orders:taken", "orders:hidden"))
            assert not valkey.exists(keys.task(task_id), "orders:dead")
            assert len(valkey.keys(keys.idempotency("*"))) == 1

    def test_equal_messages_are_two_tasks_unless_they_have_an_id(
        self, valkey_url: str, valkey: Redis, serving: Serving, tmp_path: Path
    ) -> None:
        with SourcesProcess(valkey_url, tmp_path, LIST) as process:
            pushed(valkey, TASK, TASK, TASK | {"id": "once"}, TASK | {"id": "once"})
            process.until(lambda: not valkey.exists("orders", "orders:taken"))
            process.until(lambda: len(serving.served) == 3)
            pushed(valkey, TASK | {"id": "once", "prompt": "another"})
            letter = process.until(lambda: popped(valkey, "orders:dead"))
            assert "an earlier message with this id" in letter["reason"]
            assert len(serving.served) == 3

    def test_cloudevents_are_answered_by_cloudevents(
        self, valkey_url: str, valkey: Redis, serving: Serving, tmp_path: Path
    ) -> None:
        with SourcesProcess(valkey_url, tmp_path, LIST) as process:
            body = to_structured_event(event(), JSONFormat()).body
            pushed(valkey, body, body)
            raw = process.until(lambda: valkey.lpop("answers"))
            answer = JSONFormat().read(None, raw)
            assert (answer.get_subject(), answer.get_source()) == ("e1", "/penstock/orders")
            assert answer.get_type() == "penstock.response.completed"
            assert answer.get_data()["choices"][0]["text"] == "Hello, world"
            process.until(lambda: not valkey.exists("orders", "orders:taken"))
            assert len(serving.served) == 1

    @pytest.mark.parametrize(
        ("message", "reason"),
        [
            ("{", "not JSON"),
            (b'{"model": "\xff"}', "not UTF-8"),
            ("[]", "not as a batch"),
            ("7", "must be a JSON object"),
            ('{"model": "tiny", "prompt": "x", "temperature": NaN}', "NaN"),
            ({"model": "tiny"}, "prompt is missing"),
            (TASK | {"max_tokens": "3"}, "max_tokens"),
            (TASK | {"model": "nobody"}, "There is no model"),
            (TASK | {"id": 7}, "id is 7"),
            (TASK | {"reply_to": "list:penstock:tasks"}, "reply_to"),
            ({"specversion": "0.3", "id": "1", "source": "/", "type": "t", "data": TASK}, "specversion"),
            ({"specversion": "1.0", "source": "/", "type": "t", "data": TASK}, "has no id"),
            ({"specversion": "1.0", "id": "1", "source": "/", "type": "t", "data": "x"}, "data is"),
            ({"specversion": "1.0", "id": "1", "source": "/", "type": "t", "data_base64": "!"}, "base64"),
            (
                {"specversion": "1.0", "id": "1", "source": "/", "type": "t", "datacontenttype": "text/xml", "data": 1},
                "datacontenttype",
            ),
            ("[" * 100_000, "not JSON"),
        ],
    )
    def test_a_bad_message_is_kept_apart_and_its_sender_hears_why(
        self, message: Any, reason: str, valkey_url: str, valkey: Redis, records: Any, tmp_path: Path, listener: Any
    ) -> None:
        pushed(valkey, message)
        letter = listener.until(lambda: popped(valkey, "orders:dead"))
        assert reason in letter["reason"]
        said = message if isinstance(message, (str, bytes)) else json.dumps(message)
        body = letter["body"].encode("utf-8", "surrogateescape")
        assert body == (said if isinstance(said, bytes) else said.encode())
        answer = listener.until(lambda: popped(valkey))
        answer = answer.get("data", answer)
        assert answer["status"] == "failed"
        assert reason in answer["error"]["message"]
        assert records() == {}
        assert not valkey.exists("orders:taken", "orders:hidden")

    def test_told_to_stop_it_gives_back_what_it_holds(
        self, valkey_url: str, valkey: Redis, records: Any, tmp_path: Path
    ) -> None:
        """The store is full, so that nothing can be submitted."""
        with SourcesProcess(valkey_url, tmp_path, LIST, "--health-port", "0") as process:
            valkey.config_set("maxmemory", 1)
            try:
                pushed_anyway(valkey, TASK)
                process.until(lambda: valkey.hlen("orders:taken") == 1)
                process.until(lambda: "a message is held" in process.log.read_text())
                assert process.stop() == 0
            finally:
                valkey.config_set("maxmemory", 0)
        assert float(valkey.zrange("orders:hidden", 0, 0, withscores=True)[0][1]) / 1000 <= valkey.time()[0] + 1
        assert records() == {}


def pushed_anyway(valkey: Redis, message: Any) -> None:
    """Push to a server whose memory is full."""
    valkey.eval("#!lua flags=allow-oom\nreturn redis.call('RPUSH', KEYS[1], ARGV[1])", 1, "orders", json.dumps(message))


@pytest.fixture
def listener(valkey_url: str, model: str, tmp_path: Path) -> Any:
    with SourcesProcess(valkey_url, tmp_path, LIST) as process:
        yield process


@pytest.fixture
def orders(aws: Aws) -> Sqs:
    return Sqs(aws.client("sqs"), "orders")


@pytest.fixture
def answers(aws: Aws) -> Sqs:
    return Sqs(aws.client("sqs"), "answers", redrive=False)


def answered(orders: Sqs, reply: str) -> str:
    return f'[orders]\ntype = "messages"\nqueue = "{orders.url}"\nreply = "{reply}"\n'


@pytest.mark.usefixtures("model")
class TestSqs:
    def test_json_and_both_modes_of_cloudevents_become_tasks_and_are_answered(
        self, aws: Aws, orders: Sqs, answers: Sqs, valkey_url: str, serving: Serving, tmp_path: Path
    ) -> None:
        config = answered(orders, answers.url)
        with SourcesProcess(valkey_url, tmp_path, config, AWS_ENDPOINT_URL=aws.url) as process:
            orders.send(TASK | {"id": "plain"})
            structured = to_structured_event(event(id="structured"), JSONFormat())
            orders.send(structured.body.decode(), content_type=structured.headers["content-type"])
            binary = to_binary_event(event(id="binary"), JSONFormat())
            orders.send(binary.body.decode(), **{name.replace("-", "_"): text for name, text in binary.headers.items()})
            found: dict[str, Any] = {}

            def all_there() -> bool:
                for one in answers.receive():
                    said = json.loads(one["Body"])
                    found[said.get("correlation_id") or said["subject"]] = (said, one["MessageAttributes"])
                return len(found) == 3

            process.until(all_there)
            assert found["plain"][0]["choices"][0]["text"] == "Hello, world"
            assert found["plain"][1]["content-type"]["StringValue"] == "application/json"
            for mode in ("structured", "binary"):
                said, attributes = found[mode]
                assert said["data"]["status"] == "completed"
                assert attributes["content-type"]["StringValue"] == "application/cloudevents+json"
            process.until(lambda: len(orders) == 0)
        assert len(serving.served) == 3

    def test_a_reply_that_is_too_large_comes_without_outputs(
        self, aws: Aws, orders: Sqs, answers: Sqs, valkey_url: str, serving: Serving, tmp_path: Path
    ) -> None:
        serving.pieces = ["x" * 300_000]
        aws.client("sqs").set_queue_attributes(QueueUrl=answers.url, Attributes={"MaximumMessageSize": "262144"})
        config = answered(orders, answers.url)
        with SourcesProcess(valkey_url, tmp_path, config, AWS_ENDPOINT_URL=aws.url) as process:
            orders.send(TASK | {"id": "long"})
            (message,) = process.until(answers.receive)
            said = json.loads(message["Body"])
            assert (said["correlation_id"], said["status"], said["choices"]) == ("long", "completed", None)
            assert "too large" in said["omitted"]

    def test_a_topic_is_answered(
        self, aws: Aws, orders: Sqs, answers: Sqs, valkey_url: str, serving: Serving, tmp_path: Path
    ) -> None:
        sns = aws.client("sns")
        topic = sns.create_topic(Name="done")["TopicArn"]
        sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=answers.arn, Attributes={"RawMessageDelivery": "true"})
        config = answered(orders, topic)
        with SourcesProcess(valkey_url, tmp_path, config, AWS_ENDPOINT_URL=aws.url) as process:
            orders.send(TASK)
            (message,) = process.until(answers.receive)
            assert json.loads(message["Body"])["id"] == serving.served[0]

    def test_a_bad_message_is_moved_with_its_reason(
        self, aws: Aws, valkey_url: str, records: Any, tmp_path: Path
    ) -> None:
        orders, dead = (Sqs(aws.client("sqs"), name, redrive=False) for name in ("orders", "dead"))
        config = f'[orders]\ntype = "messages"\nqueue = "{orders.url}"\ndead_letters = "{dead.url}"\n'
        with SourcesProcess(valkey_url, tmp_path, config, AWS_ENDPOINT_URL=aws.url) as process:
            orders.send("no JSON", colour="red")
            (letter,) = process.until(dead.receive)
            process.until(lambda: len(orders) == 0)
        assert letter["Body"] == "no JSON"
        said = {name: one["StringValue"] for name, one in letter["MessageAttributes"].items()}
        assert said["colour"] == "red"
        assert "not JSON" in said["penstock-reason"]
        assert records() == {}

    def test_a_bad_message_that_is_too_large_for_the_letters_is_shortened_or_stays(
        self, aws: Aws, valkey_url: str, records: Any, tmp_path: Path
    ) -> None:
        orders, dead = (Sqs(sqs := aws.client("sqs"), name, redrive=False) for name in ("orders", "dead"))
        config = f'[orders]\ntype = "messages"\nqueue = "{orders.url}"\ndead_letters = "{dead.url}"\n'
        sqs.set_queue_attributes(QueueUrl=dead.url, Attributes={"MaximumMessageSize": "8192"})
        with SourcesProcess(valkey_url, tmp_path, config, AWS_ENDPOINT_URL=aws.url) as process:
            orders.send("x" * 100_000)
            (letter,) = process.until(dead.receive)
            sqs.set_queue_attributes(QueueUrl=dead.url, Attributes={"MaximumMessageSize": "1024"})
            orders.send("y" * 100_000)
            process.until(lambda: "a bad message stays in queue orders" in process.log.read_text())
            orders.send(TASK)
            process.until(lambda: records() and len(orders) == 1)
        assert letter["Body"] == "x" * len(letter["Body"])
        assert letter["MessageAttributes"]["penstock-shortened"]["StringValue"] == "100000"

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("count", few([12, 40], 12))
    def test_whatever_sqs_does_each_message_is_one_task_and_is_answered(
        self,
        aws: Aws,
        orders: Sqs,
        answers: Sqs,
        valkey_url: str,
        serving: Serving,
        records: Any,
        tmp_path: Path,
        count: int,
    ) -> None:
        """The first process is killed while all that it receives stays visible; then faults of each kind come."""
        for number in range(count):
            orders.send(TASK | {"metadata": {"number": str(number)}})
        config = answered(orders, answers.url) + "visibility = 10\n"
        with faulty(aws, 7) as (hurt, faults):
            env = {"AWS_ENDPOINT_URL": hurt.url}
            faults.put(Fault("twice", "ReceiveMessage"), Fault("kept", "DeleteMessage"))
            with SourcesProcess(valkey_url, tmp_path, config, **env) as process:
                process.until(records)
                process.stop(signal.SIGKILL)
            faults.calm()
            send_unsent(valkey_url)
            chances = {"twice": 0.3, "kept": 0.2, "partial": 0.1, "throttle": 0.1, "error": 0.1, "reset": 0.05}
            faults.put(*(Fault(kind, chance=chance) for kind, chance in chances.items()))
            faults.put(*(Fault("lost", action, 0.2) for action in ("SendMessage", "DeleteMessage")))
            with SourcesProcess(valkey_url, tmp_path, config, **env) as process:
                # A reply that failed six times is tried again after a minute in all.
                process.until(lambda: len(records()) == count and len(answers) >= count, 200)
        numbers = [json.loads(fields["metadata"])["number"] for fields in records().values()]
        assert sorted(map(int, numbers)) == list(range(count))
        assert len(set(serving.served)) == count

    def test_without_a_place_for_bad_messages_or_a_queue_it_is_not_ready_and_says_why(
        self, aws: Aws, valkey_url: str, tmp_path: Path
    ) -> None:
        bare = Sqs(aws.client("sqs"), "bare", redrive=False)
        config = (
            f'[bare]\ntype = "messages"\nqueue = "{bare.url}"\n'
            f'[gone]\ntype = "messages"\nqueue = "{bare.url.replace("bare", "gone")}"\n'
        )
        options = ("--health-port", "0")
        with SourcesProcess(valkey_url, tmp_path, config, *options, AWS_ENDPOINT_URL=aws.url) as process:
            reasons = process.until(lambda: two(process.reasons()))
        assert "bare: queue bare has no redrive policy" in reasons[0]
        assert "gone: cannot read the settings of queue gone" in reasons[1]


def two(reasons: list[str]) -> list[str] | None:
    return reasons if len(reasons) == 2 else None
