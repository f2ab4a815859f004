"""Runs transformers' continuous batching on the workloads of engine.bench.offline, which starts it as a process."""

from __future__ import annotations

import json
import os
import time
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import torch

from engine.bench.offline import Job, measure, summary, warm_up, workload
from engine.bench.options import arguments
from engine.text.config import Config, read_config

_PAGE = 32


def batching(
    model: Any, plans: list[list[Job]], *, page: int, step_tokens: int, **settings: Any
) -> AbstractContextManager[Any]:
    """A context with a running batching manager of transformers' `model` that has room for the largest plan.

    `settings`: others of its ContinuousBatchingConfig.
    """
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model.generation_config.eos_token_id = None
    model.generation_config.do_sample = False
    sequences = max(map(len, plans))
    pages = max(sum(-(-(len(prompt) + output + 1) // page) for prompt, output in jobs) for jobs in plans)
    settings |= {
        "num_blocks": pages + sequences + 8,
        "max_batch_tokens": step_tokens,
        "max_requests_per_batch": sequences + 1,
        "allow_block_sharing": False,
        "auto_switch_to_flash": False,
    }
    supported = {field.name for field in fields(ContinuousBatchingConfig)}
    # The name of the page size differs between versions.
    settings["page_size" if "page_size" in supported else "block_size"] = page
    # transformers is only partly typed.
    library: Any = transformers
    longest = max(output for jobs in plans for _, output in jobs)
    manager: AbstractContextManager[Any] = model.continuous_batching_context_manager(
        generation_config=library.GenerationConfig(
            max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(**{k: v for k, v in settings.items() if k in supported}),
        block=True,
        timeout=5,
    )
    return manager


def loaded(args: Any) -> Any:
    """The model in `args.model`."""
    import transformers

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype, attn_implementation="sdpa")
    return model.to(device).eval()


def run_jobs(manager: Any, jobs: list[Job]) -> dict[str, float]:
    began, cpu_began = time.perf_counter(), time.process_time()
    places = {}
    for i, (prompt, output) in enumerate(jobs):
        places[manager.add_request(prompt, max_new_tokens=output, record_timestamps=True, eos_token_id=-1)] = i
    times: list[list[float]] = [[] for _ in jobs]
    while places:
        result = manager.get_result(timeout=5)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers' batching manager has ended")
            continue
        if result.error:
            raise RuntimeError(result.error)
        if result.is_finished():
            # The manager stamps tokens by the same clock, but may not stamp the last one before it returns the result.
            stamps = list(result.timestamps or [])[: len(result.generated_tokens)]
            missing = len(result.generated_tokens) - len(stamps)
            times[places.pop(result.request_id)] = stamps + [time.perf_counter()] * missing
    return measure(began, jobs, times, time.process_time() - cpu_began)


def main() -> None:
    args = arguments(__doc__).parse_args()
    vocab_size = Config.of_model(read_config(args.model)).integer("vocab_size")
    plans = {
        name: [workload(name, vocab_size, args.seed, repeat) for repeat in range(args.repeats)]
        for name in args.workload
    }
    every = [jobs for repeats in plans.values() for jobs in repeats]
    with batching(loaded(args), every, page=_PAGE, step_tokens=1024, default_compile_level=0) as manager:
        results = {}
        for name, repeats in plans.items():
            run_jobs(manager, warm_up(name, vocab_size, args.seed))
            results[name] = summary(name, "transformers-cb", [run_jobs(manager, jobs) for jobs in repeats])
        args.json.write_text(json.dumps({"dtype": args.dtype, "results": results}))
        # Its threads do not always end by themselves, and the figures are written.
        os._exit(0)


if __name__ == "__main__":
    main()
