from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models import tiny_encoding as encoding

WORDS = st.text("ab \n\"'é<>", max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | WORDS, lambda v: st.lists(v, max_size=2) | st.dictionaries(WORDS, v, max_size=2)
)
CALLS = st.lists(
    st.tuples(st.text("abc_", min_size=1, max_size=6), st.dictionaries(st.text("kl m", max_size=4), VALUES, max_size=3)), max_size=3
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@settings(max_examples=300, deadline=None)
@given(WORDS, WORDS, CALLS, st.sampled_from(["thinking", "chat"]))
def test_what_is_rendered_parses_back(reasoning: str, content: str, calls: Any, mode: str) -> None:
    tool_calls = [{"id": str(i), "type": "function", "function": {"name": name, "arguments": args}} for i, (name, args) in enumerate(calls)]
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": tool_calls}
    prompt = encoding.encode_messages([user("x")], mode)
    whole = encoding.encode_messages([user("x"), message], mode)
    assert whole.startswith(prompt)
    parsed = encoding.parse_message_from_completion_text(whole[len(prompt) :], mode)
    assert parsed["content"] == content
    assert parsed["reasoning_content"] == (reasoning if mode == "thinking" else "")
    expected = [(name, encoding.to_json(args)) for name, args in calls]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in parsed["tool_calls"]] == expected


def test_context_renders_the_tail_of_the_whole() -> None:
    messages = [user("a"), {"role": "assistant", "content": "b"}, user("c")]
    whole = encoding.encode_messages(messages, "chat")
    head = encoding.encode_messages(messages[:2], "chat")
    assert head + encoding.encode_messages(messages[2:], "chat", context=messages[:2]) == whole


def test_reasoning_is_kept_when_dropping_is_off() -> None:
    messages = [user("a"), {"role": "assistant", "content": "b", "reasoning_content": "why"}, user("c")]
    assert "why" not in encoding.encode_messages(messages, "thinking")
    assert "<think>why</think>b" in encoding.encode_messages(messages, "thinking", drop_thinking=False)


def test_images_come_back_in_prompt_order() -> None:
    parts = [{"type": "image_url", "image_url": {"url": name}} for name in ("one", "two")]
    prompt, extra = encoding.encode_messages([{"role": "user", "content": parts}], "chat", return_multi_modal_data=True)
    assert prompt.count(encoding.IMAGE_PLACEHOLDER) == 2
    assert [part["image_url"]["url"] for part in extra["images"]] == ["one", "two"]


def test_messages_are_not_changed_by_rendering() -> None:
    messages = [user("a"), user("b")]
    encoding.encode_messages(messages, "thinking")
    assert messages == [user("a"), user("b")]


@pytest.mark.parametrize("effort", [0, 101, True, 1.5, "enormous"])
def test_effort_outside_the_range_is_refused(effort: Any) -> None:
    with pytest.raises(ValueError, match="reasoning_effort"):
        encoding.encode_messages([user("a")], "thinking", reasoning_effort=effort)


@pytest.mark.parametrize(
    "completion",
    [
        "no end",
        "a</think>b",
        "a<think>b<｜end▁of▁sentence｜>",
        "a\n\n<｜DSML｜ calls>\n</｜DSML｜ calls>x<｜end▁of▁sentence｜>",
        "\n\n<｜DSML｜ calls>\n<｜end▁of▁sentence｜>",
    ],
)
def test_strict_parser_refuses_malformed_completions(completion: str) -> None:
    with pytest.raises(ValueError):
        encoding.parse_message_from_completion_text(completion, "chat")
