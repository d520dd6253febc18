"""Where settings come from, which of several wins, and what is said about a wrong one."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from blitzd.cli.config import to_toml
from blitzd.cli.settings import Settings
from blitzd.cli.settings_layers import KEYS, SettingsError, load
from blitzd.engine.options import ReplicaOptions
from blitzd.events.types import NodeLinks
from blitzd.http.limits import DEFAULT_LIMITS
from blitzd.http.server import ADMIN_PORT, PUBLIC_PORT
from blitzd.node.config import NodeConfig


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "blitzd.toml"


def problems(
    file: Path | None = None,
    assignments: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> list[str]:
    with pytest.raises(SettingsError) as refused:
        load(file, assignments, environment or {})
    return list(refused.value.problems)


def test_each_source_wins_over_the_one_before_and_the_winner_is_known(file: Path) -> None:
    file.write_text("[replicas]\nprefill = 2\ndecode = 2\nspare = 2\n[http]\nport = 2\n")
    environment = {
        "BLITZD_REPLICAS__DECODE": "3",
        "BLITZD_REPLICAS__SPARE": "3",
        "BLITZD_HTTP__PORT": "3",
    }
    loaded = load(
        file,
        ("replicas.spare=4", "http.port=4"),
        environment,
        {"http.port": ("--port", 5)},
    )
    counts = loaded.settings.replicas
    assert (counts.prefill, counts.decode, counts.spare) == (2, 3, 4)
    assert loaded.settings.http.port == 5
    assert loaded.settings.admin.port == 11237
    assert loaded.origins == {
        ("replicas", "prefill"): str(file),
        ("replicas", "decode"): "$BLITZD_REPLICAS__DECODE",
        ("replicas", "spare"): "--set",
        ("http", "port"): "--port",
    }


AGENT = ("node.role=agent", "node.address=10.0.0.2", "node.controller=a:1", "node.insecure=true")
BESIDE = {
    # A batch has to have the tokens of its requests.
    "engine.max_batch_size": ("engine.max_batch_tokens=4096",),
    "node.role": AGENT[1:],
    "node.controller": (*AGENT[:2], AGENT[3]),
    "node.address": AGENT[3:],
}
VALUES: dict[str, Any] = {
    "node.controller": "a:2",
    "baseline.preset": "impl_rdma",
    "fabric.network_devices": ["eth0", "mlx5_0:1"],
    "topology.nodes": {"a": {"gbit_s": 100.0, "links": ["e0", "e1"], "leaf": "l", "domain": "d"}},
}


@pytest.mark.parametrize("key", KEYS.values(), ids=str)
def test_every_key_can_be_set_in_all_three_ways(key: Any, file: Path) -> None:
    default = getattr(getattr(Settings(), key.section), key.name)
    value = VALUES.get(str(key)) or other_than(default, key.accepted)
    encoded = to_toml(value)
    rest = BESIDE.get(str(key), ())
    file.write_text(f"[{key.section}]\n{key.name} = {encoded}\n")
    variable = f"BLITZD_{key.section}__{key.name}".upper()
    text = value if isinstance(value, str) else encoded
    for loaded in (
        load(file, rest, {}),
        load(None, rest, {variable: text}),
        load(None, (*rest, f"{key}={text}"), {}),
    ):
        found = getattr(getattr(loaded.settings, key.section), key.name)
        assert found == msgspec.convert(value, key.type)


def other_than(default: Any, accepted: str) -> Any:
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return 1 - default if accepted.endswith(" to 1") else default + 2
    words = accepted.replace(" or ", ", ").split(", ")
    if len(words) > 1:
        return next(word for word in words if word != default)
    return f"{default}x"


def test_an_unknown_name_is_refused_with_the_nearest_one(file: Path) -> None:
    file.write_text("[http]\nprot = 1\n[replica]\nprefill = 1\n[engine]\nsame_node = 'map'\n")
    assert problems(file) == [
        f"{file}: http.prot: no such key; meant http.port?",
        f"{file}: [replica]: no such section; meant [replicas]?",
        f"{file}: engine.same_node: no such key; meant fabric.same_node?",
    ]
    assert problems(assignments=("policy.pair_caps=1",)) == [
        "--set: policy.pair_caps: no such key; meant policy.pair_cap?"
    ]
    assert problems(environment={"BLITZD_LIMITS__DRIAN_S": "1"}) == [
        "$BLITZD_LIMITS__DRIAN_S: limits.drian_s: no such key; meant limits.drain_s?"
    ]


@pytest.mark.parametrize(
    ("assignment", "value", "accepted"),
    [
        ("http.port=70000", "70000", "an integer from 0 to 65535"),
        ("http.port=web", "'web'", "an integer from 0 to 65535"),
        ("http.port=80.0", "80.0", "an integer from 0 to 65535"),
        ("http.port=true", "True", "an integer from 0 to 65535"),
        ("limits.hang_deadline_s=0.1", "0.1", "a number from 0.2 to 86400"),
        ("limits.hang_deadline_s=nan", "nan", "a number from 0.2 to 86400"),
        ("http.stall_s=0", "0", "a number above 0, up to 86400"),
        ("node.spawn=fork", "'fork'", "process, systemd"),
        ("engine.device=gpu", "'gpu'", "cpu, cuda, cuda:N or auto"),
        ("policy.pair_cap=-1", "-1", "an integer from 1 to 1000000"),
        ("model.name=", "''", "a string that is not empty"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(
    assignment: str, value: str, accepted: str
) -> None:
    key = assignment.partition("=")[0]
    assert problems(assignments=(assignment,)) == [f"--set: {key}: {value}; accepted: {accepted}"]


def test_all_that_is_wrong_is_said_at_once(file: Path) -> None:
    file.write_text("port = 1\n[http]\nport = 'x'\n")
    assert len(problems(file, ("a=b", "replicas.decode=-1"))) == 4


def test_a_file_that_is_no_toml_is_refused_with_the_place(file: Path) -> None:
    file.write_text("[http]\nport == 1\n")
    assert "line 2" in problems(file)[0]
    file.write_bytes(b"\xff")
    assert "not UTF-8" in problems(file)[0]


def test_settings_that_contradict_each_other_are_refused_with_where_they_are(file: Path) -> None:
    file.write_text("[http]\nport = 9000\n")
    [problem] = problems(file, ("admin.port=9000",))
    assert problem.startswith(f"--set, {file}: http.port and admin.port are both 9000")
    [problem] = problems(assignments=("engine.max_batch_size=600",))
    assert "engine.max_batch_size: 600; accepted: at most engine.max_batch_tokens, 512" in problem
    assert load(None, ("http.port=0", "admin.port=0"), {}).settings.http.port == 0


def test_a_preset_sets_the_policy_and_keys_go_over_it(file: Path) -> None:
    file.write_text('[baseline]\npreset = "impl_sllm,cache_replace"\n[policy]\nhost_ttl_ms = 5\n')
    loaded = load(file, [], {})
    policy = loaded.settings.policy
    assert (policy.ladder_map, policy.ladder_host, policy.host_ttl_ms) == (0, 1, 5)
    assert loaded.origins["policy", "ladder_map"] == "baseline.preset"
    assert loaded.origins["policy", "host_ttl_ms"] == str(file)
    with pytest.raises(SettingsError, match=r"--set: baseline.preset: ngrok: nothing"):
        load(None, ["baseline.preset=ngrok"], {})


def test_defaults_are_those_of_the_parts() -> None:
    settings = Settings()
    for name in ("body_bytes", "body_s", "idle_s", "send_s", "stall_s"):
        assert getattr(settings.http, name) == getattr(DEFAULT_LIMITS, name)
    assert (settings.http.port, settings.admin.port) == (PUBLIC_PORT, ADMIN_PORT)
    engine = {f.name: f.default for f in fields(ReplicaOptions)}
    for name in EQUAL:
        assert getattr(settings.engine, name) == engine[name]
    node = {f.name: f.default for f in fields(NodeConfig)}
    for name in LIMITS:
        assert getattr(settings.limits, name) == node[name]


EQUAL = (
    "threads",
    "weights",
    "max_batch_tokens",
    "max_batch_size",
    "pace_layer_ms",
    "live_policy",
)
LIMITS = ("drain_s", "hang_deadline_s", "step_deadline_s", "start_deadline_s", "orphan_timeout_s")


def blitzd(*args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "blitzd", *args]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_what_show_prints_is_a_file_that_gives_the_same(file: Path) -> None:
    shown = blitzd("config", "show", "--set", "http.port=9000", "--set", 'model.name=/a "b"')
    assert shown.returncode == 0, shown.stderr
    [line] = [line for line in shown.stdout.splitlines() if line.startswith("port = 9000")]
    assert line.endswith("# --set")
    file.write_text(shown.stdout)
    loaded = load(file, (), {})
    assert loaded.settings.http.port == 9000
    assert loaded.settings.model.name == '/a "b"'
    assert len(loaded.origins) == len(KEYS)


def test_check_says_what_is_wrong_and_exits_with_it(file: Path) -> None:
    file.write_text("[http]\nport = 9000\n")
    good = blitzd("config", "check", str(file))
    assert (good.returncode, good.stdout) == (0, f"{file}: fine; keys set: 1\n")
    file.write_text("[http]\nport = -1\n")
    bad = blitzd("config", "check", str(file), "--json")
    assert bad.returncode == 1
    assert "http.port: -1" in msgspec.json.decode(bad.stdout)["problems"][0]
    # Starting again would not help, which a manager tells from the exit code.
    assert blitzd("serve", "-c", str(file)).returncode == 2
    missing = blitzd("serve", "-c", str(file) + "x")
    assert (missing.returncode, missing.stderr) == (
        2,
        f"blitzd serve: {file}x: No such file or directory\n",
    )


@pytest.mark.parametrize(
    ("assignments", "says"),
    [
        (("node.role=agent",), "node.address: empty"),
        (("node.role=agent",), "node.controller: empty"),
        (("node.controller=a:1",), "but node.role is controller, not agent"),
        ((*AGENT, "node.controller=a"), "'a'; accepted: HOST:PORT"),
        (AGENT[:3], "nodes need node.tls_cert, node.tls_key and node.tls_ca, or"),
        ((*AGENT[:3], "node.tls_cert=x", "node.tls_key=x"), "nodes need node.tls_cert"),
        ((*AGENT, "node.tls_cert=x"), "accepted: one of the two"),
        (
            (*AGENT, "replicas.prefill=0", "replicas.decode=0", "replicas.spare=0"),
            "an agent offers some",
        ),
        (("replicas.decode=0",), "replicas.decode: 0; accepted: at least 1"),
    ],
)
def test_what_nodes_need_of_each_other_is_named(assignments: tuple[str, ...], says: str) -> None:
    assert any(says in problem for problem in problems(assignments=assignments))


def test_a_node_among_others_may_leave_a_role_to_them() -> None:
    beside = ("node.address=10.0.0.1", "node.insecure=true", "replicas.decode=0")
    assert load(None, beside, {}).settings.replicas.decode == 0


def test_a_silent_request_is_ended_by_its_own_deadline_first() -> None:
    """B.1 #20: one deadline, and not a shorter one behind it."""
    settings = Settings()
    assert settings.http.stall_s * 1000 > settings.policy.request_deadline_ms
    assert settings.http.stall_s == DEFAULT_LIMITS.stall_s


