"""Which (tensor, pipeline) configurations there are, and why some cannot serve at all."""

from dataclasses import dataclass

from blitzd.sim.cluster import Replica
from blitzd.sim.coefficients import Coefficients
from blitzd.sim.errors import InputError
from blitzd.sim.hardware import Gpu
from blitzd.sim.models import Model
from blitzd.sim.roofline import Roofline
from blitzd.sim.steptimes import RooflineSteps, StepTimes
from blitzd.sim.workload import Workload

PIPELINE_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Space:
    """Builds replicas of one model on one kind of GPU, from either source of step times."""

    model: Model
    gpu: Gpu
    workload: Workload
    coefficients: Coefficients | None

    def tensor_sizes(self, gpus_per_node: int) -> list[int]:
        """Tensor parallelism stays inside a node, and splits KV heads evenly or repeats them."""
        if self.coefficients is not None:
            sizes = sorted(self.coefficients.by_tp)
        else:
            heads = self.model.kv_heads
            sizes = [tp for tp in (1, 2, 4, 8) if heads % tp == 0 or tp % heads == 0]
        fitting = [tp for tp in sizes if tp <= gpus_per_node]
        if not fitting:
            raise InputError(
                f"gpus_per_node: {gpus_per_node} is below every tensor parallel size there are "
                f"step times for: {', '.join(map(str, sizes))}"
            )
        return fitting

    def configurations(self, gpus_per_node: int) -> list[tuple[int, int]]:
        """All (tp, pp) that fit a node, by number of GPUs."""
        pairs = [
            (tp, pp)
            for tp in self.tensor_sizes(gpus_per_node)
            for pp in PIPELINE_SIZES
            if tp * pp <= gpus_per_node and self.model.layers % pp == 0
        ]
        return sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair))

    def replica(self, tp: int, pp: int) -> Replica:
        return Replica(self._steps(tp), tp, pp, self._kv_tokens(tp, pp))

    def _steps(self, tp: int) -> StepTimes:
        if self.coefficients is not None:
            return self.coefficients.by_tp[tp]
        return RooflineSteps(Roofline(self.model, self.gpu, tp))

    def _kv_tokens(self, tp: int, pp: int) -> int:
        if self.coefficients is not None and (tp, pp) in self.coefficients.kv_tokens:
            return self.coefficients.kv_tokens[tp, pp]
        return Roofline(self.model, self.gpu, tp).kv_capacity_tokens(pp)

    def prefill_obstacle(self, replica: Replica) -> str | None:
        """Why it can prefill nothing, or None. KV need only hold a prompt until it is sent."""
        if replica.kv_tokens <= 0:
            return self._weights_do_not_fit(replica)
        if replica.kv_tokens < self.workload.longest_prompt:
            return (
                f"KV of {replica.kv_tokens:,} tokens cannot hold the longest prompt, "
                f"{self.workload.longest_prompt:,}"
            )
        return None

    def decode_obstacle(self, replica: Replica) -> str | None:
        """Why it cannot decode this workload, or None."""
        if replica.kv_tokens <= 0:
            return self._weights_do_not_fit(replica)
        share = replica.kv_tokens // replica.pp
        if share < self.workload.longest:
            whose = "" if replica.pp == 1 else f" for each of {replica.pp} batches in flight"
            return (
                f"KV of {share:,} tokens{whose} cannot hold the longest request, "
                f"{self.workload.longest:,}"
            )
        return None

    def _weights_do_not_fit(self, replica: Replica) -> str:
        have = replica.gpus * self.gpu.memory_gb
        return f"{self.model.weight_bytes / 1e9:.0f} GB of weights do not fit {have:.0f} GB"
