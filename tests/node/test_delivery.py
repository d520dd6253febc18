"""What of a worker's reports reaches a client: logprobs with their tokens, each prompt
position once, cache hits of the first prefill only."""

import anyio

from blitzd.engine.token_logprobs import TokenLogprobs
from blitzd.events import types as ev
from blitzd.node.face import Delta, GenerateRequest
from blitzd.node.live import LiveRequest
from blitzd.node.worker_calls import wire_request
from blitzd.proto.blitzd.engine import v1 as pb
from tests.node.driven import World, run


async def _nobody(request_id: int) -> None:
    raise AssertionError("the client did not leave")


def live_request(**fields: object) -> LiveRequest:
    request = GenerateRequest(prompt_tokens=(1, 2, 3), max_tokens=4, **fields)  # type: ignore[arg-type]
    return LiveRequest(7, request, 5, _nobody)


def score(value: float) -> TokenLogprobs:
    return TokenLogprobs(value, [(9, value), (8, value - 1)])


def deltas(live: LiveRequest) -> list[Delta]:
    async def read() -> list[Delta]:
        return [delta async for delta in live]

    return anyio.run(read)


def test_a_prompt_that_is_computed_again_is_scored_once() -> None:
    live = live_request(prompt_logprobs=2)
    live.push_prompt(1, score(-1))
    # Its worker dies; another begins anew.
    for position in (1, 2):
        live.push_prompt(position, score(-position))
    live.push("a", 4, score(-3), cached_tokens=2)
    live.push("b", 5, score(-4), cached_tokens=3)
    live.finish("stop")
    found = deltas(live)
    assert [score for delta in found for score in delta.prompt_logprobs] == [score(-1), score(-2)]
    assert [delta.logprobs for delta in found if delta.token_ids] == [(score(-3),), (score(-4),)]
    assert sum(delta.cached_tokens for delta in found) == 2


def test_every_parameter_goes_to_the_worker_and_prompt_logprobs_only_the_first_time() -> None:
    live = live_request(
        temperature=0.5,
        top_k=3,
        top_p=0.0,
        min_p=0.1,
        typical_p=0.0,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.4,
        logit_bias=((1, 2.5), (2, -3.0)),
        stop=("x",),
        stop_token_ids=(6,),
        ignore_eos=True,
        min_tokens=2,
        logprobs=0,
        prompt_logprobs=4,
    )
    expected = pb.Sampling(
        temperature=0.5,
        seed=5,
        top_k=3,
        top_p=0.0,
        min_p=0.1,
        typical_p=0.0,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.4,
        bias_token_ids=[1, 2],
        bias_values=[2.5, -3.0],
        stop=["x"],
        stop_token_ids=[6],
        ignore_eos=True,
        min_tokens=2,
        logprobs=0,
        prompt_logprobs=4,
    )
    # Zeros that mean something survive the wire.
    assert pb.Request.parse(bytes(wire_request(live))).sampling == expected
    live.push("a", 4, score(-3))
    expected.prompt_logprobs = None
    assert pb.Request.parse(bytes(wire_request(live))).sampling == expected


def test_what_is_in_use_is_what_was_said_last_however_slow_the_log_is() -> None:
    """Blocks that are free again must not stay in the gauges because the word of their use was
    still in the inbox when that of their end came."""

    async def scenario(world: World) -> None:
        await anyio.sleep(0.1)
        await world.serve()
        await world.driver.post(ev.DrainRequested("r1", 0))  # its turn waits for the disk
        for blocks, running in ((5, 1), (0, 0)):
            report = pb.StepReport(blocks_used=blocks, running=running)
            await world.driver.deliver("r0", 1, report)
        await anyio.sleep(0.1)
        replica = world.core.state.replicas["r0"]
        assert (replica.blocks_sampled, replica.running_sampled) == (0, 0)

    run(scenario)
