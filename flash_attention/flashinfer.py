"""FlashInfer's wrappers for caches in pages: `from flash_attention.flashinfer import
BatchDecodeWithPagedKVCacheWrapper`.

`plan` is called once for a batch, and `run` for each layer. Names, order, defaults and meaning of
the arguments are FlashInfer's:
    float_workspace_buffer: its device is that of the wrapper; nothing is written to it.
    kv_layout: "NHD", pages of (page_size, kv_heads, d_head), or "HND", (kv_heads, page_size,
        d_head).
    indptr: (batch + 1,): the pages of sequence b are indices[indptr[b]] up to
        indices[indptr[b + 1]], without the latter.
    last_page_len: (batch,): keys in the last page of each sequence, from 1 to page_size.
        These three are int32, on any device. `plan` copies indptr and last_page_len to the host;
        `run` waits for no device. indices must name pages of the cache, which nothing checks.
    window_left: keys before a query that it sees; -1 is no bound.
    logits_soft_cap: logits x become logits_soft_cap · tanh(x / logits_soft_cap); None or 0 leaves
        them.
    sm_scale: 1/sqrt(head_dim) by default.
    q_data_type: fp16 or bf16, as a dtype or its name; kv_data_type and o_data_type are the same.
        For decode kv_data_type may be float8_e4m3fn; for prefill it may not.
    k_scale, v_scale: for decode on such a cache: numbers, tensors of one, or (batch, num_kv_heads)
        in fp32. A number of K becomes a part of sm_scale. Refused for other caches.
    use_tensor_cores, non_blocking, enable_pdl, rope_scale, rope_theta: change nothing.
    disable_split_kv: a thread block computes all keys of a sequence. `plan` for prefill takes it,
        and it changes nothing there.
    backend, jit_args, pos_encoding_mode, block_tables, seq_lens, custom_mask, packed_custom_mask,
        use_fp16_qk_reduction, q_scale, and k_scale, v_scale and fixed_split_size of prefill:
        refused, unless they have FlashInfer's defaults.

All LSEs here are FlashInfer's: logarithms in base 2, with heads last. Those of
`flash_attention.decode` and `flash_attn_combine` are natural ones: divide them by ln 2.
Nothing here has a gradient.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from flash_attention._decode import decode
from flash_attention._forward import _check_flag
from flash_attention._plans import (
    Cache,
    DataType,
    PagedWrapper,
    Result,
    check_begins,
    check_outputs,
    fixed_buffers,
    host,
    host_lengths,
    lengths_on_device,
    pieces_of,
    refuse_unusual,
    result,
    scaled,
    sizes_of,
    table_on_device,
)
from flash_attention._states import combined
from flash_attention._varlen import varlen_attention
from flash_helpers.runtime.tensors import check_types

# -- merging ---------------------------------------------------------------------------------------


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention on two parts of the keys; return V, as v_a, and S, fp32.

    v_a, v_b: (seq_len, num_heads, head_dim), outputs on each part.
    s_a, s_b: (seq_len, num_heads), their LSEs, logarithms in base 2; -inf for no keys.

    Computes in fp32. A row that neither part has keys for has 0 in V and -inf in S.
    """
    check_types({"v_a": v_a, "s_a": s_a, "v_b": v_b, "s_b": s_b})
    for name, x, like, other in (("v_b", v_b, "v_a", v_a), ("s_b", s_b, "s_a", s_a)):
        if x.shape != other.shape or x.device != other.device:
            raise ValueError(
                f"{name} is {tuple(x.shape)} on {x.device} and {like} {tuple(other.shape)} on "
                f"{other.device}: pass equal shapes on one device"
            )
    if v_a.ndim != 3:
        raise ValueError(
            f"v_a has {v_a.ndim} dimensions, shape {tuple(v_a.shape)}: pass (seq_len, num_heads, "
            "head_dim)"
        )
    v, s = torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1)
    names = "v_a and v_b", "s_a and s_b"
    return combined(v, s, 1, names, base_2=True, dtype=v_a.dtype)


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Write what `merge_state` returns to v and s, fp32. mask: (seq_len,), bool: rows where it is
    False stay as they are."""
    V, S = merge_state(v, s, v_other, s_other)
    if mask is not None:
        check_types({"mask": mask})
        if mask.dtype is not torch.bool or mask.shape != v.shape[:1]:
            raise ValueError(
                f"mask is {mask.dtype} {tuple(mask.shape)}: pass torch.bool ({v.shape[0]},)"
            )
        V = torch.where(mask[:, None, None], V, v)
        S = torch.where(mask[:, None], S, s)
    v.copy_(V)
    s.copy_(S)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention on several parts of the keys as `merge_state` does; return V, (seq_len,
    num_heads, head_dim), as v, and S, (seq_len, num_heads), fp32.

    v: (seq_len, num_states, num_heads, head_dim). s: (seq_len, num_states, num_heads), logarithms
    in base 2.
    """
    check_types({"v": v, "s": s})
    if v.ndim != 4:
        raise ValueError(
            f"v has {v.ndim} dimensions, shape {tuple(v.shape)}: pass (seq_len, num_states, "
            "num_heads, head_dim)"
        )
    return combined(v, s, 1, ("v", "s"), base_2=True, dtype=v.dtype)