TOPOLOGY = """
[topology.nodes.a]
links = ["eth0", "eth1"]
gbit_s = 100
leaf = "l1"
domain = "pod"
domain_gbit_s = 3200
[topology.nodes.b]
gbit_s = 25
"""


def test_a_topology_is_a_table_for_each_node(file: Path) -> None:
    file.write_text(TOPOLOGY)
    assert load(file, (), {}).settings.topology.described() == (
        NodeLinks("a", ("eth0", "eth1"), 12_500_000_000, "l1", "pod", 400_000_000_000),
        NodeLinks("b", ("net",), 3_125_000_000),
    )
    shown = blitzd("config", "show", "-c", str(file))
    assert shown.returncode == 0, shown.stderr
    before = load(file, (), {}).settings.topology
    file.write_text(shown.stdout)
    assert load(file, (), {}).settings.topology == before


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ("{a={gbit_s=0}}", ".a.gbit_s: 0; accepted: a number above 0, up to 1e+06"),
        ("{a={}}", ".a.gbit_s: missing; accepted: a number above 0, up to 1e+06"),
        ("{a={gbit_s=1,lnks=['e']}}", ".a.lnks: no such key; meant links?"),
        ("{a={gbit_s=1,links=[]}}", ".a.links: []; accepted: a list of 1 to 16 strings"),
        ("{a={gbit_s=1,links=['e','e']}}", ".a.links: ['e', 'e']; accepted: each once"),
        ("{a=1}", ".a: 1; accepted: a table"),
        ("{'a b'={gbit_s=1}}", ": 'a b'; accepted: names of a host name's characters"),
        ("1", ": 1; accepted: a table [topology.nodes.NAME] for each, with the keys below"),
        (
            "{a={gbit_s=1,domain='d'},b={gbit_s=1,domain='d',domain_gbit_s=2}}",
            ".b.domain_gbit_s: 2; accepted: 0, as a, which is of the same domain",
        ),
    ],
)
def test_what_is_wrong_in_a_topology_is_named_by_its_key(nodes: str, says: str) -> None:
    assert problems(assignments=(f"topology.nodes={nodes}",)) == [f"--set: topology.nodes{says}"]


def test_each_described_link_of_this_node_has_its_device() -> None:
    links = "topology.nodes={local={gbit_s=1,links=['l0','l1']}}"
    [found] = problems(assignments=(links, "fabric.network_devices=['eth0']"))
    assert "fabric.network_devices: 1 of them; accepted: one for each link" in found
    assert load(None, [links, "fabric.network_devices=['eth0','eth1']"], {})


def test_an_agent_leaves_the_topology_to_its_controller() -> None:
    found = problems(assignments=(*AGENT, "topology.nodes={b={gbit_s=1}}"))
    assert "topology.nodes: given, but node.role is agent; accepted: at the controller" in found[0]
