import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blitzd.engine.errors import InvalidField, NotHeld
from blitzd.engine.executor import Executor
from blitzd.engine.sampler import sample
from blitzd.engine.stepper import WAITING, Step
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import NoRoom, Refused, StepPlan
from tests.engine.local_replica import LocalReplica, request
from tests.tiny import END, make_tiny

Start = Callable[..., LocalReplica]

PROMPTS = {
    1: "a",
    2: "The capital of France",
    3: "x" * 64,
    4: "naïve café: " * 12,
    5: "0123456789" * 21,
    6: "The capital of Spain",
}
LENGTH = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # In float64, rounding that differs with the batch cannot turn a near tie around.
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", "float64")


@pytest.fixture
def start(model: Path) -> Iterator[Start]:
    started: list[LocalReplica] = []

    def open_one(blocks: int = 64, **options: Any) -> LocalReplica:
        started.append(LocalReplica(model, blocks, **options))
        return started[-1]

    yield open_one
    for replica in started:
        replica.close()


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    """Each prompt alone, in one chunk."""
    tokens = {}
    for number, prompt in PROMPTS.items():
        replica = LocalReplica(model)
        replica.prefill(request(number, prompt, LENGTH))
        tokens[number] = replica.until(number)[number].tokens
        replica.close()
    return tokens


def run_all(replica: LocalReplica) -> dict[int, list[int]]:
    replica.prefill(*(request(n, prompt, LENGTH) for n, prompt in PROMPTS.items()))
    return {n: output.tokens for n, output in replica.until(*PROMPTS).items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_tokens": 7, "max_batch_size": 3},
        {"max_batch_tokens": 64, "max_batch_size": 1},
        {"blocks": 9},
    ],
    ids=["together", "chunks of 7", "one by one", "few blocks"],
)
def test_tokens_do_not_depend_on_the_batch(
    start: Start, expected: dict[int, list[int]], options: dict[str, Any]
) -> None:
    replica = start(**options)
    assert run_all(replica) == expected
    assert replica.steps.occupancy.blocks_used == 0


def test_tokens_are_the_same_after_preemption(start: Start, expected: dict[int, list[int]]) -> None:
    prompts = {n: f"{n}" * 60 for n in (1, 2, 3)}
    roomy, tight = start(), start(blocks=4)
    preempted = 0
    with tight.steps.exclusive() as stepper:
        schedule = stepper._scheduler.schedule

        def counting() -> StepPlan:
            nonlocal preempted
            plan = schedule()
            preempted += len(plan.preempted)
            return plan

        stepper._scheduler.schedule = counting  # type: ignore[method-assign]
    for replica in (roomy, tight):
        replica.prefill(*(request(n, prompt, 40) for n, prompt in prompts.items()))
    wanted = {n: output.tokens for n, output in roomy.until(*prompts).items()}
    assert {n: output.tokens for n, output in tight.until(*prompts).items()} == wanted
    assert preempted


def test_tokens_are_the_same_with_and_after_prefix_cache_hits(
    start: Start, expected: dict[int, list[int]]
) -> None:
    replica = start()
    assert run_all(replica) == expected
    replica.outputs.clear()
    assert run_all(replica) == expected
    # Only full blocks, and at least the last token is computed.
    assert {n: o.cached for n, o in replica.outputs.items()} == {
        1: 0, 2: 0, 3: 0, 4: 128, 5: 192, 6: 0
    }  # fmt: skip


def test_a_request_that_comes_in_the_middle_changes_nothing(
    start: Start, expected: dict[int, list[int]]
) -> None:
    replica = start(max_batch_tokens=16)
    replica.prefill(request(2, PROMPTS[2], LENGTH))
    replica.take(replica.reports.get(timeout=10))
    replica.prefill(request(5, PROMPTS[5], LENGTH))
    found = replica.until(2, 5)
    assert {n: o.tokens for n, o in found.items()} == {n: expected[n] for n in (2, 5)}


def test_a_seeded_draw_depends_on_seed_and_position_alone(start: Start) -> None:
    alone, together = start(), start(max_batch_tokens=16)
    drawn = {"temperature": 0.9, "seed": 11}
    alone.prefill(request(1, PROMPTS[2], 20, **drawn))
    wanted = alone.until(1)[1].tokens
    together.prefill(
        request(7, PROMPTS[5], 20, temperature=1.3, seed=5),
        request(1, PROMPTS[2], 20, **drawn),
        request(8, PROMPTS[2], 20, temperature=0.9, seed=12),
    )
    found = together.until(1, 7, 8)
    assert found[1].tokens == wanted
    assert found[8].tokens != wanted

    # And a request that goes on elsewhere draws what it would have drawn here.
    resumed = request(2, PROMPTS[2], 20, **drawn)
    resumed.output_tokens = wanted[:9]
    together.prefill(resumed)
    assert together.until(2)[2].tokens == wanted[9:]


