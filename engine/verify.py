"""Compare the serving path with reference vectors: chunked prefill and decode from the paged cache.

A directory holds checkpoints, `prompts.json` and `vectors-<mode>.safetensors`, whose metadata names the checkpoint. Every prompt runs
with several chunk sizes, alone and together with the others, decoder truncation off. Continuations follow the stored tokens; greedy
choices agree with free-running text exactly as long as every choice along the stored text agrees.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.batch import Batch, LogitRows, SequenceSlice, StepKind
from engine.config import EngineConfig, Precision
from engine.errors import CheckpointError
from engine.model_runner import ModelRunner

# Source: the tolerances stated with the vectors.
_CLOSE = 1e-3
_QDQ_SHARE, _QDQ_MOST, _QDQ_MARGIN = 0.90, 0.5, 0.05
_NOISY_RMS, _NOISY_KL, _NOISY_TOP1, _NOISY_TOP1_ALL = 0.25, 0.03, 0.75, 0.88


class VerifyMode(StrEnum):
    """Arithmetic of a vectors file."""

    FP32 = "fp32"
    FP32_QDQ = "fp32-qdq"
    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def precision(self) -> Precision:
        return {"fp32": Precision.F, "fp32-qdq": Precision.FQ, "bf16": Precision.B, "fp8": Precision.R}[self.value]

    @property
    def exact(self) -> bool:
        """Whether single logits are compared, and not statistics."""
        return self in (VerifyMode.FP32, VerifyMode.FP32_QDQ)


@dataclass(frozen=True, slots=True)
class PromptResult:
    """Agreement of one prompt over its stored prompt positions and its continuation.

    share_close: positions whose largest error is within 1e-3. mean_kl: KL(reference || ours), nats. greedy_agree: continuation steps whose
    greedy choice is the stored token. problems: empty when all tolerances hold.
    """

    prompt_id: str
    num_positions: int
    max_error: float
    rms: float
    share_close: float
    mean_kl: float
    top1: float
    greedy_agree: int
    greedy_steps: int
    problems: list[str]

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class RunResult:
    """One pass over all prompts. chunk_size 0 is whole prompts; together: all prompts in one batch."""

    mode: VerifyMode
    checkpoint: str
    chunk_size: int
    together: bool
    prompts: list[PromptResult]
    top1: float
    problems: list[str]

    @property
    def passed(self) -> bool:
        return not self.problems and all(p.passed for p in self.prompts)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Everything that was compared."""

    path: str
    block_size: int
    runs: list[RunResult]

    @property
    def passed(self) -> bool:
        return bool(self.runs) and all(run.passed for run in self.runs)


@dataclass(frozen=True, slots=True)
class _Reference:
    """Stored numbers of one prompt."""

    prompt_id: str
    token_ids: list[int]
    positions: Tensor
    logits: Tensor
    gen_tokens: list[int]
    gen_logits: Tensor


