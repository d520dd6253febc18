import pytest

from blitzd.sched import BlockManager, Finish, NoRoom, Phase, Refused, Scheduler, Sequence
from tests.sched.virtual_model import VirtualModel, continuation


def world(
    blocks: int = 64, size: int = 4, context: int = 128, budget: int = 16, batch: int = 8
) -> VirtualModel:
    return VirtualModel(
        Scheduler(
            BlockManager(blocks, size),
            context_tokens=context,
            max_batch_tokens=budget,
            max_batch_size=batch,
        )
    )


def request(
    number: int, prompt: int | list[int], max_tokens: int = 4, hold: bool = False
) -> Sequence:
    tokens = [1000 * number + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Sequence(number, tokens, len(tokens), max_tokens, hold)


def run_to_end(model: VirtualModel, steps: int = 1000) -> dict[int, list[int]]:
    """Output tokens by request, of everything that can finish."""
    output: dict[int, list[int]] = {}
    for _ in range(steps):
        rows = model.step()
        if not rows and not model.scheduler.running:
            return output
        for sequence, token, _ in rows:
            output.setdefault(sequence.id, []).append(token)
    raise AssertionError(f"no end after {steps} steps")


def test_a_request_gets_exactly_max_tokens_and_leaves_nothing() -> None:
    model = world()
    sequence = request(1, 10, max_tokens=5)
    model.scheduler.add(sequence)
    assert run_to_end(model) == {1: continuation(sequence.tokens[:10], 5)}
    assert sequence.phase is Phase.ENDED
    assert model.scheduler.blocks.used == 0
    model.scheduler.audit()


def test_the_contexts_end_ends_a_request() -> None:
    model = world(context=12)
    model.scheduler.add(request(1, 10, max_tokens=50))
    rows = [model.step()[0] for _ in range(2)]
    assert [finish for _, _, finish in rows] == [Finish.NONE, Finish.LENGTH]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget_and_samples_once() -> None:
    model = world(budget=16)
    model.scheduler.add(request(1, 40, max_tokens=1))
    counts = []
    while (plan := model.scheduler.schedule()).chunks:
        counts.append([(c.start, c.count, c.samples) for c in plan.chunks])
        model.scheduler.complete(plan, model.run(plan))
    assert counts == [[(0, 16, False)], [(16, 16, False)], [(32, 8, True)]]


def test_a_running_answer_moves_in_every_step_of_a_long_prompt() -> None:
    model = world(budget=8)
    model.scheduler.add(request(1, 4, max_tokens=30))
    model.step()
    model.scheduler.add(request(2, 60, max_tokens=1))
    for _ in range(6):
        assert [sequence.id for sequence, _, _ in model.step()] == [1]


def test_an_adopted_sequence_does_not_wait_for_a_prompt_that_is_being_computed() -> None:
    model = world(budget=8)
    model.scheduler.add(request(1, 60, max_tokens=1))
    model.step()
    reservation = model.scheduler.reserve(6)
    model.adopt(reservation, Sequence(2, [5, 6, 7, 8, 9, 10], 5, 4))
    assert [sequence.id for sequence, _, _ in model.step()] == [2]


def test_requests_are_admitted_in_order_as_far_as_batch_size_and_blocks_allow() -> None:
    model = world(blocks=8, batch=2, budget=64)
    for number in (1, 2, 3):
        model.scheduler.add(request(number, 8, max_tokens=3))
    model.step()
    assert (model.scheduler.running, model.scheduler.waiting) == (2, 1)
    assert set(run_to_end(model)) == {1, 2, 3}

    model = world(blocks=5, batch=8, budget=64)
    for number in (1, 2, 3):
        model.scheduler.add(request(number, 8, max_tokens=3))
    model.step()
    assert (model.scheduler.running, model.scheduler.waiting) == (2, 1)


def test_a_small_request_does_not_overtake_a_big_one_for_ever() -> None:
    model = world(blocks=6, budget=64)
    model.scheduler.add(request(1, 12, max_tokens=6))
    model.step()
    model.scheduler.add(request(2, 16, max_tokens=2))
    model.scheduler.add(request(3, 4, max_tokens=2))
    model.step()
    assert (model.scheduler.running, model.scheduler.waiting) == (1, 2)


def test_when_blocks_run_out_the_newest_gives_way_and_all_tokens_are_right() -> None:
    model = world(blocks=7, budget=64)
    prompts = {number: request(number, 8, max_tokens=12) for number in (1, 2, 3)}
    for sequence in prompts.values():
        model.scheduler.add(sequence)
    expected = {n: continuation(list(s.tokens), 12) for n, s in prompts.items()}
    assert run_to_end(model) == expected
    assert prompts[1].preemptions == 0
    assert prompts[3].preemptions > 0
    assert model.scheduler.blocks.used == 0


def test_a_preempted_request_comes_back_before_those_that_have_not_run() -> None:
    model = world(blocks=6, budget=64)
    model.scheduler.add(request(1, 12, max_tokens=6))
    model.scheduler.add(request(2, 12, max_tokens=6))
    model.step()
    model.scheduler.add(request(3, 12, max_tokens=6))
    finished = []
    for _ in range(30):
        finished += [s.id for s, _, finish in model.step() if finish is Finish.LENGTH]
    assert finished == [1, 2, 3]


def test_a_lone_request_that_fills_all_blocks_is_never_preempted() -> None:
    model = world(blocks=4, size=4)
    sequence = request(1, 8, max_tokens=9)
    model.scheduler.add(sequence)
    assert len(run_to_end(model)[1]) == 9
    assert sequence.preemptions == 0


def test_a_known_prefix_is_not_computed_again_and_is_counted() -> None:
    model = world(budget=64)
    first = request(1, list(range(18)), max_tokens=2)
    second = request(2, [*range(18), 77, 78], max_tokens=2)
    model.scheduler.add(first)
    run_to_end(model)
    model.scheduler.add(second)
    plan = model.scheduler.schedule()
    assert [(chunk.start, chunk.count) for chunk in plan.chunks] == [(16, 4)]
    assert (first.cached_tokens, second.cached_tokens) == (0, 16)
    model.scheduler.complete(plan, model.run(plan))
    assert run_to_end(model)[2] == continuation(second.tokens[:20], 2)[1:]


def test_running_requests_share_the_blocks_of_a_common_prefix() -> None:
    model = world(budget=64)
    model.scheduler.add(request(1, list(range(17)), max_tokens=9))
    model.step()
    used = model.scheduler.blocks.used
    model.scheduler.add(request(2, [*range(16), 99], max_tokens=9))
    model.step()
    assert model.scheduler.blocks.used == used + 1
    assert len(run_to_end(model)[2]) == 8


def test_a_prompt_known_to_its_last_token_still_computes_one_block() -> None:
    model = world(budget=64)
    prompt = list(range(16))
    for number in (1, 2):
        model.scheduler.add(request(number, prompt, max_tokens=1))
        rows = model.step()
        assert [token for _, token, _ in rows] == continuation(prompt, 1)
    assert model.scheduler.get(2) is None


def test_a_held_request_keeps_its_blocks_out_of_the_batch_until_released() -> None:
    model = world(budget=64, batch=1)
    sequence = request(1, 10, max_tokens=5, hold=True)
    model.scheduler.add(sequence)
    assert [(token, finish) for _, token, finish in model.step()] == [
        (continuation(sequence.tokens[:10], 1)[0], Finish.HELD)
    ]
    assert (model.scheduler.running, model.scheduler.held) == (0, 1)
    assert model.scheduler.blocks.used == 3
    model.scheduler.add(request(2, 4))
    assert set(run_to_end(model)) == {2}
    assert model.scheduler.release(1)
    assert not model.scheduler.release(1)
    assert model.scheduler.blocks.used == 0


def test_release_is_for_held_requests_only() -> None:
    model = world()
    model.scheduler.add(request(1, 4))
    assert not model.scheduler.release(1)
    model.step()
    assert not model.scheduler.release(1)
    assert not model.scheduler.release(7)


def test_a_held_request_that_ends_with_its_first_token_is_not_held() -> None:
    model = world()
    model.scheduler.add(request(1, 4, max_tokens=1, hold=True))
    assert model.step()[0][2] is Finish.LENGTH
    model.scheduler.add(request(2, 4, max_tokens=9, hold=True))
    assert model.step(stops=lambda s, t: True)[0][2] is Finish.STOP
    assert (model.scheduler.held, model.scheduler.blocks.used) == (0, 0)


def test_prefill_here_and_decode_there_gives_the_tokens_of_one_replica() -> None:
    source, target = world(), world()
    sequence = request(1, 10, max_tokens=6, hold=True)
    source.scheduler.add(sequence)
    first = source.step()[0][1]
    moved = Sequence(1, list(sequence.tokens), 10, 6)
    target.adopt(target.scheduler.reserve(len(moved.tokens)), moved)
    assert [first, *run_to_end(target)[1]] == continuation(sequence.tokens[:10], 6)


def test_an_adopted_prefix_is_known_to_requests_that_come_after_its_first_step() -> None:
    """Before, nobody has seen whether what came is sound."""
    model = world(budget=64)
    tokens = list(range(17))
    model.adopt(model.scheduler.reserve(17), Sequence(1, list(tokens), 16, 4))
    early = request(3, [*range(16), 50, 52], max_tokens=1)
    model.scheduler.add(early)
    model.step()
    assert early.cached_tokens == 0
    late = request(2, [*range(16), 50, 51], max_tokens=1)
    model.scheduler.add(late)
    run_to_end(model)
    assert late.cached_tokens == 16


def test_a_reservation_takes_blocks_and_a_place_until_given_back() -> None:
    model = world(blocks=4, batch=2)
    first = model.scheduler.reserve(8)
    with pytest.raises(NoRoom, match="3 KV blocks wanted for 9 tokens, 2 of 4 free"):
        model.scheduler.reserve(9)
    model.scheduler.reserve(1)
    with pytest.raises(NoRoom, match="batch is full"):
        model.scheduler.reserve(1)
    model.scheduler.add(request(1, 2))
    assert model.step() == []
    model.scheduler.give_back(first)
    assert len(model.step()) == 1
    model.scheduler.audit()


def test_adopt_refuses_what_does_not_match_its_reservation_and_leaves_it() -> None:
    model = world()
    reservation = model.scheduler.reserve(8)
    for sequence, computed in [(request(1, 7), 6), (request(1, 8), 8), (request(1, 8), 0)]:
        with pytest.raises(Refused):
            model.scheduler.adopt(reservation, sequence, computed)
    model.scheduler.give_back(reservation)
    assert model.scheduler.blocks.used == 0


@pytest.mark.parametrize(
    ("sequence", "reason"),
    [
        (request(1, 128), "context of 128 leaves room for 127"),
        (request(1, 40, max_tokens=60), "KV of 99 tokens wanted at the end, this replica holds 64"),
        (request(1, 70, hold=True), "KV of 70 tokens"),
        (Sequence(1, [1, 2, 3], 1, 2), "2 output tokens are there already"),
        (request(1, 0), "at least 1"),
        (request(1, 4, max_tokens=0), "at least 1"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_the_reason(
    sequence: Sequence, reason: str
) -> None:
    model = world(blocks=16)
    with pytest.raises(Refused, match=reason):
        model.scheduler.add(sequence)
    assert model.scheduler.waiting == 0


def test_an_id_that_is_here_is_refused() -> None:
    model = world()
    model.scheduler.add(request(1, 4))
    with pytest.raises(Refused, match="request_id: 1 is here already"):
        model.scheduler.add(request(1, 4))


def test_a_held_request_can_go_on_where_it_is() -> None:
    model = world(budget=64)
    sequence = request(1, 10, max_tokens=6, hold=True)
    model.scheduler.add(sequence)
    model.step()
    assert model.scheduler.resume(1)
    assert not model.scheduler.resume(1)
    assert model.scheduler.cancel(1) is True
    sequence = request(2, 10, max_tokens=6, hold=True)
    model.scheduler.add(sequence)
    first = model.step()[0][1]
    model.scheduler.resume(2)
    assert [first, *run_to_end(model)[2]] == continuation(sequence.tokens[:10], 6)
    assert model.scheduler.blocks.used == 0


def test_a_held_request_that_goes_on_waits_first_in_line_when_the_batch_is_full() -> None:
    model = world(budget=64, batch=1)
    held = request(1, 10, max_tokens=4, hold=True)
    model.scheduler.add(held)
    model.step()
    model.scheduler.add(request(2, 4, max_tokens=3))
    model.step()
    model.scheduler.add(request(3, 4, max_tokens=3))
    model.scheduler.resume(1)
    finished = []
    for _ in range(20):
        finished += [s.id for s, _, finish in model.step() if finish is Finish.LENGTH]
    assert finished == [2, 1, 3]
    assert held.tokens == held.tokens[:10] + continuation(held.tokens[:10], 4)


def test_a_held_request_whose_answer_does_not_fit_stays_held() -> None:
    model = world(blocks=4)
    model.scheduler.add(request(1, 14, max_tokens=4, hold=True))
    model.step()
    with pytest.raises(Refused, match="KV of 17 tokens wanted"):
        model.scheduler.resume(1)
    assert model.scheduler.held == 1
    assert model.scheduler.release(1)


def test_a_held_prompt_needs_no_room_for_its_answer() -> None:
    model = world(blocks=4)
    model.scheduler.add(request(1, 16, max_tokens=100, hold=True))
    assert model.step()[0][2] is Finish.HELD


def test_cancel_ends_a_request_in_every_phase() -> None:
    model = world(batch=1)
    model.scheduler.add(request(1, 8, hold=True))
    model.step()
    model.scheduler.add(request(2, 8))
    model.step()
    model.scheduler.add(request(3, 8))
    model.step()
    assert (model.scheduler.held, model.scheduler.running, model.scheduler.waiting) == (1, 1, 1)
    assert all(model.scheduler.cancel(number) for number in (1, 2, 3))
    assert not model.scheduler.cancel(2)
    assert model.scheduler.blocks.used == 0
    assert model.step() == []


def test_blocks_of_a_request_cancelled_in_mid_step_stay_taken_until_the_step_is_back() -> None:
    model = world()
    model.scheduler.add(request(1, 8, max_tokens=1))
    model.scheduler.add(request(2, 8, max_tokens=1))
    plan = model.scheduler.schedule()
    sampled = model.run(plan)
    model.scheduler.cancel(1)
    assert model.scheduler.blocks.used == 4
    model.scheduler.audit()
    assert model.scheduler.complete(plan, sampled) == [Finish.NONE, Finish.LENGTH]
    assert model.scheduler.blocks.used == 0


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    model = world(batch=2)
    for number in (1, 2, 3):
        model.scheduler.add(request(number, 20, max_tokens=2))
    plan = model.scheduler.schedule()
    failed = {chunk.sequence.id for chunk in plan.chunks}
    model.scheduler.abort(plan)
    assert failed == {1}
    assert set(run_to_end(model)) == {2, 3}
    assert model.scheduler.blocks.used == 0


def test_what_a_failed_step_wrote_is_not_in_the_prefix_cache() -> None:
    model = world(budget=64)
    model.scheduler.add(request(1, list(range(20))))
    model.scheduler.abort(model.scheduler.schedule())
    again = request(2, list(range(20)), max_tokens=1)
    model.scheduler.add(again)
    run_to_end(model)
    assert again.cached_tokens == 0


def test_only_the_plan_that_is_out_can_come_back() -> None:
    model = world()
    model.scheduler.add(request(1, 4))
    plan = model.scheduler.schedule()
    with pytest.raises(RuntimeError, match="still out"):
        model.scheduler.schedule()
    with pytest.raises(ValueError, match="0 tokens for 1 rows"):
        model.scheduler.complete(plan, [])
    model.scheduler.complete(plan, [7])
    with pytest.raises(RuntimeError, match="not the one"):
        model.scheduler.complete(plan, [7])


def test_a_budget_that_could_starve_a_running_request_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_size=9"):
        world(budget=8, batch=9)


def test_a_spoilt_sequence_ends_alone_and_nothing_of_it_stays_in_the_prefix_cache() -> None:
    """Not even what an earlier step of its own had put there."""
    model = world(budget=16)
    spoilt, sound = request(1, 20), request(2, 3)
    model.scheduler.add(spoilt)
    model.step()
    model.scheduler.add(sound)
    plan = model.scheduler.schedule()
    sampled = model.run(plan)
    assert [chunk.sequence.id for chunk in plan.sampling] == [1, 2]
    assert model.scheduler.complete(plan, sampled, spoilt={1}) == [Finish.NONE, Finish.NONE]
    assert model.scheduler.sequence_ids() == [2]
    assert len(spoilt.tokens) == 20 and len(sound.tokens) == 4
    again = request(3, 20, max_tokens=1)
    model.scheduler.add(again)
    run_to_end(model)
    assert again.cached_tokens == 0
    model.scheduler.audit()


def test_a_spoilt_sequence_that_was_cancelled_meanwhile_gives_its_blocks_back_once() -> None:
    model = world(budget=32)
    model.scheduler.add(request(1, 20))
    plan = model.scheduler.schedule()
    sampled = model.run(plan)
    assert model.scheduler.cancel(1)
    assert model.scheduler.complete(plan, sampled, spoilt={1}) == [Finish.NONE]
    assert model.scheduler.blocks.used == 0
    model.scheduler.audit()