# -- decode ----------------------------------------------------------------------------------------


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of one query of each sequence on its pages of a cache.

    use_cuda_graph: each plan writes into the same memory, so that a captured `run` finds the newest
        plan. Then paged_kv_indptr_buffer, (batch + 1,), paged_kv_indices_buffer and
        paged_kv_last_page_len_buffer, (batch,), all int32, tell the batch and the most pages, and
        each plan is copied to them as well.
    max_pages_per_sequence: with use_cuda_graph the most pages of one sequence; those of
        paged_kv_indices_buffer by default. A table of batch rows has so many columns.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        *,
        max_pages_per_sequence: int | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        _check_flag("use_cuda_graph", use_cuda_graph)
        _check_flag("use_tensor_cores", use_tensor_cores)
        refuse_unusual(backend=backend, jit_args=jit_args)
        self._block_table: torch.Tensor | None = None
        self._cache_seqlens: torch.Tensor | None = None
        self._pieces: dict[str, Any] = {}
        self._buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if not use_cuda_graph:
            return
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        indptr, indices, last = fixed_buffers(buffers, self.device)
        blocks = len(indices) if max_pages_per_sequence is None else max_pages_per_sequence
        if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
            raise ValueError(
                f"{blocks!r} pages are the most of a sequence: pass max_pages_per_sequence of 1 or "
                "more"
            )
        self._buffers = indptr, indices, last
        self._block_table = torch.zeros(len(last), blocks, dtype=torch.int32, device=self.device)
        self._cache_seqlens = torch.zeros_like(last)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans are written to the same memory."""
        return self._buffers is not None

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DataType | None = "float16",
        kv_data_type: DataType | None = None,
        o_data_type: DataType | None = None,
        data_type: DataType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Make the table of pages and the lengths of a batch on the device.

        data_type: if given, stands for q_data_type and kv_data_type.
        fixed_split_size: pages of a piece of keys. The bits of a sequence's results then do not
            depend on the others, as `flash_attention.decode` tells of keys_per_piece, which is
            fixed_split_size · page_size. With disable_split_kv it has no effect. Both work in CUDA
            graphs: the number of thread blocks follows from max_pages_per_sequence.
        """
        refuse_unusual(
            pos_encoding_mode=pos_encoding_mode,
            block_tables=block_tables,
            seq_lens=seq_lens,
        )
        data_types = {
            "q_data_type": q_data_type if data_type is None else data_type,
            "kv_data_type": kv_data_type if data_type is None else data_type,
            "o_data_type": o_data_type,
        }
        check_types({"last_page_len": last_page_len})
        sizes = sizes_of(
            len(last_page_len),
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            data_types,
            window_left,
            logits_soft_cap,
            sm_scale,
            takes_fp8=True,
        )
        pieces = pieces_of(fixed_split_size, disable_split_kv, page_size)
        names = "indptr", "indices", "last_page_len"
        pages, _ = host_lengths(names, indptr, indices, last_page_len, page_size)
        most = max(pages, default=0)
        given = indptr, indices[: sum(pages)], last_page_len
        if self._block_table is not None and self._buffers is not None:
            batch, blocks = self._block_table.shape
            if len(pages) != batch:
                raise ValueError(
                    f"indptr is for {len(pages)} sequences and paged_kv_last_page_len_buffer for "
                    f"{batch}: pass {batch}, some without pages"
                )
            if most > blocks or sum(pages) > len(self._buffers[1]):
                raise ValueError(
                    f"{sum(pages)} pages, up to {most} of a sequence, and there are buffers for "
                    f"{len(self._buffers[1])} and {blocks}: make another wrapper with larger ones"
                )
            for buffer, x in zip(self._buffers, given, strict=True):
                buffer[: len(x)].copy_(x)
            given = self._buffers
        else:
            own, of_pages, last = given
            given = own.to(self.device), of_pages.to(self.device), last.to(self.device)
            # lengths that grow ask for few problems so, each of which takes time to plan
            blocks = 1 << (most - 1).bit_length() if most else 0
        table = table_on_device(*given[:2], blocks)
        lengths = lengths_on_device(given[0], given[2], page_size)
        if self.is_cuda_graph_enabled:
            assert self._block_table is not None and self._cache_seqlens is not None
            self._block_table.copy_(table)
            self._cache_seqlens.copy_(lengths)
        else:
            self._block_table, self._cache_seqlens = table, lengths
        self._sizes, self._pieces = sizes, pieces

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *,
        q_scale: float | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Result:
        """Compute attention of a planned batch; return out, as q, with return_lse (out, lse).

        q: (batch, num_qo_heads, head_dim).
        paged_kv_cache: a pair of K and V in pages of kv_layout, or one tensor (pages, 2, ...).
        out, lse: written and returned if given. lse is (batch, num_qo_heads), fp32, in base 2.
        window_left: that of the plan, if it is given.
        sinks: (num_qo_heads,), as for `flash_attention.attention`, in the dtype of q.
        """
        sizes = self._planned()
        refuse_unusual(q_scale=q_scale)
        _check_flag("return_lse", return_lse)
        k, v = self._checked(sizes, q, paged_kv_cache, window_left)
        check_outputs(sizes, out, lse)
        found = decode(
            *(q[:, None], k, v),
            cache_seqlens=self._cache_seqlens,
            block_table=self._block_table,
            sinks=sinks,
            return_lse=return_lse,
            o=None if out is None else out[:, None],
            **{**sizes.options, **self._pieces, **scaled(sizes, self.device, k_scale, v_scale)},
        )
        o, natural = found if isinstance(found, tuple) else (found, None)
        # a given out was written through a view
        o = o[:, 0] if out is None else out
        return result(o, None if natural is None else natural[..., 0], out, lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)


