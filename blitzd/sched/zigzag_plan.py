"""BlitzScale's integer programme for a live pair: how many layers of each request New runs.

The programme as published (section 5.2) with two corrections. Its loading constraint charges
for layer 1, which is there at time zero, and so rejects the paper's own example; here it is
t (T_i - ready). And T_1 is bounded by what New can do before Old begins. Even so it is
optimistic: it takes for granted that every later request has layers to run while New waits.
So a solution is only a proposal: whoever uses it runs it through `pair_model` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

NODES_MAX = 2000
"""Of the search tree: a bound that does not depend on the machine's speed."""
REQUESTS_MAX = 32


@dataclass(frozen=True, slots=True)
class Programme:
    """`costs[i]` is the time of one layer of request i, in order of arrival, `done[i]` its
    layers executed on New. Old is busy for `old_busy`, the next layer takes `layer_load`: all
    in one unit, any."""

    layers: int
    ready: int
    """Layers that have arrived; at least 1."""
    layer_load: float
    costs: Sequence[float]
    done: Sequence[int]
    old_busy: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.ready <= self.layers:
            raise ValueError(f"ready: {self.ready}; must be in 1..{self.layers}")
        if not 1 <= len(self.costs) == len(self.done) <= REQUESTS_MAX:
            raise ValueError(
                f"costs, done: {len(self.costs)} and {len(self.done)} requests; as many of both "
                f"are needed, 1 to {REQUESTS_MAX}"
            )

    def bounds(self) -> list[tuple[int, int]]:
        """(least, most) T of each request. What is executed cannot be taken back, and New
        executes at least one layer of each."""
        last = [self.layers] * len(self.costs)
        last[0] = max(1, self.done[0] + int(self.old_busy // self.costs[0]))
        return [
            (max(1, done), max(1, done, min(most, self.layers)))
            for done, most in zip(self.done, last, strict=True)
        ]

    def source_times(self, split: Sequence[int]) -> list[float]:
        """When Old has finished each request, from when it begins the first:
        sum over j <= i of c_j S_j, with S = L - T."""
        parts = zip(self.costs, split, strict=True)
        return list(accumulate(cost * (self.layers - here) for cost, here in parts))

    def objective(self, split: Sequence[int]) -> float:
        """(1/N) sum over i of `source_times`."""
        return sum(self.source_times(split)) / len(split)

    def allows(self, split: Sequence[int]) -> bool:
        """Whether T = `split` keeps both constraints and the bounds."""
        inside = all(
            low <= here <= high for here, (low, high) in zip(split, self.bounds(), strict=True)
        )
        return inside and all(
            sum(a * t for a, t in zip(row, split, strict=True)) <= most + 1e-9
            for row, most in self.rows()
        )

    def rows(self) -> list[tuple[list[float], float]]:
        """Constraints as (coefficients of T, upper bound), for every i after the first.

        Dependency: New's part of 1..i is done when Old has finished 1..i-1,
            sum_{j<=i} c_j (T_j - done_j) <= busy + sum_{j<i} c_j (L - T_j).
        Loading: while the layers up to T_i come, New has other work,
            t (T_i - ready) <= sum_{j<i} c_j (T_j - done_j) + (T_i - ready) sum_{j>=i} c_j.
        """
        costs, count = self.costs, len(self.costs)
        behind = [cost * done for cost, done in zip(costs, self.done, strict=True)]
        rows = []
        for i in range(1, count):
            before, later = sum(costs[:i]), sum(costs[i:])
            dependency = [2 * cost for cost in costs[:i]] + [costs[i]] + [0.0] * (count - i - 1)
            rows.append((dependency, self.old_busy + self.layers * before + sum(behind[: i + 1])))
            slope = self.layer_load - later
            loading = [-cost for cost in costs[:i]] + [slope] + [0.0] * (count - i - 1)
            rows.append((loading, slope * self.ready - sum(behind[:i])))
        return rows


def solve(programme: Programme) -> list[int] | None:
    """T of each request that minimises the mean time of completion; None when there is none,
    or none was proved best within `NODES_MAX` nodes. Equal programmes give equal answers."""
    # Only here: the solver takes half a second to import, and most replicas never use it.
    import highspy

    highs = highspy.Highs()
    highs.silent()
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("random_seed", 0)
    highs.setOptionValue("mip_max_nodes", NODES_MAX)
    highs.setOptionValue("mip_rel_gap", 0.0)
    count, unit = len(programme.costs), max(programme.costs)
    for index, (low, high) in enumerate(programme.bounds()):
        # c_i (L - T_i) counts once for each request from i on: Old's times, summed.
        weight = programme.costs[index] / unit * (count - index)
        highs.addCol(-weight, low, high, 0, [], [])
        highs.changeColIntegrality(index, highspy.HighsVarType.kInteger)
    everyone = list(range(count))
    for row, most in programme.rows():
        scaled = [value / unit for value in row]
        highs.addRow(-highspy.kHighsInf, most / unit, count, everyone, scaled)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return [round(value) for value in highs.getSolution().col_value]
