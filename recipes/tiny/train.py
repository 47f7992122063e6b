"""Train phases of the backbone, or the draft stages, within a time budget.

`python -m recipes.tiny.train p1=130 p2=300 --out DIR [--resume DIR]`: seconds of steps for each phase, compilation not counted.
After each phase DIR holds the weights (bf16, in parts) and `curves.json`; `--work` keeps the full state with the optimiser.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.tiny import score, selection
from recipes.tiny.checkpoint import load_parts, save_parts
from recipes.tiny.corpus import FAMILIES, Sample
from recipes.tiny.feed import Feed
from recipes.tiny.model import DENSE, Backbone, Batch, Options, Result
from recipes.tiny.optim import Optimiser
from recipes.tiny.packing import Packed, pack
from recipes.tiny.params import Params, initial_params
from recipes.tiny.phases import MINIATURE, PHASES, Phase
from recipes.tiny.setup import full_setup, miniature_setup

BIAS_RATE = 0.003


class Trainer:
    """Parameters, optimiser and the step; one object for all phases of a run."""

    def __init__(self, backbone: Backbone, params: Params, rows: int, dtype: torch.dtype) -> None:
        self.b, self.rows = backbone, rows
        self.params = {name: p.to(backbone.device) for name, p in params.items()}
        self.fused = backbone.device == "cuda"
        self.options = Options(dtype=dtype)
        self.step_count = 0
        for name, p in self.params.items():
            p.requires_grad_(not name.endswith("gate.bias"))
        self.optimiser = Optimiser({n: p for n, p in self.params.items() if not n.startswith("mtp.")}, self.fused)

    def device_batch(self, packed: Packed) -> tuple[Batch, Tensor]:
        """The model's batch and the targets, row i predicts ids[i + 1]."""
        put = lambda array: torch.from_numpy(array.astype(np.int64)).to(self.b.device, non_blocking=True)  # noqa: E731
        batch = Batch(put(packed.ids), put(packed.start), put(packed.end), put(packed.rect))
        return batch, batch.ids.roll(-1)

    def losses(self, result: Result, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.b.fn.token_loss(result.hidden, self.params["norm.weight"], self.params["head.weight"], targets)

    def index_loss(self, result: Result, batch: Batch, kl_rows: Tensor) -> Tensor:
        """Divergence of every index source from the attention of the layers that use its picks, or its candidate blocks."""
        s, total = self.b.shape, torch.zeros((), device=self.b.device)
        groups, per_group = kl_rows.shape
        flat = kl_rows.flatten()
        for source, indexed in result.indexed.items():
            vis = indexed.vis
            length = self.options.max_len // vis.ratio
            first = vis.start[kl_rows[:, 0]].long()
            at = first[:, None] + torch.arange(length, device=first.device)
            visible = at[:, None] < vis.hi[kl_rows][..., None]
            at = at.clamp(max=indexed.key.shape[0] - 1).flatten()
            keys = indexed.key.index_select(0, at).unflatten(0, (groups, length))
            query = indexed.query.index_select(0, flat).unflatten(0, (groups, per_group))
            weight = indexed.weight.index_select(0, flat).unflatten(0, (groups, per_group))
            scores = selection.index_scores_with_gradient(query, weight, keys, visible)
            entries = result.attended[source][1].detach().index_select(0, at).unflatten(0, (groups, length))
            behind = source == s.candidate_source
            users = [[layer for layer in result.attended if s.topk_owner(layer) == source]]
            users += [[layer for layer in result.attended if s.topk_owner(layer) > source]] if behind else []
            masses = [sum(self._mass(result, layer, flat, kl_rows, entries, visible) for layer in layers) for layers in users if layers]
            total = total + selection.index_divergence(masses, scores, visible, s.candidate_block_size if behind else 0)
        return total

    @torch.no_grad()
    def _mass(self, result: Result, layer: int, flat: Tensor, kl_rows: Tensor, entries: Tensor, visible: Tensor) -> Tensor:
        q, _, lse = result.attended[layer]
        q, lse = (t.detach().index_select(0, flat).unflatten(0, tuple(kl_rows.shape)) for t in (q, lse))
        sink = self.params[f"layers.{layer}.attn.attn_sink"]
        return selection.attention_mass(q, lse, sink, entries, visible, self.options.selection != DENSE)

    def step(self, packed: Packed, factor: float, with_index: bool) -> Tensor:
        """One update. Returns on the device: answer loss, right, answers, index loss, highest load, right and answers per family."""
        batch, targets = self.device_batch(packed)
        weights = torch.from_numpy(packed.weights.copy()).to(self.b.device, non_blocking=True)
        result = self.b.forward(self.params, batch, self.options)
        ce, right = self.losses(result, targets)
        loss = (ce * weights).sum() / weights.sum()
        index = torch.zeros((), device=self.b.device)
        if with_index:
            index = self.index_loss(result, batch, torch.from_numpy(packed.kl_rows.astype(np.int64)).to(self.b.device))
        (loss + index).backward()
        self.optimiser.step(factor)
        loads = torch.stack(result.loads).detach()
        with torch.no_grad():
            for layer, load in enumerate(loads):
                self.params[f"layers.{layer}.ffn.gate.bias"] += BIAS_RATE * min(factor, 1.0) * torch.sign(load.mean() - load)
            answer = (weights == 1.0).float()
            family = torch.from_numpy(packed.family.astype(np.int64)).to(self.b.device)
            by_family = torch.zeros(2, len(FAMILIES), device=self.b.device)
            by_family[0].index_add_(0, family, right * answer)
            by_family[1].index_add_(0, family, answer)
            sums = torch.stack(
                ((ce.detach() * answer).sum(), (right * answer).sum(), answer.sum(), index.detach(), (loads.amax(1) / loads.mean(1)).amax())
            )
        self.step_count += 1
        return torch.cat((sums, by_family.flatten()))

    def right_rows(self, samples: list[Sample], rects: list[int]) -> np.ndarray:
        """Whether each row's argmax is the next token, [rows] bool, with the current options."""
        packed = pack(samples, self.rows, 0.0, random.Random(0))
        rect, at = packed.rect.copy(), 0
        for sample, boundary in zip(samples, rects, strict=True):
            size = -(-len(sample.ids) // 16) * 16
            rect[at : at + size] = at + boundary
            at += size
        batch, targets = self.device_batch(replace(packed, rect=rect))
        # Gradients stay on so that the compiled functions of training serve here too.
        return self.losses(self.b.forward(self.params, batch, self.options), targets)[1].cpu().numpy()


def learning_rate(phase: Phase, progress: float, step: int) -> float:
    start, end = phase.rates
    return (start + (end - start) * progress) * min(1.0, (step + 1) / phase.warmup)


def run_phase(trainer: Trainer, phase: Phase, seconds: float, seed: int, workers: int, curves: list[dict[str, Any]], feed: Feed) -> None:
    """Steps until the budget is spent; the clock starts after the first step, which compiles."""
    began, since, sums, steps_here = None, 0, None, 0
    launched = time.monotonic()
    seen: set[str] = set()
    while True:
        progress = 0.0 if began is None else min(1.0, (time.monotonic() - began) / seconds)
        if progress >= 1.0:
            break
        mode = next(mode for until, mode in phase.selections if progress < until)
        trainer.options = replace(trainer.options, rounding=phase.rounding, selection=mode, max_len=phase.lengths[1])
        every = phase.index_every if mode == DENSE else 1
        found = trainer.step(feed.next(), learning_rate(phase, progress, steps_here), steps_here % every == 0)
        if not torch.isfinite(found[0]) if steps_here % phase.report_every == 0 else False:
            raise FloatingPointError(f"the loss of phase {phase.name} is not finite at step {steps_here}; lower phases.{phase.name}.rates")
        sums = found if sums is None else sums + found
        since, steps_here = since + 1, steps_here + 1
        if mode not in seen:
            seen.add(mode)
            if trainer.fused:
                torch.cuda.synchronize()
            print(f"{phase.name}: first {mode} step after {time.monotonic() - launched:.1f} s", flush=True)
        if began is None:
            began = time.monotonic()
        if since == phase.report_every:
            curves.append(_report(trainer, phase, mode, sums, since, time.monotonic() - began, steps_here))
            since, sums = 0, None


def _report(trainer: Trainer, phase: Phase, mode: str, sums: Tensor, count: int, elapsed: float, steps: int) -> dict[str, Any]:
    v = sums.tolist()
    right, seen = v[5 : 5 + len(FAMILIES)], v[5 + len(FAMILIES) :]
    record = {
        "phase": phase.name,
        "mode": mode,
        "step": trainer.step_count,
        "seconds": round(elapsed, 1),
        "loss": v[0] / v[2],
        "accuracy": v[1] / v[2],
        "index": v[3] / count * phase.index_every if mode == DENSE else v[3] / count,
        "load": v[4] / count,
        "tokens_per_second": round(steps * trainer.rows / max(elapsed, 1e-9)),
        "families": {name: round(r / n, 4) for name, r, n in zip(FAMILIES, right, seen, strict=True) if n},
    }
    if steps % (4 * phase.report_every) == 0 or steps <= 3 * phase.report_every:
        print(
            f"{phase.name} {mode} step {steps} {elapsed:.0f}s loss {record['loss']:.4f} acc {record['accuracy']:.4f} "
            f"index {record['index']:.3f} "
            f"load {record['load']:.2f} {record['tokens_per_second']} tok/s {record['families']}",
            flush=True,
        )
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phases", nargs="+", help="name=seconds")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="directory of the full state (weights in f32 and optimiser); read when it exists")
    parser.add_argument("--resume", type=Path, help="directory with weights in parts")
    parser.add_argument("--miniature", action="store_true", help="a small model on the CPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--scores", default="", help="comma-separated option sets to score after each phase: dense, topk, filter, +keep")
    parser.add_argument("--score-counts", default="128,64")
    args = parser.parse_args()
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    setup = miniature_setup() if args.miniature else full_setup()
    table = MINIATURE if args.miniature else PHASES
    plan = [(table[name], float(seconds)) for name, seconds in (item.split("=") for item in args.phases)]
    held_out = args.out / "heldout.npz"
    builder = subprocess.Popen([sys.executable, "-m", "recipes.tiny.score", str(held_out), *args.score_counts.split(",")])
    feeds = [
        Feed(args.workers, args.seed + i + 97 * p.order, setup.rows, p.mixture, p.lengths, p.truncated) for i, (p, _) in enumerate(plan[:1])
    ]
    params = load_parts(args.resume) if args.resume and any(args.resume.glob("weights-*")) else initial_params(setup.shape, args.seed)
    trainer = Trainer(setup.backbone, params, setup.rows, setup.dtype)
    state_file = args.work / "state.pt" if args.work else None
    if state_file and state_file.exists():
        state = torch.load(state_file, map_location=setup.backbone.device)
        with torch.no_grad():
            for name, p in state["params"].items():
                trainer.params[name].copy_(p)
        trainer.optimiser.load(state["optimiser"])
        print(f"resumed from {state_file}", flush=True)
    curves: list[dict[str, Any]] = []
    for number, (phase, seconds) in enumerate(plan):
        feed = feeds.pop(0)
        if number + 1 < len(plan):  # the next phase's feeders fill their queues while this one trains
            p = plan[number + 1][0]
            feeds.append(Feed(args.workers, args.seed + 97 * p.order, setup.rows, p.mixture, p.lengths, p.truncated))
        run_phase(trainer, phase, seconds, args.seed, args.workers, curves, feed)
        feed.close()
        save_parts(args.out, trainer.params)
        (args.out / "curves.json").write_text(json.dumps(curves))
        if state_file:
            state_file.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"params": {n: p.detach() for n, p in trainer.params.items()}, "optimiser": trainer.optimiser.state()}, state_file)
        print(f"{phase.name} saved at {time.monotonic() - started:.0f} s", flush=True)
        if curves and curves[-1].get("accuracy", 1.0) < phase.minimum:
            sys.exit(
                f"phase {phase.name} ended at accuracy {curves[-1]['accuracy']:.3f}, less than {phase.minimum}: "
                "look at curves.json before going on"
            )
        builder.wait()
        found = score.load(held_out)
        for name in filter(None, args.scores.split(",")):
            mode, keep = name.removesuffix("+keep"), name.endswith("+keep")
            trainer.options = replace(trainer.options, selection=mode)
            marks = score.score(found, trainer, setup.rows, keep)
            curves.append({"phase": phase.name, "scores": name, "rounding": phase.rounding, **marks})
            print(f"{phase.name} {name}: {marks}", flush=True)
        (args.out / "curves.json").write_text(json.dumps(curves))
    held_out.unlink(missing_ok=True)
    print(f"done after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
