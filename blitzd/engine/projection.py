"""Matrix products of a few rows, in the form that the CPU library does fastest."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

FEW_ROWS = 8


def project(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`rows` [n, in] times `weight` [out, in] transposed: [n, out], contiguous.

     A decode step is bound by reading the weights. MKL reads them about twice as fast for
     weight x columns as for rows x weight^T when there are two to eight of them, and its
     product with two columns beats its matrix-vector product, so a single row is doubled
    . With a long inner dimension, or more rows, the usual
     form is as good or better.
    """
    count = rows.shape[0]
    if rows.dtype != torch.float32 or count > FEW_ROWS:
        return linear(rows, weight)
    if count == 1:
        return torch.mm(weight, torch.cat((rows, rows)).t())[:, 0].contiguous().unsqueeze(0)
    if count > 2 and weight.shape[1] > weight.shape[0]:
        return linear(rows, weight)
    return torch.mm(weight, rows.t()).t().contiguous()
