"""`blitzd replay`: fold a log and show what came of it."""

import sys
from pathlib import Path

import msgspec

from blitzd.events import LogError, LogReader
from blitzd.fsm import ClusterState, IllegalEvent, IllegalTransition, fold


def replay(
    directory: Path, *, state: bool = False, until: int | None = None, json: bool = False
) -> int:
    """Fold a log and show the state that it leads to.

    Parameters
    ----------
    directory
        A daemon's state directory, or its log/.
    state
        Print the whole state and not only where it ended.
    until
        Stop after this sequence number.
    json
        Print one JSON object: with --state what /admin/state gave at that sequence.
    """
    folded = ClusterState()
    try:
        for record in LogReader(directory).records():
            if until is not None and record.seq > until:
                break
            fold(folded, record)
    except (LogError, OSError, IllegalEvent, IllegalTransition) as error:
        print(f"blitzd replay: after record {folded.seq}: {error}", file=sys.stderr)
        return 1
    shown = folded.to_json() if state else {"seq": folded.seq, "hash": folded.hash()}
    encoded = msgspec.json.encode(shown)
    print((encoded if json else msgspec.json.format(encoded)).decode())
    return 0
