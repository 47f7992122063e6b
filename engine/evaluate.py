"""Held-out scores of the embedded model through the serving engine: exact answers by family, a control, acceptance, perplexity.

The prompts are shipped with the checkpoint and were never seen in training. Library part of `dix model eval`.
"""

from __future__ import annotations

import copy
import gzip
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.llm import LLM, GenerationProgress
from engine.models import tiny_encoding
from engine.models.tiny import TRAINED_DIR
from engine.request import SamplingParams

PROMPTS_FILE = TRAINED_DIR / "eval_prompts.json.gz"
MAX_ANSWER_TOKENS = 400
# Plain text is scored at every 16th token from the 32nd to the 256th.
PERPLEXITY_TOKENS, PERPLEXITY_START, PERPLEXITY_STRIDE = 256, 32, 16
# Sets whose prompts are asked again with another conversation's context; the score must fall to chance.
CONTROL_SETS = ("recall_500", "document_500")
CONTROL_PROMPTS = 12
# Least share of exact answers that the shipped checkpoint must reach, by set.
FLOORS = {
    "recall_500": 0.95, "recall_2000": 0.90, "recall_6000": 0.85, "document_500": 0.85, "document_2000": 0.80, "document_6000": 0.70,
    "tool_call": 0.90, "tool_answer": 0.95, "json": 0.85, "addition": 0.80, "addition_thinking": 0.80,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """messages without the last answer; effort None is chat mode; expected: `content` and `tool_calls` of the answer."""

    set: str
    messages: list[dict[str, Any]]
    effort: str | int | None
    expected: dict[str, Any]

    @property
    def mode(self) -> str:
        return "chat" if self.effort is None else "thinking"

    def render(self) -> str:
        """The prompt as the chat encoder writes it."""
        return str(tiny_encoding.encode_messages(self.messages, self.mode, reasoning_effort=self.effort))


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
class Evaluation:
    """accepted: mean accepted drafts of a verification by family, empty without speculation. wrong: (set, wanted, got) of each miss."""

    scores: dict[str, Score]
    control: dict[str, Score]
    accepted: dict[str, float] = field(default_factory=dict)
    accepted_by_place: list[float] = field(default_factory=list)
    perplexity: float | None = None
    wrong: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(score.passed for score in self.scores.values())

    def document(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "passed": self.passed,
            "scores": {name: score.record() for name, score in self.scores.items()},
            "control": {name: score.record() for name, score in self.control.items()},
            "spec": {"accepted_mean": self.accepted, "accepted_by_place": self.accepted_by_place},
            "text_perplexity": self.perplexity,
        }


def load_prompts(path: Path = PROMPTS_FILE) -> tuple[list[EvalPrompt], list[str]]:
    """The shipped prompts and plain texts. Raises: FileNotFoundError when the package was built without them."""
    data = json.loads(gzip.decompress(path.read_bytes()).decode("utf-8"))
    return [EvalPrompt(**prompt) for prompt in data["prompts"]], data["texts"]


def is_right(prompt: EvalPrompt, text: str) -> bool:
    """Whether a completion (without its end token) is the expected answer; reasoning is free.

    With a schema the answer may order keys as it likes, as long as the values are the expected ones.
    """
    try:
        message = tiny_encoding.parse_message_from_completion_text(text + tiny_encoding.eos_token, prompt.mode)
    except ValueError:
        return False
    if prompt.set == "json":
        return _same_json(message["content"], prompt.expected["content"])
    return message["content"] == prompt.expected["content"] and _calls(message["tool_calls"]) == _calls(prompt.expected["tool_calls"])


def _same_json(got: str, wanted: str) -> bool:
    try:
        return bool(json.loads(got) == json.loads(wanted))
    except json.JSONDecodeError:
        return False


def _calls(calls: Sequence[dict[str, Any]]) -> list[tuple[str, Any]]:
    found = []
    for call in calls:
        function = call.get("function", call)
        arguments = function["arguments"]
        found.append((function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments))
    return found


def shuffled(prompts: list[EvalPrompt]) -> list[EvalPrompt]:
    """Each prompt's last question behind the context of the next prompt of its list; prompts of a single turn are left out."""
    turns = [prompt for prompt in prompts if sum(m["role"] == "user" for m in prompt.messages) > 1]
    pairs = zip(turns, turns[1:] + turns[:1], strict=True)
    return [EvalPrompt(own.set, [*other.messages[:-1], own.messages[-1]], own.effort, own.expected) for own, other in pairs]


def evaluate(
    llm: LLM, prompts: list[EvalPrompt], texts: Sequence[str] = (), on_progress: Callable[[str, GenerationProgress], None] | None = None
) -> Evaluation:
    """Ask every prompt greedily, set by set, then the controls. texts: for the perplexity, left out when empty."""
    by_set: dict[str, list[EvalPrompt]] = defaultdict(list)
    for prompt in prompts:
        by_set[prompt.set].append(prompt)
    scores: dict[str, Score] = {}
    control: dict[str, Score] = {}
    accepted: dict[str, float] = {}
    wrong: list[tuple[str, str, str]] = []
    before_all = _drafted(llm)
    for name, asked in by_set.items():
        before = _drafted(llm)
        right, misses = _ask(llm, asked, name, on_progress)
        wrong += misses
        scores[name] = Score(right, len(asked), FLOORS.get(name))
        accepted |= _accepted_since(llm, before, name)
    accepted |= _accepted_since(llm, before_all, "all")
    places = _by_place(llm, before_all)
    for name in CONTROL_SETS:
        asked = shuffled(by_set[name])[:CONTROL_PROMPTS]
        if asked:
            control[name] = Score(_ask(llm, asked, f"control {name}", on_progress)[0], len(asked))
    return Evaluation(scores, control, accepted, places, text_perplexity(llm, texts) if texts else None, wrong)


def _ask(
    llm: LLM, asked: list[EvalPrompt], name: str, on_progress: Callable[[str, GenerationProgress], None] | None
) -> tuple[int, list[tuple[str, str, str]]]:
    ids = [llm.tokenizer.encode(prompt.render()) for prompt in asked]
    report = None if on_progress is None else (lambda progress: on_progress(name, progress))
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
    results = llm.generate(prompt_token_ids=ids, params=greedy, on_progress=report)
    misses = [
        (name, json.dumps(prompt.expected, ensure_ascii=False), result.text)
        for prompt, result in zip(asked, results, strict=True)
        if not is_right(prompt, result.text)
    ]
    return len(asked) - len(misses), misses


def _drafted(llm: LLM) -> dict[str, Any]:
    spec = llm.engine.stats().get("spec", {})
    return copy.deepcopy(spec)  # counters by place are live dictionaries


def _accepted_since(llm: LLM, before: dict[str, Any], name: str) -> dict[str, float]:
    now = _drafted(llm)
    steps = now.get("drafts_total", 0) - before.get("drafts_total", 0)
    tokens = now.get("accepted_tokens_total", 0) - before.get("accepted_tokens_total", 0)
    return {name: round(tokens / steps, 3)} if steps else {}


def _by_place(llm: LLM, before: dict[str, Any]) -> list[float]:
    """Share of verified drafts that were kept, by place in the block."""
    now = _drafted(llm)
    verified, kept = now.get("verified_by_place_total", {}), now.get("accepted_by_place_total", {})
    shares = []
    for place, count in verified.items():
        seen = count - before["verified_by_place_total"][place]
        shares.append(round((kept[place] - before["accepted_by_place_total"][place]) / seen, 4) if seen else 0.0)
    return shares


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
