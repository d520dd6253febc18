"""A plan in sentences: what was there, what each equation asked for, what came of it."""

from typing import Any

from blitzd.control.policy import Policy
from blitzd.events import types as ev
from blitzd.fsm import ClusterState

Numbers = dict[str, int]
WORDS = {
    "up": "{count} → {target}: the load needs {least} to {most}",
    "down": "{count} → {target}: the most that was needed for {window} ms",
    "observed": "{target} wanted from here on, as many as there are: the rest cannot be had",
    "steady": "{count}: the load needs {least} to {most}",
    "down_wait": (
        "{count}, of which {peak} would do; down if that stays so for {window} ms,"
        " {waited} ms are over"
    ),
    "loading": "{count}, more than needed; but some of them have not served yet",
    "draining": "{count}, more than needed; but the last that went down still has work",
    "asked": "{count}; the load needs {least} to {most}, which are wanted and not free yet",
    "at_max": "{count}, the most that is allowed; the load needs {least} to {most}",
    "no_spare": "{count}; the load needs {least} to {most}, and no spare is left",
    "no_rate": "{count}: prompts come, and none was computed yet that would say how fast",
    "pinned": "{count}: an operator set the counts; the load needs {least} to {most}",
    "refused": "{count}: the original would have stopped here",
}
TERMS = {
    "prefill_backlog": (
        "{waiting_tokens} tokens wait, a replica computes {prefill_rate} in a second: {least}"
        " keep that below {prefill_backlog_high_ms} ms, {most} below"
        " {prefill_backlog_low_ms} ms"
    ),
    "prefill_use": (
        "{arrival_rate} tokens arrive in a second, a replica computes {prefill_rate}: {least}"
        " are busy for less than {prefill_use_high_ppm} ppm of it, {most} less than"
        " {prefill_use_low_ppm} ppm"
    ),
    "decode_use": (
        "{kv_blocks} KV blocks are in use or needed, a replica has {blocks_per_replica}:"
        " {least} are filled to less than {decode_use_high_ppm} ppm, {most} to less than"
        " {decode_use_low_ppm} ppm"
    ),
    "decode_transfer": (
        "{moving_tokens} tokens of KV wait to move, a replica takes {transfer_rate} in a"
        " second: {least} need less than {transfer_backlog_high_ms} ms, {most} less than"
        " {transfer_backlog_low_ms} ms"
    ),
    "decode_ahead": (
        "{coming_blocks} blocks more are coming: with them {least} to {most}, which counts"
        " while prefill goes up"
    ),
}
OF_ROLE = {
    "prefill": ("prefill_backlog", "prefill_use"),
    "decode": ("decode_use", "decode_transfer"),
}


def plan_facts(
    state: ClusterState, policy: Policy, event: ev.PlanDecided | ev.PlanHeld
) -> dict[str, Any]:
    inputs, terms = dict(event.inputs), dict(event.terms)
    numbers = {name: getattr(policy, name) for name in policy.__struct_fields__}
    shown = {
        name: text.format(
            **numbers,
            **inputs,
            least=terms[f"{name}_least"],
            most=terms[f"{name}_most"],
        )
        for name, text in TERMS.items()
        if f"{name}_least" in terms
    }
    return {
        "why": {role: _why(state, policy, event, role) for role in OF_ROLE},
        "terms": shown or terms,
        "inputs": inputs,
        "clamps": list(event.clamps),
    }


def _why(
    state: ClusterState, policy: Policy, event: ev.PlanDecided | ev.PlanHeld, role: str
) -> str:
    inputs, terms = dict(event.inputs), dict(event.terms)
    dead = inputs[f"{role}_dead"]
    names: tuple[str, ...] = OF_ROLE[role]
    if role == "decode" and event.prefill == "up":
        names = (*names, "decode_ahead")
    wait = getattr(state.plan, role)
    word = getattr(event, role)
    text = WORDS[word].format(
        count=inputs[f"{role}_ready"] + inputs[f"{role}_loading"],
        target=getattr(event, f"wanted_{role}", 0) - dead,
        least=max(terms.get(f"{name}_least", 0) for name in names),
        most=max(terms.get(f"{name}_most", 0) for name in names),
        peak=getattr(event, f"{role}_peak", wait.peak),
        window=policy.scale_down_window_ms,
        waited=(state.mono_ns - wait.since_ns) // 10**6 if wait.verdict == word else 0,
    )
    if dead:
        text += f"; and {dead} that failed, for which a spare is wanted while they are tried"
    return text
