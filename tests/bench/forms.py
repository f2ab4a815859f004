"""What an output's form costs a step: `python -m tests.bench.forms MODEL`.

The same requests with a form and without, in turns; none ends before its last token. Another process's load falls on
both. MODEL: a folder with a tokenizer, such as `python -m tests.bench.checkpoints` makes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from engine import Engine, EngineConfig, SamplingParams

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with Engine.load(args.model, EngineConfig(device="cpu", threads=args.threads, kv_cache_bytes=1 << 30)) as engine:
        for count in args.sequences:
            print(json.dumps({"sequences": count, **measure(engine, count, args.rounds)}), flush=True)


if __name__ == "__main__":
    main()
