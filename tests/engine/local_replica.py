"""A replica in the test's own process: a real model and step loop, no RPC."""

import queue
import time
from pathlib import Path
from typing import Any

from blitzd.engine.generation import Grammar
from blitzd.engine.options import ReplicaOptions
from blitzd.engine.prepared import open_prepared
from blitzd.engine.replica import Replica, open_replica
from blitzd.engine.token_logprobs import TokenLogprobs, entries
from blitzd.proto.blitzd.engine import v1 as pb

DEADLINE_S = 20.0


def request(number: int, prompt: str, max_tokens: int = 8, **sampling: Any) -> pb.Request:
    return pb.Request(
        request_id=number,
        prompt_tokens=list(prompt.encode()),
        max_tokens=max_tokens,
        sampling=pb.Sampling(**sampling),
    )


class Output:
    """What the reports said of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.finish = pb.FinishReason.NONE
        self.error = ""
        self.cached = 0
        self.logprobs: dict[int, TokenLogprobs] = {}
        """By position in the request."""

    @property
    def ended(self) -> bool:
        return self.finish is not pb.FinishReason.NONE


class LocalReplica:
    def __init__(self, model_dir: Path, blocks: int = 64, **options: Any) -> None:
        options.setdefault("max_batch_size", min(64, options.get("max_batch_tokens", 512)))
        self.reports: queue.Queue[pb.StepReport] = queue.Queue()
        self.crashes: list[BaseException] = []
        self.outputs: dict[int, Output] = {}
        self.seen: list[pb.StepReport] = []
        self.replica: Replica = open_replica(
            open_prepared(model_dir, lambda progress: None, options.get("weights", "map")),
            blocks,
            ReplicaOptions(**options),
            publish=self.reports.put,
            crashed=self.crashes.append,
        )
        self.steps = self.replica.steps

    def prefill(
        self, *requests: pb.Request, hold: bool = False, grammar: Grammar | None = None
    ) -> None:
        with self.steps.exclusive() as stepper:
            for one in requests:
                stepper.prefill(one, hold, grammar)

    def until(self, *numbers: int) -> dict[int, Output]:
        """Reads reports until all of these have ended."""
        end = time.monotonic() + DEADLINE_S
        while not all(self.output(n).ended for n in numbers):
            self.take(self.reports.get(timeout=max(0.01, end - time.monotonic())))
        return {n: self.outputs[n] for n in numbers}

    def output(self, number: int) -> Output:
        return self.outputs.setdefault(number, Output())

    def take(self, report: pb.StepReport) -> None:
        self.seen.append(report)
        columns = (
            report.request_ids,
            report.token_ids,
            report.texts,
            report.finish,
            report.cached_tokens,
        )
        for number, token, text, finish, cached in zip(*columns, strict=True):
            output = self.output(number)
            assert not output.ended or output.finish is pb.FinishReason.HELD
            output.tokens.append(token)
            output.text += text
            output.finish = finish
            output.cached += cached
        for number, position, found in entries(report):
            assert position not in self.output(number).logprobs
            self.output(number).logprobs[position] = found
        for number, error in zip(report.failed_ids, report.errors, strict=True):
            self.output(number).finish = pb.FinishReason.ERROR
            self.output(number).error = error

    def idle_report(self) -> pb.StepReport:
        """The next report without rows."""
        while (report := self.reports.get(timeout=DEADLINE_S)).request_ids:
            self.take(report)
        return report

    def close(self) -> None:
        with self.steps.exclusive() as stepper:
            stepper.audit()
        self.replica.close(5.0)
        assert not self.crashes