# -- prefill ---------------------------------------------------------------------------------------


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of any number of queries of each sequence on its pages of a cache.

    `run` gathers the keys of all sequences and computes attention over them as
    `flash_attn_varlen_func` does.

    use_cuda_graph: each plan writes into the same memory, so that a captured `run` finds the newest
        plan. Then the four buffers, int32, tell the batch and the most pages, and each plan is
        copied to them as well; the first plan tells the page_size and the rows of q. If a later
        plan has fewer rows, the others of out are left unwritten. `run` gathers as many keys as
        paged_kv_indices_buf has room for.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        _check_flag("use_cuda_graph", use_cuda_graph)
        refuse_unusual(backend=backend, jit_args=jit_args)
        self._begins: tuple[torch.Tensor, torch.Tensor] | None = None
        self._longest = (0, 0)
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None
        self._n_keys = 0
        self._buffers: list[torch.Tensor] | None = None
        if use_cuda_graph:
            buffers = {
                "qo_indptr_buf": qo_indptr_buf,
                "paged_kv_indptr_buf": paged_kv_indptr_buf,
                "paged_kv_indices_buf": paged_kv_indices_buf,
                "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
            }
            self._buffers = fixed_buffers(buffers, self.device)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans are written to the same memory."""
        return self._buffers is not None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DataType = "float16",
        kv_data_type: DataType | None = None,
        o_data_type: DataType | None = None,
        non_blocking: bool = True,
        *,
        seq_lens: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Make the place of each key of a batch on the device.

        qo_indptr: (batch + 1,), int32: the queries of sequence b are rows qo_indptr[b] up to
            qo_indptr[b + 1] of q, without the latter.
        head_dim_vo: head_dim_qk, or None.
        causal: aligned to the bottom right: the last query of a sequence sees its last key.
        """
        refuse_unusual(
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            pos_encoding_mode=pos_encoding_mode,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            seq_lens=seq_lens,
            block_tables=block_tables,
            fixed_split_size=fixed_split_size,
        )
        _check_flag("disable_split_kv", disable_split_kv)
        _check_flag("causal", causal)
        if head_dim_vo not in (None, head_dim_qk):
            raise ValueError(
                f"head_dim_vo {head_dim_vo} is not head_dim_qk {head_dim_qk}: pad the smaller one"
            )
        queries = host("qo_indptr", qo_indptr)
        check_begins("qo_indptr", queries)
        data_types = {
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "o_data_type": o_data_type,
        }
        rows = queries[-1]
        if self.is_cuda_graph_enabled and self._sizes is not None:
            rows = self._sizes.q[0]
            if queries[-1] > rows or page_size != self._sizes.rows[0]:
                raise ValueError(
                    f"{queries[-1]} rows of q and page_size {page_size}, and the first plan had "
                    f"{rows} and {self._sizes.rows[0]}: plan the most rows first, and make another "
                    "wrapper for another page_size"
                )
        sizes = sizes_of(
            rows,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            data_types,
            window_left,
            logits_soft_cap,
            sm_scale,
        )
        names = "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"
        given = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        pages, keys = host_lengths(names, *given, page_size)
        if len(queries) != len(keys) + 1:
            raise ValueError(
                f"qo_indptr has {len(queries)} elements and paged_kv_indptr {len(keys) + 1}: pass "
                "batch + 1 in both"
            )
        given = paged_kv_indptr, paged_kv_indices[: sum(pages)], paged_kv_last_page_len
        if self._buffers is not None:
            _, _, of_pages, of_batch = self._buffers
            if len(keys) != len(of_batch) or sum(pages) > len(of_pages):
                raise ValueError(
                    f"{len(keys)} sequences with {sum(pages)} pages, and there are buffers for "
                    f"{len(of_batch)} and {len(of_pages)}: pass that batch, some sequences without "
                    "pages, or make another wrapper with larger ones"
                )
            for buffer, x in zip(self._buffers, (qo_indptr, *given), strict=True):
                buffer[: len(x)].copy_(x)
        indptr, indices, last = (x.to(self.device) for x in given)
        lengths = lengths_on_device(indptr, last, page_size)
        begins = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        every = torch.arange(sum(keys), device=self.device)
        sequence = torch.repeat_interleave(lengths, output_size=sum(keys))
        key = every - begins[sequence]
        places = indices[indptr[sequence] + key // page_size].long(), key % page_size
        if self._buffers is None:
            self._places = places
            self._begins = qo_indptr.to(self.device).contiguous(), begins
            of_q = (end - begin for begin, end in pairwise(queries))
            self._longest = max(of_q, default=0), max(keys, default=0)
        else:
            self._write(places, begins, page_size, rows)
        self._n_keys, self._causal = sum(keys), causal
        self._sizes = sizes

    begin_forward = plan

    def _write(
        self,
        places: tuple[torch.Tensor, torch.Tensor],
        begins: torch.Tensor,
        page_size: int,
        rows: int,
    ) -> None:
        """Write a plan to the memory that captured runs read. places: page and key of each key.
        begins: those of the sequences' keys."""
        assert self._buffers is not None
        most = len(self._buffers[2]) * page_size
        if self._places is None or self._begins is None:
            page = torch.zeros(most, dtype=torch.long, device=self.device)
            self._places = page, torch.zeros_like(page)
            self._begins = self._buffers[0], torch.zeros_like(begins)
            self._longest = rows, most
        for static, x in zip(self._places, places, strict=True):
            static[: len(x)].copy_(x)
            static[len(x) :].zero_()  # keys of no sequence, of a page that exists
        self._begins[1].copy_(begins)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Result:
        """Compute attention of a planned batch; return out, as q, with return_lse (out, lse).

        q: (rows, num_qo_heads, head_dim), with as many rows as qo_indptr tells. lse is (rows,
        num_qo_heads). The others are those of `BatchDecodeWithPagedKVCacheWrapper.run`.
        """
        sizes = self._planned()
        refuse_unusual(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        _check_flag("return_lse", return_lse)
        k, v = self._checked(sizes, q, paged_kv_cache, window_left)
        check_outputs(sizes, out, lse)
        assert self._places is not None and self._begins is not None
        page, key = self._places
        if self.device.type == "cpu":  # where keys of no sequence are refused
            page, key = page[: self._n_keys], key[: self._n_keys]
        found = varlen_attention(
            *(q, k[page, key], v[page, key], *self._begins, *self._longest),
            causal=self._causal,
            sinks=sinks,
            return_lse=return_lse,
            **sizes.options,
        )
        o, natural = found if isinstance(found, tuple) else (found, None)
        return result(o, None if natural is None else natural.mT, out, lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)


# -- levels ----------------------------------------------------------------------------------------


class MultiLevelCascadeAttentionWrapper:
    """Attention of queries whose sequences share keys, such as a prompt, which the cache has once.

    Each level has a part of a query's keys, in sequences of its own: the first ones those that many
    queries share, the last one each request's own. All queries of a sequence of a level read its
    keys once. `run` merges the levels by their LSEs, as `merge_states` does; each level's part is
    rounded to the dtype of q before.

    A level each of whose sequences has one query is computed as by
    `BatchDecodeWithPagedKVCacheWrapper`, any other as by `BatchPrefillWithPagedKVCacheWrapper`.

    use_cuda_graph: as there. Then each list of buffers has one for each level, and the first plan
        tells which levels have one query of each sequence.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[torch.Tensor] | None = None,
    ) -> None:
        if isinstance(num_levels, bool) or not isinstance(num_levels, int) or num_levels < 1:
            raise ValueError(f"num_levels {num_levels!r}: pass 1 or more")
        PagedWrapper(float_workspace_buffer, kv_layout)  # refuses what no level takes
        _check_flag("use_cuda_graph", use_cuda_graph)
        self._num_levels = num_levels
        self._workspace, self._kv_layout = float_workspace_buffer, kv_layout
        self._buffers: list[_Tensors] | None = None
        if use_cuda_graph:
            lists = {
                "qo_indptr_buf_arr": qo_indptr_buf_arr,
                "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
                "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
                "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
            }
            self._buffers = self._by_level(lists)
        self._levels: list[_Level] = []
        self._is_planned = False

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans are written to the same memory."""
        return self._buffers is not None

    def _by_level(self, lists: dict[str, list[torch.Tensor] | None]) -> list[_Tensors]:
        """Return the tensors of each level. Raises ValueError for lists of another length."""
        for name, own in lists.items():
            if own is None or len(own) != self._num_levels:
                has = "is None" if own is None else f"has {len(own)} tensors"
                raise ValueError(
                    f"{name} {has} and num_levels is {self._num_levels}: pass one for each level"
                )
        queries, indptr, indices, last = (own or [] for own in lists.values())
        return [*zip(queries, indptr, indices, last, strict=True)]

    def plan(
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DataType = "float16",
        kv_data_type: DataType | None = None,
    ) -> None:
        """Plan all levels: of each list, a tensor for each level, as the wrappers take them. Every
        level's qo_indptr ends with the rows of q.

        causal: of the last level alone, whose keys are the last ones.
        window_left: -1, since the keys before a query are those of several levels.
        """
        refuse_unusual(
            pos_encoding_mode=pos_encoding_mode, use_fp16_qk_reduction=use_fp16_qk_reduction
        )
        _check_flag("causal", causal)
        if window_left != -1:
            raise ValueError(
                f"window_left {window_left} is not built for levels: pass -1, or all keys of a "
                "sequence to one wrapper"
            )
        lists: dict[str, list[torch.Tensor] | None] = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        given = self._by_level(lists)
        queries = [host("qo_indptr", own) for own, *_ in given]
        rows = [own[-1] if own else 0 for own in queries]
        if len({*rows}) > 1:
            raise ValueError(
                f"the levels' qo_indptr end with {', '.join(map(str, rows))}: pass the rows of q, "
                "the same for each"
            )
        is_decode = [own == [*range(len(own))] for own in queries]
        levels, self._is_planned = self._levels, False
        if not levels or not self.is_cuda_graph_enabled:
            levels = [self._level(n, alone) for n, alone in enumerate(is_decode)]
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        options: dict[str, Any] = {
            "sm_scale": sm_scale,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }
        for n, (level, own) in enumerate(zip(levels, given, strict=True)):
            of_queries, indptr, indices, last = own
            if isinstance(level, BatchPrefillWithPagedKVCacheWrapper):
                is_last = n == len(levels) - 1
                level.plan(
                    of_queries,
                    indptr,
                    indices,
                    last,
                    *sizes,
                    causal=causal and is_last,
                    **options,
                )
            elif is_decode[n]:
                level.plan(indptr, indices, last, *sizes, **options)
            else:
                raise ValueError(
                    f"level {n} has several queries of a sequence, and had one of each in the "
                    "first plan: make another wrapper, whose first plan has several"
                )
        self._levels, self._is_planned = levels, True

    begin_forward = plan

    def _level(self, n: int, is_decode: bool) -> _Level:
        """Return the wrapper of a level. is_decode: each of its sequences has one query."""
        start = self._workspace, self._kv_layout, self.is_cuda_graph_enabled
        buffers = self._buffers[n] if self._buffers is not None else (None, None, None, None)
        queries, indptr, indices, last = buffers
        if is_decode:
            return BatchDecodeWithPagedKVCacheWrapper(*start, False, indptr, indices, last)
        return BatchPrefillWithPagedKVCacheWrapper(*start, queries, indptr, indices, last)

    def run(self, q: torch.Tensor, paged_kv_cache: Cache) -> torch.Tensor:
        """Compute attention of a planned batch; return it, as q.

        q: (rows, num_qo_heads, head_dim), with as many rows as qo_indptr tells.
        paged_kv_cache: all levels' pages, as for the other wrappers.
        """
        if not self._is_planned:
            raise RuntimeError("run() without a plan: call plan() before")
        if len(self._levels) == 1:
            o = self._levels[0].run(q, paged_kv_cache)
            assert isinstance(o, torch.Tensor)
            return o
        parts = (level.run(q, paged_kv_cache, return_lse=True) for level in self._levels)
        o, lse = (torch.stack(own, 1) for own in zip(*parts, strict=True))
        return merge_states(o, lse)[0]

    forward = run


_Tensors: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_Level: TypeAlias = "BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper"
