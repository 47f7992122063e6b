"""Train the draft stages on a frozen backbone in the serving arithmetic.

`python -m recipes.tiny.train_draft SECONDS --resume DIR --out DIR`: DIR holds weights in parts, those of the last backbone phase.
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

from recipes.tiny.checkpoint import load_parts, save_parts
from recipes.tiny.corpus import EOS
from recipes.tiny.draft import Draft
from recipes.tiny.feed import Feed
from recipes.tiny.model import FILTER
from recipes.tiny.optim import Optimiser
from recipes.tiny.packing import Packed
from recipes.tiny.setup import full_setup, miniature_setup
from recipes.tiny.train import Trainer

POSITION_DECAY = 0.95
CONFIDENCE_WEIGHT = 0.2
WARMUP_STEPS = 50
REPORT_EVERY = 25
SAVE_EVERY = 200
BIAS_RATE = 0.003


@dataclass(slots=True)
class Outcome:
    """loss: scalar. hits, valid [M, block] bool: the backbone agrees; the position is inside the answer. confidence [M, block]."""

    loss: Tensor
    hits: Tensor
    valid: Tensor
    confidence: Tensor


class DraftTrainer:
    """The stages' optimiser and step around a backbone trainer."""

    def __init__(self, trainer: Trainer, num_anchors: int, seed: int) -> None:
        self.t, self.num_anchors = trainer, num_anchors
        self.draft = Draft(trainer.b)
        stages = {n: p for n, p in trainer.params.items() if n.startswith("mtp.")}
        self.optimiser = Optimiser(stages, trainer.fused)
        # The stages share embedding and head with the backbone, which must stay as it is.
        self.params = {n: p if n in stages else p.detach() for n, p in trainer.params.items()}
        self.rng = np.random.default_rng(seed)

    def anchors(self, packed: Packed) -> np.ndarray:
        """Rows whose next token is an answer token other than EOS, [M] int64."""
        following = np.roll(packed.ids, -1)
        rows = np.flatnonzero((packed.weights == 1.0) & (following != EOS))
        rows = rows[rows < len(packed.ids) - 2 * self.t.b.shape.draft_block]
        return self.rng.choice(rows, self.num_anchors, replace=len(rows) < self.num_anchors).astype(np.int64)

    def outcome(self, packed: Packed) -> Outcome:
        """Backbone, drafts with the true previous tokens, and the loss against the backbone's distributions."""
        t, s = self.t, self.t.b.shape
        batch, _ = t.device_batch(packed)
        result = t.b.forward(t.params, batch, t.options)
        hidden, taps = result.hidden.detach(), result.taps.detach()
        del result
        anchors = torch.from_numpy(self.anchors(packed)).to(t.b.device)
        lo = t.b.visibility(batch, 1).lo.long()[anchors]
        drafted = self.draft.forward(self.params, batch, taps, anchors, lo, t.options)
        at = anchors[:, None] + torch.arange(1, s.draft_block + 1, device=anchors.device)
        previous = batch.ids[at]
        valid = (previous != EOS).cumprod(1).bool()
        markov = self.draft.markov(self.params, previous)
        logits = self.draft.logits(self.params, drafted.base, markov)
        with torch.no_grad():
            teacher = t.b.fn.head_logits(hidden.index_select(0, at.flatten()), self.params["norm.weight"], self.params["head.weight"])
            teacher = teacher.unflatten(0, at.shape)
            hits = logits.argmax(-1) == teacher.argmax(-1)
            target = torch.softmax(teacher, -1)
        ce = -(target * F.log_softmax(logits, -1)).sum(-1)
        weight = valid * POSITION_DECAY ** torch.arange(s.draft_block, device=anchors.device)
        confidence = self.draft.confidence(self.params, drafted.hidden, markov)
        bce = F.binary_cross_entropy_with_logits(confidence, hits.float(), reduction="none")
        loss = ((ce + CONFIDENCE_WEIGHT * bce) * weight).sum() / weight.sum()
        return Outcome(loss, hits, valid, confidence.detach())

    def step(self, packed: Packed, factor: float) -> Tensor:
        """One update. Returns on the device: loss, accepted and number of whole blocks, hits and valid drafts per position."""
        found = self.outcome(packed)
        found.loss.backward()
        self.optimiser.step(factor)
        with torch.no_grad():
            for stage, load in enumerate(self.draft.loads):
                self.t.params[f"mtp.{stage}.ffn.gate.bias"] += BIAS_RATE * min(factor, 1.0) * torch.sign(load.mean() - load)
            whole = found.valid.all(1)
            accepted = (found.hits.cumprod(1).sum(1) * whole).sum()
            sums = torch.stack((found.loss.detach(), accepted.float(), whole.sum().float()))
            return torch.cat((sums, (found.hits & found.valid).sum(0).float(), found.valid.sum(0).float()))


