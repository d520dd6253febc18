"""The shape of one step: which tokens of which requests, and where their KV lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Requests in the order of their rows; request i has `query_lens[i]` rows in a row.

    `context_lens` counts what a request has after this step, its new tokens included, and
    `block_tables[i]` names at least the blocks that hold them.
    """

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]

    @property
    def rows(self) -> int:
        return sum(self.query_lens)

    def positions(self) -> list[int]:
        """Of each row in its request, from 0."""
        return [
            position
            for query, context in zip(self.query_lens, self.context_lens, strict=True)
            for position in range(context - query, context)
        ]

    def slots(self, block_tokens: int) -> list[int]:
        """Of each row's key and value in a plane of blocks, in tokens from its start."""
        size = block_tokens
        return [
            table[position // size] * size + position % size
            for query, context, table in zip(
                self.query_lens, self.context_lens, self.block_tables, strict=True
            )
            for position in range(context - query, context)
        ]

    def part(self, first: int, last: int) -> BatchLayout:
        """Requests [first, last) alone."""
        return BatchLayout(
            self.query_lens[first:last],
            self.context_lens[first:last],
            self.block_tables[first:last],
        )

    def last_rows(self) -> list[int]:
        """The row of each request's last token, whose logits give the next one."""
        rows, end = [], 0
        for query in self.query_lens:
            end += query
            rows.append(end - 1)
        return rows

    def check(self, blocks: int, block_tokens: int) -> None:
        """Raises ValueError when a request's numbers do not fit together or its blocks do
        not exist: a wrong table would read, or overwrite, another request's cache."""
        count = len(self.query_lens)
        if len(self.context_lens) != count or len(self.block_tables) != count:
            raise ValueError(
                f"{count} query lengths, {len(self.context_lens)} context lengths and "
                f"{len(self.block_tables)} block tables"
            )
        for index, (query, context, table) in enumerate(
            zip(self.query_lens, self.context_lens, self.block_tables, strict=True)
        ):
            if not 1 <= query <= context:
                raise ValueError(f"request {index} has {query} new tokens of {context}")
            if len(table) * block_tokens < context:
                raise ValueError(
                    f"request {index} has {len(table)} blocks of {block_tokens} tokens "
                    f"for a context of {context}"
                )
            if min(table) < 0 or max(table) >= blocks:
                raise ValueError(f"request {index} names a block outside [0, {blocks})")
