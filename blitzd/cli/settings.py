"""What a daemon can be told, section by section, with what is accepted for each key.

The one place that names keys: the file, the environment, `--set`, `blitzd config show`,
docs/config.md and the errors all follow from these types.
"""

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from blitzd.control.policy import Policy
from blitzd.engine import catalogue
from blitzd.engine.options import LivePolicy, Weights
from blitzd.events.types import NodeLinks
from blitzd.fabric import host_and_port

Port = Annotated[int, Meta(ge=0, le=65535)]
Replicas = Annotated[int, Meta(ge=0, le=64)]
Count = Annotated[int, Meta(ge=1, le=1 << 30)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Device = Annotated[
    str, Meta(pattern=r"^(cpu|auto|cuda(:\d{1,3})?)$", description="cpu, cuda, cuda:N or auto")
]
Name = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="a host name's characters")
]
NetworkDevice = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,62}$")]
Text = Annotated[str, Meta(min_length=1)]


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    name: Name = "local"
    """Of this node, in the log, and in its certificate if there are several."""
    role: Literal["controller", "agent"] = "controller"
    """controller: serves, and decides for all nodes. agent: starts workers here as the controller
    tells it (docs/nodes.md); its [replicas] are what it offers."""
    address: str = ""
    """By which other nodes reach this one, and where its workers listen for them. On a controller
    it lets agents join; empty: this is the only node."""
    port: Port = 11238
    """Of the controller, at `address`, for agents."""
    controller: str = ""
    """Of an agent: HOST:PORT of the controller."""
    tls_cert: str = ""
    """PEM: this node's certificate, which names `name` and `address`."""
    tls_key: str = ""
    """PEM: its key."""
    tls_ca: str = ""
    """PEM: the authority that signed the certificates of all nodes."""
    insecure: bool = False
    """true: nodes talk over plain TCP, without any certificates. For trials only."""
    lease_s: Annotated[float, Meta(ge=1, le=3600)] = 10.0
    """Of the controller. An agent that is not heard of for so long is lost, and ends its workers
    by then."""
    state_dir: str = ""
    """Where the event log is kept. Empty: `$STATE_DIRECTORY`, `/var/lib/blitzd` if it can be
    written, else `$XDG_STATE_HOME/blitzd`."""
    spawn: Literal["process", "systemd"] = "process"
    """How workers are started: as processes of the daemon, or as units of the system's manager
    (`blitzd-worker@ID.service`; see docs/systemd.md)."""


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    name: Text = catalogue.DEFAULT_MODEL
    """A name of the catalogue or hf:ORG/REPO[@REVISION] of the Hugging Face hub (fetched if it
    is not here), or the path of a GGUF file or of a directory with config.json and safetensors."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV; auto: float32 on a CPU, bfloat16 on GPUs."""


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    prefill: Replicas = 1
    """Replicas that compute prompts. 0 of these, or of `decode`: other nodes have them."""
    decode: Replicas = 1
    """Replicas that make the tokens after the first."""
    spare: Replicas = 1
    """Workers without a model, for when replicas are added."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    device: Device = "cpu"
    """Where replicas run: cpu; cuda, in turns on every visible GPU; cuda:N; auto for cuda where
    it can be had, else cpu. The CUDA path has never been run on a GPU yet."""
    weights: Weights = "map"
    """map: replicas share the mapped file. copy: each has its own, on huge pages."""
    kv_mib: Count = 1024
    """KV cache of each replica, MiB."""
    threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Compute threads of each worker."""
    max_batch_tokens: Count = 512
    """Of one step: longer prompts are computed in chunks, so it bounds how long the other
    requests of a replica wait for a step."""
    max_batch_size: Count = 64
    """Requests of one step; at most `max_batch_tokens`."""
    pace_layer_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0
    """Floor under a layer's time, for experiments on few cores; 0: none."""
    live_policy: LivePolicy = "ilp_free"
    """Which layer of which request runs next on a replica whose weights arrive (docs/zigzag.md):
    ilp_free, BlitzScale's queues; ilp, with plans of its integer programme; best_effort, to
    compare with."""


