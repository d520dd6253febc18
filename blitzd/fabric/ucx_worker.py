"""UCX's worker, and nothing of ours: endpoints, tagged messages, progress.

Used by one thread only, down to the release of its objects.
"""

import logging
import time
from collections import deque
from typing import Any

import numpy as np

from blitzd.fabric.staging import SlotPool
from blitzd.fabric.ucx_env import CHUNK_BYTES, binding
from blitzd.fabric.ucx_wire import (
    CONTROL_BYTES,
    CONTROL_TAG,
    KIND_MASK,
    Control,
)

SEND_SLOTS = 32
RECEIVE_SLOTS = 64
CONTROL_AHEAD = 8

log = logging.getLogger(__name__)


class UcxWorker:
    """A UCX context and worker with error handling, in blocking progress mode."""

    def __init__(self) -> None:
        self._ucx = binding()
        from ucxx._lib.arr import Array

        self.array: Any = Array
        self.error: type[Exception] = self._ucx.UCXError
        features = (self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP)
        self._context = self._ucx.UCXContext({}, features)
        self._worker = self._ucx.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._exact = self._ucx.UCXXTagMaskFull
        self.fd: int = self._worker.epoll_file_descriptor
        """Readable when there is something to do, once `arm` said True."""
        self.address: bytes = bytes(self._worker.address)
        self.now = time.monotonic()
        """The time of this turn of the thread."""
        self.slots_out = SlotPool(SEND_SLOTS, CHUNK_BYTES, Array)
        self.slots_in = SlotPool(RECEIVE_SLOTS, CHUNK_BYTES, Array)
        self._retired: deque[tuple[Any, SlotPool | None, Any]] = deque()
        self._control: deque[tuple[Any, Any]] = deque()
        for _ in range(CONTROL_AHEAD):
            self._post_control(np.zeros(CONTROL_BYTES, dtype=np.uint8))

    def connect(self, address: bytes) -> Any:
        remote = self._ucx.UCXAddress.create_from_buffer(address)
        return self._worker.create_endpoint_from_worker_address(remote, True)

    def disconnect(self, endpoint: Any, period_ns: int) -> None:
        endpoint.close_blocking(period_ns, 1)
        # Runs the cancellations that the end of an endpoint schedules; `progress_once`
        # never does.
        self._worker.progress()

    def send(self, endpoint: Any, array: Any, tag: int) -> Any:
        return endpoint.tag_send(array, self._ucx.UCXXTag(tag))

    def receive(self, endpoint: Any, array: Any, tag: int) -> Any:
        """Posted on the endpoint, so that its end cancels it."""
        return endpoint.tag_recv(array, self._ucx.UCXXTag(tag), self._exact)

    def retire(self, request: Any, pool: SlotPool | None, memory: Any) -> None:
        """Keeps `memory` until UCX has let go of it, then puts it back to `pool`."""
        self._retired.append((request, pool, memory))

    @property
    def retired(self) -> int:
        return len(self._retired)

    def heard(self) -> list[Control]:
        """Control messages that came since the last call, in order."""
        messages: list[Control] = []
        while self._control and self._control[0][0].completed:
            request, buffer = self._control.popleft()
            try:
                request.check_error()
                messages.append(Control.decode(buffer.tobytes()))
            except self.error as error:
                # Too long to be one of ours; whoever sent it, the rest goes on.
                log.warning("a control message was dropped: %s", error)
            self._post_control(buffer)
        return messages

    def progress(self) -> bool:
        """One round of UCX; True when something happened."""
        self._bury()
        return bool(self._worker.progress_once())

    def progress_all(self) -> None:
        """UCX until it is quiet, with the cancellations of ended endpoints."""
        self._worker.progress()

    def arm(self) -> bool:
        """True when it is safe to wait for `fd`."""
        return bool(self._worker.arm())

    def _post_control(self, buffer: Any) -> None:
        mask = self._ucx.UCXXTagMask(KIND_MASK)
        tag = self._ucx.UCXXTag(CONTROL_TAG)
        self._control.append((self._worker.tag_recv(self.array(buffer), tag, mask), buffer))

    def _bury(self) -> None:
        for _ in range(len(self._retired)):
            request, pool, memory = self._retired.popleft()
            if not request.completed:
                self._retired.append((request, pool, memory))
            elif pool is not None:
                pool.put(memory)
