"""A worker without transport and engine: takes messages off lists and drives the protocol's scripts, call by call."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence

from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.connection.script import Call, run, text
from producers.contract import keys
from producers.contract.stream import Logprobs, encode_prompt, encode_token
from producers.store import protocol
from producers.store.protocol import Append, Claimed


class FakeWorker:
    """One incarnation with a lease that does not lapse until `die`. Claims are kept by task."""

    def __init__(self, redis: Redis, incarnation: str = "fake") -> None:
        self.redis = redis
        self.incarnation = incarnation
        self.claims: dict[str, str] = {}
        redis.set(keys.lease(incarnation), "{}")

    def die(self) -> None:
        """The lease is gone, the claims stay."""
        self.redis.delete(keys.lease(self.incarnation))

    def take(self, queue: str, seconds: float = 0.0) -> str | None:
        """The id of the next message of a queue, best tier first; the message is gone. Waits for one that long."""
        tiers = sorted(keys.TIERS, key=lambda tier: keys.TIERS[tier][0])
        lists = [broker_keys.tier_list(queue, tier) for tier in tiers]
        if seconds:
            _, message = self.redis.brpop(lists, seconds) or (None, None)
        else:
            message = next(filter(None, map(self.redis.rpop, lists)), None)
        if message is None:
            return None
        task_id: str = json.loads(message)["headers"]["id"]
        return task_id

    def claim(self, task_id: str) -> Claimed:
        claim = uuid.uuid4().hex
        answer = protocol.read_claim(task_id, run(self.redis, self._call(task_id, claim)))
        if answer.record is not None:
            self.claims[task_id] = claim
        return answer

    def _call(self, task_id: str, claim: str) -> Call:
        """Of whichever version the task was sent to."""
        model, version = self.redis.hmget(keys.task(task_id), "model", "version")
        return protocol.claim(
            task_id, claim, self.incarnation, keys.Pool(text(model or "tiny"), text(version or "v"), "fake")
        )

    def prompt(self, task_id: str, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> str:
        """How likely its prompt was."""
        entries = encode_prompt(token_ids, logprobs)
        return text(run(self.redis, protocol.prompt(task_id, self.claims[task_id], entries)))

    def append(
        self,
        task_id: str,
        index: int,
        texts: Sequence[str],
        *,
        choice: int = 0,
        token_ids: Sequence[int] | None = None,
        logprobs: Sequence[Logprobs | None] | None = None,
        finish_reason: str | None = None,
    ) -> tuple[str, int]:
        """Tokens `index`, `index` + 1, ... of a choice in one step; a token's id is its index + 1000 * its choice, or
        of `token_ids`."""
        last = len(texts) - 1
        entries = [
            encode_token(
                choice,
                index + k,
                token_ids[k] if token_ids else index + k + 1000 * choice,
                piece,
                logprobs[k] if logprobs else None,
                finish_reason if k == last else None,
            )
            for k, piece in enumerate(texts)
        ]
        batch = [Append(task_id, self.claims[task_id], choice, index, entries)]
        return protocol.read_append(run(self.redis, protocol.append(batch)))[0]

    def finish(
        self,
        task_id: str,
        nexts: Sequence[int],
        *,
        status: str = "completed",
        reasons: Sequence[str] | None = None,
        error: dict[str, str] | None = None,
        prompt_tokens: int = 3,
        result: str = "",
    ) -> list[str]:
        answer = run(
            self.redis,
            protocol.finish(
                task_id,
                self.claims[task_id],
                status,
                reasons=json.dumps(reasons if reasons is not None else ["stop"] * len(nexts)),
                nexts=nexts,
                error=json.dumps(error),
                prompt_tokens=prompt_tokens,
                result=result,
            ),
        )
        return [text(part) for part in answer]

    def settle(self, task_id: str) -> None:
        run(self.redis, protocol.settle(task_id))
        self.claims.pop(task_id)

    def serve(self, task_id: str, pieces: Iterable[str] = ("Hello", ",", " world")) -> None:
        """A whole life: claim, a step a token, finish, settle."""
        assert self.claim(task_id).answer == "go"
        count = 0
        for count, piece in enumerate(pieces, 1):
            assert self.append(task_id, count - 1, [piece]) == ("ok", count)
        assert self.finish(task_id, [count])[0] == "won"
        self.settle(task_id)