class FabricSettings(msgspec.Struct, frozen=True, kw_only=True):
    same_node: Literal["map", "ucx"] = "map"
    """How KV moves between workers of this node: a mapped arena, or UCX as between nodes."""
    network_devices: Annotated[tuple[NetworkDevice, ...], Meta(min_length=0, max_length=16)] = ()
    """Of this node, as UCX names them (eth0, mlx5_0:1), in the order of its `links` in [topology]:
    replicas take turns on them, so that each brings its shard of the weights over a link of its
    own. None: every replica uses all of them."""


Gbits = Annotated[float, Meta(gt=0, le=1_000_000)]


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gbit_s: Gbits
    """Of each network link, each way, Gbit/s."""
    links: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=16)] = ("net",)
    """The network links by name, best that of the interface. Replicas take turns on them."""
    leaf: str = ""
    """The switch that the links end in; transfers stay within one where they can."""
    domain: str = ""
    """Of scale-up (NVLink). Empty: the node alone, with the memory of one machine."""
    domain_gbit_s: Annotated[float, Meta(ge=0, le=1_000_000)] = 0.0
    """Inside the domain, Gbit/s. 0: unknown, taken for more than over any link."""


class TopologySettings(msgspec.Struct, frozen=True, kw_only=True):
    nodes: Annotated[
        dict[Name, LinkSettings],
        Meta(description="a table [topology.nodes.NAME] for each, with the keys below"),
    ] = {}
    """What joins the nodes, the controller and its agents, by `node.name`. One that is left out
    is a domain alone, with a link for each replica, as fast as the slowest that is described."""

    def described(self) -> tuple[NodeLinks, ...]:
        return tuple(
            NodeLinks(
                name,
                node.links,
                _bytes_s(node.gbit_s),
                node.leaf,
                node.domain,
                _bytes_s(node.domain_gbit_s),
            )
            for name, node in sorted(self.nodes.items())
        )


def _bytes_s(gbit_s: float) -> int:
    return math.ceil(gbit_s * 1e9 / 8)


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    host: Text = "127.0.0.1"
    """Where the OpenAI API, the probes and `/metrics` listen."""
    port: Port = 11236
    """0: any that is free."""
    body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 4 * 1024 * 1024
    """Of a request's body; more is a 413."""
    body_s: Seconds = 30.0
    """A body arrives within this time, or the answer is 408."""
    idle_s: Seconds = 75.0
    """A connection without a complete request is closed after it."""
    send_s: Seconds = 30.0
    """A client that takes nothing for so long is disconnected, its request cancelled."""
    stall_s: Seconds = 3700.0
    """Longest wait for acceptance, for a first token and between two tokens. Behind a request's own
    deadline (`request_deadline_ms` of the policy), which should come first."""


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    port: Port = 11237
    """Of the admin API, on 127.0.0.1; it has no authentication. 0: any that is free."""
    socket: str = ""
    """Of the admin API beside the port, mode 0660. Empty: in the runtime directory."""


class LimitSettings(msgspec.Struct, frozen=True, kw_only=True):
    drain_s: Annotated[float, Meta(ge=0, le=86400)] = 30.0
    """What runs when the daemon is told to stop may take so long to finish. A second signal
    brings the end forward."""
    hang_deadline_s: Annotated[float, Meta(ge=0.2, le=86400)] = 5.0
    """A worker without a sign of life for so long is killed. Ten times the slowest answer that
    was measured on two cores at a load of 14 (0.47 s, while torch is imported)."""
    step_deadline_s: Annotated[float, Meta(ge=0.2, le=86400)] = 60.0
    """A worker that answers, but computes one step for so long, is killed. Above the longest
    step that a model can take: `max_batch_tokens` of prompt."""
    start_deadline_s: Seconds = 30.0
    """From the start of a worker to its first answer."""
    orphan_timeout_s: Annotated[float, Meta(ge=1, le=86400)] = 20.0
    """A worker that no daemon asks for so long ends by itself: the time that a daemon which
    died has to come back to its workers."""