def test_a_draw_is_made_for_the_place_that_the_token_takes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[int] = []

    def recording(logits: Any, params: Any, positions: list[int], *rest: Any) -> list[int]:
        places.extend(positions)
        return sample(logits, params, positions, *rest)

    monkeypatch.setattr("blitzd.engine.scoring.sample", recording)
    replica = start(max_batch_tokens=16)
    replica.prefill(request(1, "x" * 40, 3, temperature=0.5, seed=1))
    replica.until(1)
    assert places == [40, 41, 42]


def free_text(start: Start, prompt: str, count: int) -> Any:
    replica = start()
    replica.prefill(request(1, prompt, count))
    return replica.until(1)[1]


def test_a_stop_string_ends_the_text_before_it(start: Start) -> None:
    whole = free_text(start, PROMPTS[2], 30)
    stop = whole.text[8:11]
    replica = start()
    replica.prefill(request(2, PROMPTS[2], 30, stop=["never there", stop]))
    output = replica.until(2)[2]
    assert output.finish is pb.FinishReason.STOP
    assert output.text == whole.text[: whole.text.index(stop)]
    assert output.tokens == whole.tokens[: len(output.tokens)]


def test_text_held_back_for_a_stop_string_comes_at_the_length_end(start: Start) -> None:
    whole = free_text(start, PROMPTS[2], 12)
    replica = start()
    replica.prefill(request(2, PROMPTS[2], 12, stop=[whole.text[-2:] + "no"]))
    output = replica.until(2)[2]
    assert (output.finish, output.text) == (pb.FinishReason.LENGTH, whole.text)


def test_a_stop_string_may_end_in_a_character_that_the_length_end_cuts(start: Start) -> None:
    """What is shown lacks it, so the reason is the stop string, as everywhere."""
    half = {"bias_token_ids": [0xC3, ord("a")], "bias_values": [170.0, 230.0]}
    for stop, text, finish in [
        ("a\ufffd", "", pb.FinishReason.STOP),
        ("\ufffd", "a", pb.FinishReason.STOP),
        ("\ufffda", "a\ufffd", pb.FinishReason.LENGTH),
        ("é", "a\ufffd", pb.FinishReason.LENGTH),
    ]:
        replica = start()
        replica.prefill(request(2, "b", 2, stop=[stop], presence_penalty=100.0, **half))
        output = replica.until(2)[2]
        assert output.tokens == [ord("a"), 0xC3]
        assert (output.finish, output.text) == (finish, text)


def test_stop_tokens_end_the_output_without_a_text_of_their_own(start: Start) -> None:
    whole = free_text(start, PROMPTS[2], 30)
    at = next(i for i in range(5, 30) if whole.tokens[i] not in whole.tokens[:i])
    replica = start()
    stops = {"stop_token_ids": [whole.tokens[at]]}
    replica.prefill(request(2, PROMPTS[2], 30, **stops))
    output = replica.until(2)[2]
    assert output.finish is pb.FinishReason.STOP
    assert output.tokens == whole.tokens[: at + 1]
    assert whole.text.startswith(output.text)

    # Text that could have become a stop string is certain by then.
    replica.prefill(request(4, PROMPTS[2], 30, **stops, stop=[output.text[-1] + "no"]))
    assert replica.until(4)[4].text == output.text

    # Not before min_tokens: something else is chosen in its place.
    replica.prefill(request(3, PROMPTS[2], 30, **stops, min_tokens=at + 3))
    late = replica.until(3)[3]
    assert late.tokens[:at] == whole.tokens[:at]
    assert whole.tokens[at] not in late.tokens[: at + 3]


def test_stop_strings_wait_for_min_tokens_too(start: Start) -> None:
    whole = free_text(start, PROMPTS[2], 30)
    replica = start()
    replica.prefill(request(2, PROMPTS[2], 30, stop=[whole.text[3:5]], min_tokens=20))
    assert len(replica.until(2)[2].tokens) > 20


def test_end_of_sequence_stops_unless_ignored(tmp_path: Path) -> None:
    # A token that comes early is declared to end the text.
    plain = LocalReplica(make_tiny(tmp_path / "a", "float64"))
    plain.prefill(request(1, "hello", 30, ignore_eos=True))
    tokens = plain.until(1)[1].tokens
    plain.close()
    ending = LocalReplica(make_tiny(tmp_path / "b", "float64", eos_token_ids=(END, tokens[4])))
    ending.prefill(request(1, "hello", 30), request(2, "hello", 30, ignore_eos=True))
    found = ending.until(1, 2)
    ending.close()
    assert (found[1].finish, found[1].tokens) == (
        pb.FinishReason.STOP,
        tokens[: tokens.index(tokens[4]) + 1],
    )
    assert (found[2].finish, found[2].tokens) == (pb.FinishReason.LENGTH, tokens)


