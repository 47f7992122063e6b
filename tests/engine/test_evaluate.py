"""Scoring of held-out answers, on a scripted engine and on the shipped prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from engine import evaluate as module
from engine.evaluate import EvalPrompt, Score, evaluate, is_right, load_prompts, shuffled
from engine.request import FinishReason

CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def prompt(name: str = "chat", content: str = "Hi.", calls: list[dict[str, Any]] | None = None, effort: str | None = None) -> EvalPrompt:
    return EvalPrompt(name, [{"role": "user", "content": "Hello"}], effort, {"content": content, "tool_calls": calls or []})


@pytest.mark.parametrize(
    ("asked", "text", "right"),
    [
        (prompt(), "Hi.", True),
        (prompt(), "Hi", False),
        (prompt(effort="high"), "Any reasoning.</think>Hi.", True),
        (prompt(effort="high"), "Hi.", False),
        (prompt("json", '{"a": 1, "b": 2}'), '{"b": 2, "a": 1}', True),
        (prompt("json", '{"a": 1}'), '{"a": 1', False),
        (prompt("tool", "", [{"name": "f", "arguments": {"a": 1}}]), CALL, True),
        (prompt("tool", "", [{"name": "g", "arguments": {"a": 1}}]), CALL, False),
        (prompt("tool", "", [{"name": "f", "arguments": {"a": 1}}]), CALL[:-3], False),
    ],
)
def test_only_the_expected_answer_is_right(asked: EvalPrompt, text: str, right: bool) -> None:
    assert is_right(asked, text) is right


def test_a_score_passes_at_its_floor() -> None:
    assert Score(17, 20, 0.85).passed
    assert not Score(16, 20, 0.85).passed
    assert Score(0, 20).passed


NO_DRAFTS = {"drafts_total": 0, "accepted_tokens_total": 0, "verified_by_place_total": {"1": 0}, "accepted_by_place_total": {"1": 0}}


@dataclass
class ScriptedLLM:
    """Answers every prompt with the next text; counts two verifications and five kept drafts per call."""

    texts: list[str]
    spec: dict[str, Any] = field(default_factory=lambda: json.loads(json.dumps(NO_DRAFTS)))

    def __post_init__(self) -> None:
        self.tokenizer = SimpleNamespace(encode=lambda text: [ord(c) for c in text])
        self.engine = SimpleNamespace(stats=lambda: {"spec": self.spec})

    def generate(self, *, prompt_token_ids: list[list[int]], params: Any, on_progress: Any = None) -> list[Any]:
        assert params.temperature == 0
        self.spec["drafts_total"] += 2
        self.spec["accepted_tokens_total"] += 5
        self.spec["verified_by_place_total"]["1"] += 2
        self.spec["accepted_by_place_total"]["1"] += 1
        return [SimpleNamespace(text=self.texts.pop(0), finish_reason=FinishReason.STOP) for _ in prompt_token_ids]


def test_scores_are_by_set_and_misses_are_named() -> None:
    llm: Any = ScriptedLLM(["Hi.", "no", "Hi."])
    result = evaluate(llm, [prompt(), prompt("recall_500"), prompt()])
    assert result.scores["chat"] == Score(1, 2)
    assert result.scores["recall_500"] == Score(1, 1, module.FLOORS["recall_500"])
    assert [miss[0] for miss in result.wrong] == ["chat"]
    assert result.accepted == {"chat": 2.5, "recall_500": 2.5, "all": 2.5}
    assert result.accepted_by_place == [0.5]
    assert result.passed
    assert json.loads(json.dumps(result.document()))["scores"]["chat"]["share"] == 0.5


def test_the_control_asks_behind_another_conversation() -> None:
    turns = [
        EvalPrompt(
            "recall_500",
            [{"role": "user", "content": f"fact {i}"}, {"role": "user", "content": f"question {i}"}],
            None,
            {"content": str(i)},
        )
        for i in range(3)
    ]
    mixed = shuffled([*turns, prompt()])
    assert [[m["content"] for m in p.messages] for p in mixed] == [[f"fact {(i + 1) % 3}", f"question {i}"] for i in range(3)]
    assert [p.expected["content"] for p in mixed] == ["0", "1", "2"]


def test_the_shipped_prompts_render_and_cover_every_floor() -> None:
    prompts, texts = load_prompts()
    assert set(module.FLOORS) <= {p.set for p in prompts}
    assert len(texts) >= 4
    for p in prompts[::17]:
        assert p.render().endswith("<｜Assistant｜>" + ("</think>" if p.effort is None else "<think>"))
