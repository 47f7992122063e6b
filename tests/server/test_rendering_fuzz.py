"""No body, however odd, gets anything but a prompt or a 400."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import BadRequest
from server.rendering import RenderedPrompt, RenderOptions, render_chat
from tests.server.vectors import loaded

WORDS = st.sampled_from(
    ["", "a", "1", "null", "{}", '{"a": 1}', '"{}"', "[1]", "</think>", "｜DSML｜", "<｜User｜>", "none", "text", "\ue000"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 120) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
PART = st.builds(lambda text: {"type": "text", "text": text}, WORDS) | st.just({"type": "image_url", "image_url": {"url": "data:,"}})
USER = st.builds(lambda content: [{"role": "user", "content": content}], WORDS | st.lists(PART, max_size=2))
SYSTEM = st.builds(
    lambda role, content: [{"role": role, "content": content}], st.sampled_from(["system", "developer", "latest_reminder"]), WORDS
)
ASSISTANT = st.builds(
    lambda content, reasoning, prefix: [{"role": "assistant", "content": content, "reasoning_content": reasoning, "prefix": prefix}],
    WORDS | st.none(), WORDS | st.none(), st.sampled_from([False, False, False, True]),
)  # fmt: skip


def tool_turn(arguments: list[Any], result: str) -> list[dict[str, Any]]:
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": value}} for i, value in enumerate(arguments)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in reversed(calls)]
    return [{"role": "assistant", "content": None, "tool_calls": calls}, *results]


TOOL_TURN = st.builds(tool_turn, st.lists(WORDS | st.dictionaries(WORDS, JSON, max_size=2), max_size=2), WORDS)
MESSAGES = st.lists(USER | SYSTEM | ASSISTANT | TOOL_TURN, min_size=1, max_size=4).map(
    lambda turns: [message for turn in turns for message in turn]
)


def one_tool(description: str, properties: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "description": description, "parameters": {"properties": properties}}}]


TOOLS = st.builds(one_tool, WORDS, st.dictionaries(WORDS, JSON, max_size=2))
FIELDS = {
    "tools": TOOLS,
    "tool_choice": st.sampled_from(["none", "auto", "required"]),
    "response_format": st.sampled_from([{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"｜DSML｜": {}}}}]),
    "reasoning_effort": st.sampled_from(["low", "max", "7", 9]),
    "thinking": st.sampled_from([{"type": "disabled"}, {"type": "enabled"}]),
    "task": st.sampled_from(["title", "action"]),
    "continue_final_message": st.booleans(),
}
BODY = st.fixed_dictionaries({"messages": MESSAGES}, optional=FIELDS)


def check_prompt(prompt: RenderedPrompt) -> None:
    _, tokenizer = loaded()
    ids = prompt.token_ids
    assert tokenizer.decode(ids) == prompt.prompt
    assert ids.count(tokenizer.token_id("<｜begin▁of▁sentence｜>")) == 1
    headers = {tokenizer.token_id("<｜Assistant｜>"), tokenizer.token_id("<｜title｜>")}
    last = max(i for i, token in enumerate(ids) if token in headers)
    # The assistant's turn is open: nothing behind its header ends it or begins another one.
    assert not {tokenizer.token_id(s) for s in ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜System｜>")} & set(ids[last:])


def render_or_refuse(body: dict[str, Any], options: RenderOptions) -> bool:
    encoder, tokenizer = loaded()
    try:
        prompt = render_chat(encoder, tokenizer, body, options)
    except BadRequest as error:
        message = error.message
    else:
        check_prompt(prompt)
        return True
    assert 0 < len(message) < 300
    return False


@settings(max_examples=600, deadline=None)
@given(BODY, st.booleans())
def test_plausible_bodies_render_or_are_refused(body: dict[str, Any], able: bool) -> None:
    render_or_refuse(body, RenderOptions(constrained=able, images=able))


def mutate(value: Any, path: list[int], replacement: Any) -> Any:
    """`value` with something inside it, found by following `path`, replaced."""
    if not path or not isinstance(value, dict | list) or not value:
        return replacement
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[path[0] % len(keys)]
    changed = mutate(value[key], path[1:], replacement)
    if isinstance(value, dict):
        return {**value, key: changed}
    return [changed if i == key else item for i, item in enumerate(value)]


@settings(max_examples=600, deadline=None)
@given(BODY, st.lists(st.integers(0, 7), min_size=1, max_size=6), JSON, st.booleans())
def test_bodies_with_one_absurd_value_render_or_are_refused(body: dict[str, Any], path: list[int], value: Any, lenient: bool) -> None:
    render_or_refuse(mutate(body, path, value), RenderOptions(constrained=True, images=True, lenient_tool_history=lenient))


def test_the_fuzz_reaches_the_encoder() -> None:
    assert render_or_refuse({"messages": tool_turn(["{}"], "r"), "tools": one_tool("</think>", {"｜": {}})}, RenderOptions())
