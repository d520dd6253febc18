"""The operator's verbs: each one request to the daemon's admin API, and a wait if wanted.

The decisions, and everything that follows from them, are the daemon's: a verb that is cut
off changes nothing about what was begun.
"""

import json
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal
from urllib.parse import quote

from cyclopts import Parameter
from cyclopts.validators import Number

from blitzd.cli.admin_client import AdminClient, NoDaemon, Refused, Where
from blitzd.cli.verbs_wait import (
    NotDone,
    Until,
    emptied,
    has_role,
    restarted,
    rolled,
    scaled,
    wait_until,
    went_live,
)

Deadline = Annotated[
    float | None,
    Parameter(
        validator=Number(gte=0, lte=7 * 86_400),
        help="Seconds that what runs may take. Default: drain_ms of the policy.",
    ),
]
Wait = Annotated[bool, Parameter(negative="", help="Return when it is done, not when decided.")]
Timeout = Annotated[
    float, Parameter(validator=Number(gt=0, lte=7 * 86_400), help="Seconds that --wait takes.")
]
Here = Annotated[Where, Parameter(name="*")]


def drain(
    replica: str,
    *,
    deadline: Deadline = None,
    wait: Wait = False,
    timeout: Timeout = 660.0,
    where: Here = Where(),  # noqa: B008 - it is frozen
) -> int:
    """Let a replica finish what it has and give it nothing new, until `blitzd undrain`."""
    done = (emptied(replica), timeout) if wait else None
    return _do(f"{_one(replica)}/drain", _body(deadline), where, done)


def undrain(replica: str, *, where: Here = Where()) -> int:  # noqa: B008
    """Let a drained replica serve again; a restart that has not begun in earnest is off."""
    return _do(f"{_one(replica)}/undrain", {}, where, None)


def restart(
    replica: str = "",
    *,
    all: Annotated[bool, Parameter(negative="")] = False,
    stop: Annotated[bool, Parameter(negative="")] = False,
    deadline: Deadline = None,
    wait: Wait = False,
    timeout: Timeout = 1200.0,
    where: Here = Where(),  # noqa: B008
) -> int:
    """Replace a replica's worker, or all of them in turn, without losing a request.

    Parameters
    ----------
    replica
        Its id, as `blitzd status` shows it.
    all
        Every replica, one of each role at a time.
    stop
        Of a restart of all: begin with no other.
    """
    if [bool(replica), all, stop].count(True) != 1:
        print("blitzd restart: name a replica, or give --all or --stop", file=sys.stderr)
        return 2
    if stop:
        return _do("/admin/restart", {"stop": True}, where, None)
    until = rolled() if all else restarted(replica)
    path = "/admin/restart" if all else f"{_one(replica)}/restart"
    return _do(path, _body(deadline), where, (until, timeout) if wait else None)


def mutate(
    replica: str,
    role: Literal["prefill", "decode", "colocated", "spare"],
    *,
    wait: Wait = False,
    timeout: Timeout = 660.0,
    where: Here = Where(),  # noqa: B008
) -> int:
    """Give a replica another role. What runs there stays, or finishes first."""
    done = (has_role(replica, role), timeout) if wait else None
    return _do(f"{_one(replica)}/mutate", {"role": role}, where, done)


def live(
    new: str,
    *,
    old: str,
    wait: Wait = False,
    timeout: Timeout = 660.0,
    where: Here = Where(),  # noqa: B008
) -> int:
    """Let a spare serve prompts while its weights arrive, with another prefill's help.

    Parameters
    ----------
    new
        The id of an inactive replica. It runs the layers that it has.
    old
        The id of a prefill replica, which runs the others of the same requests.
    """
    done = (went_live(new, old), timeout) if wait else None
    return _do(f"{_one(new)}/live", {"old": old}, where, done)


