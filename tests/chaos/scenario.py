"""What a seed draws: who is there, what comes, what breaks."""

from dataclasses import dataclass, replace
from random import Random

from blitzd.control.policy import Policy


@dataclass
class Faults:
    """Probabilities per opportunity."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    step_failure: float = 0.0
    refusal: float = 0.0
    bad_import: float = 0.0
    stalled_import: float = 0.0
    leak: float = 0.0
    """A worker does not let go of what it is told to."""
    no_room: float = 0.0
    load_failure: float = 0.0
    lost_ack: float = 0.0
    """Old and New do not agree on who has a request."""


@dataclass(frozen=True)
class Scenario:
    """Drawn from the seed: who is there, what comes, what breaks."""

    replicas: tuple[tuple[str, str], ...]
    requests: int
    rate: float
    faults: Faults
    kills: int
    hangs: int
    slow: int
    disk_full: int
    commands: int
    leavers: float
    autoscale: int
    pairs: int = 0
    """1: replicas go live, by themselves where they can, and as often as `unions` says on
    demand."""
    unions: int = 0

    def with_pairs(self, random: Random) -> "Scenario":
        spares = tuple((f"s{i}", "spare") for i in range(random.randint(1, 2)))
        faults = replace(self.faults, lost_ack=random.choice([0.0, 0.0, 0.1, 0.5]))
        return replace(
            self,
            replicas=self.replicas + spares,
            faults=faults,
            # Long enough for loads to begin and end under it.
            requests=self.requests + 30,
            rate=random.choice([5.0, 10.0, 20.0]),
            pairs=1,
            unions=random.choice([1, 3, 8]),
        )

    def with_pool(self, random: Random) -> "Scenario":
        """One decode alone gives its weights, and dies: then a spare has to keep them."""
        kept = [(name, role) for name, role in self.replicas if role == "prefill"]
        spares = [(f"s{i}", "spare") for i in range(random.randint(1, 2))]
        replicas = (*kept, ("d0", "decode"), *spares)
        return replace(self, replicas=replicas, kills=max(self.kills, random.choice([3, 8])))

    @classmethod
    def draw(cls, random: Random) -> "Scenario":
        prefills, decodes = random.randint(1, 3), random.randint(1, 3)
        roles = ["prefill"] * prefills + ["decode"] * decodes + ["spare"] * random.randint(0, 1)

        def sometimes(most: float) -> float:
            return random.choice([0.0, 0.0, most / 4, most])

        faults = Faults(
            drop=sometimes(0.2),
            duplicate=sometimes(0.2),
            delay=sometimes(0.5),
            step_failure=sometimes(0.2),
            refusal=sometimes(0.2),
            bad_import=sometimes(0.3),
            stalled_import=sometimes(0.3),
            leak=random.choice([0.0, 0.0, 0.0, 0.2]),
            no_room=sometimes(0.5),
            load_failure=sometimes(0.5),
        )
        return cls(
            replicas=tuple((f"r{i}", role) for i, role in enumerate(roles)),
            requests=random.randint(5, 60),
            rate=random.choice([2.0, 10.0, 50.0]),
            faults=faults,
            kills=random.choice([0, 0, 1, 3, 8]),
            hangs=random.choice([0, 0, 1, 2]),
            slow=random.choice([0, 0, 1]),
            disk_full=random.choice([0, 0, 0, 1, 2]),
            commands=random.choice([0, 0, 5, 20]),
            leavers=random.choice([0.0, 0.1, 0.5]),
            autoscale=random.choice([0, 0, 1]),
        )

    def policy(self, seed: int) -> Policy:
        quick = {"scale_down_window_ms": 1000, "arrival_window_ms": 1000, "manual_hold_ms": 5000}
        return Policy(
            max_queued_requests=20,
            lease_ttl_ms=5000,
            lease_stall_ms=1000,
            drain_ms=20_000,
            autoscale=self.autoscale,
            ladder_map=(seed + 1) % 2 * (1 - self.pairs),
            ladder_live=self.pairs,
            ladder_live_decode=self.pairs * (seed // 8 % 2),
            ladder_nvlink=seed // 2 % 2,
            ladder_host=seed // 4 % 2,
            **quick if self.autoscale else {},
        )
