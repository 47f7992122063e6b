"""Scoring of held-out answers, on scripted answers and on the shipped prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine import evaluate as module
from engine.eval_prompts import EvalPrompt, Reply, is_right, load_prompts, obeys_schema, read_reply, shuffled
from engine.evaluate import DraftScores, Evaluation, Score, score_answers

CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["n"],
    "additionalProperties": False,
}


def prompt(
    name: str = "chat", content: str = "Hi.", calls: list[dict[str, Any]] | None = None, effort: str | None = None, schema: Any = None
) -> EvalPrompt:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    if schema:
        messages.insert(0, {"role": "system", "content": "", "response_format": schema})
    return EvalPrompt(name, messages, effort, {"content": content, "tool_calls": calls or []})


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
    assert is_right(asked, read_reply(asked, text)) is right


def test_an_openai_message_and_a_completion_say_the_same() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert Reply.of(None, [call]) == read_reply(prompt(), CALL)
    assert Reply.of("", [{"function": {"name": "f", "arguments": "{"}}]).tool_calls == (("f", "{"),)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"n": 1}', True),
        ('{"tags": ["a"], "n": 1}', True),
        ('{"n": "1"}', False),
        ('{"n": true}', False),
        ('{"tags": []}', False),
        ('{"n": 1, "tags": [1]}', False),
        ('{"n": 1, "more": 2}', False),
        ('[{"n": 1}]', False),
        ('{"n": 1', False),
    ],
)
def test_an_answer_obeys_its_schema_or_not(text: str, fits: bool) -> None:
    asked = prompt("json", schema=SCHEMA)
    assert obeys_schema(asked, read_reply(asked, text)) is fits


def test_a_score_passes_at_its_floor() -> None:
    assert Score(17, 20, 0.85).passed
    assert not Score(16, 20, 0.85).passed
    assert Score(0, 20).passed


def test_scores_are_by_set_and_misses_are_named() -> None:
    texts = {"chat": ["Hi.", "no"], "recall_500": ["Hi."], "json": ['{"n": 2}']}
    asked = [prompt(), prompt("recall_500"), prompt(), prompt("json", '{"n": 1}', schema=SCHEMA)]

    def ask(name: str, prompts: list[EvalPrompt]) -> list[Reply | None]:
        return [read_reply(p, texts[name].pop(0)) for p in prompts]

    result = score_answers(ask, asked)
    assert result.scores["chat"] == Score(1, 2)
    assert result.scores["recall_500"] == Score(1, 1, module.FLOORS["recall_500"])
    assert result.scores["json"].right == 0
    assert result.scores["schema"] == Score(1, 1, module.FLOORS["schema"])
    assert [miss[0] for miss in result.wrong] == ["chat", "json"]
    assert not result.passed
    assert json.loads(json.dumps(result.document()))["scores"]["chat"]["share"] == 0.5


def test_drafts_below_a_floor_or_miscalibrated_fail_an_evaluation() -> None:
    good = DraftScores({"all": 2.5, "without copy": 3.5}, [0.9], [0.03])
    assert Evaluation({}, {}, drafts=good).passed
    assert not Evaluation({}, {}, drafts=DraftScores({"all": 2.4, "without copy": 3.5}, [0.9], [0.03])).passed
    assert not Evaluation({}, {}, drafts=DraftScores({"all": 2.5, "without copy": 3.4}, [0.9], [0.03])).passed
    assert not Evaluation({}, {}, drafts=DraftScores(good.kept, [0.9], [0.031])).passed


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
    assert set(module.FLOORS) - {"schema"} <= {p.set for p in prompts}
    assert all(p.schema is None or obeys_schema(p, Reply.of(p.expected["content"], None)) for p in prompts)
    assert len(texts) >= 4
    for p in prompts[::17]:
        assert p.render().endswith("<｜Assistant｜>" + ("</think>" if p.effort is None else "<think>"))
