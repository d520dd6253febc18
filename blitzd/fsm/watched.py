"""A state that says what each record touched, for those who read a log."""

from blitzd.events.record import Record
from blitzd.fsm.replaying import replay_one
from blitzd.fsm.state import ClusterState, Key


class WatchedState(ClusterState):
    """The daemon does not pay for this: it folds into a plain ClusterState."""

    def __init__(self) -> None:
        super().__init__()
        self._touched: dict[Key, None] = {}

    def touch(self, kind: str, key: str | int) -> None:
        super().touch(kind, key)
        self._touched[kind, key] = None

    def take(self, record: Record) -> list[Key]:
        """Folds `record` (see `replay_one`); returns what it touched, each once."""
        self._touched.clear()
        replay_one(self, record)
        return list(self._touched)
