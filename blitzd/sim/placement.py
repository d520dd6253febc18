"""DistServe's placement search: what to buy for a rate, and what every other choice costs.

Algorithm 1 (any two GPUs are well connected): prefill and decode configurations are searched
apart, each for the goodput of one GPU, and replicated to the target rate. Algorithm 2 (only
the GPUs of a node are): an instance is a chain of segments, one a node, in which the same
layers' prefill and decode stages sit together, so KV crosses NVLink only. Both end with a
simulation of the whole deployment with its KV transfers. (Zhong et al., OSDI'24, 4.1, 4.2.)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from blitzd.sim.candidates import PIPELINE_SIZES, Space
from blitzd.sim.cluster import Replica
from blitzd.sim.errors import InputError
from blitzd.sim.goodput import Bench
from blitzd.sim.hardware import Link

CHUNK_SIZES = (512, 1024)
SEGMENT_CHECKS = 6
"""Algorithm 2 simulates so many of the best-looking segments as a whole."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Phase:
    """One configuration in one role."""

    replica: Replica
    goodput: float
    """Requests per second of one instance; 0 with an obstacle."""
    obstacle: str | None = None

    @property
    def per_gpu(self) -> float:
        return self.goodput / self.replica.gpus

    @property
    def name(self) -> str:
        return f"TP{self.replica.tp}xPP{self.replica.pp}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """So many instances of a prefill and of a decode configuration."""

    prefill: Phase
    prefill_count: int
    decode: Phase
    decode_count: int

    @property
    def gpus(self) -> int:
        prefill = self.prefill_count * self.prefill.replica.gpus
        return prefill + self.decode_count * self.decode.replica.gpus

    @property
    def estimate(self) -> float:
        """Requests per second, each phase by itself."""
        prefill = self.prefill_count * self.prefill.goodput
        return min(prefill, self.decode_count * self.decode.goodput)

    @property
    def name(self) -> str:
        return f"{self.prefill_count}x{self.prefill.name} + {self.decode_count}x{self.decode.name}"


@dataclass(frozen=True, slots=True)
class Colocated:
    name: str
    gpus: int
    goodput: float

    @property
    def goodput_per_gpu(self) -> float:
        return self.goodput / self.gpus


@dataclass(frozen=True, slots=True)
class Placement:
    deployment: Deployment
    checked_goodput: float
    prefill_phases: list[Phase]
    decode_phases: list[Phase]
    considered: list[Deployment]
    """Every pair of configurations, replicated by the same rule."""
    colocated: list[Colocated]
    """On as many GPUs as the deployment, as far as whole instances fill them."""
    lecture: list[Colocated]
    """One instance each, no pooling: the placement document's comparison."""
    segments: int = 1
    """Algorithm 2: nodes that one instance spans."""

    def fewest_gpus(self, rate: float) -> Deployment | None:
        """The smallest of those considered that reaches `rate`, each phase by itself. At low
        rates it is smaller than what the algorithm builds of the best per GPU."""
        reaching = [d for d in self.considered if d.estimate >= rate]
        return min(reaching, key=lambda d: (d.gpus, -d.estimate), default=None)


