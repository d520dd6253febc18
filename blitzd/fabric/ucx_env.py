"""UCX as we use it: its environment, and the one import of its binding.

UCX reads its variables when the library is loaded, so they are set here and nowhere else,
before `ucxx` is imported, and `ucxx` is imported nowhere else. `ucxx` is the maintained
successor of `ucx-py`. Of the binding only the layer that its own asyncio front end stands
on is used (`ucxx._lib`, private, hence pinned): that front end polls without pause as soon
as one request is pending.
"""

import importlib
import os
import sys
from typing import Any

CHUNK_BYTES = 1 << 20
"""Payload of one message, at most."""

SEGMENT_BYTES = CHUNK_BYTES + (64 << 10)
"""A whole message must fit one TCP segment of UCX. Of a message in several segments the
first may arrive before the sender dies, and such a receive can be neither completed nor
cancelled: it would hold its buffer, and swallow the tag, for ever."""

_ALWAYS = {
    "UCX_RNDV_THRESH": "inf",  # a rendezvous would queue behind bulk data of the other way
    "UCX_TCP_TX_SEG_SIZE": str(SEGMENT_BYTES),
    "UCX_TCP_RX_SEG_SIZE": str(SEGMENT_BYTES),
    "UCX_TCP_CONN_NB": "y",  # connecting to a silent host must not stop the thread
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_HANDLE_ERRORS": "none",  # Python's handlers stay in charge of signals
}
_UNLESS_SET = {
    "UCX_TLS": "tcp",
    "UCX_LOG_LEVEL": "fatal",  # a dead peer is our error to report
    "UCX_LOG_FILE": "stderr",  # standard output belongs to the command
}
_SHARED_MEMORY = {"all", "sm", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem"}


def binding() -> Any:
    """The module `ucxx._lib.libucxx`, with UCX set up.

    Raises RuntimeError when somebody imported `ucxx` before, or asked for lanes that a
    dead peer can take this process down with.
    """
    module = sys.modules.get("ucxx._lib.libucxx")
    if module is not None:
        if os.environ.get("UCX_RNDV_THRESH") != "inf":
            raise RuntimeError("ucxx was imported before blitzd.fabric could set UCX up")
        return module
    for name, value in _UNLESS_SET.items():
        os.environ.setdefault(name, value)
    lanes = set(os.environ["UCX_TLS"].lower().split(","))
    refused = sorted(lanes & _SHARED_MEMORY)
    if refused or os.environ["UCX_TLS"].startswith("^"):
        raise RuntimeError(
            f"UCX_TLS={os.environ['UCX_TLS']}: accepted are named lanes other than shared "
            f"memory, such as 'tcp' or 'rc,tcp'; a peer that dies on a shared memory lane "
            "takes the survivor with it"
        )
    os.environ.update(_ALWAYS)
    importlib.import_module("ucxx")
    return importlib.import_module("ucxx._lib.libucxx")
