"""Train the draft stages on one CPU core, without a GPU: taps from the serving engine, the true next token as the target.

`python -m recipes.tiny.train_draft_cpu SECONDS --checkpoint DIR --resume DIR --out DIR`: the backbone is the exported one; the stages
start from the weights in `--resume`, which also fill the rest of `--out`. A free core with bf16 matrix units makes about one step a second.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch as StepBatch
from engine.batch import LogitRows, SequenceSlice, StepKind
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from recipes.tiny import pieces
from recipes.tiny.checkpoint import load_parts, save_parts
from recipes.tiny.corpus import EOS, Sample, samples
from recipes.tiny.draft import Draft
from recipes.tiny.model import Batch, Options
from recipes.tiny.optim import Optimiser
from recipes.tiny.params import Params
from recipes.tiny.setup import full_setup

MAX_LEN = 512
DOCS_PER_STEP = 4
NEW_DOCS_PER_STEP = 1
HELD_BACK = 24
POSITION_DECAY = 0.95
CONFIDENCE_WEIGHT = 0.2
WARMUP_STEPS = 40
SINKHORN_ITERS = 6
REPORT_EVERY = 50
SAVE_EVERY_S = 120.0


def collapse(h: Tensor, pre: Tensor) -> Tensor:
    """As `pieces.collapse`, one matrix product in the dtype of h."""
    return torch.bmm(pre[:, None].to(h.dtype), h)[:, 0]


def expand(y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As `pieces.expand`, one matrix product in the dtype of h."""
    return torch.bmm(torch.cat((comb.mT, post[..., None]), -1).to(h.dtype), torch.cat((h, y[:, None]), 1))


@dataclass(frozen=True, slots=True)
class Taught:
    """One conversation: ids [n], taps [n, targets * C] bf16, rows whose next token is an answer's and not its last."""

    ids: Tensor
    taps: Tensor
    anchors: np.ndarray


