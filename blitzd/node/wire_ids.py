"""The ids that workers know requests by: each attempt of a request is another one to them,
so what a worker still says of an earlier attempt is never taken for the newest."""

from blitzd.control.commands import MAX_ATTEMPTS


def wire_id(request_id: int, attempt: int) -> int:
    """A uint64, as request ids stay below 2**56."""
    return request_id * MAX_ATTEMPTS + attempt


def request_and_attempt(wire: int) -> tuple[int, int]:
    return divmod(wire, MAX_ATTEMPTS)
