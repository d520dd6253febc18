"""From a worker's step report to the clients: tokens, text and logprobs to whom they are for,
and into the inbox what they imply.

A row is for one attempt of a request on one replica. What a worker still says of another one,
because it has not heard of its end or was stopped meanwhile, goes nowhere and is counted.
"""

from collections.abc import Awaitable, Callable

from blitzd.control.core import Core
from blitzd.engine.token_logprobs import TokenLogprobs, entries
from blitzd.events import types as ev
from blitzd.events.record import Payload
from blitzd.fsm import Request, RequestState
from blitzd.node.face import Observations
from blitzd.node.live import LiveRequest
from blitzd.node.ports import Clock
from blitzd.node.wire_ids import request_and_attempt
from blitzd.proto.blitzd.engine import v1 as pb

PREFILLED = (RequestState.PREFILLING, RequestState.RELAYED)
"""The next token is the first."""
FINISHES = {pb.FinishReason.STOP: "stop", pb.FinishReason.LENGTH: "length"}


class Delivery:
    def __init__(
        self,
        core: Core,
        live: dict[int, LiveRequest],
        observations: Observations,
        clock: Clock,
        *,
        post: Callable[[Payload], Awaitable[None]],
        reached: Callable[[Payload], None],
    ) -> None:
        """`post` puts an input behind the others in the inbox, `reached` a milestone before
        them."""
        self._core = core
        self._live = live
        self._observations = observations
        self._clock = clock
        self._post = post
        self._reached = reached
        self._said: dict[str, ev.OccupancyReported] = {}
        """Posted last, by replica."""

    async def deliver(self, replica: str, epoch: int, report: pb.StepReport) -> None:
        self._tell_relays(replica, epoch, report)
        now = self._clock.mono_ns()
        scores = self._deliver_logprobs(replica, epoch, report)
        cached = report.cached_tokens or [0] * len(report.request_ids)
        columns = (report.request_ids, report.token_ids, report.texts, report.finish, cached)
        outdated = 0
        for wire, token_id, text, finish, saved in zip(*columns, strict=True):
            live, over = self._addressed(replica, epoch, wire)
            if live is None:
                outdated += over
                continue
            self._observe(live, now)
            live.push(text, token_id, scores.get(live.request_id), saved)
            self._tell_milestone(replica, epoch, live, finish)
        if outdated:
            await self._post(ev.TokensOutdated(replica, epoch, outdated))
        await self._post_errors(replica, epoch, report)
        occupancy = (report.blocks_used, report.running)
        await self._post_occupancy(ev.OccupancyReported(replica, epoch, *occupancy))

    def _tell_relays(self, replica: str, epoch: int, report: pb.StepReport) -> None:
        """Before the tokens of the same report: they are made where the request went. Also of
        requests that are over: their cancel may have missed them on the way."""
        for wire, layers in zip(report.relayed_ids, report.relayed_layers, strict=True):
            request_id, attempt = request_and_attempt(wire)
            self._reached(ev.Relayed(replica, epoch, request_id, attempt, layers))

    def _addressed(self, replica: str, epoch: int, wire: int) -> tuple[LiveRequest | None, bool]:
        """(whom a worker's word is for, if anybody; whether the request goes on, but this
        attempt of it does not, or not there)."""
        request_id, attempt = request_and_attempt(wire)
        request = self._core.state.requests.get(request_id)
        if request is None:
            return None, False
        if attempt != request.resumes or (replica, epoch) not in request.on():
            return None, True
        return self._live.get(request_id), False

    def _tell_milestone(
        self, replica: str, epoch: int, live: LiveRequest, finish: pb.FinishReason
    ) -> None:
        """What the token that was just pushed implies."""
        request = self._core.state.requests[live.request_id]
        made = len(live.output) - request.output_tokens
        if finish in FINISHES:
            ended = (FINISHES[finish], len(live.output), live.output_digest())
            self._reached(ev.GenerationEnded(replica, epoch, live.request_id, *ended))
        elif request.state in PREFILLED and made == 1:
            held = int(finish is pb.FinishReason.HELD)
            self._reached(ev.FirstTokenProduced(replica, epoch, live.request_id, held))
        elif request.state is RequestState.DECODING and finish is pb.FinishReason.HELD:
            self._reached(ev.DecodeHeld(replica, epoch, live.request_id))
        elif request.lease_id != live.arrived and _on_target(request, replica, epoch):
            # What the target makes it makes with the KV. Its word of that may come later, or
            # never; the source must not go on from fewer tokens than the client has got.
            live.arrived = request.lease_id
            self._reached(ev.FirstTokenProduced(replica, epoch, live.request_id, held=0))

    async def _post_occupancy(self, said: ev.OccupancyReported) -> None:
        """Unless it is known. What was said last may still be in the inbox, behind what the
        state has."""
        known = self._core.state.replicas.get(said.replica)
        new = known is None or (known.blocks_sampled, known.running_sampled) != (
            said.blocks_used,
            said.running,
        )
        if new or self._said.get(said.replica) != said:
            self._said[said.replica] = said
            await self._post(said)

    async def _post_errors(self, replica: str, epoch: int, report: pb.StepReport) -> None:
        alone = report.failed_alone or [True] * len(report.failed_ids)
        for wire, error, own in zip(report.failed_ids, report.errors, alone, strict=True):
            request_id, attempt = request_and_attempt(wire)
            await self._post(
                ev.RequestErrored(replica, epoch, request_id, error, attempt, lost=int(not own))
            )

    def _deliver_logprobs(
        self, replica: str, epoch: int, report: pb.StepReport
    ) -> dict[int, TokenLogprobs]:
        """Routes those of prompt tokens to their clients; returns those of this step's
        tokens, by request."""
        found = {}
        for wire, position, logprobs in entries(report):
            live, _ = self._addressed(replica, epoch, wire)
            if live is None:
                continue
            if position < len(live.request.prompt_tokens):
                live.push_prompt(position, logprobs)
            else:
                found[live.request_id] = logprobs
        return found

    def _observe(self, live: LiveRequest, now: int) -> None:
        if live.output:
            self._observations.tpot_s.observe((now - live.last_token_ns) / 1e9)
        else:
            live.first_token_ns = now
            self._observations.ttft_s.observe((now - live.submitted_ns) / 1e9)
        live.last_token_ns = now


def _on_target(request: Request, replica: str, epoch: int) -> bool:
    on = (request.target, request.target_epoch)
    return request.state is RequestState.MIGRATING and on == (replica, epoch)