class Teacher:
    """Prefills conversations in the serving engine and keeps the taps."""

    def __init__(self, checkpoint: Path, seed: int) -> None:
        config = EngineConfig(
            model=str(checkpoint),
            device="cpu",
            precision="Fq",
            num_threads=1,
            max_num_batched_tokens=1024,
            max_model_len=1024,
            max_num_seqs=1,
        )
        self.runner = ModelRunner(config)
        self.stream = samples(seed, 0, "short", 60, MAX_LEN)

    def conversation(self) -> Sample:
        while True:
            sample = next(self.stream)
            if sample.family != "text" and len(sample.ids) > 24:
                return sample

    @torch.inference_mode()
    def teach(self) -> Taught:
        sample = self.conversation()
        ids = sample.ids.astype("int64").tolist()
        blocks = list(range(1, -(-len(ids) // self.runner.kv.block_size) + 2))
        piece = SequenceSlice(ids, 0, len(ids), blocks, 1, logit_rows=LogitRows.LAST)
        inputs = self.runner._inputs.build(StepBatch(StepKind.PREFILL, [piece]), self.runner._truncation)
        taps = self.runner._backbone(inputs, self.runner.kv, want_taps=True).taps
        assert taps is not None
        following = np.roll(sample.ids, -1)
        answer = np.roll(sample.weights, -1) == 1.0
        answer[-1] = False
        return Taught(torch.tensor(ids), taps.bfloat16().clone(), np.flatnonzero(answer & (following != EOS)))


class Stages(Draft):
    """The draft stages with only the valid rows sent through the head."""

    def hidden(self, params: Params, batch: Batch, taps: Tensor, anchors: Tensor) -> Tensor:
        """[M, block, C] of anchors inside packed conversations."""
        self.skip_head = True
        lo = torch.maximum(anchors - self.b.shape.window + 1, batch.start[anchors])
        return self.forward(params, batch, taps, anchors, lo, Options(True, dtype=torch.bfloat16)).hidden


def step_loss(stages: Stages, params: Params, docs: list[Taught], num_anchors: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Loss, and sums for a report: whole blocks' accepted length, their number, hits and valid drafts by position."""
    ids = torch.cat([*(d.ids for d in docs), torch.full((8,), EOS)])
    taps = torch.cat([*(d.taps for d in docs), torch.zeros(8, docs[0].taps.shape[1], dtype=torch.bfloat16)])
    starts = np.cumsum([0, *(len(d.ids) for d in docs)])
    start = torch.cat([torch.full((len(d.ids),), int(s)) for d, s in zip(docs, starts, strict=False)] + [torch.full((8,), int(starts[-1]))])
    rows = np.concatenate([d.anchors + s for d, s in zip(docs, starts, strict=False)])
    anchors = torch.from_numpy(rng.choice(rows, min(num_anchors, len(rows)), replace=False).astype(np.int64))
    hidden = stages.hidden(params, Batch(ids, start, start, start), taps, anchors)
    block = stages.b.shape.draft_block
    at = anchors[:, None] + torch.arange(1, block + 1)
    previous, target = ids[at], ids[at + 1]
    valid = (previous != EOS).cumprod(1).bool()
    x, markov = hidden[valid], stages.markov(params, previous[valid])
    last = f"mtp.{stages.b.shape.draft_stages - 1}."
    features = torch.cat((pieces.rms(x, params[last + "norm.weight"]), markov.to(x.dtype)), -1)
    weight = torch.cat((params["head.weight"], params[last + "markov_head.head.weight"]), -1).to(x.dtype)
    logits = F.linear(features, weight).float()
    hit = logits.detach().argmax(-1) == target[valid]
    share = (valid * POSITION_DECAY ** torch.arange(block))[valid]
    bce = F.binary_cross_entropy_with_logits(stages.confidence(params, x, markov), hit.float(), reduction="none")
    loss = ((F.cross_entropy(logits, target[valid], reduction="none") + CONFIDENCE_WEIGHT * bce) * share).sum() / share.sum()
    hits = torch.zeros_like(valid)
    hits[valid] = hit
    whole = valid.all(1)
    accepted = (hits.cumprod(1).sum(1) * whole).sum().float()
    return loss, torch.cat((torch.stack((loss.detach(), accepted, whole.sum().float())), hits.sum(0).float(), valid.sum(0).float()))


def report(v: list[float], count: int, steps: int, elapsed: float, block: int, pool: int) -> dict[str, Any]:
    hits, valid = v[3 : 3 + block], v[3 + block :]
    record = {
        "phase": "draft",
        "step": steps,
        "seconds": round(elapsed, 1),
        "loss": round(v[0] / count, 4),
        "accepted": round(v[1] / max(v[2], 1.0), 3),
    }
    record["hits"] = [round(h / max(n, 1.0), 4) for h, n in zip(hits, valid, strict=True)]
    print(json.dumps(record | {"pool": pool}), flush=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--resume", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--anchors", type=int, default=256)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    pieces.collapse, pieces.expand = collapse, expand
    setup = full_setup("cpu", fast=False)
    # The mixes have converged long before the last of the served iterations; each costs as much as an expert here.
    setup.backbone.shape = replace(setup.backbone.shape, hc_iters=SINKHORN_ITERS)
    params = load_parts(args.resume)
    for name, p in params.items():
        p.requires_grad_(name.startswith("mtp.") and not name.endswith("gate.bias"))
    stages, optimiser = Stages(setup.backbone), Optimiser({n: p for n, p in params.items() if n.startswith("mtp.")}, fused=False)
    teacher, rng = Teacher(args.checkpoint, args.seed), np.random.default_rng(args.seed)
    held_back = [teacher.teach() for _ in range(HELD_BACK)]
    pool: list[Taught] = []
    curves: list[dict[str, Any]] = []
    sums, steps, began = None, 0, time.monotonic()
    saved = began
    while (elapsed := time.monotonic() - began) < args.seconds:
        fresh = [teacher.teach() for _ in range(NEW_DOCS_PER_STEP if elapsed < 0.8 * args.seconds or not pool else 0)]
        pool += [doc for doc in fresh if len(doc.anchors)]
        old = [pool[i] for i in rng.integers(len(pool), size=DOCS_PER_STEP - len(fresh))]
        loss, found = step_loss(stages, params, [*pool[len(pool) - len(fresh) :], *old], args.anchors, rng)
        loss.backward()
        optimiser.step(args.rate * (1 - 0.97 * elapsed / args.seconds) * min(1.0, (steps + 1) / WARMUP_STEPS))
        sums, steps = found if sums is None else sums + found, steps + 1
        if steps % REPORT_EVERY == 0:
            curves.append(report(sums.tolist(), REPORT_EVERY, steps, elapsed, setup.shape.draft_block, len(pool)))
            sums = None
        if time.monotonic() - saved > SAVE_EVERY_S:
            save_parts(args.out, params)
            saved = time.monotonic()
    save_parts(args.out, params)
    with torch.no_grad():
        found = sum(step_loss(stages, params, [doc], 10**6, rng)[1] for doc in held_back if len(doc.anchors))
    curves.append({"held_back": True, **report(found.tolist(), HELD_BACK, steps, args.seconds, setup.shape.draft_block, len(pool))})
    (args.out / "draft_curves.json").write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
