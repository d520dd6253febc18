"""How a process ended that is not our child: the kernel tells whoever holds its pidfd."""

import asyncio
import fcntl
import os
import struct

REAPED_S = 0.1
"""The kernel knows once the parent has reaped it, which systemd does within a millisecond."""

# struct pidfd_info of <linux/pidfd.h> in its first version: mask, cgroup, eleven ids, exit code.
_INFO = struct.Struct("=QQ11Ii")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_EXIT = 1 << 3


async def exit_code(pidfd: int) -> int | None:
    """As Popen.returncode: negative for a signal. None before Linux 6.15, or when the parent
    takes too long."""
    info = bytearray(_INFO.size)
    deadline = asyncio.get_running_loop().time() + REAPED_S
    while asyncio.get_running_loop().time() < deadline:
        _INFO.pack_into(info, 0, _EXIT, 0, *[0] * 12)
        try:
            fcntl.ioctl(pidfd, _GET_INFO, info)
        except OSError:  # no such request
            return None
        mask, *_, status = _INFO.unpack(info)
        if mask & _EXIT:
            return os.waitstatus_to_exitcode(status)
        await asyncio.sleep(0.001)
    return None