def test_the_contexts_end_is_a_length_finish(tmp_path: Path) -> None:
    replica = LocalReplica(make_tiny(tmp_path / "short", context_tokens=32))
    replica.prefill(request(1, "x" * 30, 100))
    output = replica.until(1)[1]
    replica.close()
    assert (output.finish, len(output.tokens)) == (pb.FinishReason.LENGTH, 2)


def test_a_held_request_stops_after_its_first_token_and_keeps_its_blocks(
    start: Start, expected: dict[int, list[int]]
) -> None:
    replica = start()
    replica.prefill(request(4, PROMPTS[4], LENGTH), hold=True)
    output = replica.until(4)[4]
    assert (output.finish, output.tokens) == (pb.FinishReason.HELD, expected[4][:1])
    with replica.steps.exclusive() as stepper:
        tokens, blocks = stepper.held(4)
    assert (tokens, len(blocks)) == (len(PROMPTS[4].encode()), 3)
    assert replica.steps.occupancy.blocks_used == 3
    with replica.steps.exclusive() as stepper:
        assert (stepper.release([4]), stepper.release([4])) == (1, 0)
    # Nothing runs, yet the watcher hears that the blocks are free.
    assert replica.idle_report().blocks_used == 0
    with replica.steps.exclusive() as stepper, pytest.raises(NotHeld, match="4 is not here"):
        stepper.held(4)


class FailingOnce(Executor):
    """Wraps a real executor; its first step fails."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._failed = False

    def run(self, *arguments: Any) -> Any:
        if not self._failed:
            self._failed = True
            raise RuntimeError("out of luck")
        return self._inner.run(*arguments)


def test_a_failed_step_ends_its_requests_with_the_reason_and_the_loop_lives_on(
    start: Start, expected: dict[int, list[int]]
) -> None:
    replica = start(max_batch_size=2)
    with replica.steps.exclusive() as stepper:
        stepper._executor = FailingOnce(stepper._executor)
        for number in (2, 4, 6):
            stepper.prefill(request(number, PROMPTS[number], LENGTH), False)
    found = replica.until(2, 4, 6)
    reason = "step 1 failed: RuntimeError: out of luck"
    assert [found[n].error for n in (2, 4, 6)] == [reason, reason, ""]
    assert found[6].tokens == expected[6]
    assert replica.steps.occupancy.blocks_used == 0


class Gate(Executor):
    """Wraps a real executor; a step waits until it is let go."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def run(self, *arguments: Any) -> Any:
        self.entered.release()
        assert self.go.acquire(timeout=10)
        return self._inner.run(*arguments)


def gated(replica: LocalReplica) -> Gate:
    with replica.steps.exclusive() as stepper:
        gate = Gate(stepper._executor)
        stepper._executor = gate
    return gate


def test_requests_come_and_go_while_a_step_computes(
    start: Start, expected: dict[int, list[int]]
) -> None:
    replica = start()
    gate = gated(replica)
    replica.prefill(request(2, PROMPTS[2], LENGTH), request(4, PROMPTS[4], LENGTH))
    assert gate.entered.acquire(timeout=10)
    began = time.monotonic()
    with replica.steps.exclusive() as stepper:
        assert stepper.cancel([2]) == 1
        stepper.prefill(request(6, PROMPTS[6], LENGTH), False)
        # The same id again, while the cancelled one's step is still running.
        stepper.prefill(request(2, PROMPTS[5], LENGTH), False)
        used = stepper.occupancy.blocks_used
    assert time.monotonic() - began < 1.0
    assert used == 4, "blocks of a request whose step is running are not given away"
    gate.go.release(1000)
    found = replica.until(2, 4, 6)
    assert found[2].tokens == expected[5]
    assert [found[n].tokens for n in (4, 6)] == [expected[n] for n in (4, 6)]


def test_health_shows_a_step_that_takes_too_long_and_nothing_when_idle(start: Start) -> None:
    replica = start()
    gate = gated(replica)
    assert replica.steps.idle_ns == 0
    replica.prefill(request(1, "a", 1))
    assert gate.entered.acquire(timeout=10)
    time.sleep(0.05)
    assert replica.steps.idle_ns >= 40_000_000
    gate.go.release()
    replica.until(1)
    deadline = time.monotonic() + 5
    while replica.steps.idle_ns and time.monotonic() < deadline:
        time.sleep(0.005)
    assert replica.steps.idle_ns == 0


