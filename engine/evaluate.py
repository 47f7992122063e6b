"""Held-out scores of the embedded model: exact answers by family, a control, drafts, perplexity.

The prompts are shipped with the checkpoint and were never seen in training. Library part of `dix model eval`.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.eval_prompts import EvalPrompt, Reply, is_right, obeys_schema, read_reply, shuffled
from engine.llm import LLM, GenerationProgress
from engine.request import SamplingParams
from engine.spec_stats import DraftRecorder, measure_drafts

MAX_ANSWER_TOKENS = 400
# Plain text is scored at every 16th token from the 32nd to the 256th.
PERPLEXITY_TOKENS, PERPLEXITY_START, PERPLEXITY_STRIDE = 256, 32, 16
# Sets whose prompts are asked again with another conversation's context; the score must fall to chance.
CONTROL_SETS = ("recall_500", "document_500")
CONTROL_PROMPTS = 12
# Least share of exact answers that the shipped checkpoint must reach, by set; "schema": answers of `json` that obey theirs.
FLOORS = {
    "recall_500": 0.95, "recall_2000": 0.90, "recall_6000": 0.85, "document_500": 0.85, "document_2000": 0.80, "document_6000": 0.70,
    "tool_call": 0.90, "tool_answer": 0.95, "json": 0.85, "schema": 0.85, "addition": 0.80, "addition_thinking": 0.80,
}  # fmt: skip
# One set per family, equally many prompts of each: a mean over other mixtures is another number, as copies of random text are
# hard to draft and calls are easy.
DRAFT_SETS = (
    "recall_500",
    "document_500",
    "tool_call",
    "tool_answer",
    "tool_none",
    "json",
    "addition",
    "addition_thinking",
    "copy",
    "chat",
)
DRAFT_PROMPTS = 24
DRAFT_FLOORS = {"all": 2.5, "without copy": 3.5}  # mean kept drafts of a block of five
CALIBRATION_LIMIT = 0.03  # expected calibration error at every place of the block

# Answers of one set's prompts, in order. Its name is for progress only.
Ask = Callable[[str, list[EvalPrompt]], list[Reply | None]]


@dataclass(frozen=True, slots=True)
class Score:
    """right of count exact answers; floor is the least share that counts as passed, None where none is set."""

    right: int
    count: int
    floor: float | None = None

    @property
    def share(self) -> float:
        return self.right / self.count if self.count else 0.0

    @property
    def passed(self) -> bool:
        return self.floor is None or self.share >= self.floor

    def record(self) -> dict[str, Any]:
        return {"right": self.right, "count": self.count, "share": round(self.share, 4), "floor": self.floor, "passed": self.passed}


@dataclass(frozen=True, slots=True)
class DraftScores:
    """Kept drafts of a verification when every draft is verified. kept: by set, "all" and "without copy".

    by_place and calibration: acceptance of a draft whose predecessors were kept, and the confidences' expected error.
    """

    kept: dict[str, float]
    by_place: list[float]
    calibration: list[float]

    @property
    def passed(self) -> bool:
        enough = all(self.kept[name] >= floor for name, floor in DRAFT_FLOORS.items())
        return enough and max(self.calibration) <= CALIBRATION_LIMIT

    def record(self) -> dict[str, Any]:
        return {
            "kept_mean": self.kept, "floors": DRAFT_FLOORS, "accepted_by_place": self.by_place,
            "calibration_error_by_place": self.calibration, "calibration_limit": CALIBRATION_LIMIT, "passed": self.passed,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Evaluation:
    """wrong: (set, wanted, got) of each miss. drafts: None without speculation or over HTTP, perplexity as well."""

    scores: dict[str, Score]
    control: dict[str, Score]
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    drafts: DraftScores | None = None
    perplexity: float | None = None

    @property
    def passed(self) -> bool:
        return all(score.passed for score in self.scores.values()) and (self.drafts is None or self.drafts.passed)

    def document(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "passed": self.passed,
            "scores": {name: score.record() for name, score in self.scores.items()},
            "control": {name: score.record() for name, score in self.control.items()},
            "drafts": None if self.drafts is None else self.drafts.record(),
            "text_perplexity": self.perplexity,
        }


def score_answers(ask: Ask, prompts: Sequence[EvalPrompt]) -> Evaluation:
    """Ask every prompt, set by set, then the controls."""
    by_set = _by_set(prompts)
    scores: dict[str, Score] = {}
    control: dict[str, Score] = {}
    wrong: list[tuple[str, str, str]] = []
    for name, asked in by_set.items():
        replies = ask(name, asked)
        misses = [(name, json.dumps(p.expected), str(r)) for p, r in zip(asked, replies, strict=True) if not is_right(p, r)]
        wrong += misses
        scores[name] = Score(len(asked) - len(misses), len(asked), FLOORS.get(name))
        with_schema = [obeys_schema(p, r) for p, r in zip(asked, replies, strict=True) if p.schema is not None]
        if with_schema:
            scores["schema"] = Score(sum(with_schema), len(with_schema), FLOORS["schema"])
    for name in CONTROL_SETS:
        asked = shuffled(by_set.get(name, []))[:CONTROL_PROMPTS]
        if asked:
            replies = ask(f"control {name}", asked)
            control[name] = Score(sum(is_right(p, r) for p, r in zip(asked, replies, strict=True)), len(asked))
    return Evaluation(scores, control, wrong)


def ask_engine(llm: LLM, on_progress: Callable[[str, GenerationProgress], None] | None = None) -> Ask:
    """Answers of an engine in this process, greedily, without a grammar."""

    def ask(name: str, asked: list[EvalPrompt]) -> list[Reply | None]:
        ids = [llm.tokenizer.encode(prompt.render()) for prompt in asked]
        report = None if on_progress is None else (lambda progress: on_progress(name, progress))
        results = llm.generate(prompt_token_ids=ids, params=_greedy(), on_progress=report)
        return [read_reply(prompt, result.text) for prompt, result in zip(asked, results, strict=True)]

    return ask


def score_drafts(llm: LLM, prompts: Sequence[EvalPrompt], on_set: Callable[[str], None] = lambda name: None) -> DraftScores:
    """How many drafts of a block are kept when all are verified, over `DRAFT_PROMPTS` prompts of each of `DRAFT_SETS`."""
    by_set = _by_set(prompts)
    everything, without_copy = DraftRecorder(), DraftRecorder()
    kept: dict[str, float] = {}
    for name in (name for name in DRAFT_SETS if name in by_set):
        on_set(name)
        ids = [llm.tokenizer.encode(prompt.render()) for prompt in by_set[name][:DRAFT_PROMPTS]]
        recorder = DraftRecorder()
        kept[name] = round(measure_drafts(llm.engine, ids, _greedy(), recorder).accepted_per_round, 3)
        everything.add(recorder)
        if name != "copy":
            without_copy.add(recorder)
    whole = everything.report()
    kept["all"] = round(whole.accepted_per_round, 3)
    kept["without copy"] = round(without_copy.report().accepted_per_round, 3)
    return DraftScores(kept, [round(p.acceptance, 4) for p in whole.places], [round(p.calibration_error, 4) for p in whole.places])


def text_perplexity(llm: LLM, texts: Sequence[str]) -> float:
    """Perplexity per token of plain texts, every token behind BOS: each is asked for as the one next token of its prefix's prompt.

    The engine gives log-probabilities of generated tokens only, so each position is forced by a large bias and read back unbiased.
    """
    total, count = 0.0, 0
    for text in texts:
        ids = llm.tokenizer.encode(text, add_special=True)[:PERPLEXITY_TOKENS]
        positions = range(PERPLEXITY_START, len(ids), PERPLEXITY_STRIDE)
        params = [SamplingParams(temperature=0.0, max_tokens=1, logprobs=True, logit_bias={ids[p]: 100.0}) for p in positions]
        results = llm.generate(prompt_token_ids=[ids[:p] for p in positions], params=params, detokenize=False)
        for result in results:
            total -= result.logprobs[0].logprob
            count += 1
    return round(math.exp(total / max(count, 1)), 2)


def _by_set(prompts: Sequence[EvalPrompt]) -> dict[str, list[EvalPrompt]]:
    by_set: dict[str, list[EvalPrompt]] = defaultdict(list)
    for prompt in prompts:
        by_set[prompt.set].append(prompt)
    return by_set


def _greedy() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
