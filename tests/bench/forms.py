"""What an output's form costs a step: `python -m tests.bench.forms MODEL`. What bounding a schema costs: `--rules`.

The same requests with a form and without, in turns; none ends before its last token. Another process's load falls on
both. MODEL: a folder with a tokenizer, such as `python -m tests.bench.checkpoints` makes.

`--rules` needs no model: it tells the processor time of one thread, the least of some rounds, for some schemas.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import RequestError
from engine.grammar import schema as rules
from engine.grammar.source import form_of, new_rules

TOKENS = 48
#: Forms that go on: text that may be nearly anything, text of few tokens, JSON with everything that it may have.
FORMS = {
    "any text": {"regex": "(?s:.){400,}"},
    "small letters": {"regex": "[a-z ]{400,}"},
    "JSON": {"json_schema": {"type": "array", "items": {"type": ["string", "integer", "object"]}, "minItems": 400}},
}


def seconds(engine: Engine, params: SamplingParams, count: int) -> float:
    prompts = [list(range(10 + i, 74 + i)) for i in range(count)]
    began = time.perf_counter()
    found = engine.generate(prompts, params)
    took = time.perf_counter() - began
    assert {len(one.token_ids) for one in found} == {TOKENS}, [one.error or one.text for one in found]
    return took


def measure(engine: Engine, count: int, rounds: int) -> dict[str, float]:
    plain = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=1, ignore_eos=True)
    asked = {"none": plain} | {
        name: SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=1, ignore_eos=True, **form)
        for name, form in FORMS.items()
    }
    for one in asked.values():
        seconds(engine, one, 1)
    took = {name: [] for name in asked}
    for _ in range(rounds):
        for name, one in asked.items():
            took[name].append(seconds(engine, one, count))
    none = statistics.median(took["none"])
    return {name: statistics.median(times) / none for name, times in took.items()} | {
        "tokens_per_s": TOKENS * count / none
    }


def schemas() -> dict[str, dict[str, Any]]:
    """Schemas as callers write them, and the last two as those who want to hold others up."""
    kind = {"type": "object", "properties": {"kind": {"const": "a"}, "n": {"type": "integer"}}, "required": ["kind"]}
    texts = {f"property_{at}": {"type": "string"} for at in range(2000)}
    kinds = [kind | {"properties": kind["properties"] | {"kind": {"const": f"k{at}"}}} for at in range(300)]
    return {
        "10 numbers": {"type": "object", "properties": {f"n{at}": {"type": "number"} for at in range(10)}},
        "100 numbers": {"type": "object", "properties": {f"n{at}": {"type": "number"} for at in range(100)}},
        "2,000 texts, required": {"type": "object", "properties": texts, "required": list(texts)},
        "`enum` of 1,000 words": {"enum": [f"word {at}" for at in range(1000)]},
        "`anyOf` of 300 objects": {"anyOf": kinds},
        "`oneOf` of references to 300 objects": {
            "oneOf": [{"$ref": f"#/$defs/K{at}"} for at in range(300)],
            "$defs": {f"K{at}": each for at, each in enumerate(kinds)},
        },
        "`allOf` of 100 objects": {"allOf": [{"properties": {f"p{at}": {"type": "number"}}} for at in range(100)]},
        "300 lists of any JSON": {"prefixItems": [{"items": {}}] * 300},
        "1,000 `allOf` of a reference": {
            "prefixItems": [{"allOf": [{"$ref": "#/$defs/a"}]}] * 1000,
            "$defs": {"a": {"properties": {"x": {"type": "number"}}}},
        },
    }


def cost_of_rules(rounds: int) -> None:
    """Print for each schema what it costs to bound it, and to make a matcher of it with its bounds and without."""
    from llguidance import LLTokenizer

    tokenizer = LLTokenizer("byte")

    def bound(schema: dict[str, Any]) -> rules.Bounded:
        rules._bounded.cache_clear()
        return rules.bounded(schema)

    def made(schema: dict[str, Any]) -> float | None:
        form = form_of("json_schema", json.dumps(schema))
        try:
            return least_ms(rounds, lambda: new_rules(form, tokenizer))
        except RequestError:  # it cannot be followed
            return None

    for name, schema in schemas().items():
        followed = bound(schema).schema
        row = {
            "schema": name,
            "characters": len(json.dumps(schema)),
            "bounded_ms": least_ms(rounds, partial(bound, schema)),
            "characters_then": len(json.dumps(followed)),
            "to_the_letter": rules.rules_of(followed) is None,
            "matcher_ms": made(schema),
            "matcher_ms_then": made(followed),
        }
        print(json.dumps(row), flush=True)


def least_ms(rounds: int, work: Callable[[], object]) -> float:
    """The least processor time (ms) of this thread."""
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return round(1000 * min(times), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="?")
    parser.add_argument("--rules", action="store_true")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.rules:
        cost_of_rules(args.rounds)
        return
    if args.model is None:
        parser.error("give a MODEL, or --rules")
    with Engine.load(args.model, EngineConfig(device="cpu", threads=args.threads, kv_cache_bytes=1 << 30)) as engine:
        for count in args.sequences:
            print(json.dumps({"sequences": count, **measure(engine, count, args.rounds)}), flush=True)


if __name__ == "__main__":
    main()
