"""Logprobs of tokens, and their columns in a step's report. No torch here: the daemon
reads them too."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from blitzd.proto.blitzd.engine import v1 as pb


class TokenLogprobs(NamedTuple):
    logprob: float
    """Of the token that was chosen (or given), natural logarithm."""
    top: list[tuple[int, float]]
    """The most likely tokens, best first."""


def append(
    report: pb.StepReport, request_id: int, position: int, found: Sequence[TokenLogprobs]
) -> None:
    """Adds the logprobs of a request's tokens from `position` on."""
    report.logprob_request_ids += [request_id] * len(found)
    report.logprob_positions += range(position, position + len(found))
    for logprob, top in found:
        report.logprob_values.append(logprob)
        report.logprob_top_counts.append(len(top))
        report.top_token_ids += [token for token, _ in top]
        report.top_logprobs += [value for _, value in top]


def entries(report: pb.StepReport) -> Iterator[tuple[int, int, TokenLogprobs]]:
    """(request id, position, logprobs), in the report's order."""
    top = zip(report.top_token_ids, report.top_logprobs, strict=True)
    columns = (
        report.logprob_request_ids,
        report.logprob_positions,
        report.logprob_values,
        report.logprob_top_counts,
    )
    for request_id, position, value, count in zip(*columns, strict=True):
        yield request_id, position, TokenLogprobs(value, [next(top) for _ in range(count)])
