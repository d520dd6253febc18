"""Folders of the network between nodes."""

from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm.folding import IllegalEvent, folds
from blitzd.fsm.state import ClusterState


@folds(ev.TopologyDescribed)
def _(state: ClusterState, event: ev.TopologyDescribed, record: Record) -> None:
    described = {links.node: links for links in event.nodes}
    if len(described) != len(event.nodes):
        raise IllegalEvent("a node is described twice")
    for node in state.topology.keys() | described.keys():
        state.touch("topology", node)
    state.topology = described
