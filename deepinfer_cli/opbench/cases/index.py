"""The indexer at the released shapes: scores over packed keys, selection, candidate blocks."""

from __future__ import annotations

import torch

from deepinfer_cli.opbench.case import Call, Case, Prepared, Setting, Target, num_copies, relative_error
from engine.ops.cache_rows import index_row_bytes, pack_index_rows
from engine.ops.index_search import GROUP_BYTES, INDEX_SEARCH, IndexQuery, PagedIndexKeys, ascending
from engine.ops.q4_index import q4_index
from engine.ops.select_topk import SELECT_TOPK

# Source: config keys `index_n_heads`, `index_head_dim`, `index_topk`; 128 entries of ratio 1 in a block of the released cache.
_HEADS, _WIDTH, _TOPK, _PER_BLOCK = 32, 128, 512, 128


def _problem(setting: Setting, rows: int, context: int) -> tuple[IndexQuery, PagedIndexKeys]:
    """Every row has its own sequence of full length; blocks lie in scrambled order."""
    heads, width, per_block = (16, 32, 16) if setting.small else (_HEADS, _WIDTH, _PER_BLOCK)
    pages, size = -(-context // per_block), per_block * index_row_bytes(width)
    blocks = torch.empty(rows * pages + 1, -(-size // 128) * 128, dtype=torch.uint8, device=setting.device)
    some = pack_index_rows(setting.normal(per_block * 8, width)).unflatten(0, (8, per_block))
    data = width // 2
    pattern = torch.cat((some[:, :, :data].flatten(1), some[:, :, data:].flatten(1)), 1)
    blocks[:, :size] = pattern[torch.arange(len(blocks), device=setting.device) % 8]
    order = torch.randperm(rows * pages, device=setting.device, generator=setting.generator()) + 1
    keys = PagedIndexKeys(blocks, 0, per_block, order.view(rows, pages))
    count = torch.full((rows,), context, device=setting.device)
    query = IndexQuery(
        q4_index(setting.normal(rows, heads, width)), setting.normal(rows, heads), torch.arange(rows, device=count.device), count
    )
    return query, keys


def _scores(rows: int, context: int, target: Target) -> Case:
    def prepare(setting: Setting) -> Prepared:
        count, length = (min(rows, 3), 100) if setting.small else (rows, context)
        query, keys = _problem(setting, count, length)
        heads, width = query.q.shape[1:]
        num_bytes = count * length * index_row_bytes(width)
        flops = 2 * count * length * heads * width
        if setting.device != "cuda":
            return Prepared([lambda: INDEX_SEARCH.reference(query, keys, length, 8, None, 8, 0)], num_bytes, flops)
        from engine.ops.triton.index_search import scores_of

        step = max(1, GROUP_BYTES // (4 * length))

        def run() -> None:
            for begin in range(0, count, step):
                scores_of(query, keys, slice(begin, min(begin + step, count)), length, None, 8)

        def check() -> tuple[float, float]:
            from engine.ops.cache_rows import unpack_index_rows
            from engine.ops.index_scores import index_scores

            entries = torch.arange(length, device=query.q.device)[None]
            unpacked = unpack_index_rows(keys.rows(query.seq[:1], entries, width), torch.float32)
            wanted = index_scores(query.q[:1, None].float(), query.weights[:1, None].float(), unpacked, query.count[:1, None])
            got = scores_of(query, keys, slice(0, 1), length, None, 8)
            return relative_error(got, wanted[:, 0]), INDEX_SEARCH.tolerance.bf16

        return Prepared([run], num_bytes, flops, check=check)

    return Case("k.index", {"rows": rows, "context": context}, prepare, target)


def _topk(rows: int, columns: int, target: Target) -> Case:
    def prepare(setting: Setting) -> Prepared:
        count, length, k = (min(rows, 3), 100, 8) if setting.small else (rows, columns, _TOPK)
        num_bytes = count * length * 4
        inputs = [setting.normal(count, length, dtype=torch.float32) for _ in range(min(8, num_copies(num_bytes, setting)))]
        SELECT_TOPK.use(SELECT_TOPK.backends()[0] if setting.device == "cuda" else "reference")
        calls: list[Call] = [lambda x=x: SELECT_TOPK(x, k) for x in inputs]  # type: ignore[misc]
        peers: dict[str, list[Call]] = {"torch.topk": [lambda x=x: x.topk(k) for x in inputs]}  # type: ignore[misc]

        def check() -> tuple[float, float]:
            same = torch.equal(ascending(SELECT_TOPK(inputs[0], k)), ascending(SELECT_TOPK.reference(inputs[0], k)))
            return (0.0 if same else 1.0), 0.0

        return Prepared(calls, num_bytes, peers=peers, check=check)

    return Case("k.topk", {"rows": rows, "columns": columns}, prepare, target)


CASES = [
    _scores(8, 131_072, Target("floor", 0.35, 0.5)),
    _scores(64, 131_072, Target("floor", 0.45, 0.7)),
    *(_topk(rows, 65_536, Target("time", 30, 15, {"torch.topk": 2.0})) for rows in (1, 8)),
    _topk(64, 65_536, Target("time", 60, 40, {"torch.topk": 4.0})),
]
