"""Plans capacity: what a model needs on a GPU and makes there, how many workers a load needs, and what they cost.

    Size (config.json) ─▶ Need: weights, KV cache ─▶ room(gpu): sequences at once below the line
    Work, Speed (roofline) ──┐
    kept profile (measured) ─┴▶ Rates ─▶ WorkerModel ─▶ the simulation under arrivals ─▶ Fleet: workers, waits, hours
                                                                                      └▶ break-even of scale-to-zero

Rates on a GPU are the roofline's times a share that was measured: `SHARES`. With n sequences at once, each with P
prompt and G output tokens, G steps and the prompts of those that begin meanwhile take G * step(n) + n * prompt seconds,
in which n * G tokens are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf
from typing import Final

from engine.kernels.reference import stored_width
from engine.models import Size
from engine.models.shares import possible_ranks
from engine.roofline import Gpu, Work
from producers.contract.profile import Profile
from workers.autoscaler.policy import Rules
from workers.trials.simulate.compare import time_to_first
from workers.trials.simulate.scalers import Policy, Schedule
from workers.trials.simulate.simulation import Outcome, Scaler, Simulation, WorkerModel
from workers.trials.simulate.traces import Arrival

#: How weights may be kept -> bytes of a matrix's element, with scales of 16 bits for each 128 elements.
WEIGHTS: Final = {"fp8": 1.0, "int8": 1.0 + 2 / 128, "int4": 0.5 + 2 / 128}
#: Share of the roofline that the engine reaches: 0.76 to 0.92 in bf16 and 0.52 to 0.62 with fp8, on an H200 and an H100
#: (docs/notes/gpu-limits.md). Nobody has measured 8-bit and 4-bit integers on a GPU.
SHARES: Final = {"": 0.8, "fp8": 0.55, "int8": 0.5, "int4": 0.5}
#: The host's work for a step, and for each of its sequences (s), on the H200's machine: the limit of small models.
HOST_S, HOST_ROW_S = 1.15e-3, 22e-6
#: Share of the best throughput that a knee has, as in workers' profiles (`workers.measure.KNEE_SHARE`).
KNEE_SHARE: Final = 0.85
#: Quantile of the waits that a fleet must keep.
QUANTILE: Final = 0.95
_YEAR_S: Final = 366 * 86_400.0


@dataclass(frozen=True, slots=True)
class Load:
    """The tokens of a mean task."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Margins:
    """`overhead`: added to weights and KV cache, for activations, fragments, the driver. `line`: the share of a GPU's
    memory that may be used."""

    overhead: float = 0.3
    line: float = 0.85


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that a model needs. `form`: a key of SHARES, how its weights are kept."""

    weight_bytes: float
    work: Work
    form: str
    possible: tuple[int, ...] = (1,)
    """The numbers of GPUs among which its matrices can be divided."""

    @classmethod
    def of(cls, size: Size, weights: str = "auto", kv_cache_dtype: str = "auto") -> Need:
        """`weights`: auto (as the checkpoint has them) or a key of WEIGHTS. `kv_cache_dtype`: auto (the weights'), or a
        narrow one with its scales. Raises ValueError where a quantised checkpoint is to be quantised."""
        width, head_dim = float(size.dtype.itemsize), size.settings.head_dim
        kv_width = width if kv_cache_dtype == "auto" else stored_width(head_dim, kv_cache_dtype) / head_dim
        work = Work.of_settings(size.settings, width, kv_width)
        matrices = work.layers + work.experts + work.head
        possible = tuple(possible_ranks(size.settings))
        if size.stored_bytes is not None:
            if weights != "auto":
                raise ValueError(f"the checkpoint is quantised already; leave --weights {weights} out")
            small = size.stored_bytes / size.elements
            form = "int4" if small < 0.8 else "int8"
            return cls(float(size.stored_bytes), work.with_weights(small), form, possible)
        if weights == "auto":
            return cls(size.elements * width, work, "", possible)
        # The head stays as it is: quantisation leaves it out.
        layers = work.layers + work.experts
        kept = layers * WEIGHTS[weights] + (size.elements - layers) * width
        read = (layers * WEIGHTS[weights] + work.head * width) / matrices
        return cls(kept, work.with_weights(read), weights, possible)

    def kv_bytes(self, load: Load) -> float:
        """Bytes of the KV cache of one task at its end."""
        return self.work.kv_bytes_of(load.prompt + load.output)

    def total(self, sequences: int, load: Load, margins: Margins) -> float:
        """Bytes of weights and so many whole tasks, with the overhead."""
        return (self.weight_bytes + sequences * self.kv_bytes(load)) * (1 + margins.overhead)

    def room(self, gpu: Gpu, load: Load, margins: Margins, ranks: int = 1) -> int:
        """The whole tasks at once that keep so many GPUs below the line; 0: the model does not fit."""
        free = ranks * gpu.memory_bytes * margins.line / (1 + margins.overhead) - self.weight_bytes
        return max(0, int(free / self.kv_bytes(load) / self.work.kv_copies(ranks)))


@dataclass(frozen=True, slots=True)
class Divided:
    """A model on several GPUs of one machine: an estimate that nobody has checked. `step_s`: by sequences at once."""

    ranks: int
    room: int
    step_s: dict[int, float]


#: Sequences at once for which a step of several GPUs is estimated.
TOGETHER: Final = (1, 16, 64)


def ranks_needed(gpu: Gpu, need: Need, load: Load, margins: Margins) -> int | None:
    """The fewest GPUs of one kind that hold the model and a task. None if no possible number does."""
    return next((ranks for ranks in need.possible if need.room(gpu, load, margins, ranks)), None)


def divided(gpu: Gpu, need: Need, load: Load, margins: Margins, max_gpus: int = 8) -> list[Divided]:
    """The model on each possible number of GPUs that holds it, from two to `max_gpus`."""
    share, fp8, context = SHARES[need.form], need.form == "fp8", load.prompt + load.output / 2
    return [
        Divided(
            ranks,
            room,
            {
                batch: max(
                    need.work.step_of_ranks_s(gpu, ranks, batch, context, fp8=fp8) / share, HOST_S + HOST_ROW_S * batch
                )
                for batch in TOGETHER
                if batch <= room
            },
        )
        for ranks in need.possible
        if 1 < ranks <= max_gpus and (room := need.room(gpu, load, margins, ranks))
    ]


@dataclass(frozen=True, slots=True)
class Rates:
    """One worker's speed under a load. `sequences`: at once, with which all but `knee` and `worker` is meant.

    `ttft_s`: time to the first token of a task that waits for nobody. `basis`: where the figures come from.
    """

    sequences: int
    knee: int
    step_s: float
    prefill_tokens_per_s: float
    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float
    tasks_per_s: float
    basis: str
    worker: WorkerModel


def rates_on(gpu: Gpu, need: Need, load: Load, sequences: int, cold_start: float) -> Rates:
    """The rates of a worker on a GPU, by the roofline."""
    share, speed = SHARES[need.form], gpu.speed(fp8=need.form == "fp8")
    context = load.prompt + load.output / 2
    prompt_s = load.prompt / (need.work.prefill_tokens_per_s(speed, load.prompt) * share)

    def step(n: int) -> float:
        return max(need.work.step_s(speed, n, context) / share, HOST_S + HOST_ROW_S * n)

    def tokens_per_s(n: int) -> float:
        return n * load.output / (load.output * step(n) + n * prompt_s)

    best = tokens_per_s(sequences)
    knee = next(n for n in range(1, sequences + 1) if tokens_per_s(n) >= KNEE_SHARE * best)
    decode = knee / step(knee)
    return Rates(
        sequences=sequences,
        knee=knee,
        step_s=step(sequences),
        prefill_tokens_per_s=load.prompt / prompt_s,
        ttft_s=prompt_s + step(1),
        tpot_s=sequences / best,
        output_tokens_per_s=best,
        tasks_per_s=best / load.output,
        basis="roofline, measured there" if gpu.torch_name and need.form in ("", "fp8") else "roofline",
        worker=WorkerModel(
            knee=knee,
            tokens_per_s=decode,
            slots=sequences,
            prompt_cost=decode * prompt_s / load.prompt,
            cold_start=cold_start,
        ),
    )


def rates_of(profile: Profile, load: Load, cold_start: float | None = None) -> Rates:
    """The rates of a worker that measured this profile, at its knee: its tokens a second count prompts like outputs.

    Raises ValueError where it has not measured them yet.
    """
    if not profile.knee or not profile.tokens_per_s:
        raise ValueError("its workers have not measured a knee and tokens a second yet: they need some load first")
    knee, rate = max(1, round(profile.knee)), profile.tokens_per_s
    tasks = rate / (load.prompt + load.output)
    start = profile.cold_start.get("total", 0.0) if cold_start is None else cold_start
    return Rates(
        sequences=knee,
        knee=knee,
        step_s=knee / rate,
        prefill_tokens_per_s=rate,
        ttft_s=(load.prompt + knee) / rate,
        tpot_s=knee / (tasks * load.output),
        output_tokens_per_s=tasks * load.output,
        tasks_per_s=tasks,
        basis="profile",
        worker=WorkerModel(knee=knee, tokens_per_s=rate, slots=2 * knee, prompt_cost=1.0, cold_start=start),
    )


@dataclass(frozen=True, slots=True)
class Fleet:
    """A number of workers under a trace. `wait_p50_s`, `wait_p95_s`: from a task's arrival to its first token; None for
    a task that never began. `busy`: the share of the workers' time that the work takes."""

    workers: int
    wait_p50_s: float | None
    wait_p95_s: float | None
    worker_hours: float
    busy: float


def needed(
    arrivals: Sequence[Arrival],
    model: WorkerModel,
    max_wait: float,
    max_workers: int,
    note: Callable[[int], None] = lambda workers: None,
) -> tuple[Fleet, bool]:
    """The fewest workers, up at all times, with which 95% of the tasks wait at most `max_wait` seconds; and whether
    `max_workers` workers suffice for that. `note` gets each number that is tried."""
    tried: dict[int, Fleet] = {}

    def holds(workers: int) -> bool:
        note(workers)
        out = Simulation(arrivals, model, Schedule([(0.0, workers)]), ready=workers).run()
        tried[workers] = _fleet(out, workers, max(out.ended_at, 1.0) * workers)
        wait = tried[workers].wait_p95_s
        return wait is not None and wait <= max_wait

    work = sum(model.work(arrival.prompt, arrival.output) for arrival in arrivals) / model.tokens_per_s
    low, high = 1, min(max_workers, max(1, int(work / max(arrivals[-1].at, 1.0))))
    while not holds(high):
        if high == max_workers:
            return tried[max_workers], False
        low, high = high + 1, min(max_workers, 2 * high)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return tried[high], True


def scaled(arrivals: Sequence[Arrival], model: WorkerModel, max_workers: int, cool_down: float) -> Fleet:
    """The same load with workers that the autoscaler's policy starts and ends, down to none."""
    scaler: Scaler = Policy(Rules(min=0, max=max_workers, cool_down=cool_down))
    out = Simulation(arrivals, model, scaler).run()
    return _fleet(out, out.max_workers, out.worker_s)


def _fleet(out: Outcome, workers: int, worker_s: float) -> Fleet:
    waits = sorted(map(time_to_first, out.tasks))
    middle, late = (waits[int(share * (len(waits) - 1))] for share in (0.5, QUANTILE))
    return Fleet(
        workers=workers,
        wait_p50_s=middle if middle < inf else None,
        wait_p95_s=late if late < inf else None,
        worker_hours=worker_s / 3600,
        busy=out.work_s / worker_s if worker_s else 0.0,
    )


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Scale-to-zero against one worker that is always up, for tasks that come by chance (Poisson). Tasks an hour.

    `cheaper_below`: up to this rate a worker that starts on demand costs less; None: at any rate. `cold_below`: below
    this rate more than 5% of the tasks wait for a start.
    """

    cheaper_below: float | None
    cold_below: float


def break_even(start_s: float, task_s: float, cool_down: float, price_ratio: float) -> BreakEven:
    """`task_s`: a task's time alone. `price_ratio`: the price of a worker that is always up, as one that is reserved,
    in that of a worker on demand.

    A cycle is an idle time of 1 / rate, then a start, a task, and gaps shorter than the cool-down. Gaps being
    exponential, these and the last cool-down take (exp(rate * cool_down) - 1) / rate on average.
    """

    def up_s(rate: float) -> float:
        gaps = (exp(min(700.0, rate * cool_down)) - 1) / rate if cool_down else 0.0
        return start_s + task_s + gaps

    def share_up(rate: float) -> float:
        return up_s(rate) / (up_s(rate) + 1 / rate)

    def share_warm(rate: float) -> float:
        return 1 - min(1.0, (1 + rate * start_s) / (1 + rate * up_s(rate)))

    cheaper = None if price_ratio >= 1 else _rate_with(share_up, price_ratio) * 3600
    return BreakEven(cheaper, _rate_with(share_warm, QUANTILE) * 3600)


def _rate_with(share: Callable[[float], float], target: float) -> float:
    """The rate (1/s) from which on a share that grows with it is at least `target`."""
    low, high = 1 / _YEAR_S, 1e6
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if share(middle) < target else (low, middle)
    return high


def poisson(rate: float, load: Load, seed: int = 0) -> list[Arrival]:
    """Tasks of the tier default that come by chance, `rate` a second: an hour, or as many as are at most 20,000 and at
    least 200. Lengths are lognormal (`traces.Synthetic`)."""
    from workers.trials.simulate.traces import Synthetic

    tasks = min(20_000, max(200, ceil(rate * 3600)))
    drawn = Synthetic(
        shape="flat",
        tasks=tasks,
        duration=tasks / rate,
        mix={"default": 1.0},
        prompt_tokens=load.prompt,
        output_tokens=load.output,
        seed=seed,
    )
    return drawn.arrivals()