@dataclass(frozen=True, slots=True)
class Search:
    """One question: a space of configurations, a bench to run them on, a target rate."""

    space: Space
    bench: Bench
    rate: float
    gpus_per_node: int
    nodes: int | None
    """None: as many as the rate takes."""
    on_progress: Progress = lambda _done, _total: None

    @property
    def gpu_limit(self) -> int | None:
        return None if self.nodes is None else self.nodes * self.gpus_per_node

    def algorithm_1(self) -> Placement:
        """Raises InputError when some role can be filled by no configuration."""
        pairs = self.space.configurations(self.gpus_per_node)
        replicas = [self.space.replica(tp, pp) for tp, pp in pairs]
        ticks = _Ticks(self.on_progress, 2 * len(pairs) + 1 + 3 * len(replicas))
        prefills = [self._prefill_phase(replica, ticks) for replica in replicas]
        decodes = [self._decode_phase(replica, ticks) for replica in replicas]
        considered = self._deployments(prefills, decodes)
        best = self._choose(considered, prefills, decodes)
        link = self._network(best.prefill.replica, best.decode.replica)
        checked = self._check(best, link)
        ticks.tick()
        return Placement(
            best,
            checked,
            prefills,
            decodes,
            considered,
            self._colocated(decodes, best.gpus, checked, ticks),
            self._lecture(),
        )

    def algorithm_2(self) -> Placement:
        """Raises InputError when no segment can be built."""
        shapes = self._segment_shapes()
        sizes = sorted({(c, tp, pp) for c, (p, d) in shapes for tp, pp in (p, d)})
        ticks = _Ticks(self.on_progress, 2 * len(sizes) + SEGMENT_CHECKS + 1)
        replicas = {(tp, c * pp): self.space.replica(tp, c * pp) for c, tp, pp in sizes}
        prefill = {key: self._prefill_phase(r, ticks) for key, r in replicas.items()}
        decode = {key: self._decode_phase(r, ticks) for key, r in replicas.items()}
        units = [
            (c, Deployment(prefill[p[0], c * p[1]], 1, decode[d[0], c * d[1]], 1))
            for c, (p, d) in shapes
        ]
        units = [unit for unit in units if unit[1].estimate > 0]
        if not units:
            raise InputError(self._nothing_serves([*prefill.values(), *decode.values()]))
        units.sort(key=lambda unit: -unit[1].estimate / unit[1].gpus)
        checked = []
        for segments, unit in units[:SEGMENT_CHECKS]:
            checked.append((self._check(unit, self._nvlink(unit)) / unit.gpus, segments, unit))
            ticks.tick()
        _, segments, unit = max(checked, key=lambda entry: entry[0])
        per_unit = max(c[0] for c in checked) * unit.gpus
        count = max(1, math.ceil(self.rate / max(per_unit, 1e-9)))
        if self.nodes is not None:
            count = min(count, max(1, self.nodes // segments))
        best = Deployment(unit.prefill, count, unit.decode, count)
        total = self._check(best, self._nvlink(unit))
        inside = [phase for phase in decode.values() if phase.replica.gpus <= self.gpus_per_node]
        return Placement(
            best,
            total,
            list(prefill.values()),
            list(decode.values()),
            [deployment for _, deployment in units],
            self._colocated(inside, best.gpus, total, ticks),
            [],
            segments,
        )

    # -- phases -------------------------------------------------------------------------

    def _prefill_phase(self, replica: Replica, ticks: "_Ticks") -> Phase:
        obstacle = self.space.prefill_obstacle(replica)
        goodput = 0.0 if obstacle else self.bench.prefill(replica, 2.0 * replica.gpus)
        ticks.tick()
        if goodput == 0 and obstacle is None:
            obstacle = "a prompt alone misses the TTFT target too often"
        return Phase(replica, goodput, obstacle)

    def _decode_phase(self, replica: Replica, ticks: "_Ticks") -> Phase:
        obstacle = self.space.decode_obstacle(replica)
        goodput = 0.0 if obstacle else self.bench.decode(replica, 8.0 * replica.gpus)
        ticks.tick()
        if goodput == 0 and obstacle is None:
            obstacle = "a step misses the TPOT target even with a small batch"
        return Phase(replica, goodput, obstacle)

    # -- choosing -----------------------------------------------------------------------

    def _deployments(self, prefills: list[Phase], decodes: list[Phase]) -> list[Deployment]:
        found = []
        for prefill, decode in product(prefills, decodes):
            if prefill.goodput and decode.goodput:
                found += self._replicated(prefill, decode)
        return found

    def _replicated(self, prefill: Phase, decode: Phase) -> list[Deployment]:
        """To the rate; within a GPU limit too small for it, every count of decode instances
        with just enough prefill ones beside it."""
        counts = (math.ceil(self.rate / phase.goodput) for phase in (prefill, decode))
        whole = Deployment(prefill, next(counts), decode, next(counts))
        limit = self.gpu_limit
        if limit is None or whole.gpus <= limit:
            return [whole]
        found = []
        for decode_count in range(1, limit // decode.replica.gpus + 1):
            room = (limit - decode_count * decode.replica.gpus) // prefill.replica.gpus
            matching = math.ceil(decode_count * decode.goodput / prefill.goodput)
            for prefill_count in {min(room, matching), min(room, max(1, matching - 1))}:
                if prefill_count > 0:
                    found.append(Deployment(prefill, prefill_count, decode, decode_count))
        return found

    def _choose(
        self, considered: list[Deployment], prefills: list[Phase], decodes: list[Phase]
    ) -> Deployment:
        """Each phase's best per GPU, replicated. With a GPU limit: the fewest GPUs that reach
        the rate, or when none do the best goodput per GPU."""
        if not considered:
            raise InputError(self._nothing_serves([*prefills, *decodes]))
        if self.gpu_limit is None:
            prefill, decode = (
                max(phases, key=lambda p: p.per_gpu) for phases in (prefills, decodes)
            )
            return self._replicated(prefill, decode)[0]
        reaching = [d for d in considered if d.estimate >= self.rate]
        if reaching:
            return min(reaching, key=lambda d: (d.gpus, -d.estimate))
        return max(considered, key=lambda d: (d.estimate / d.gpus, -d.gpus))

    def _nothing_serves(self, phases: Sequence[Phase]) -> str:
        reasons = dict.fromkeys(f"{p.name}: {p.obstacle}" for p in phases if p.obstacle)
        limit = "" if self.gpu_limit is None else f" within {self.gpu_limit} GPUs"
        serving = [p.replica.gpus for p in phases if p.goodput]
        if serving:
            reasons[f"a prefill and a decode instance take {2 * min(serving)} GPUs or more"] = None
        return f"no placement meets the targets{limit}; " + "; ".join(reasons)

    # -- checking -----------------------------------------------------------------------

    def _check(self, deployment: Deployment, link: Link) -> float:
        return self.bench.disaggregated(
            (deployment.prefill.replica, deployment.prefill_count),
            (deployment.decode.replica, deployment.decode_count),
            link,
            self.space.model.kv_bytes_per_token,
            max(deployment.estimate, 0.1),
        )

    def _network(self, prefill: Replica, decode: Replica) -> Link:
        """KV between instances of one prefill instance: a network card for each GPU of the
        smaller side, or NVLink when a single node holds everything."""
        lanes = min(prefill.gpus, decode.gpus)
        one = self.space.gpu.intra_node if self.nodes == 1 else self.space.gpu.nic
        return Link(one.name, lanes * one.bytes_per_s, one.latency_s)

    def _nvlink(self, unit: Deployment) -> Link:
        """All segments of an instance together: each sends its own layers."""
        lanes = min(unit.prefill.replica.gpus, unit.decode.replica.gpus)
        one = self.space.gpu.intra_node
        return Link(one.name, lanes * one.bytes_per_s, one.latency_s)

    def _segment_shapes(self) -> list[tuple[int, tuple[tuple[int, int], tuple[int, int]]]]:
        """(segments, (prefill (tp, pp), decode (tp, pp)) in one node)."""
        inside = self.space.configurations(self.gpus_per_node)
        shapes = []
        for segments in PIPELINE_SIZES:
            if self.nodes is not None and segments > self.nodes:
                break
            for prefill, decode in product(inside, inside):
                used = prefill[0] * prefill[1] + decode[0] * decode[1]
                deepest = segments * max(prefill[1], decode[1])
                if used <= self.gpus_per_node and self.space.model.layers % deepest == 0:
                    shapes.append((segments, (prefill, decode)))
        return shapes

    # -- baselines ----------------------------------------------------------------------

    def _colocated(
        self, phases: Sequence[Phase], gpus: int, guess: float, ticks: "_Ticks"
    ) -> list[Colocated]:
        """What cannot decode by itself cannot do so beside prefills either."""
        results = []
        for phase in phases:
            count = gpus // phase.replica.gpus
            for chunk in (None, *CHUNK_SIZES):
                ticks.tick()
                if count and phase.goodput:
                    results.append(self._one_colocated(phase.replica, count, chunk, guess))
        return results

    def _lecture(self) -> list[Colocated]:
        return [
            self._one_colocated(replica, 1, chunk, 2.0 * replica.gpus)
            for replica in (self.space.replica(tp, 1) for tp in (4, 8) if self._has(tp))
            for chunk in (None, 1024)
            if self.space.decode_obstacle(replica) is None
        ]

    def _has(self, tp: int) -> bool:
        return tp in self.space.tensor_sizes(self.gpus_per_node)

    def _one_colocated(
        self, replica: Replica, count: int, chunk: int | None, guess: float
    ) -> Colocated:
        policy = "prefill-first" if chunk is None else f"chunked-{chunk}"
        goodput = self.bench.colocated(replica, count, chunk, max(guess, 0.1))
        name = f"{count}xTP{replica.tp}xPP{replica.pp} {policy}"
        return Colocated(name, count * replica.gpus, goodput)


class _Ticks:
    def __init__(self, on_progress: Progress, total: int) -> None:
        self._on_progress, self._total, self._done = on_progress, total, 0

    def tick(self) -> None:
        self._done += 1
        self._on_progress(min(self._done, self._total), self._total)