def test_an_idle_replica_does_not_spin(start: Start) -> None:
    replica = start()
    replica.prefill(request(1, "a", 1))
    replica.until(1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


def test_a_request_that_waits_for_held_blocks_does_not_spin_either(start: Start) -> None:
    replica = start(blocks=3)
    replica.prefill(request(1, "x" * 130, 5), hold=True)
    replica.until(1)
    replica.prefill(request(2, "y" * 10, 5))
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05
    assert replica.steps.occupancy.waiting == 1
    with replica.steps.exclusive() as stepper:
        stepper.release([1])
    assert len(replica.until(2)[2].tokens) == 5


def test_pacing_puts_a_floor_under_a_layers_time_and_changes_no_token(
    start: Start, expected: dict[int, list[int]]
) -> None:
    replica = start(pace_layer_ms=5.0)
    replica.prefill(request(2, PROMPTS[2], 10))
    assert replica.until(2)[2].tokens == expected[2][:10]
    layers = replica.replica.arena.config.layers
    times = [report.step_ns / 1e6 for report in replica.seen]
    assert all(layers * 5.0 <= ms for ms in times), times


def test_reports_say_what_each_step_did(start: Start) -> None:
    replica = start(max_batch_tokens=16)
    replica.prefill(request(1, "x" * 40, 2), request(2, "y", 2))
    replica.until(1, 2)
    reports = replica.seen
    assert [report.step for report in reports] == list(range(1, len(reports) + 1))
    assert [report.prefill_tokens for report in reports[:3]] == [16, 16, 8]
    assert reports[0].running == 1 and reports[0].waiting == 1
    assert reports[0].blocks_used == 1 and reports[0].blocks_total == 64
    assert (reports[-1].running, reports[-1].blocks_used) == (0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_id": 0}, "request.request_id: 0"),
        ({"prompt_tokens": []}, "request.prompt_tokens: empty"),
        ({"prompt_tokens": [1, 259]}, r"request.prompt_tokens\[1\]: 259; .* \[0, 259\)"),
        ({"output_tokens": [9999]}, r"request.output_tokens\[0\]: 9999"),
        ({"max_tokens": 0}, "request.max_tokens: 0"),
        ({"sampling": pb.Sampling(temperature=-1)}, "temperature: -1"),
        ({"sampling": pb.Sampling(temperature=float("nan"))}, "temperature: nan"),
        ({"sampling": pb.Sampling(stop=["a", ""])}, "sampling.stop: an empty string"),
        ({"sampling": pb.Sampling(stop=["a"] * 65)}, "sampling.stop: 65 strings"),
        ({"sampling": pb.Sampling(stop_token_ids=[300])}, r"stop_token_ids\[0\]: 300"),
        ({"sampling": pb.Sampling(min_tokens=9)}, "min_tokens: 9; must be at most max_tokens, 8"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(
    start: Start, change: dict[str, Any], message: str
) -> None:
    replica = start()
    bad = request(1, "hello")
    for name, value in change.items():
        setattr(bad, name, value)
    with replica.steps.exclusive() as stepper, pytest.raises(InvalidField, match=message):
        stepper.prefill(bad, False)
    replica.prefill(request(1, "hello"))
    assert len(replica.until(1)[1].tokens) == 8


def test_the_queue_of_waiting_requests_is_bounded(start: Start) -> None:
    replica = start()
    with replica.steps.exclusive() as stepper:
        for number in range(1, WAITING + 1):
            stepper.prefill(request(number, "a", 1), False)
        with pytest.raises(NoRoom, match=f"{WAITING} requests wait already"):
            stepper.prefill(request(WAITING + 1, "a", 1), False)
        assert stepper.cancel(range(1, WAITING + 1)) == WAITING


def test_a_request_is_refused_while_another_has_its_id(start: Start) -> None:
    replica = start()
    with replica.steps.exclusive() as stepper:
        stepper.prefill(request(1, "a", 1), False)
        with pytest.raises(Refused, match="request_id: 1 is here already"):
            stepper.prefill(request(1, "a", 1), False)


def test_a_crash_of_the_loop_itself_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = LocalReplica(model)

    def broken(step: Step, result: object) -> pb.StepReport:
        raise RuntimeError("bookkeeping is broken")

    with replica.steps.exclusive() as stepper:
        monkeypatch.setattr(stepper, "finish", broken)
        stepper.prefill(request(1, "a", 1), False)
    deadline = time.monotonic() + 5
    while not replica.crashes and time.monotonic() < deadline:
        time.sleep(0.005)
    assert replica.steps.stop(5.0)
    assert [str(error) for error in replica.crashes] == ["bookkeeping is broken"]
