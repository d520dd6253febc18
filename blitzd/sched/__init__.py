"""Which tokens run next inside one replica: block manager, sequences, scheduler.

Pure and deterministic: no clock, no threads, no tensors. The engine runs it over a real
KV cache, the simulator over a model of one.

A sequence has only computed and wanted tokens; prompts, chunks of prompts and decodes are
the same thing at different distances. The promises: a step never exceeds its token budget
or its batch size, a running answer is never held up by a long prompt, the oldest running
sequence is never preempted for a newer one, and every block is in exactly one of
{free, owned by the sequences and reservations that count on it}.
"""

from blitzd.sched.block_manager import BlockManager, NoFreeBlocks
from blitzd.sched.plan import Chunk, NoRoom, Refused, Reservation, StepPlan
from blitzd.sched.scheduler import Scheduler
from blitzd.sched.sequence import Finish, Phase, Sequence

__all__ = [
    "BlockManager",
    "Chunk",
    "Finish",
    "NoFreeBlocks",
    "NoRoom",
    "Phase",
    "Refused",
    "Reservation",
    "Scheduler",
    "Sequence",
    "StepPlan",
]
