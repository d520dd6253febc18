"""The jumping lane against one that steps through every iteration and every sequence."""

import random
from collections import deque
from dataclasses import dataclass

import pytest

from blitzd.sim.data import AZURE_CONV
from blitzd.sim.hardware import GPUS
from blitzd.sim.lane import Job, Lane, Policy, steps_to_reach
from blitzd.sim.models import MODELS
from blitzd.sim.roofline import Roofline
from blitzd.sim.steptimes import LinearSteps, RooflineSteps
from blitzd.sim.traces import load_trace

STEPS = LinearSteps((900, 13, 0.02), (500, 7, 11), (300, 5, 23), threshold=6)


@dataclass
class Seq:
    job: Job
    tokens: int
    left: int
    has_kv: bool
    done: int = 0


class SteppedLane:
    """The same rules, nothing clever: each iteration looks at every sequence."""

    def __init__(self, kv_tokens, max_batch, policy, budget, steps=STEPS):
        self.steps = steps
        self.kv, self.max_batch, self.policy, self.budget = kv_tokens, max_batch, policy, budget
        self.now, self.preemptions = 0, 0
        self.waiting, self.prefilling, self.running = deque(), deque(), []

    def run(self, jobs, has_kv):
        pending = deque(jobs)
        while pending or self.waiting or self.prefilling or self.running:
            if not (self.waiting or self.prefilling or self.running):
                self.now = max(self.now, pending[0].arrival_ns)
            while pending and pending[0].arrival_ns <= self.now:
                job = pending.popleft()
                produced = int(has_kv)
                tokens, left = job.prompt_tokens + produced, job.output_tokens - produced
                self.waiting.append(Seq(job, tokens, left, has_kv))
            self.iterate()

    def held(self):
        return sum(s.tokens for s in self.running) + sum(s.tokens + 1 for s in self.prefilling)

    def fits(self, batch):
        if not self.waiting:
            return False
        extra = sum(s.tokens + 1 for s in batch)
        count = len(self.running) + len(self.prefilling) + len(batch)
        return count < self.max_batch and (
            self.held() + extra + self.waiting[0].tokens + 1 <= self.kv
        )

    def iterate(self):
        if self.policy is Policy.CHUNKED:
            budget = self.budget - len(self.running)
            budget -= sum(s.tokens - s.done for s in self.prefilling)
            while budget > 0 and self.fits([]):
                self.prefilling.append(self.waiting.popleft())
                budget -= self.prefilling[-1].tokens
        else:
            batch, budget = [], self.budget
            while self.fits(batch):
                if self.waiting[0].has_kv:
                    seq = self.waiting.popleft()
                    self.running.append(seq)
                    if seq.left == 0:
                        self.end(seq)
                    continue
                if batch and self.waiting[0].tokens > budget:
                    break
                budget -= self.waiting[0].tokens
                batch.append(self.waiting.popleft())
            if batch:
                self.now += self.steps.prefill_ns([s.tokens for s in batch])
                for seq in batch:
                    self.running.append(seq)
                    self.token(seq)
                return
        if self.running or self.prefilling:
            self.one_pass()

    def one_pass(self):
        while self.held() > self.kv:
            victim = self.running.pop()
            victim.has_kv, victim.done = False, 0
            self.waiting.appendleft(victim)
            self.preemptions += 1
        decoding, context = list(self.running), sum(s.tokens for s in self.running)
        chunks, done, budget = [], [], max(1, self.budget - len(decoding))
        for seq in list(self.prefilling):
            new = min(budget, seq.tokens - seq.done)
            if new == 0:
                break
            chunks.append((new, seq.done))
            budget -= new
            seq.done += new
            if seq.done == seq.tokens:
                done.append(self.prefilling.popleft())
        if chunks:
            self.now += self.steps.mixed_ns(chunks, len(decoding), context)
        else:
            base, slope = self.steps.decode(len(decoding))
            self.now += base + slope * context
        for seq in decoding:
            self.token(seq)
        for seq in done:
            self.running.append(seq)
            self.token(seq)

    def token(self, seq):
        seq.tokens, seq.left = seq.tokens + 1, seq.left - 1
        if seq.job.first_ns < 0:
            seq.job.first_ns = self.now
        if seq.left == 0:
            self.end(seq)

    def end(self, seq):
        self.running.remove(seq)
        seq.job.end_ns = self.now


