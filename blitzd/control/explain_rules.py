"""The rule behind each record type, in a sentence. `--plan` prints it beside the facts."""

from blitzd.events import types as ev
from blitzd.events.record import REGISTRY, Payload

INPUT = "An input: the core was told, and decided the events of this turn."
EPOCH = "A notice of another epoch, or about a lease or request that has ended, is counted only."
BACK_OFF = (
    "At once after the first failure in a row, then after restart_backoff_ms, doubled each"
    " time up to restart_backoff_max_ms."
)

RULES: dict[type[Payload], str] = {
    **{cls: INPUT for cls in REGISTRY.values() if cls.type_id < 100},
    ev.NodeStarted: "Each start begins with the configuration and the policy in force.",
    ev.TopologyDescribed: "The [topology] of the start's configuration is not what was known.",
    ev.NodeDraining: "Told to stop: no new request is accepted, those accepted may finish.",
    ev.NodeJoined: "An agent is in contact; its replicas are this cluster's from here on.",
    ev.NodeLost: (
        "Its agent left, was silent for its lease, or did not come back within one to a"
        " controller that was restarted: requests leave its replicas, its replicas leave the"
        " state."
    ),
    ev.NodeAwaited: "A restarted controller waits a lease for the agents that were in contact.",
    ev.WorkerAwaited: (
        "A restarted controller does not know yet whether it lives. Those that were ready, or had"
        " no weights, may go on; others are lost."
    ),
    ev.WorkerAdopted: (
        "Its agent still has it and it has all the weights: it serves again in the role that its"
        " replica is to have, without a load."
    ),
    ev.NodeStopped: "A draining node stops once no request is left, or its deadline has come.",
    ev.ReplicaRegistered: (
        "The configuration, or a node that joins, names this replica: new, or with another role"
        " or node."
    ),
    ev.WorkerSpawning: (
        "A running node spawns a worker where there is none and the back-off is over."
    ),
    ev.WorkerSpawned: "The process was started.",
    ev.WorkerAttached: "The worker answers on its socket, or was adopted from the last boot.",
    ev.WorkerLost: f"A dead worker makes its replica Failed. The next one: {BACK_OFF}",
    ev.ReplicaRetired: (
        "The configuration no longer names this replica, or its node is lost; it has no worker."
    ),
    ev.LoadStarted: (
        "An Inactive replica with an attached worker and a role other than spare loads, unless"
        " it is cordoned or in back-off; from a replica that has the weights, or will, and gives"
        " them to nobody yet, if the policy says so (not from a Prefill, whose egress is for KV,"
        " nor after two failures), in shards where its node's links are described and several"
        " can be had at once, else from the node's file."
    ),
    ev.LoadProgressed: "Progress of a load that is under way.",
    ev.LoadFinished: "The last layer has arrived; the role says which state follows.",
    ev.LoadFailed: f"The worker could not load. The next try: {BACK_OFF}",
    ev.DecodeOpened: "An AusDecode accepts KV from here on.",
    ev.PairOpened: (
        "A prefill replica that is to get its weights from another, and gives them to nobody,"
        " serves meanwhile (ladder_live, or an operator asked): beside a Prefill that finishes,"
        " one that feeds nobody first, then the one with the fewest blocks reserved."
    ),
    ev.FollowStarted: "New has said that it takes prompts: Old is told to take over from it.",
    ev.FollowStopped: (
        "Old has nothing more to take over; or it could not, and is told again after"
        " resume_backoff_ms, doubled each time, three times in all."
    ),
    ev.PairSettled: "Nothing begun in the pair is left: both are ordinary prefill replicas.",
    ev.PairBroken: (
        "One side is gone, the load failed, Old could not follow, or the daemon was restarted;"
        " who is left goes on by itself."
    ),
    ev.MutationStarted: (
        "A role has too many and the other too few (or an operator asked): the serving replica"
        " with the fewest blocks reserved changes, then the smallest id."
    ),
    ev.MutationFinished: (
        "Every prompt here is computed and nothing is on its way: the KV stays, the role changes."
    ),
    ev.ShutdownStarted: (
        "A role has too many (or an operator asked): of the serving ones, that with the fewest"
        " blocks reserved, then the smallest id, finishes what it has."
    ),
    ev.ReplicaRevived: (
        "A role has too few: first a replica that is still shutting from that role, the one with"
        " the fewest blocks reserved."
    ),
    ev.ReplicaEmptied: "Nothing is left on a shutting replica.",
    ev.ReplicaExpired: "A Decode without requests is shut in one go.",
    ev.NullReused: (
        "A role has too few and none is shutting from it: a warm null, one of that role first,"
        " then the one that has been warm longest."
    ),
    ev.ReplicaDeactivated: 'A null gives up its weights: "plan" on command, "ttl" when unused.',
    ev.RoleAssigned: (
        "A replica without weights gets a role: the last rung up, or the first one down, since it"
        " serves nothing."
    ),
    ev.PrefillOpened: "What the replica decoded has ended; it takes prompts from here on.",
    ev.ScaleSet: "At least one of each role, and no more than there are replicas.",
    ev.RestartStarted: (
        "An operator asked, or a rolling restart came to it: one of each role at a time, one"
        " stand-in at a time, spares last."
    ),
    ev.StandInCalled: (
        "The one that restarts is the last that serves its role, and a spare can take it: one"
        " that is still shutting from that role, then a warm null, then one without weights."
    ),
    ev.StandInReleased: "The one it stood in for no longer restarts, or it keeps the role.",
    ev.WorkerStopping: (
        "A replica that restarts, or whose load is broken off, serves nothing: its worker ends."
    ),
    ev.WorkerStopped: "The process of a worker that was told to end is gone; this is no failure.",
    ev.RestartEnded: (
        "The new worker serves in the replica's role, or is attached if it is a spare; not after"
        " restart_limit_ms beside its drain, or an operator undrained it."
    ),
    ev.RollingRestartStarted: "An operator asked for a new worker of every replica there is.",
    ev.RollingRestartEnded: "Each has left the epoch it had, or one did not come back.",
    ev.ReplicaCordoned: "Drained while it served nothing new: no plan brings it back.",
    ev.PolicyChanged: "Each value is within its bounds and differs from the one before.",
    ev.PlanDecided: (
        "The planner: a role with fewer replicas than the load needs goes up to the middle of what"
        " is needed, one that had more for scale_down_window_ms goes down to the most that was"
        " needed meanwhile; counts that are no longer there are corrected."
    ),
    ev.PlanHeld: (
        "The planner changes nothing; its reason is another than before, or the load of a role"
        " that waits to go down rose."
    ),
    ev.PlannerPinned: "An operator who sets counts owns them for manual_hold_ms (0: for good).",
    ev.PlannerReleased: "The counts are the planner's again: an operator said so, or time is over.",
    ev.HostCopyKept: "A load has read the model into the node's memory; ladder_host counts on it.",
    ev.HostCopyDropped: "host_ttl_ms after the last load, and no replica of the node has weights.",
    ev.PoolCopyAssigned: (
        "No replica has weights and a free egress, or will have soon: a spare keeps a copy for"
        " those that load, on a node without weights if there is one, by the fastest link."
    ),
    ev.PoolCopyHeld: "The keeper has read the whole model into its node's memory.",
    ev.PoolCopyFailed: "The keeper could not; it is passed over for restart_backoff_max_ms.",
    ev.PoolCopyReleased: (
        "A replica gives the weights (and nobody loads from the keeper any more), or the policy"
        " wants no pool, or the node stops."
    ),
    ev.CommandRefused: "A command that does not fit the state is refused; nothing else changed.",
    ev.RequestAccepted: "The node runs, the queue has room, and some replica is large enough.",
    ev.RequestRejected: (
        "Refused if the node drains (draining), max_queued_requests wait (queue_full), or no"
        " serving replica's KV is large enough (too_long)."
    ),
    ev.PrefillStarted: (
        "First come, first served, to the replica with the fewest prompt tokens granted, then"
        " the smallest id, if it has a grant and the blocks free; one that lost the request since"
        " its last token comes last. Of a live pair New takes it, within the pair's cap by now,"
        " with blocks on both; Old does until New can, and what New refuses or is too small for."
    ),
    ev.RequestRelayed: (
        "The first of the two of a live pair has said that Old goes on with the request."
    ),
    ev.RequestReturned: (
        "A replica that serves while it loads refused it; one with all layers may take it."
    ),
    ev.PrefillFinished: "The first token is out; the KV goes to a decode replica, or stays.",
    ev.MigrationStarted: (
        "First come, first served, to the replica that accepts KV, has the blocks free and the"
        " fewest in use, then the smallest id; not to one with max_imports_per_replica"
        " transfers, nor with more than half of its blocks and twice the mean in use. The"
        " blocks are reserved for lease_ttl_ms."
    ),
    ev.MigrationFinished: "The target has the KV (it said so, or ended the request).",
    ev.RequestMoving: (
        "A decode replica shuts, more than move_min_tokens may be left, and another has room: it"
        " moves with its KV. It stays if no lease comes of it."
    ),
    ev.LeaseExtended: "The target said that it gets on: lease_stall_ms from then, or the cap.",
    ev.LinkCooled: (
        "A transfer broke: the link rests for link_cooldown_ms, doubled with each failure in a"
        " row up to link_cooldown_max_ms. A mismatch of layouts rests for the longest time."
    ),
    ev.LinkReopened: "The link has rested: one hand-over at a time may try it.",
    ev.LinkHealed: "A hand-over over the link succeeded.",
    ev.KvMismatched: "One of kv_checksum_every transfers is verified, layer by layer.",
    ev.AuditOpened: "A worker without requests said that it holds something.",
    ev.AuditPassed: "It holds nothing any more, or has requests again.",
    ev.AuditFailed: (
        "It still does after audit_grace_ms: what it names is cancelled; if it names nothing, or"
        " that has not helped, it is restarted."
    ),
    ev.InvariantBroken: "The state was checked while nothing ran. A defect of ours.",
    ev.MigrationFailed: (
        "no_room: again after import_retry_ms. If the source lost the KV the request is resumed;"
        " anything else: another target is asked."
    ),
    ev.RequestResumed: (
        "What was computed is lost, the prompt and the tokens that the client has got are not:"
        " queued again at its old place. Not if it is not resumable, nor after max_resumes losses"
        " in a row without a new token; with a living replica involved, after resume_backoff_ms,"
        " doubled with each loss in a row."
    ),
    ev.RequestFinished: "The worker that has the request said that it is complete.",
    ev.RequestFailed: "What the request depended on is gone for good, or its time is over.",
    ev.RequestCancelled: "The client left; what it held is freed.",
    ev.OccupancySampled: "The worker's KV occupancy has changed.",
    ev.StaleNoticeIgnored: EPOCH,
    ev.StateHashed: "Every so many records the log holds the hash of the state.",
}