def scale(
    *,
    prefill: int | None = None,
    decode: int | None = None,
    remove: str = "",
    auto: Annotated[bool, Parameter(negative="")] = False,
    wait: Wait = False,
    timeout: Timeout = 660.0,
    where: Here = Where(),  # noqa: B008
) -> int:
    """Say how many replicas of each role there are to be, or which one goes.

    Parameters
    ----------
    prefill
        Replicas that compute prompts; the present number if only --decode is given.
    decode
        Replicas that make the tokens after the first; likewise.
    remove
        The id of one that is to go: one less of its role from then on.
    auto
        The planner decides again, after counts that were given here.
    """
    if bool(remove) + auto + (prefill is not None or decode is not None) != 1:
        print("blitzd scale: give --prefill and --decode, --remove or --auto", file=sys.stderr)
        return 2
    if auto:
        return _do("/admin/scale", {"auto": True}, where, None)
    if remove:
        done = (emptied(remove), timeout) if wait else None
        return _do("/admin/scale", {"remove": remove}, where, done)

    def body(client: AdminClient) -> dict[str, Any]:
        counts = {"prefill": prefill, "decode": decode}
        if None in counts.values():
            counts = _counts_now(client.get("/admin/state")) | {
                role: count for role, count in counts.items() if count is not None
            }
        return counts

    return _do("/admin/scale", body, where, (scaled(), timeout) if wait else None)


def policy(*changes: str, preset: str = "", where: Here = Where()) -> int:  # noqa: B008
    """Show the numbers that decisions depend on, or change some until the next start.

    Parameters
    ----------
    changes
        name=integer, as in drain_ms=30000; none: show them.
    preset
        A baseline by the original's feature names, as in impl_sllm,cache_replace, or blitzd for
        none; see docs/baselines.md. Changes go over it.
    """
    values: dict[str, Any] = {"preset": preset} if preset else {}
    for change in changes:
        name, _, value = change.partition("=")
        if not value.lstrip("-").isdecimal():
            print(f"blitzd policy: {change}; accepted: name=integer", file=sys.stderr)
            return 2
        values[name] = int(value)
    if values:
        return _do("/admin/policy", values, where, None)
    return report("policy", where, lambda client: _show_policy(client.get("/admin/policy"), where))


def _show_policy(shown: dict[str, Any], where: Where) -> int:
    values = shown["policy"]
    if where.json:
        print(json.dumps(shown))
        return 0
    width = max(map(len, values))
    for name, value in sorted(values.items()):
        print(f"{name:<{width}}  {value['value']:>10}  ({value['min']} to {value['max']})")
    return 0


def _counts_now(state: dict[str, Any]) -> dict[str, Any]:
    wanted = state["node"]["wanted"]
    if all(wanted.values()):
        return dict(wanted)
    roles = [r["role"] for r in state["replicas"] if not r["stands_in"]]
    return {role: roles.count(role) for role in ("prefill", "decode")}


def _one(replica: str) -> str:
    return f"/admin/replicas/{quote(replica, safe='')}"


def _body(deadline: float | None) -> dict[str, Any]:
    return {} if deadline is None else {"deadline_s": deadline}


Body = dict[str, Any] | Callable[[AdminClient], dict[str, Any]]


def _do(path: str, body: Body, where: Where, done: tuple[Until, float] | None) -> int:
    def work(client: AdminClient) -> int:
        answer = client.post(path, body(client) if callable(body) else body)
        if not where.json:
            _tell(answer)
        if done is not None:
            tell = None if where.json else _tell_event
            answer["waited_s"] = wait_until(client, answer, *done, tell)
            if not where.json:
                print(f"done after {answer['waited_s']:.1f} s")
        if where.json:
            print(json.dumps(answer))
        return 0

    return report(path.rpartition("/")[2], where, work)


def report(verb: str, where: Where, work: Callable[[AdminClient], int]) -> int:
    """Exit codes: 0 done, 1 failed, 2 never accepted."""
    try:
        return work(AdminClient.at(where))
    except ValueError as error:
        print(f"blitzd {verb}: {error}", file=sys.stderr)
        return 2
    except Refused as error:
        print(f"blitzd {verb}: {error}", file=sys.stderr)
        return 2 if error.status == 400 else 1
    except (NoDaemon, NotDone) as error:
        print(f"blitzd {verb}: {error}", file=sys.stderr)
        return 1


def _tell(answer: dict[str, Any]) -> None:
    if not answer["events"]:
        print("nothing to change")
    for event in answer["events"]:
        _tell_event(event)


def _tell_event(event: dict[str, Any]) -> None:
    fields = " ".join(
        f"{name}={json.dumps(value)}"
        for name, value in event["payload"].items()
        if value not in ("", 0)
    )
    print(f"{event['seq']:>8}  {event['type']}  {fields}", flush=True)