def verify_dir(
    path: Path,
    modes: list[VerifyMode] | None = None,
    chunk_sizes: tuple[int, ...] = (16, 64, 0),
    batch: tuple[bool, ...] = (False, True),
    *,
    block_size: int = 16,
    on_run: Callable[[RunResult], None] | None = None,
) -> VerifyReport:
    """Run the comparison. modes: None for all whose vectors exist. chunk_sizes: 0 stands for whole prompts. batch: alone, together.

    on_run is called with every finished pass.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    prompts = _read_prompts(path)
    if modes is None:
        modes = [mode for mode in VerifyMode if (path / f"vectors-{mode}.safetensors").exists()]
        if not modes:
            raise CheckpointError(f"{path} has no vectors-<mode>.safetensors", hint=f"modes: {', '.join(VerifyMode)}")
    runs = []
    for mode in modes:
        checkpoint, references = _read_vectors(path, mode, prompts)
        runner = _make_runner(path / checkpoint, mode, references, block_size)
        _check_ids(references, runner.limits.vocab_size)
        for chunk_size in chunk_sizes:
            for together in batch:
                run = _compare(mode, checkpoint, chunk_size, together, references, runner)
                runs.append(run)
                if on_run is not None:
                    on_run(run)
    return VerifyReport(str(path), block_size, runs)


def _check_ids(references: list[_Reference], vocab_size: int) -> None:
    for reference in references:
        foreign = [token for token in (*reference.token_ids, *reference.gen_tokens) if not 0 <= token < vocab_size]
        if foreign:
            raise CheckpointError(f"prompt {reference.prompt_id} has token {foreign[0]}; the checkpoint has {vocab_size} tokens")


def _read_prompts(path: Path) -> list[dict[str, Any]]:
    file = path / "prompts.json"
    if not file.is_file():  # a pipe would be waited for
        raise CheckpointError(
            f"{file} is missing", hint="point to a directory with prompts.json, checkpoints and vectors-<mode>.safetensors"
        )
    try:
        prompts = json.loads(file.read_text(encoding="utf-8"))
        found = [{"id": str(p["id"]), "token_ids": [int(i) for i in p["token_ids"]]} for p in prompts]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}") from error
    if not found or not all(prompt["token_ids"] for prompt in found):
        raise CheckpointError(f"{file} holds no prompt, or one without tokens")
    return found


def _read_vectors(path: Path, mode: VerifyMode, prompts: list[dict[str, Any]]) -> tuple[str, list[_Reference]]:
    file = path / f"vectors-{mode}.safetensors"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    try:
        with safe_open(str(file), framework="pt") as stored:
            checkpoint = (stored.metadata() or {}).get("checkpoint")
            references = [_reference(stored, f"p{number}", prompt) for number, prompt in enumerate(prompts)]
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read: {error}", hint="copy the directory again") from error
    if checkpoint is None:
        raise CheckpointError(f"{file} does not name its checkpoint in its metadata")
    if Path(checkpoint).name != checkpoint:
        raise CheckpointError(f"{file} names a checkpoint that is not beside it: {checkpoint[:64]!r}")
    return checkpoint, references


def _reference(stored: Any, key: str, prompt: dict[str, Any]) -> _Reference:
    return _Reference(
        prompt_id=prompt["id"],
        token_ids=prompt["token_ids"],
        positions=stored.get_tensor(f"{key}.logits_positions").long(),
        logits=stored.get_tensor(f"{key}.logits"),
        gen_tokens=stored.get_tensor(f"{key}.gen_tokens").tolist(),
        gen_logits=stored.get_tensor(f"{key}.gen_logits"),
    )


def _make_runner(checkpoint: Path, mode: VerifyMode, references: list[_Reference], block_size: int) -> ModelRunner:
    blocks = sum(_num_blocks(r, block_size) for r in references)
    longest = max(len(r.token_ids) + len(r.gen_tokens) for r in references)
    config = EngineConfig(
        model=str(checkpoint),
        precision=mode.precision,
        block_size=block_size,
        num_blocks=blocks + 1,
        max_num_seqs=len(references),
        max_model_len=longest,
        max_num_batched_tokens=sum(len(r.token_ids) for r in references),
    )
    runner = ModelRunner(config)
    # Some fake-quantised keys of the vectors lie on a rounding edge. The compiled step's sums have one order on every CPU and round them
    # as the reference does; torch's depend on the kernels it picks for the CPU.
    runner.native.wait()
    return runner


def _num_blocks(reference: _Reference, block_size: int) -> int:
    return -(-(len(reference.token_ids) + len(reference.gen_tokens)) // block_size) + 1


def _compare(
    mode: VerifyMode, checkpoint: str, chunk_size: int, together: bool, references: list[_Reference], runner: ModelRunner
) -> RunResult:
    timelines = list(_timelines(references, runner))
    for group in [timelines] if together else [[t] for t in timelines]:
        _prefill(group, chunk_size, runner)
        _continue(group, runner)
    results = [_judge(mode, t) for t in timelines]
    positions = sum(r.num_positions for r in results)
    top1 = sum(r.top1 * r.num_positions for r in results) / positions
    low = not mode.exact and not top1 >= _NOISY_TOP1_ALL
    problems = [f"top-1 agreement over all positions is {top1:.3f}, needs {_NOISY_TOP1_ALL}"] if low else []
    return RunResult(mode, checkpoint, chunk_size, together, results, top1, problems)


@dataclass(slots=True)
class _Timeline:
    """One prompt on its way through the engine. prompt_logits, gen_logits: rows seen so far."""

    reference: _Reference
    token_ids: list[int]
    block_table: list[int]
    state_slot: int
    history_len: int
    computed: int
    prompt_logits: list[Tensor]
    gen_logits: list[Tensor]

    def slice(self, end: int) -> SequenceSlice:
        """The next tokens up to `end`, with all logits."""
        start = self.computed
        self.computed = end
        return SequenceSlice(
            token_ids=self.token_ids[start:end],
            start=start,
            total_len=len(self.reference.token_ids),
            block_table=self.block_table,
            state_slot=self.state_slot,
            history=tuple(self.token_ids[max(0, start - self.history_len) : start]),
            logit_rows=LogitRows.ALL,
        )


def _timelines(references: list[_Reference], runner: ModelRunner) -> Iterator[_Timeline]:
    first = 1
    for slot, reference in enumerate(references, start=1):
        count = _num_blocks(reference, runner.kv.block_size)
        ids = reference.token_ids + reference.gen_tokens
        yield _Timeline(reference, ids, list(range(first, first + count)), slot, runner.limits.ngram_history, 0, [], [])
        first += count


def _prefill(group: list[_Timeline], chunk_size: int, runner: ModelRunner) -> None:
    while pending := [t for t in group if t.computed < len(t.reference.token_ids)]:
        slices = [t.slice(min(t.computed + (chunk_size or len(t.token_ids)), len(t.reference.token_ids))) for t in pending]
        logits = runner.run(Batch(StepKind.PREFILL, slices)).cpu().split([len(s.token_ids) for s in slices])
        for timeline, rows in zip(pending, logits, strict=True):
            timeline.prompt_logits.append(rows)


def _continue(group: list[_Timeline], runner: ModelRunner) -> None:
    """Row 0 of a continuation comes from the prefill, the others from decode steps along the stored tokens."""
    for timeline in group:
        timeline.gen_logits.append(timeline.prompt_logits[-1][-1:])
    for step in range(1, max(len(t.reference.gen_tokens) for t in group)):
        pending = [t for t in group if step < len(t.reference.gen_tokens)]
        logits = runner.run(Batch(StepKind.DECODE, [t.slice(t.computed + 1) for t in pending])).cpu()
        for timeline, row in zip(pending, logits.split(1), strict=True):
            timeline.gen_logits.append(row)


def _judge(mode: VerifyMode, timeline: _Timeline) -> PromptResult:
    reference = timeline.reference
    gen = torch.cat(timeline.gen_logits)
    ours = torch.cat((torch.cat(timeline.prompt_logits)[reference.positions], gen))
    theirs = torch.cat((reference.logits, reference.gen_logits))
    error = (ours - theirs).abs().amax(1)
    kl = torch.nn.functional.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    agree = gen.argmax(-1) == torch.tensor(reference.gen_tokens)
    result = PromptResult(
        prompt_id=reference.prompt_id,
        num_positions=len(error),
        max_error=float(error.max()),
        rms=float((ours - theirs).square().mean().sqrt()),
        share_close=float((error <= _CLOSE).float().mean()),
        mean_kl=float(kl.mean()),
        top1=float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
        greedy_agree=int(agree.sum()),
        greedy_steps=len(agree),
        problems=[],
    )
    result.problems.extend(_problems(mode, result, agree, reference.gen_logits))
    return result


def _problems(mode: VerifyMode, result: PromptResult, agree: Tensor, gen_logits: Tensor) -> Iterator[str]:
    """Broken tolerances. Comparisons are written so that NaN breaks them."""
    if not mode.exact:
        if not result.rms <= _NOISY_RMS:
            yield f"rms {result.rms:.3f} > {_NOISY_RMS}"
        if not result.mean_kl <= _NOISY_KL:
            yield f"mean KL {result.mean_kl:.4f} > {_NOISY_KL}"
        if not result.top1 >= _NOISY_TOP1:
            yield f"top-1 agreement {result.top1:.3f} < {_NOISY_TOP1}"
        return
    if mode is VerifyMode.FP32:
        if not result.max_error <= _CLOSE:
            yield f"largest logit error {result.max_error:.2e} > {_CLOSE}"
    else:
        if not result.share_close >= _QDQ_SHARE:
            yield f"{result.share_close:.1%} of positions within {_CLOSE}, needs {_QDQ_SHARE:.0%}"
        if not result.max_error <= _QDQ_MOST:
            yield f"largest logit error {result.max_error:.2e} > {_QDQ_MOST}"
    best = gen_logits.topk(2, dim=-1).values
    excused = (best[:, 0] - best[:, 1] < _QDQ_MARGIN) & (mode is VerifyMode.FP32_QDQ)
    wrong = (~agree & ~excused).nonzero()[:, 0].tolist()
    if wrong:
        yield f"greedy token differs at step {wrong[0]} ({len(wrong)} of {result.greedy_steps})"
