"""Divisions of the sampling, top-k and index kernels against each other: `python -m tests.gpu.tune_rows OUT [sample|topk|index|joint ...]`.

Every line names the division that the product takes first. Each is checked before it is timed; a line is printed as soon as it is known.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepinfer_cli.opbench.case import Setting
from deepinfer_cli.opbench.cases.index import problem
from deepinfer_cli.opbench.timing import time_side_by_side
from engine.draws import FIXED_ONE
from engine.ops.cuda import index_search, sample_rows, select_topk
from engine.ops.cuda.packed_gemm import machine
from engine.ops.cuda.select_topk import Division
from engine.ops.index_search import GROUP_BYTES, INDEX_SEARCH, ascending
from engine.ops.sample_rows import SAMPLE_ROWS, Draws, Filters, Mode
from engine.ops.select_topk import SELECT_TOPK
from engine.ops.triton import index_search as triton_search
from engine.ops.triton import select_topk as triton_topk

# What is measured, its divisions, what they have to agree with, and how many bytes they read at least.
Line = tuple[str, Mapping[str, Callable[[], Any]], Callable[[Any], bool], int]


def _sample(setting: Setting) -> Iterator[Line]:
    for rows in (256, 8):
        logits = setting.normal(rows, 129_280, std=3.0, dtype=torch.float32)
        numbers = torch.randint(0, 2**53, (rows,), device="cuda", generator=setting.generator())
        few, nucleus = (
            Filters(
                torch.full((rows,), int(0.95 * FIXED_ONE), device="cuda"),
                torch.full((rows,), k, dtype=torch.int32, device="cuda"),
                torch.zeros(rows, device="cuda"),
            )
            for k in (50, 2**31 - 1)
        )
        wanted_draws = [(mode, None, "") for mode in Mode] + [(mode, few, " top-k, top-p") for mode in (Mode.INVERSE, Mode.RACE)]
        for mode, kept, name in [*wanted_draws, (Mode.INVERSE, nucleus, " top-p")]:
            modes = torch.full((rows,), int(mode), dtype=torch.int32, device="cuda")
            draws = Draws(torch.ones(rows, device="cuda"), modes, numbers, kept, frozenset({mode}))
            wanted = SAMPLE_ROWS.reference(logits, draws, 129_280)[0]
            runs: dict[str, Callable[[], Any]] = {
                f"{threads} threads": _native(sample_rows.run_rows, logits, draws, 129_280, threads) for threads in (256, 512, 128)
            }
            if mode is Mode.GREEDY:
                runs["torch.max"] = lambda x=logits: (x.max(dim=-1).indices,)
            yield (
                f"sample rows={rows} {mode.name.lower()}{name}",
                runs,
                lambda got, w=wanted: bool((got[0] != w).float().mean() <= 0.01),
                logits.numel() * 4,
            )


def _topk(setting: Setting) -> Iterator[Line]:
    for rows, columns in ((1, 65_536), (8, 65_536), (64, 65_536), (8, 131_072), (1024, 16_384), (8, 1_000_000)):
        scores = setting.normal(rows, columns, dtype=torch.float32)
        wanted = ascending(SELECT_TOPK.reference(scores, 512))
        own = Division.of(rows, columns, machine(scores.device)[0].num_processors)
        forms = [Division(t, b, lists) for b in (8, 4, 2, 1) for t in (512, 256) for lists in (True, False)]
        others = [d for d in forms if (rows > 8 or d.blocks > 2) and (d.lists or d.blocks == own.blocks)]
        runs: dict[str, Callable[[], Any]] = {
            f"{d.blocks} x {d.threads}{' lists' if d.lists else ''}": _native(select_topk.select_rows, scores, 512, division=d)
            for d in dict.fromkeys([own, *others])
        }
        runs |= {"triton": partial(triton_topk.select_rows, scores, 512), "torch.topk": lambda x=scores: x.topk(512)[1]}
        yield (
            f"topk rows={rows} columns={columns}",
            runs,
            lambda got, w=wanted: torch.equal(got.int().sort(1).values, w),
            scores.numel() * 4,
        )


def _index(setting: Setting) -> Iterator[Line]:
    for rows in (1, 8, 64):
        query, keys = problem(setting, rows, 131_072)
        part = slice(0, rows)
        wanted = triton_search.scores_of(query, keys, part, 131_072, None, 8)
        tunings = [index_search.ScoreTuning(s, r, w, False) for s in (4, 8) for r in (4, 3) for w in (1, 4)]
        tunings += [index_search.ScoreTuning(4, r, w, True) for r in (4, 5) for w in (1, 2, 4, 8)]
        runs: dict[str, Callable[[], Any]] = {
            f"{'groups ' if t.groups else ''}{t.stages}/{t.residents}/{t.waves}": _native(
                index_search.scores_of, query, keys, part, 131_072, None, 8, t
            )
            for t in tunings
        }
        runs["triton"] = partial(triton_search.scores_of, query, keys, part, 131_072, None, 8)
        largest = wanted.abs().max()
        check = lambda got, w=wanted, most=largest: bool((got - w).abs().max() <= 1e-3 * most)  # noqa: E731
        yield f"scores rows={rows} entries=131072", runs, check, rows * 131_072 * 68
        searches = {
            "native": partial(index_search.launch, query, keys, 131_072, 512, None, 8),
            "triton": partial(triton_search.launch, query, keys, 131_072, 512, None, 8),
        }
        picked = INDEX_SEARCH.reference(query, keys, 131_072, 512, None, 8, 0)[0] if rows == 1 else searches["triton"]()[0]
        agree = lambda got, w=picked: bool((got[0] != w).float().mean() <= 0.02)  # noqa: E731
        yield f"search rows={rows} entries=131072", searches, agree, rows * 131_072 * 68


def _joint(setting: Setting) -> Iterator[Line]:
    """Rows of few sequences: where they share decoded keys they must have the bits of rows alone."""
    for rows, each, entries in (
        (428, 428, 65_536),
        (140, 140, 131_072),
        (428, 428, 16_384),
        (384, 6, 32_768),
        (64, 4, 65_536),
        (6, 6, 65_536),
    ):
        query, keys = problem(setting, rows, entries, each)
        step = max(1, GROUP_BYTES // (4 * entries))
        parts = [slice(first, min(first + step, rows)) for first in range(0, rows, step)]

        def scores(joint: bool, query: Any = query, keys: Any = keys, parts: Any = parts, entries: int = entries) -> list[torch.Tensor]:
            run, stream = machine(torch.device("cuda"))
            return [index_search.scores_of(run, stream, query, keys, part, entries, None, 8, joint=joint) for part in parts]

        runs = {"alone": partial(scores, False), "joint": partial(scores, True)}
        wanted = [part.clone() for part in scores(False)]
        seen = [torch.arange(entries, device="cuda") < query.count[part, None] for part in parts]
        agree = lambda got, w=wanted, m=seen: all(torch.equal(a[k], b[k]) for a, b, k in zip(got, w, m, strict=True))  # noqa: E731
        yield f"scores rows={rows} of {rows // each} entries={entries}", runs, agree, rows * entries * 4
        yield (
            f"search rows={rows} of {rows // each} entries={entries}",
            {"all": partial(index_search.launch, query, keys, entries, 512, None, 8)},
            lambda got: bool((got[0][:, 1:] > got[0][:, :-1]).all()),
            rows * entries * 4,
        )


def _native(function: Callable[..., Any], *arguments: Any, **named: Any) -> Callable[[], Any]:
    """A call on the stream that is current when it happens: a recording has its own."""
    return lambda: function(*machine(torch.device("cuda")), *arguments, **named)


PARTS: dict[str, Callable[[Setting], Iterator[Line]]] = {"sample": _sample, "topk": _topk, "index": _index, "joint": _joint}


@torch.inference_mode()
def main() -> int:
    out, wanted = Path(sys.argv[1]), sys.argv[2:]
    out.mkdir(parents=True, exist_ok=True)
    began, setting, wrong = time.monotonic(), Setting("cuda"), 0
    with (out / "tune_rows.jsonl").open("w", encoding="utf-8") as file:
        for part, lines in PARTS.items():
            if wanted and part not in wanted:
                continue
            for name, runs, agrees, num_bytes in lines(setting):
                good = {run: agrees(call()) for run, call in runs.items()}
                wrong += sum(not right for right in good.values())
                times = time_side_by_side({run: [call] for run, call in runs.items()}, "cuda")
                shown = [f"{run} {times[run].median:.1f}{'' if good[run] else ' WRONG'}" for run in runs]
                print(f"{name:34s} {num_bytes / 4.2e6:6.1f} us of bytes | {' | '.join(shown)}", flush=True)
                file.write(json.dumps({"name": name, "us": {run: t.median for run, t in times.items()}, "agrees": good}) + "\n")
                file.flush()
    print(f"{wrong} wrong, {time.monotonic() - began:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
