"""Whatever path requests take, their tokens, logprobs and texts are those that transformers'
logits imply: chunked prefill at any chunk size, prefix-cache hits, preemption, any batch, any
layer ranges, KV that moves, requests that go on elsewhere from their tokens alone.

Float64, so that what differs is an error and not rounding.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

from blitzd.engine.arena import Arena
from blitzd.engine.prepare import prepare
from blitzd.engine.tokenizer import Tokenizer
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.oracle import Oracle
from tests.engine.scenario import Cluster, Shape, Spec
from tests.hf_models import MODELS, save

torch.set_num_threads(1)

EXAMPLES = 20
"""Scenarios of each model and kind."""
LOGPROB_BOUND = 1e-12


class Model(NamedTuple):
    name: str
    arena: Arena
    tokenizer: Tokenizer
    reference: torch.nn.Module


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name.replace(" ", "-"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    source = tmp_path_factory.mktemp("hf") / "model"
    reference = save(source, request.param)
    directory = prepare(source, "float64", source.parent / "cache")
    return Model(request.param, Arena.open(directory), Tokenizer.from_dir(directory), reference)


GREEDY = st.builds(pb.Sampling, logprobs=st.sampled_from([None, 0, 3]), ignore_eos=st.booleans())
# Few bytes that are likely together, so that stop strings come up, some of them cut in two.
BIASED = {"bias_token_ids": [97, 98, 0xC3, 0xA9, 256], "bias_values": [7.0, 7.0, 7.0, 7.0, 4.0]}
MIXED = st.builds(
    lambda biased, **fields: pb.Sampling(**fields, **(BIASED if biased else {})),
    biased=st.booleans(),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    seed=st.integers(0, 2**64 - 1),
    top_k=st.sampled_from([0, 0, 1, 40]),
    top_p=st.sampled_from([None, 0.3, 0.95]),
    min_p=st.sampled_from([0.0, 0.05]),
    typical_p=st.sampled_from([None, 0.5]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.8]),
    repetition_penalty=st.sampled_from([None, 0.8, 1.6]),
    stop=st.lists(st.sampled_from(["a", "ab", "bba", "é", "éa", "\ufffd"]), max_size=2),
    stop_token_ids=st.lists(st.sampled_from([98, 7]), max_size=1),
    min_tokens=st.sampled_from([0, 0, 1, 6]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 4]),
    prompt_logprobs=st.sampled_from([None, None, 2]),
)
LENGTHS = st.one_of(st.integers(1, 12), st.sampled_from([15, 16, 17, 31, 32, 33, 50, 64, 90]))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Mostly the beginning of one text, so that prefixes are shared, and then a turn."""
    length = draw(LENGTHS)
    kept = draw(st.integers(0, length))
    turn = draw(st.integers(0, 200))
    text = [(7 * i * i + 3 * i) % 251 for i in range(length)]
    return tuple(text[:kept] + [(t + turn) % 256 for t in text[kept:]])


def requests(sampling: st.SearchStrategy[pb.Sampling]) -> st.SearchStrategy[list[Spec]]:
    one = st.builds(
        Spec,
        prompt=prompts(),
        max_tokens=st.integers(6, 14),
        sampling=sampling,
        arrives=st.integers(0, 6),
        hold=st.sampled_from([False, False, True]),
        when_held=st.sampled_from(["move", "move", "go on", "lose"]),
        holds=st.sampled_from([(), (), (0,), (1,), (3,), (4,), (8,)]).map(frozenset),
        losses=st.frozensets(st.integers(1, 12), max_size=1),
    )
    return st.lists(one, min_size=2, max_size=6)


class Scenario(NamedTuple):
    specs: list[Spec]
    shapes: tuple[Shape, Shape]
    crashes: dict[int, int]
    seed: int


@st.composite
def scenarios(draw: st.DrawFn, sampling: st.SearchStrategy[pb.Sampling]) -> Scenario:
    """Replicas that hold the longest request alone, and seldom all of them. In a crowd they
    hold no more, in blocks of a token, and take in whatever comes."""
    specs = draw(requests(sampling))
    longest = max(len(spec.prompt) + spec.max_tokens for spec in specs)
    crowd = draw(st.booleans())
    size = 1 if crowd else draw(st.sampled_from([4, 16]))

    def shape() -> Shape:
        if crowd:
            return Shape(longest, 1, 512, 6)
        budget = draw(st.sampled_from([1, 5, 16, 61, 512, 512]))
        return Shape(
            blocks=-(-longest // size) + draw(st.sampled_from([0, 0, 1, 40])),
            block_tokens=size,
            max_batch_tokens=budget,
            max_batch_size=min(budget, draw(st.sampled_from([1, 4, 6]))),
        )

    crashes = draw(st.dictionaries(st.integers(1, 30), st.integers(0, 1), max_size=2))
    return Scenario(specs, (shape(), shape()), crashes, draw(st.integers(0, 2**32)))


def run(model: Model, sampling: st.SearchStrategy[pb.Sampling]) -> tuple[Counter[str], float]:
    oracle = Oracle(model.reference, model.tokenizer)
    did: Counter[str] = Counter()

    # Each model its own scenarios, the same ones each time.
    @seed(Random(model.name).getrandbits(32))
    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(scenario=scenarios(sampling))
    def check(scenario: Scenario) -> None:
        cluster = Cluster(model.arena, model.tokenizer, *scenario)
        cluster.run()
        for story in cluster.stories.values():
            oracle.check(story)
            did["requests"] += 1
            did["tokens"] += len(story.tokens)
            did[story.finish.name or "?"] += 1
        did.update(cluster.did)

    check()
    return did, oracle.worst


def assert_reached(did: Counter[str], *what: str) -> None:
    missing = [name for name in what if not did[name]]
    assert not missing, f"the scenarios never came to {missing}: {dict(did)}"


PATHS = (
    "moved",
    "moved in decode",
    "went on",
    "lost",
    "crashed under",
    "preempted",
    "cached",
    "LENGTH",
)


def test_greedy_tokens_and_logprobs_on_every_path(model: Model) -> None:
    did, worst = run(model, GREEDY)
    print(f"{dict(did)}; largest difference of a logprob: {worst:.1e}")
    assert_reached(did, *PATHS)
    assert worst < LOGPROB_BOUND


def test_any_mix_of_parameters_on_every_path(model: Model) -> None:
    did, worst = run(model, MIXED)
    print(f"{dict(did)}; largest difference of a logprob: {worst:.1e}")
    assert_reached(did, "STOP", *PATHS)
    assert worst < LOGPROB_BOUND