class BaselineSettings(msgspec.Struct, frozen=True, kw_only=True):
    preset: str = ""
    """Values of the policy by the original's feature names, as in impl_sllm,cache_replace; keys
    of `[policy]` go over them. Empty: none. See docs/baselines.md."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    node: NodeSettings = NodeSettings()
    model: ModelSettings = ModelSettings()
    replicas: ReplicaSettings = ReplicaSettings()
    engine: EngineSettings = EngineSettings()
    fabric: FabricSettings = FabricSettings()
    topology: TopologySettings = TopologySettings()
    http: HttpSettings = HttpSettings()
    admin: AdminSettings = AdminSettings()
    limits: LimitSettings = LimitSettings()
    baseline: BaselineSettings = BaselineSettings()
    policy: Policy = Policy()


def conflicts(settings: Settings) -> list[str]:
    """What is wrong though each key alone is right."""
    found = []
    http, admin, engine = settings.http, settings.admin, settings.engine
    if http.port and http.port == admin.port:
        found.append(f"http.port and admin.port are both {http.port}; two ports are needed")
    if engine.max_batch_size > engine.max_batch_tokens:
        found.append(
            f"engine.max_batch_size: {engine.max_batch_size}; accepted: at most"
            f" engine.max_batch_tokens, {engine.max_batch_tokens}"
        )
    found += _node_conflicts(settings.node) + _replica_conflicts(settings)
    found += _topology_conflicts(settings)
    devices, here = settings.fabric.network_devices, settings.topology.nodes.get(settings.node.name)
    if devices and here is not None and len(devices) != len(here.links):
        found.append(
            f"fabric.network_devices: {len(devices)} of them; accepted: one for each link of"
            f" topology.nodes.{settings.node.name}, {len(here.links)}"
        )
    found += [f"policy.{reason}" for _, reason in settings.policy.conflicts()]
    return found


def _node_conflicts(node: NodeSettings) -> list[str]:
    found = []
    agent, given = node.role == "agent", (node.tls_cert, node.tls_key, node.tls_ca)
    if agent and not node.address:
        found.append("node.address: empty; an agent's workers are reached there")
    if agent and not node.controller:
        found.append("node.controller: empty; an agent needs the controller's HOST:PORT")
    if not agent and node.controller:
        found.append(f"node.controller: {node.controller}, but node.role is controller, not agent")
    if node.controller:
        try:
            host_and_port(node.controller)
        except ValueError as error:
            found.append(f"node.controller: {error}")
    if node.insecure and any(given):
        found.append("node.insecure: true, and node.tls_... are given; accepted: one of the two")
    elif node.address and not node.insecure and not all(given):
        found.append(
            "node.address: nodes need node.tls_cert, node.tls_key and node.tls_ca, or"
            " node.insecure = true for plain TCP"
        )
    return found


def _replica_conflicts(settings: Settings) -> list[str]:
    counts, node = settings.replicas, settings.node
    if node.role == "agent" and not counts.prefill + counts.decode + counts.spare:
        return ["replicas.prefill, replicas.decode, replicas.spare: 0 each; an agent offers some"]
    return [
        f"replicas.{role}: 0; accepted: at least 1 where no other node can join (node.address)"
        for role in ("prefill", "decode")
        if not (getattr(counts, role) or node.address)
    ]


def _topology_conflicts(settings: Settings) -> list[str]:
    nodes = settings.topology.nodes
    if settings.node.role == "agent" and nodes:
        return ["topology.nodes: given, but node.role is agent; accepted: at the controller"]
    found, rates = [], dict[str, tuple[str, float]]()
    for name, node in sorted(nodes.items()):
        if len(set(node.links)) < len(node.links):
            found.append(f"topology.nodes.{name}.links: {list(node.links)}; accepted: each once")
        first, rate = rates.setdefault(node.domain or name, (name, node.domain_gbit_s))
        if node.domain_gbit_s != rate:
            found.append(
                f"topology.nodes.{name}.domain_gbit_s: {node.domain_gbit_s:g}; accepted:"
                f" {rate:g}, as {first}, which is of the same domain"
            )
    return found
