"""What `blitzd replay` prints for people."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from blitzd.control.explain import Explanation
from blitzd.events.json_form import record_json
from blitzd.events.record import Record
from blitzd.fsm.diff import Change
from blitzd.fsm.pair_story import PairRequest, PairStory
from blitzd.fsm.story import Milestone, Story


def as_document(shown: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(shown)).decode()


def as_line(record: Record, since_ns: int, moves: list[dict[str, Any]]) -> str:
    """Seconds since the first record, sequence, cause, type, fields, moves of replicas."""
    shown = record_json(record)
    cause = f"<{record.cause}" if record.cause else ""
    line = f"{since_ns / 1e9:10.3f} {record.seq:>7} {cause:>8} {shown['type']} "
    line += _fields(shown["payload"])
    for move in moves:
        line += f"  [{move['replica']} {move['from'] or 'new'} → {move['to']}]"
    return line


def _fields(payload: dict[str, Any]) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in payload.items())


def _short(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _wall(wall_ns: int) -> str:
    moment = datetime.fromtimestamp(wall_ns // 10**9, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{wall_ns // 1000 % 10**6:06d}Z"


def as_diff(shown: dict[str, Any]) -> str:
    changes: list[Change] = shown["changes"]
    lines = [f"from record {shown['from']} to {shown['to']}: {len(changes)} changes"]
    for change in changes:
        name = f"{change.entity} {change.key}" if change.key else change.entity
        events = ", ".join(map(str, change.events))
        if change.event_count > len(change.events):
            events = f"{change.event_count} events, the last {events}"
        if change.field:
            moved = f"{change.field}: {_short(change.before)} → {_short(change.after)}"
        elif change.before is None:
            moved = f"came: {_short(change.after)}"
        else:
            moved = f"went: {_short(change.before)}"
        lines.append(f"  {name}  {moved}  (by {events})")
    for kind, count in shown["passed"].items():
        lines.append(f"  {count} of kind {kind} came and went in between")
    return "\n".join(lines)


def as_story(story: Story) -> str:
    tokens = f"{story.prompt_tokens} prompt tokens, at most {story.max_tokens} out"
    lines = [
        f"request {story.request_id}: {story.state}" + (f" ({story.why})" if story.why else "")
    ]
    lines.append(f"  {tokens}, seed {story.seed}")
    if story.output_tokens:
        lines.append(f"  {story.output_tokens} tokens out, digest {story.output_digest}")
    if story.begun_before_log:
        lines.append("  it began before this log does")
    lines.append("")
    for step in story.milestones:
        where = f" on {step.replica}" if step.replica else ""
        lines.append(
            f"  {step.since_ms:10.3f} ms  {_wall(step.wall_ns)}  {step.seq:>7} <{step.cause:<7}"
            f" {step.event}{where} → {step.state}{_loss(step)}"
        )
    spent = [f"{name} {ms:.3f}" for name, ms in story.phases_ms.items()]
    lines += ["", f"  ms: {', '.join(spent)}"]
    for hop in story.hops:
        speed = f", {hop.transfer_ms:.3f} ms of transfer" if hop.transfer_ms else ""
        reason = f": {hop.reason}" if hop.reason else ""
        rest = f" and, from layer {hop.split_layer}, {hop.rest}" if hop.rest else ""
        lines.append(
            f"  hop {hop.lease_id}: {hop.source}{rest} → {hop.target}, {hop.blocks} blocks,"
            f" {hop.bytes_moved} bytes{speed}, {hop.lease_ms:.3f} ms held, {hop.outcome}{reason}"
        )
    lines += ["", "  what led to it:"]
    for cause in story.causes:
        lines.append(f"    {cause.seq} {cause.kind} {cause.type} {_fields(cause.payload)}")
    return "\n".join(lines)


def _loss(step: Milestone) -> str:
    """What a resume lost, and what it kept."""
    if step.event != "RequestResumed":
        return ""
    lost = step.detail
    return f" ({lost['cause']}: {lost['reason']}; goes on after {lost['output_tokens']} tokens)"


COLUMNS, ROWS = 96, 40


def as_pair(story: PairStory) -> str:
    """A row a request, time to the right, and how many of its layers the new side ran."""
    parts = [part for request in story.requests for part in request.parts]
    end_us = max([story.end_us, 1.0, *(part.end_us for part in parts)])

    def column(at_us: float) -> int:
        return min(COLUMNS - 1, max(0, int(at_us * COLUMNS / end_us)))

    def fill(row: list[str], begin_us: float, until_us: float, letter: str) -> None:
        for at in range(column(begin_us), max(column(begin_us) + 1, column(until_us))):
            row[at] = letter

    marks = [" "] * COLUMNS
    for at_us in story.layers_us:
        marks[column(at_us)] = "|"
    width = max([6, *(len(str(request.id)) for request in story.requests)])
    lines = [
        f"pair {story.id}: {story.new} loads, {story.old} finishes for it;"
        f" {story.end or 'still open'} after {story.end_us / 1e6:.3f} s",
        f"{'layers':>{width}} {''.join(marks).rstrip()}",
    ]
    for request in story.requests[:ROWS]:
        row = [" "] * COLUMNS
        fill(row, request.asked_us, request.parts[-1].end_us, ".")
        # The first part last: it is often shorter than a column.
        for part in reversed(request.parts):
            fill(row, part.begin_us, part.end_us, "n" if part.side == "new" else "O")
        lines.append(f"{request.id:>{width}} {''.join(row).rstrip()}  {_ran(request)}")
    if len(story.requests) > ROWS:
        lines.append(f"{'':>{width}} and {len(story.requests) - ROWS} more")
    legend = "n: with new, O: with old, .: waits for either, |: a layer came"
    lines.append(f"{'':>{width}} 0 to {end_us / 1e3:.0f} ms; {legend}")
    return "\n".join(lines)


def _ran(request: PairRequest) -> str:
    """How many layers the new side ran of it, the last time."""
    last = request.parts[-1]
    if last.broken_off:
        return f"broken off on {last.side}"
    if last.side == "new":
        return "all on new"
    return f"{last.first} on new"


def as_explanation(found: Explanation) -> str:
    record, cause = found.record, found.cause
    lines = [f"{record['seq']} {record['type']} {_fields(record['payload'])}"]
    if cause is not None:
        lines.append(f"  because of {cause['seq']} {cause['type']} {_fields(cause['payload'])}")
    lines += [f"  {found.rule}", ""]
    for name, value in found.facts.items():
        if isinstance(value, dict):
            lines.append(f"  {name}")
            lines += [f"    {inner} {_short(shown)}" for inner, shown in value.items()]
        else:
            lines.append(f"  {name} {_short(value)}")
    if found.candidates:
        lines += ["", "  candidates"]
    for one in found.candidates:
        mark = "chosen" if one.chosen else f"no: {one.refusal}" if one.refusal else "could"
        lines.append(f"    {one.replica} {one.state:<16} {_fields(one.facts)}  {mark}")
    turn = ", ".join(f"{step['seq']} {step['type']}" for step in found.turn)
    return "\n".join([*lines, "", f"  the turn: {turn}"])


def as_redecided(shown: dict[str, Any]) -> str:
    difference = shown["difference"]
    if difference is not None:
        return f"decided otherwise: {difference}"
    folded = f", {shown['skipped']} of other core versions only folded" if shown["skipped"] else ""
    return f"{shown['turns']} inputs decided again as recorded{folded}"