def draw(seed):
    rng = random.Random(seed)
    now, jobs = 0, []
    gap = rng.choice([0, 300, 3000, 40_000])
    for _ in range(rng.randint(1, 60)):
        now += rng.randint(0, gap)
        jobs.append((now, rng.randint(1, 80), rng.choice([1, rng.randint(1, 120)])))
    kv = rng.choice([10**9, 210, 400])
    return jobs, kv, rng.choice([1, 4, 1000]), rng.choice([8, 60, 5000])


def run_both(seed, policy, has_kv):
    jobs, kv, max_batch, budget = draw(seed)
    lane, stepped = Lane(STEPS, kv, max_batch, policy, budget), None
    ours, theirs = [Job(*j) for j in jobs], [Job(*j) for j in jobs]
    if has_kv:
        for job in ours + theirs:
            job.first_ns = job.arrival_ns
    for job in ours:
        lane.advance(job.arrival_ns)
        assert lane.push(job, has_kv)
    lane.drain()
    stepped = SteppedLane(kv, max_batch, policy, budget)
    stepped.run(theirs, has_kv)
    return lane, ours, stepped, theirs


@pytest.mark.parametrize("seed", range(120))
@pytest.mark.parametrize(
    ("policy", "has_kv"),
    [(Policy.PREFILL_FIRST, False), (Policy.CHUNKED, False), (Policy.PREFILL_FIRST, True)],
)
def test_jumping_equals_stepping(seed, policy, has_kv):
    lane, ours, stepped, theirs = run_both(seed, policy, has_kv)
    assert ours == theirs
    assert (lane.now, lane.preemptions) == (stepped.now, stepped.preemptions)
    assert lane.outstanding_tokens == 0


@pytest.mark.parametrize("policy", list(Policy))
def test_azure_conversations_equal_stepping(policy):
    """Real lengths and arrivals, at 60 times their rate, so that batches and queues form."""
    roofline = Roofline(MODELS["llama-3.1-8b"], GPUS["h100"], 1)
    steps, kv = RooflineSteps(roofline), 60_000
    requests = load_trace(AZURE_CONV, limit=400)
    ours, theirs = ([Job(r[0] // 60, *r[1:]) for r in requests] for _ in range(2))
    lane = Lane(steps, kv, 1024, policy, 2048)
    for job in ours:
        lane.advance(job.arrival_ns)
        lane.push(job)
    lane.drain()
    stepped = SteppedLane(kv, 1024, policy, 2048, steps)
    stepped.run(theirs, False)
    assert ours == theirs
    assert lane.preemptions == stepped.preemptions > 0


def test_the_random_sets_reach_preemption_under_both_policies():
    for policy in Policy:
        assert sum(run_both(seed, policy, False)[0].preemptions for seed in range(30)) > 20


def test_a_job_that_can_never_fit_is_refused_and_leaves_nothing():
    lane = Lane(STEPS, kv_tokens=100)
    assert not lane.push(Job(0, 90, 11))
    assert lane.outstanding_tokens == 0
    job = Job(0, 90, 10)
    assert lane.push(job)
    lane.drain()
    assert job.end_ns > job.first_ns > 0


def test_stopping_on_the_way_changes_nothing():
    plain, halting = Job(0, 50, 4000), Job(0, 50, 4000)
    one, other = Lane(STEPS), Lane(STEPS)
    one.push(plain)
    one.drain()
    other.push(halting)
    for until in range(0, plain.end_ns + 5000, 4999):
        other.advance(until)
    assert halting == plain


@pytest.mark.parametrize("seed", range(50))
def test_steps_to_reach_is_the_least_count(seed):
    rng = random.Random(seed)
    growth = rng.choice([0, 1, rng.randint(1, 10**6)])
    first, span = growth + rng.randint(1, 10**6), rng.randint(-5, 10**9)

    def time(k):
        return k * first + growth * k * (k - 1) // 2

    k = steps_to_reach(first, growth, span)
    assert k >= 1 and time(k) >= span
    assert k == 1 or time(k - 1) < span
