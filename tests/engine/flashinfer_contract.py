"""What FlashInfer's documentation says of the wrappers that we use, in plain torch.

It stands in for the library where there is no device: it computes from nothing but what the
real wrappers are given, so a wrong pointer, page or length gives wrong numbers. Every call is
kept, so that its form can be compared with the installed library's signatures.
"""

from __future__ import annotations

from typing import Any

import torch

Call = tuple[str, str, tuple[Any, ...], dict[str, Any]]


class Library:
    """The module `flashinfer`, as far as it is used."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        kind = {
            "BatchDecodeWithPagedKVCacheWrapper": _Decode,
            "BatchPrefillWithPagedKVCacheWrapper": _Paged,
            "BatchPrefillWithRaggedKVCacheWrapper": _Ragged,
        }[name]

        def make(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, "__init__", args, kwargs))
            return _Recorded(name, self.calls, kind(*args, **kwargs))

        return make

    def count(self, wrapper: str, method: str) -> int:
        return sum((wrapper in name and method == called) for name, called, _, _ in self.calls)


class _Recorded:
    def __init__(self, name: str, calls: list[Call], wrapper: Any) -> None:
        self._name, self._calls, self._wrapper = name, calls, wrapper

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self._calls.append((self._name, "plan", args, kwargs))
        self._wrapper.plan(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._calls.append((self._name, "run", args, kwargs))
        result: torch.Tensor = self._wrapper.run(*args, **kwargs)
        return result


class _Wrapper:
    def __init__(self, workspace: torch.Tensor, kv_layout: str, *, backend: str) -> None:
        assert (kv_layout, backend) == ("NHD", "fa2")
        assert workspace.dtype == torch.uint8 and not workspace[:4096].any()

    def _keep(
        self, heads: int, kv_heads: int, head_dim: int, numbers: dict[str, Any], causal: bool
    ) -> None:
        assert numbers["q_data_type"] == numbers["kv_data_type"]
        self.shape, self.causal = (heads, kv_heads, head_dim), causal
        self.window_left, self.dtype = numbers["window_left"], numbers["q_data_type"]

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[rows, heads, head_dim] whose last row is the context's last position."""
        heads, kv_heads, head_dim = self.shape
        assert q.dtype == k.dtype == v.dtype == self.dtype
        assert q.shape[1:] == (heads, head_dim) and k.shape[1:] == v.shape[1:]
        assert k.shape[1:] == (kv_heads, head_dim)
        k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
        position = torch.arange(len(k) - len(q), len(k)).unsqueeze(1)
        key = torch.arange(len(k)).unsqueeze(0)
        hidden = key > position if self.causal else torch.zeros_like(key > position)
        if self.window_left >= 0:
            hidden = hidden | (key < position - self.window_left)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class _Pages(_Wrapper):
    """Keys and values looked up in [pages, page_size, kv_heads, head_dim] planes."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor

    def _check(self, page_size: int) -> None:
        self.page_size = page_size
        for part in (self.indptr, self.indices, self.last_page_len):
            assert part.dtype == torch.int32 and part.dim() == 1
        assert len(self.indptr) == len(self.last_page_len) + 1
        assert bool(((self.last_page_len >= 1) & (self.last_page_len <= page_size)).all())

    def _run_pages(
        self,
        q: torch.Tensor,
        qo_indptr: list[int],
        planes: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> torch.Tensor:
        assert q.is_contiguous() and out.shape == q.shape and len(q) == qo_indptr[-1]
        assert all(plane.is_contiguous() and plane.shape[1] == self.page_size for plane in planes)
        for i in range(len(qo_indptr) - 1):
            pages = self.indices[int(self.indptr[i]) : int(self.indptr[i + 1])].long()
            length = (len(pages) - 1) * self.page_size + int(self.last_page_len[i])
            k, v = (plane[pages].flatten(0, 1)[:length] for plane in planes)
            rows = slice(qo_indptr[i], qo_indptr[i + 1])
            out[rows] = self._attend(q[rows], k, v)
        return out


class _Decode(_Pages):
    def __init__(
        self,
        workspace: torch.Tensor,
        kv_layout: str,
        *,
        backend: str,
        use_tensor_cores: bool,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        super().__init__(workspace, kv_layout, backend=backend)
        self.tensor_cores = use_tensor_cores
        self.buffers = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            self.buffers = (
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            )

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        **numbers: Any,
    ) -> None:
        given = (indptr, indices, last_page_len)
        if self.buffers is not None:
            for buffer, part in zip(self.buffers, given, strict=True):
                buffer[: len(part)].copy_(part)
            assert len(self.buffers[0]) == len(indptr), "a graph's batch size cannot change"
            assert len(self.buffers[2]) == len(last_page_len)
            given = self.buffers
        self.indptr, self.indices, self.last_page_len = given
        assert self.tensor_cores or heads // kv_heads in (1, 2, 3, 4, 6, 8, 16)
        self._keep(heads, kv_heads, head_dim, numbers, causal=False)
        self._check(page_size)

    def run(
        self, q: torch.Tensor, planes: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        return self._run_pages(q, list(range(len(self.last_page_len) + 1)), planes, out)


class _Paged(_Pages):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        **numbers: Any,
    ) -> None:
        assert len(qo_indptr) == len(indptr)
        self.qo_indptr: list[int] = qo_indptr.tolist()
        self.indptr, self.indices, self.last_page_len = indptr, indices, last_page_len
        self._keep(heads, kv_heads, head_dim, numbers, causal)
        self._check(page_size)

    def run(
        self, q: torch.Tensor, planes: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        return self._run_pages(q, self.qo_indptr, planes, out)


class _Ragged(_Wrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        causal: bool,
        **numbers: Any,
    ) -> None:
        self.qo_indptr: list[int] = qo_indptr.tolist()
        self.kv_indptr: list[int] = kv_indptr.tolist()
        self._keep(heads, kv_heads, head_dim, numbers, causal)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor
    ) -> torch.Tensor:
        assert len(q) == self.qo_indptr[-1] and len(k) == len(v) == self.kv_indptr[-1]
        for i in range(len(self.qo_indptr) - 1):
            rows = slice(self.qo_indptr[i], self.qo_indptr[i + 1])
            keys = slice(self.kv_indptr[i], self.kv_indptr[i + 1])
            out[rows] = self._attend(q[rows], k[keys], v[keys])
        return out
