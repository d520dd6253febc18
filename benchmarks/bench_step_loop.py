"""What a step costs besides its forward pass: scheduling, batching, sampling, text, reports.

Thread CPU time, with one torch thread, so that neighbours on the machine do not count.

    python benchmarks/bench_step_loop.py [--model NAME|PATH] [--batches 1 8 32]
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blitzd.engine import catalogue
from blitzd.engine.options import ReplicaOptions
from blitzd.engine.prepare import prepare
from blitzd.engine.prepared import open_prepared
from blitzd.engine.replica import open_replica
from blitzd.proto.blitzd.engine import v1 as pb

STEPS = 100


class Clock:
    """CPU time of this thread by part, in ns."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = defaultdict(int)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return function(*arguments)
            finally:
                self.spent[part] += time.thread_time_ns() - began

        return call


def measure(model_dir: Path, batch: int, context: int) -> dict[str, float]:
    """Microseconds of CPU per decode step, by part."""
    replica = open_replica(
        open_prepared(model_dir, lambda progress: None),
        batch * (-(-(context + STEPS + 8) // 64)),
        ReplicaOptions(max_batch_size=batch),
        publish=lambda report: None,
        crashed=lambda error: None,
    )
    replica.steps.stop(5.0)  # its thread: the steps below are this one's
    with replica.steps.exclusive() as stepper:
        for number in range(1, batch + 1):
            prompt = [(number * 7919 + i * 31) % 40_000 + 100 for i in range(context)]
            sampling = pb.Sampling(ignore_eos=True, stop=["\x00never"])
            request = pb.Request(
                request_id=number, prompt_tokens=prompt, max_tokens=STEPS + 8, sampling=sampling
            )
            stepper.prefill(request, False)
    prefilled = 0
    while prefilled < batch:
        step = stepper.begin()
        assert step is not None
        prefilled = len(stepper.finish(step, stepper.compute(step)).request_ids)
    clock = Clock()
    executor: Any = stepper._executor
    model, attention = executor._model, executor._attention
    model.run_layers = clock.timed("forward", model.run_layers)
    model.logits = clock.timed("forward", model.logits)
    model.embed = clock.timed("forward", model.embed)
    attention.plan = clock.timed("attention plan", attention.plan)
    compute = clock.timed("compute", stepper.compute)
    begin, finish = clock.timed("schedule", stepper.begin), clock.timed("finish", stepper.finish)
    encode = clock.timed("encode (event loop)", bytes)
    steps = 0
    while steps < STEPS - batch:
        step = begin()
        assert len(step.sampling) == batch
        encode(finish(step, compute(step)))
        steps += 1
    replica.kv.close()
    spent = {part: ns / steps / 1e3 for part, ns in clock.spent.items()}
    inside = spent["forward"] + spent["attention plan"]
    spent["batch, sample, text"] = spent.pop("compute") - inside
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/blitzd/models")
    options = parser.parse_args()
    model_dir = prepare(catalogue.resolve(options.model), "float32", options.cache)
    for batch in options.batches:
        spent = measure(model_dir, batch, options.context)
        forward = spent["forward"]
        print(f"batch {batch}: forward {forward / 1e3:.1f} ms of CPU a step")
        for part, us in sorted(spent.items()):
            if part != "forward":
                print(f"  {part:22s} {us:8.0f} us  {100 * us / forward:5.2f} % of forward")
        own = sum(us for part, us in spent.items() if part not in ("forward", "attention plan"))
        print(f"  step loop's own: {own:.0f} us, {100 * own / forward:.2f} % of forward")


if __name__ == "__main__":
    main()
