"""The indexer at the released shapes: scores over packed keys, selection, candidate blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deepinfer_cli.opbench.case import Call, Case, Prepared, Setting, Target, num_copies, relative_error
from engine.ops.cache_rows import entry_row_bytes, index_row_bytes, pack_index_rows, unpack_index_rows
from engine.ops.compress_entries import COMPRESS_ENTRIES, IndexKeys, IndexPlaces, PairSource, compress_entries
from engine.ops.index_scores import index_scores
from engine.ops.index_search import GROUP_BYTES, INDEX_SEARCH, IndexQuery, PagedIndexKeys, ascending
from engine.ops.q4_index import q4_index
from engine.ops.select_topk import SELECT_TOPK

# Source: config keys `index_n_heads`, `index_head_dim`, `index_topk`, `rms_norm_eps`; 128 entries of ratio 1 in a released block.
_HEADS, _WIDTH, _TOPK, _PER_BLOCK, _EPS = 32, 128, 512, 128, 1e-20


def problem(setting: Setting, rows: int, context: int, per_sequence: int = 1) -> tuple[IndexQuery, PagedIndexKeys]:
    """The last `per_sequence` rows of sequences of full length; blocks lie in scrambled order."""
    heads, width, per_block = (16, 32, 16) if setting.small else (_HEADS, _WIDTH, _PER_BLOCK)
    pages, size, sequences = -(-context // per_block), per_block * index_row_bytes(width), rows // per_sequence
    blocks = torch.empty(sequences * pages + 1, -(-size // 128) * 128, dtype=torch.uint8, device=setting.device)
    some = pack_index_rows(setting.normal(per_block * 8, width)).view(8, per_block, -1)
    data = width // 2
    pattern = torch.cat((some[:, :, :data].flatten(1), some[:, :, data:].flatten(1)), 1)
    blocks[:, :size] = pattern[torch.arange(len(blocks), device=setting.device) % 8]
    order = torch.randperm(sequences * pages, device=setting.device, generator=setting.generator()) + 1
    keys = PagedIndexKeys(blocks, 0, per_block, order.view(sequences, pages))
    row = torch.arange(rows, device=setting.device)
    seq, count = row // per_sequence, context + 1 - per_sequence + row % per_sequence
    return IndexQuery(q4_index(setting.normal(rows, heads, width)), setting.normal(rows, heads), seq, count), keys


def _score_kernels() -> tuple[Any, dict[str, Any]]:
    """The scoring kernel that the op takes here, and the ones beside it."""
    from engine.ops.triton.index_search import scores_of as portable

    if "cuda" not in INDEX_SEARCH.backends():
        return portable, {}
    from engine.ops.cuda.index_search import scores_of
    from engine.ops.cuda.packed_gemm import machine

    # The stream is that of the call: a recording has its own.
    return lambda *problem: scores_of(*machine(torch.device("cuda")), *problem), {"triton": portable}


def _scores(rows: int, context: int, target: Target, per_sequence: int = 1) -> Case:
    def prepare(setting: Setting) -> Prepared:
        count, length = (min(rows, 3), 100) if setting.small else (rows, context)
        query, keys = problem(setting, count, length, min(per_sequence, count))
        heads, width = query.q.shape[1:]
        num_bytes = len(keys.table) * length * index_row_bytes(width)
        flops = 2 * count * length * heads * width
        if setting.device != "cuda":
            return Prepared([lambda: INDEX_SEARCH.reference(query, keys, length, 8, None, 8, 0)], num_bytes, flops)
        score, peers = _score_kernels()
        step = max(1, GROUP_BYTES // (4 * length))

        def run(kernel: Any) -> None:
            for begin in range(0, count, step):
                kernel(query, keys, slice(begin, min(begin + step, count)), length, None, 8)

        def check() -> tuple[float, float]:
            entries = torch.arange(length, device=query.q.device)[None]
            unpacked = unpack_index_rows(keys.rows(query.seq[:1], entries, width), torch.float32)
            wanted = index_scores(query.q[:1, None].float(), query.weights[:1, None].float(), unpacked, query.count[:1, None])
            got = score(query, keys, slice(0, 1), length, None, 8)
            seen = int(query.count[0])
            return relative_error(got[:, :seen], wanted[:, 0, :seen]), INDEX_SEARCH.tolerance.bf16

        beside = {name: [partial(run, kernel)] for name, kernel in peers.items()}
        return Prepared([partial(run, score)], num_bytes, flops, peers=beside, check=check)

    params = {"rows": rows, "context": context} | ({"per_sequence": per_sequence} if per_sequence > 1 else {})
    return Case("k.index", params, prepare, target)


def _topk(rows: int, columns: int, target: Target) -> Case:
    def prepare(setting: Setting) -> Prepared:
        count, length, k = (min(rows, 3), 100, 8) if setting.small else (rows, columns, _TOPK)
        num_bytes = count * length * 4
        inputs = [setting.normal(count, length, dtype=torch.float32) for _ in range(min(8, num_copies(num_bytes, setting)))]
        setting.select(SELECT_TOPK)
        calls = [partial(SELECT_TOPK, x, k) for x in inputs]
        peers = {"torch.topk": [partial(torch.topk, x, k) for x in inputs]}

        def check() -> tuple[float, float]:
            same = torch.equal(ascending(SELECT_TOPK(inputs[0], k)), ascending(SELECT_TOPK.reference(inputs[0], k)))
            return (0.0 if same else 1.0), 0.0

        return Prepared(calls, num_bytes, peers=peers, check=check)

    return Case("k.topk", {"rows": rows, "columns": columns}, prepare, target)


@dataclass(frozen=True, slots=True)
class CompressProblem:
    """A ratio-2 source layer behind its large product. inputs: products of both tokens of every entry, one set per call."""

    inputs: list[torch.Tensor]
    pairs: PairSource
    norm: torch.Tensor
    rot: torch.Tensor
    kv_rows: torch.Tensor
    number: torch.Tensor
    keys: IndexKeys
    num_bytes: int

    def calls(self, run: Callable[..., None]) -> list[Call]:
        return [partial(run, x, self.pairs, self.norm, _EPS, self.rot, self.kv_rows, self.number, self.keys) for x in self.inputs]

    def wrong_share(self, run: Callable[..., None], reference: Callable[..., None]) -> float:
        """Share of bytes that differ: a number on the edge between two codes may fall to either."""
        blocks, rows = self.keys.places.blocks, self.kv_rows
        found = []
        for function in (reference, run):
            rows.fill_(255)
            blocks.zero_()
            self.calls(function)[0]()
            found.append((rows[self.number].clone(), blocks.clone()))
        return max(float((got != want).float().mean()) for want, got in zip(*found, strict=True))


def compress_problem(setting: Setting, tokens: int) -> CompressProblem:
    width, key_width, per_block, rotary = (64, 32, 16, 8) if setting.small else (512, _WIDTH, 64, 32)
    entries, device = max(1, tokens // 2), setting.device
    pages = -(-entries // per_block)
    kv_rows = torch.empty(pages * per_block, entry_row_bytes(width), dtype=torch.uint8, device=device)
    blocks = torch.empty(pages, -(-per_block * index_row_bytes(key_width) // 128) * 128, dtype=torch.uint8, device=device)
    number = torch.arange(entries, device=device)
    places = IndexPlaces(blocks, 0, per_block, number // per_block, number % per_block)
    rot = torch.polar(torch.ones(entries, rotary, device=device), number[:, None] * torch.rand(rotary, device=device))
    ones, key_ones = setting.normal(width, std=0.0) + 1, setting.normal(key_width, std=0.0) + 1
    wk = setting.normal(key_width, width, std=width**-0.5)
    num_bytes = tokens * 2 * width * 4 + entries * (entry_row_bytes(width) + index_row_bytes(key_width)) + wk.numel() * 2
    inputs = [setting.normal(2 * entries, 2 * width, dtype=torch.float32) for _ in range(min(16, num_copies(num_bytes, setting)))]
    pairs = PairSource(inputs[0], None, 2 * number, 2 * number + 1)
    return CompressProblem(inputs, pairs, ones, rot, kv_rows, number, IndexKeys(wk, key_ones, places), num_bytes)


def _compress(tokens: int, target: Target) -> Case:
    """Everything of a ratio-2 source layer behind its large product: pool, norm, rotation, packing, the index product, its key."""

    def prepare(setting: Setting) -> Prepared:
        setting.select(COMPRESS_ENTRIES)
        problem = compress_problem(setting, tokens)

        def check() -> tuple[float, float]:
            return problem.wrong_share(COMPRESS_ENTRIES, COMPRESS_ENTRIES.reference), 0.02

        return Prepared(problem.calls(compress_entries), problem.num_bytes, check=check)

    return Case("k.compress", {"tokens": tokens}, prepare, target)


CASES = [
    _scores(8, 131_072, Target("floor", 0.35, 0.5)),
    _scores(64, 131_072, Target("floor", 0.45, 0.7)),
    _scores(428, 65_536, Target("floor"), per_sequence=428),  # the suffix of a prompt of 131,072 tokens, in a layer of ratio 2
    *(_topk(rows, 65_536, Target("time", 30, 15, {"torch.topk": 2.0})) for rows in (1, 8)),
    _topk(64, 65_536, Target("time", 60, 40, {"torch.topk": 4.0})),
    _compress(8, Target("time", 12, 6)),
    _compress(4096, Target("copy", 0.55, 0.75)),
]
