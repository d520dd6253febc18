"""A request that is computed again after any number of its tokens says what it would have said:
the same tokens, the same text in all, the same end, the same logprobs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from blitzd.engine.token_logprobs import TokenLogprobs
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.local_replica import LocalReplica, request
from tests.engine.test_handover import EVERYTHING
from tests.tiny import make_tiny

LENGTH = 24
PROMPT = "Once upon a time there was"


class Rows(NamedTuple):
    tokens: list[int]
    texts: list[str]
    finish: pb.FinishReason
    logprobs: dict[int, TokenLogprobs]


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalReplica]:
    model = make_tiny(tmp_path_factory.mktemp("model") / "tiny", "float64")
    one = LocalReplica(model, 64)
    yield one
    one.close()


class Story:
    """One request, and every way to cut it in two."""

    def __init__(self, replica: LocalReplica, **sampling: Any) -> None:
        self._replica = replica
        self._sampling = sampling

    def tell(self, told: list[int] = []) -> Rows:  # noqa: B006 - it is only read
        number = len(self._replica.outputs) + 1
        wanted = request(number, PROMPT, LENGTH, **self._sampling)
        wanted.output_tokens = told
        self._replica.prefill(wanted)
        output = self._replica.until(number)[number]
        texts = [
            text
            for report in self._replica.seen
            for row, text in zip(report.request_ids, report.texts, strict=True)
            if row == number
        ]
        return Rows(output.tokens, texts, output.finish, output.logprobs)


# Bytes of "é" and "🐙": nearly every character takes several tokens.
MULTIBYTE = {
    "bias_token_ids": [*"é🐙".encode()],
    "bias_values": [30.0] * 6,
    "temperature": 1.5,
    "seed": 11,
}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.2, "seed": 5},
    "everything": EVERYTHING,
    "penalties": {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
    "half characters": MULTIBYTE,
    "min_tokens": {"min_tokens": 9, "stop_token_ids": [*range(0, 256, 2)]},
    "logprobs": {"temperature": 1.2, "seed": 6, "logprobs": 4},
}


def check_every_cut(story: Story) -> Rows:
    whole = story.tell()
    assert len(whole.tokens) > 1
    for cut in range(1, len(whole.tokens)):
        rest = story.tell(whole.tokens[:cut])
        assert rest.tokens == whole.tokens[cut:], cut
        assert rest.texts == whole.texts[cut:], cut
        assert rest.finish is whole.finish, cut
        later = {at: scores for at, scores in whole.logprobs.items() if at >= len(PROMPT) + cut}
        assert rest.logprobs.keys() == later.keys(), cut
        for at, (logprob, top) in rest.logprobs.items():
            assert logprob == pytest.approx(later[at].logprob, abs=1e-9)
            assert [token for token, _ in top] == [token for token, _ in later[at].top]
    return whole


@pytest.mark.parametrize("case", CASES)
def test_cut_anywhere_it_goes_on_as_if_nothing_had_happened(
    replica: LocalReplica, case: str
) -> None:
    whole = check_every_cut(Story(replica, **CASES[case]))
    if case == "half characters":
        assert "" in whole.texts, "no character took several tokens: this shows nothing"


@pytest.mark.parametrize("ends", [True, False])
def test_text_that_might_have_been_a_stop_string_is_kept_over_the_cut(
    replica: LocalReplica, ends: bool
) -> None:
    """A daemon has not got it, so it must come from the second worker, or not at all."""
    text = "".join(Story(replica, ignore_eos=True).tell().texts)
    wanted = text[6:14] if ends else text[6:13] + "☃"
    whole = check_every_cut(Story(replica, ignore_eos=True, stop=[wanted]))
    assert whole.texts.count("") >= 5, "nothing was held back: this shows nothing"
    assert (whole.finish is pb.FinishReason.STOP) == ends
    assert "".join(whole.texts) == (text[:6] if ends else text)