def calibration(outcomes: list[Outcome], bins: int = 10) -> list[float]:
    """Expected calibration error of each position, ten bins."""
    errors = []
    for i in range(outcomes[0].hits.shape[1]):
        p = torch.cat([torch.sigmoid(o.confidence[:, i])[o.valid[:, i]] for o in outcomes])
        hit = torch.cat([o.hits[:, i][o.valid[:, i]].float() for o in outcomes])
        index = (p * bins).long().clamp(max=bins - 1)
        gaps = [
            abs(float(p[index == b].mean() - hit[index == b].mean())) * float((index == b).float().mean())
            for b in range(bins)
            if (index == b).any()
        ]
        errors.append(round(sum(gaps), 4))
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--resume", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--rates", default="1.0,0.03")
    parser.add_argument("--anchors", type=int, default=4096)
    parser.add_argument("--miniature", action="store_true")
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    setup = miniature_setup() if args.miniature else full_setup()
    trainer = Trainer(setup.backbone, load_parts(args.resume), setup.rows, setup.dtype)
    max_len = 256 if args.miniature else 2048
    trainer.options = replace(trainer.options, rounding=True, selection=FILTER, max_len=max_len)
    drafts = DraftTrainer(trainer, min(args.anchors, 64) if args.miniature else args.anchors, args.seed)
    feed = Feed(args.workers, args.seed * 1000, setup.rows, "short", (60, max_len), 0.5)
    first, last = (float(x) for x in args.rates.split(","))
    curves: list[dict[str, Any]] = []
    began, sums, count, steps, launched = None, None, 0, 0, time.monotonic()
    while began is None or time.monotonic() - began < args.seconds:
        progress = 0.0 if began is None else (time.monotonic() - began) / args.seconds
        found = drafts.step(feed.next(), (first + (last - first) * progress) * min(1.0, (steps + 1) / WARMUP_STEPS))
        sums = found if sums is None else sums + found
        count, steps = count + 1, steps + 1
        if began is None:
            print(f"draft: first step {found[0].item():.2f} after {time.monotonic() - launched:.1f} s", flush=True)
            began = time.monotonic()
        if count == REPORT_EVERY:
            curves.append(report(sums.tolist(), count, steps, time.monotonic() - began, setup.shape.draft_block))
            sums, count = None, 0
        if steps % SAVE_EVERY == 0:
            save_parts(args.out, trainer.params)
    save_parts(args.out, trainer.params)
    outcomes = [drafts.outcome(feed.next()) for _ in range(4)]
    feed.close()
    curves.append({"phase": "draft", "calibration_error": calibration(outcomes)})
    print(f"draft calibration {curves[-1]}", flush=True)
    (args.out / "draft_curves.json").write_text(json.dumps(curves))
    print(f"draft saved after {time.monotonic() - launched:.0f} s", flush=True)


def report(v: list[float], count: int, steps: int, elapsed: float, block: int) -> dict[str, Any]:
    hits, valid = v[3 : 3 + block], v[3 + block :]
    record = {
        "phase": "draft",
        "step": steps,
        "seconds": round(elapsed, 1),
        "loss": v[0] / count,
        "accepted": v[1] / max(v[2], 1.0),
        "hits": [round(h / max(n, 1.0), 4) for h, n in zip(hits, valid, strict=True)],
    }
    if steps % (4 * REPORT_EVERY) == 0 or steps <= REPORT_EVERY:
        print(
            f"draft step {steps} {elapsed:.0f}s loss {record['loss']:.3f} accepted {record['accepted']:.2f} hits {record['hits']}",
            flush=True,
        )
    return record


if __name__ == "__main__":
    main()
