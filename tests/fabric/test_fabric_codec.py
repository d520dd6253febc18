"""The quickened codec writes what the package's own does."""

import betterproto2
import pytest

from blitzd.fabric import codec
from blitzd.proto.blitzd.engine import v1 as pb

MESSAGES = (
    pb.StepReport(),
    pb.StepReport(
        step=3,
        request_ids=[1 << 40, 2],
        token_ids=[0, 49151],
        texts=["", "naïve"],
        finish=[pb.FinishReason.NONE, pb.FinishReason.LENGTH],
        failed_alone=[False, True],
        top_logprobs=[-0.5],
    ),
    pb.PrefillRequest(
        request=pb.Request(request_id=7, sampling=pb.Sampling(top_p=0.0, logprobs=0)), hold=True
    ),
    pb.HealthReply(holdings=pb.Holdings()),
    pb.HealthReply(holdings=pb.Holdings(peers=["r0/1"])),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_bytes_are_those_of_the_package(
    message: betterproto2.Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert betterproto2.Message._get_field_default is not codec.PLAIN
    ours = bytes(message)
    assert type(message).parse(ours) == message
    monkeypatch.setattr(betterproto2.Message, "_get_field_default", codec.PLAIN)
    assert bytes(message) == ours
