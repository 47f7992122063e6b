"""How far next-token distributions behind a replay are from those of a full prefill, on held-out prompts of the embedded model.

    python -m tests.engine.bench_replay [--prompts 6] [--precision Fq]

For each set and mode: the divergence KL(full, replayed) over the answer's tokens, and at how many of them both prefer the same token.
Pages end as late as they may ("late"), or in the middle of the prompt ("middle").
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import Batch, LogitRows, SequenceSlice, StepKind
from engine.config import EngineConfig
from engine.eval_prompts import load_prompts
from engine.model_runner import ModelRunner
from engine.models.tiny import ensure_tiny
from engine.tokenizer import Tokenizer
from hicache.policy import restore_cap
from hicache.replay import ReplayMode, replayed_tokens

KEEP, PAGE, ANSWER, BLOCKS = 140, 128, 24, 70
SETS = ("recall_2000", "document_2000", "recall_6000", "document_6000")


def make_runner(model: str, precision: str = "F") -> ModelRunner:
    config = EngineConfig(
        model=model, device="cpu", precision=precision, yoco_mode="compact", yoco_keep_tokens=KEEP, max_num_seqs=2, num_threads=1,
        max_model_len=(BLOCKS - 2) * PAGE, num_blocks=2 * BLOCKS + 1, max_num_batched_tokens=BLOCKS * PAGE,
    )  # fmt: skip
    runner = ModelRunner(config)
    runner.native.wait()
    return runner


class Trial:
    """One prompt in slot 1, computed in full, with its greedy answer; `divergence` puts a replay of it beside in slot 2."""

    def __init__(self, runner: ModelRunner, ids: list[int]) -> None:
        self.runner, self.ids, self.answer = runner, ids, list[int]()
        rows = [self._prefill(1, 0)]
        while len(rows) < ANSWER:
            self.answer.append(int(rows[-1].argmax()))
            rows.append(self._decode(1, len(rows)))
        self.full = torch.stack(rows).log_softmax(-1)

    def divergence(self, mode: ReplayMode, end: int) -> tuple[Tensor, Tensor]:
        """[ANSWER] fp32 KL(full, replayed) in nats, and whether both prefer the same token. end: of the pages that are there."""
        kv = self.runner.kv
        kv.blocks[1 + BLOCKS : 1 + BLOCKS + end // PAGE] = kv.blocks[1 : 1 + end // PAGE]
        start = end - replayed_tokens(mode, kv.window, kv.num_encoder_layers, PAGE)
        rows = [self._prefill(2, start, end), *(self._decode(2, count) for count in range(1, ANSWER))]
        replayed = torch.stack(rows).log_softmax(-1)
        return (self.full.exp() * (self.full - replayed)).sum(-1), self.full.argmax(-1) == replayed.argmax(-1)

    def _prefill(self, slot: int, start: int, end: int = 0) -> Tensor:
        piece = self._slice(self.ids, slot, start, swa_valid_start=start, entries_start=end)
        return self.runner.run(Batch(StepKind.PREFILL, [piece]))[0]

    def _decode(self, slot: int, count: int) -> Tensor:
        ids = self.ids + self.answer[:count]
        return self.runner.run(Batch(StepKind.DECODE, [self._slice(ids, slot, len(ids) - 1)]))[0].clone()

    def _slice(self, ids: list[int], slot: int, start: int, swa_valid_start: int = 0, entries_start: int = 0) -> SequenceSlice:
        history = tuple(ids[max(0, start - self.runner.limits.ngram_history) : start])
        table = list(range(1 + (slot - 1) * BLOCKS, 1 + slot * BLOCKS))
        return SequenceSlice(
            ids[start:], start, len(ids), table, slot, history, swa_valid_start, LogitRows.LAST, entries_start=entries_start
        )


def page_ends(runner: ModelRunner, mode: ReplayMode, num_tokens: int) -> Iterator[tuple[str, int]]:
    """Where pages may end so that a replay fits before it."""
    cap = restore_cap(num_tokens, KEEP, PAGE)
    least = replayed_tokens(mode, runner.kv.window, runner.kv.num_encoder_layers, PAGE) + PAGE
    for name, end in (("late", cap), ("middle", cap // 2 // PAGE * PAGE)):
        if end >= least:
            yield name, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=6, help="of each set")
    parser.add_argument("--precision", default="F")
    args = parser.parse_args()
    model = str(ensure_tiny(Path.home() / ".cache" / "dix" / "models"))
    runner, tokenizer = make_runner(model, args.precision), Tokenizer.from_dir(model)
    prompts, _ = load_prompts()
    print(f"embedded model, {runner.path}, profile {args.precision}; KL in nats: mean / largest; tokens with the same favourite")
    for name in SETS:
        found: dict[tuple[str, str], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for prompt in [prompt for prompt in prompts if prompt.set == name][: args.prompts]:
            trial = Trial(runner, tokenizer.encode(prompt.render())[: (BLOCKS - 2) * PAGE])
            for mode in (ReplayMode.BOUNDED, ReplayMode.EXACT):
                for place, end in page_ends(runner, mode, len(trial.ids)):
                    found[mode, place].append(trial.divergence(mode, end))
        for (mode_name, place), parts in found.items():
            divergence, same = (torch.cat(values) for values in zip(*parts, strict=True))
            figures = f"{divergence.mean():9.1e} / {divergence.max():9.1e}   {int(same.sum())} of {len(same)}"
            print(f"{name:14} {mode_name:8} {place:7} {len(parts):3} prompts  {figures}", flush=True)


if __name__ == "__main__":
    main()
