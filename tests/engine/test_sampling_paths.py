"""Sampling parameters, logprobs and grammars through the step loop: the same in any batch,
any chunking and after preemption; and transformers' numbers."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from blitzd.engine.arena import Arena
from blitzd.engine.catalogue import CATALOGUE, DEFAULT_MODEL, is_pulled, prepared_dir, resolve
from blitzd.engine.errors import InvalidField
from blitzd.engine.llama import Llama
from blitzd.engine.prepare import prepare
from blitzd.engine.tokenizer import Tokenizer
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import StepPlan
from tests.engine.local_replica import LocalReplica, Output, request
from tests.engine.test_handover import EVERYTHING
from tests.reference import reference_model
from tests.tiny import END, make_tiny

Start = Callable[..., LocalReplica]

PROMPT = "The capital of France is Paris, and that of Spain " * 5
VOCAB = 259


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


PARAMETERS = {
    "temperature": {"temperature": 1.3},
    "top_k": {"temperature": 1.5, "top_k": 5},
    "top_p": {"temperature": 1.5, "top_p": 0.6},
    "min_p": {"temperature": 1.5, "min_p": 0.2},
    "typical_p": {"temperature": 1.5, "typical_p": 0.3},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "logit_bias": {"bias_token_ids": [65, 66], "bias_values": [9.0, 8.5]},
    "everything": EVERYTHING,
}


def count_preemptions(replica: LocalReplica) -> list[int]:
    """One entry for each preemption from now on."""
    found: list[int] = []
    with replica.steps.exclusive() as stepper:
        schedule = stepper._scheduler.schedule

        def counting() -> StepPlan:
            plan = schedule()
            found.extend(sequence.id for sequence in plan.preempted)
            return plan

        stepper._scheduler.schedule = counting  # type: ignore[method-assign]
    return found


def test_no_parameter_depends_on_the_batch_or_on_preemption(start: Start) -> None:
    def requests() -> list[pb.Request]:
        return [
            request(number, f"{name}: {PROMPT}"[:150], 50, **{"seed": 7} | sampling)
            for number, (name, sampling) in enumerate(PARAMETERS.items(), 1)
        ]

    alone = start()
    expected = {}
    for one in requests():
        alone.prefill(one)
        expected[one.request_id] = alone.until(one.request_id)[one.request_id].tokens
    preempted: dict[int, list[int]] = {}
    for blocks, options in ((64, {}), (65, {"max_batch_tokens": 13, "max_batch_size": 4}), (7, {})):
        replica = start(blocks, **options)
        preempted[blocks] = count_preemptions(replica)
        replica.prefill(*requests())
        found = replica.until(*expected)
        assert {n: output.tokens for n, output in found.items()} == expected, options
    assert preempted[7]


def test_each_parameter_does_something(start: Start) -> None:
    """Against the same request without it: drawn where the parameter cuts a distribution,
    greedy where it moves the logits."""
    replica = start()
    plain = {
        drawn: request(n, PROMPT, 40, temperature=1.5 if drawn else 0.0, seed=7)
        for n, drawn in ((1, True), (2, False))
    }
    replica.prefill(*plain.values())
    found = replica.until(1, 2)
    for number, (name, sampling) in enumerate(PARAMETERS.items(), 3):
        replica.prefill(request(number, PROMPT, 40, **{"seed": 7} | sampling))
        tokens = replica.until(number)[number].tokens
        assert tokens != found[1 if "temperature" in sampling else 2].tokens, name


def reference_logprobs(model: Path, tokens: Sequence[int]) -> torch.Tensor:
    """[positions, vocab]: row i is the distribution of token i + 1."""
    hf = reference_model(Arena.open(model))
    with torch.inference_mode():
        return hf(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)


def assert_transformers(
    model: Path, output: Output, prompt: str, top: int, first: int, last: int
) -> None:
    tokens = [*prompt.encode(), *output.tokens]
    assert sorted(output.logprobs) == list(range(first, last))
    expected = reference_logprobs(model, tokens)
    for position in range(first, last):
        row, found = expected[position - 1], output.logprobs[position]
        assert found.logprob == pytest.approx(float(row[tokens[position]]), abs=1e-3)
        best = row.topk(top)
        assert [token for token, _ in found.top] == best.indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-3)


@pytest.mark.parametrize("chunk", [512, 7])
def test_logprobs_are_those_of_transformers(start: Start, model: Path, chunk: int) -> None:
    replica = start(max_batch_tokens=chunk)
    replica.prefill(
        request(1, PROMPT, 20, logprobs=5),
        # Bans, bias and penalties do not show: the logprobs are the model's.
        request(2, PROMPT, 20, prompt_logprobs=20, **EVERYTHING),
        request(3, PROMPT, 1, prompt_logprobs=0),
        request(4, PROMPT, 20),
    )
    found = replica.until(1, 2, 3, 4)
    size = len(PROMPT)
    assert_transformers(model, found[1], PROMPT, 5, size, size + 20)
    prompt, output = Output(), Output()
    prompt.tokens = output.tokens = found[2].tokens
    length = len(output.tokens)
    prompt.logprobs = {p: v for p, v in found[2].logprobs.items() if p < size}
    output.logprobs = {p: v for p, v in found[2].logprobs.items() if p >= size}
    assert_transformers(model, prompt, PROMPT, 20, 1, size)
    assert_transformers(model, output, PROMPT, 3, size, size + length)
    assert_transformers(model, found[3], PROMPT, 0, 1, size)
    assert found[4].logprobs == {}


@pytest.mark.skipif(not is_pulled(CATALOGUE[DEFAULT_MODEL]), reason="blitzd model pull was not run")
def test_logprobs_of_the_embedded_model_are_those_of_transformers() -> None:
    """In float32, also where a prompt has several chunks and slices of logits."""
    directory = prepare(resolve(DEFAULT_MODEL), "float32", prepared_dir())
    tokenizer = Tokenizer.from_dir(directory)
    prompt = tokenizer.encode("The history of France begins with the Gauls, " * 8)
    wanted = pb.Sampling(logprobs=5, prompt_logprobs=5)
    replica = LocalReplica(directory, 16, max_batch_tokens=70)
    replica.prefill(pb.Request(request_id=1, prompt_tokens=prompt, max_tokens=4, sampling=wanted))
    output = replica.until(1)[1]
    replica.close()
    tokens = [*prompt, *output.tokens]
    assert sorted(output.logprobs) == list(range(1, len(tokens)))
    rows = reference_logprobs(directory, tokens)
    worst = 0.0
    for position, found in output.logprobs.items():
        row = rows[position - 1]
        ids, values = zip(*found.top, strict=True)
        ours = torch.tensor([found.logprob, *values])
        # By id, since two that are nearly equal may change places.
        theirs = row[[tokens[position], *ids]]
        worst = max(worst, float((ours - theirs).abs().max()))
        assert float(row.topk(5).values[-1]) <= min(values) + 1e-3
    print(f"largest difference of {6 * len(output.logprobs)} logprobs: {worst:.1e}")
    assert worst < 1e-3


def test_a_warm_prefix_cache_does_not_cost_prompt_logprobs(start: Start, model: Path) -> None:
    replica = start()
    replica.prefill(request(1, PROMPT, 1))
    replica.until(1)
    replica.prefill(request(2, PROMPT, 4, prompt_logprobs=2), request(3, PROMPT, 4))
    found = replica.until(2, 3)
    assert (found[2].cached, found[3].cached) == (0, 192)
    assert_transformers(model, found[2], PROMPT, 2, 1, len(PROMPT))


def test_logprobs_come_once_also_after_preemption(start: Start, model: Path) -> None:
    replica = start(blocks=5)
    preempted = count_preemptions(replica)
    prompts = {n: f"{n}" * 60 for n in (1, 2, 3)}
    replica.prefill(*(request(n, p, 70, prompt_logprobs=1, logprobs=1) for n, p in prompts.items()))
    found = replica.until(*prompts)
    for number, prompt in prompts.items():
        assert_transformers(model, found[number], prompt, 1, 1, 130)
    assert preempted


def test_a_report_has_no_logprobs_unless_asked(start: Start) -> None:
    replica = start()
    replica.prefill(request(1, PROMPT, 3))
    replica.until(1)
    for report in replica.seen:
        assert not (report.logprob_request_ids or report.logprob_values or report.top_token_ids)


DIGITS = torch.zeros(VOCAB, dtype=torch.bool)
DIGITS[48:58] = True


def test_a_grammar_decides_what_may_come(start: Start) -> None:
    seen: list[list[int]] = []

    def digits_then_end(output: Sequence[int]) -> torch.Tensor | None:
        seen.append(list(output))
        if len(output) < 4:
            return DIGITS
        end = torch.zeros(VOCAB, dtype=torch.bool)
        end[END] = True
        return end

    replica = start()
    replica.prefill(request(1, PROMPT, 20, temperature=1.0, seed=3), grammar=digits_then_end)
    replica.prefill(request(2, PROMPT, 20))
    output = replica.until(1, 2)[1]
    assert output.finish is pb.FinishReason.STOP
    assert output.text.isdigit() and len(output.text) == 4
    assert output.tokens[4:] == [END]
    assert seen == [output.tokens[:i] for i in range(5)]


def end_at_once(output: Sequence[int]) -> torch.Tensor:
    """Wants an end where `min_tokens` allows none."""
    return torch.arange(VOCAB) == END


def raising(output: Sequence[int]) -> torch.Tensor:
    raise KeyError("rule 7")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (lambda output: DIGITS & ~DIGITS, "grammar: no token is allowed after 0 of output"),
        (end_at_once, "grammar: no token is allowed after 0 of output"),
        (lambda output: DIGITS[:5], "grammar: torch.bool [5]; must be torch.bool [259]"),
        (raising, "grammar: KeyError: 'rule 7'"),
    ],
)
@pytest.mark.parametrize("max_tokens", [1, 9])
def test_a_grammar_that_fails_ends_its_request_alone(
    start: Start, grammar: Any, reason: str, max_tokens: int
) -> None:
    replica = start()
    replica.prefill(request(2, PROMPT, 9))
    replica.prefill(request(1, PROMPT, max_tokens, min_tokens=1), grammar=grammar)
    found = replica.until(1, 2)
    assert (found[1].error, found[1].tokens) == (reason, [])
    assert len(found[2].tokens) == 9
    assert replica.steps.occupancy.blocks_used == 0


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.5}, {"logprobs": 2}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_their_request_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch, value: float, sampling: dict[str, Any]
) -> None:
    """As when activations overflow in float16: no token may come of them."""
    plain = Llama.logits

    def overflowing(model: Llama, hidden: torch.Tensor) -> torch.Tensor:
        logits = plain(model, hidden)
        if len(logits) == 2:
            logits[0, 65] = value
        return logits

    monkeypatch.setattr(Llama, "logits", overflowing)
    replica = start()
    replica.prefill(request(1, PROMPT, 9, **sampling), request(2, PROMPT, 9))
    found = replica.until(1, 2)
    assert found[1].error.startswith("the model's logits at position")
    assert found[1].error.endswith("are not finite (NaN or infinity)")
    assert len(found[2].tokens) == 9
    assert replica.steps.occupancy.blocks_used == 0


def test_an_id_that_the_tokenizer_lacks_ends_its_request_alone(tmp_path: Path) -> None:
    replica = LocalReplica(make_tiny(tmp_path / "wide", vocab=300))
    replica.prefill(
        request(1, PROMPT, 9, bias_token_ids=[290], bias_values=[100.0]), request(2, PROMPT, 9)
    )
    found = replica.until(1, 2)
    resumed = request(3, PROMPT, 9)
    resumed.output_tokens = [290]
    with replica.steps.exclusive() as stepper, pytest.raises(InvalidField, match="token id 290"):
        stepper.prefill(resumed, False)
    replica.close()
    assert found[1].error == "token id 290 is outside the vocabulary"
    assert len(found[2].tokens) == 9


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_p": 1.5}, "request.sampling.top_p: 1.5; must be between 0.0 and 1.0"),
        ({"min_p": -0.1}, "request.sampling.min_p: -0.1"),
        ({"typical_p": 2.0}, "request.sampling.typical_p: 2.0"),
        ({"repetition_penalty": 0.0}, "request.sampling.repetition_penalty: 0.0"),
        ({"presence_penalty": float("inf")}, "request.sampling.presence_penalty: inf"),
        ({"frequency_penalty": 101.0}, "request.sampling.frequency_penalty: 101.0"),
        ({"top_k": 2**32 - 1}, "request.sampling.top_k: 4294967295"),
        ({"bias_token_ids": [3]}, "request.sampling.bias_values: 0 for 1 bias_token_ids"),
        (
            {"bias_token_ids": [259], "bias_values": [1.0]},
            r"request.sampling.bias_token_ids\[0\]: 259",
        ),
        (
            {"bias_token_ids": [3], "bias_values": [float("nan")]},
            "request.sampling.logit_bias of token 3: nan",
        ),
        ({"logprobs": 21}, "request.sampling.logprobs: 21; at most 20"),
        ({"prompt_logprobs": 21}, "request.sampling.prompt_logprobs: 21; at most 20"),
    ],
)
def test_what_is_out_of_range_is_refused_by_its_name_on_the_wire(
    start: Start, sampling: dict[str, Any], message: str
) -> None:
    replica = start()
    bad = request(1, "hello", **sampling)
    with replica.steps.exclusive() as stepper, pytest.raises(InvalidField, match=message):
        stepper.prefill(bad, False)
