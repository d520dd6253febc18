"""A batch's block tables in the compressed form that FlashInfer plans from. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from blitzd.engine.batch import BatchLayout


@dataclass(frozen=True, slots=True)
class PageTables:
    """Names are those of FlashInfer's `plan`; a page is one of our blocks.

    Request i of n has the query rows [qo_indptr[i], qo_indptr[i + 1]) and its keys in the
    pages kv_indices[kv_indptr[i] : kv_indptr[i + 1]], the last of which holds
    `last_page_len[i]` tokens, 1 to the page's size. The pointers have n + 1 entries.
    """

    qo_indptr: list[int]
    kv_indptr: list[int]
    kv_indices: list[int]
    last_page_len: list[int]

    @classmethod
    def of(cls, batch: BatchLayout, block_tokens: int) -> PageTables:
        """Blocks that a table names beyond its context are left out: they hold nothing yet."""
        pages = [-(-context // block_tokens) for context in batch.context_lens]
        return cls(
            qo_indptr=[0, *accumulate(batch.query_lens)],
            kv_indptr=[0, *accumulate(pages)],
            kv_indices=[
                block
                for table, count in zip(batch.block_tables, pages, strict=True)
                for block in table[:count]
            ],
            last_page_len=[(context - 1) % block_tokens + 1 for context in batch.context_lens],
        )
