"""The original's build features as values of the policy that can change at run time.

The original chooses its behaviour when it is compiled. Here each of its feature names, or
several with commas, is a preset: it sets every switch of the ladder, so that going from one
preset to another leaves nothing of the first. A name that means something here that we do not
have is refused, with the reason. `docs/baselines.md` has the whole table.

The forms are those that the original meant, not what it does where it aborts or takes a wrong
turn (reference 15.4): decode replicas load in every case, a decode's miss reads the disk as a
prefill's does, `mutate` alone decides whether replicas mutate.
"""

from collections.abc import Collection

from blitzd.control.policy import Policy

DEFAULT = "blitzd"
"""Ours, and what the presets are compared with."""

SWITCHES = (
    *(name for name in Policy.__struct_fields__ if name.startswith("ladder_")),
    "host_ttl_ms",
    "mutate_after_load",
)

IMPLIES: dict[str, tuple[str, ...]] = {
    "default": ("impl_blitz",),
    "impl_blitz": ("impl_rdma", "mutate"),
    "impl_sllm": (),
    "impl_rdma": (),
    "impl_nvl": (),
    "mutate": (),
    "unidirect": ("impl_rdma",),
    "fast": (),
    "impl_fast": ("fast", "impl_rdma"),
    "impl_tanz": ("fast", "impl_rdma", "impl_nvl"),
    "impl_fast_pro": ("fast", "impl_tanz"),
    "cache_replace": ("impl_sllm",),
    "cache_all_hit": ("impl_sllm",),
    "cache_all_miss": ("impl_sllm",),
    "mock_transfer": (),
    "motiv": ("impl_sllm", "mock_transfer"),
    "eval_sllm": ("cache_replace",),
    "eval_sllm_pro": ("cache_all_hit", "mutate"),
    "eval_net": ("impl_blitz", "unidirect", "impl_nvl"),
    "eval_fast": ("impl_blitz", "impl_fast_pro"),
    "eval_fast_wo_nvl": ("impl_blitz", "impl_fast"),
    "live": ("impl_blitz",),
    "impl_live": ("live",),
    "test_live": ("live",),
    "impl_live_pro": ("live", "impl_tanz"),
    "eval_all": ("impl_blitz", "impl_fast_pro", "impl_live_pro"),
    "eval_fast_live_wo_nvl": ("eval_fast_wo_nvl", "impl_live"),
    "test_nvl": ("impl_nvl",),
    "test_tanz": ("impl_blitz", "impl_tanz"),
    "manually_scale": (),
    "static": (),
}
"""Each name and those that come with it. `static` is ours: the DistServe baseline, which the
original builds by equal least and greatest counts."""

CACHES = ("cache_replace", "cache_all_hit", "cache_all_miss")

REFUSED: dict[str, str] = {
    "statistic": (
        "it needs no switch while a daemon runs: blitzd replay DIR --csv FILE writes the same time"
        " series, and more, from any log afterwards"
    ),
    "decode_load_balance": (
        "it aborts in the original; here a decode replica with more than half of its blocks and"
        " twice the mean in use never gets more, with every preset"
    ),
    "optimize_network_interference": (
        "it is so already: weights never leave by a prefill's egress but under unidirect"
        " (ladder_prefills_give)"
    ),
    "optimize_op_loading": "no load here sleeps for operators; mock_load_ms makes one as slow",
    "ngrok": "nothing here opens a tunnel",
    "buddy_nic": "the original names it and never declares it: it can not be built",
    "sched_naive": "the original names it and never declares it: it can not be built",
}

NAMES = (DEFAULT, *IMPLIES, *REFUSED)


class PresetRefused(ValueError):
    """The message names what was asked for, and why it cannot be had."""


def expand(preset: str) -> dict[str, int]:
    """The values of a preset: one name, or several with commas, in any order.

    Raises PresetRefused.
    """
    names = [name.strip() for name in preset.split(",")]
    for name in names:
        if name in REFUSED:
            raise PresetRefused(f"{name}: {REFUSED[name]}")
        if name not in NAMES:
            raise PresetRefused(f"{name!r}: no such preset; accepted: {', '.join(NAMES)}")
    ours = Policy()
    values = {name: getattr(ours, name) for name in SWITCHES}
    features = _closure(set(names) - {DEFAULT})
    counted = {"static": "autoscale", "manually_scale": "autoscale"}
    fixed = {counted[name]: 0 for name in features if name in counted}
    features -= set(counted)
    if DEFAULT in names and features:
        raise PresetRefused(f"{preset}: {DEFAULT} is a whole system; accepted: it alone")
    if not features:
        return values | fixed
    if "impl_sllm" not in features:
        features = _closure(features | {"impl_blitz"})  # as a build with default features
    _check(preset, features)
    return values | _values(features) | fixed


def _closure(features: Collection[str]) -> set[str]:
    found, open_ = set(features), list(features)
    while open_:
        new = set(IMPLIES[open_.pop()]) - found
        found |= new
        open_ += new
    return found


def _check(preset: str, features: set[str]) -> None:
    """What the original refuses to compile, but for `motiv`, which it refuses by mistake."""
    caches = [name for name in CACHES if name in features]
    if "impl_sllm" not in features:
        if "mock_transfer" in features:
            raise PresetRefused(
                f"{preset}: mock_transfer is a form of impl_sllm; accepted: motiv, with"
                " mock_load_ms"
            )
        return
    if "impl_blitz" in features:
        raise PresetRefused(f"{preset}: impl_blitz and impl_sllm; accepted: one of the two")
    if "impl_rdma" in features or "impl_nvl" in features:
        raise PresetRefused(
            f"{preset}: impl_sllm loads nothing over the network; accepted: impl_sllm without"
            " impl_rdma, impl_nvl and what contains them"
        )
    if len(caches) + ("mock_transfer" in features) != 1:
        raise PresetRefused(
            f"{preset}: impl_sllm with {', '.join(caches) or 'no cache policy'}; accepted:"
            f" exactly one of {', '.join(CACHES)}, or motiv"
        )


def _values(features: set[str]) -> dict[str, int]:
    sllm = "impl_sllm" in features
    # With mutate, ServerlessLLM runs through the other's executor: "AllCache".
    executor_of_blitz = not sllm or "mutate" in features
    cached = {"cache_replace", "cache_all_hit", "mock_transfer"} & features
    return {
        "ladder_mutate": int("mutate" in features),
        "ladder_revive": int(executor_of_blitz),
        "ladder_reuse": 1,
        "ladder_reuse_any": int(executor_of_blitz),
        "ladder_map": 0,
        "ladder_nvlink": int("impl_nvl" in features),
        "ladder_shard": int("impl_tanz" in features),
        # With one link a machine it falls back to a chain.
        "ladder_chain": int(bool({"impl_fast", "impl_tanz"} & features)),
        "ladder_p2p": int("impl_rdma" in features),
        "ladder_prefills_give": int("unidirect" in features),
        "ladder_live": int("live" in features),
        "ladder_live_decode": int({"live", "mutate"} <= features),
        "ladder_host": int(bool(cached)),
        "ladder_pool": 0,  # in the paper; not in what can be built
        "host_ttl_ms": 0 if cached - {"cache_replace"} else Policy().host_ttl_ms,
        "mutate_after_load": int(sllm),
    }
