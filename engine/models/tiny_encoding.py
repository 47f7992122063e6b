"""Chat format of DeepSeek-V4.1: messages to prompt text, and finished completion text back to a message.

This file is copied into a checkpoint as `encoding/encoding.py`, next to `encoding/tests`. It stands alone: a server loads it
from the checkpoint and reads the token spellings and the effort map below from it instead of knowing them itself.

A prompt is
    BOS [System [effort line] [system text] [tools block] [response format]] { turn } header
where the header (`Assistant` and a think token) is always written by the message in front of an assistant turn.
"""

import copy
import json
import re
from typing import Any

bos_token = "<｜begin▁of▁sentence｜>"
eos_token = "<｜end▁of▁sentence｜>"
pad_token = "<｜▁pad▁｜>"
system_token = "<｜System｜>"
user_token = "<｜User｜>"
assistant_token = "<｜Assistant｜>"
latest_reminder_token = "<｜latest_reminder｜>"
thinking_start_token = "<think>"
thinking_end_token = "</think>"
dsml_token = "｜DSML｜"
IMAGE_PLACEHOLDER = "<｜deepseek_image｜>"

# The leading blanks belong to the tag words of this family.
tool_calls_block_name = " calls"
invoke_block_name = " invoke"
parameter_block_name = " parameter"

TASK_TOKENS = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}

REASONING_EFFORT_MAPPINGS = {"low": 50, "high": 75, "max": 100}
DEFAULT_REASONING_EFFORT = "high"
REASONING_EFFORT_TEMPLATE = "Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

_CONTROL_SPELLINGS = (
    bos_token,
    eos_token,
    pad_token,
    system_token,
    user_token,
    assistant_token,
    latest_reminder_token,
    thinking_start_token,
    thinking_end_token,
    dsml_token,
)

_CALLS_OPEN = f"<{dsml_token}{tool_calls_block_name}>"
_CALLS_CLOSE = f"</{dsml_token}{tool_calls_block_name}>"
_INVOKE_OPEN = f"<{dsml_token}{invoke_block_name}"
_INVOKE_CLOSE = f"</{dsml_token}{invoke_block_name}>"
_PARAMETER_OPEN = f"<{dsml_token}{parameter_block_name}"
_PARAMETER_CLOSE = f"</{dsml_token}{parameter_block_name}>"

TOOLS_TEMPLATE = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "{_CALLS_OPEN}" block like the following:

{_CALLS_OPEN}
{_INVOKE_OPEN} name="$TOOL_NAME">
{_PARAMETER_OPEN} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{_PARAMETER_CLOSE}
...
{_INVOKE_CLOSE}
{_INVOKE_OPEN} name="$TOOL_NAME2">
...
{_INVOKE_CLOSE}
{_CALLS_CLOSE}

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {thinking_start_token}), you MUST output your complete reasoning inside {thinking_start_token}...{thinking_end_token} BEFORE any tool calls or final response.

Otherwise, output directly after {thinking_end_token} with tool calls or final response.

### Available Tool Schemas

SCHEMAS

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""  # noqa: E501 -- the block is one fixed text; its line breaks are part of the format

RESPONSE_FORMAT_TEMPLATE = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{schema}"

_ROLES = ("system", "user", "assistant", "tool", "latest_reminder")


def to_json(value: Any) -> str:
    """JSON as it appears in prompts: `", "` and `": "` separators, non-ASCII unescaped, key order as given."""
    return json.dumps(value, ensure_ascii=False)


def encode_messages(
    messages: list[dict[str, Any]],
    thinking_mode: str,
    context: list[dict[str, Any]] | None = None,
    drop_thinking: bool = True,
    add_default_bos_token: bool = True,
    reasoning_effort: str | int | None = None,
    return_multi_modal_data: bool = False,
) -> Any:
    """Render a conversation.

    messages: OpenAI-like dicts; message 0 may carry `tools` and `response_format`, assistant messages `reasoning_content`,
    `tool_calls` and `wo_eos`, the last user message `task`. thinking_mode: "thinking" or "chat". context: messages that are
    already rendered; only the rest is returned, without BOS. drop_thinking: forget reasoning before the last user turn unless
    some message carries tools. reasoning_effort: a name of REASONING_EFFORT_MAPPINGS or an integer 1..100.
    Returns the prompt, or (prompt, {"images": [...]}) when `return_multi_modal_data` is true.
    Raises ValueError, NotImplementedError, TypeError or KeyError for input that has no rendering.
    """
    if thinking_mode not in ("thinking", "chat"):
        raise ValueError(f"thinking_mode is {thinking_mode!r}; it must be 'thinking' or 'chat'")
    effort = _effort_value(reasoning_effort)
    done, _ = _prepare(context or [], None)
    todo, images = _prepare(messages, _latest_calls(context or []))
    conversation = done + todo
    keep_reasoning = not drop_thinking or any(message.get("tools") for message in conversation)
    last_user = max((i for i, m in enumerate(conversation) if _is_user_turn(i, m)), default=-1)
    parts = [bos_token] if add_default_bos_token and not done else []
    for index in range(len(done), len(conversation)):
        thinks = thinking_mode == "thinking" and (keep_reasoning or index >= last_user)
        parts.append(_render_message(index, conversation, thinking_mode, thinks, effort))
    prompt = "".join(parts)
    return (prompt, {"images": images}) if return_multi_modal_data else prompt


def _effort_value(reasoning_effort: str | int | None) -> int:
    if reasoning_effort is None:
        reasoning_effort = DEFAULT_REASONING_EFFORT
    if isinstance(reasoning_effort, str):
        if reasoning_effort not in REASONING_EFFORT_MAPPINGS:
            raise ValueError(f"reasoning_effort is {reasoning_effort!r}; known names: {', '.join(REASONING_EFFORT_MAPPINGS)}")
        return REASONING_EFFORT_MAPPINGS[reasoning_effort]
    if isinstance(reasoning_effort, bool) or not isinstance(reasoning_effort, int) or not 1 <= reasoning_effort <= 100:
        raise ValueError(f"reasoning_effort is {reasoning_effort!r}; a number must be an integer from 1 to 100")
    return reasoning_effort


def _is_user_turn(index: int, message: dict[str, Any]) -> bool:
    return message["role"] == "user" or (message["role"] == "system" and index > 0)


def _render_message(index: int, conversation: list[dict[str, Any]], thinking_mode: str, thinks: bool, effort: int) -> str:
    message = conversation[index]
    role = message["role"]
    prompt = ""
    if index == 0 and thinking_mode == "thinking":
        prompt = system_token + REASONING_EFFORT_TEMPLATE.format(effort=effort)
    if role == "system":
        if not prompt:
            prompt = system_token
        prompt += _system_text(message)
        # The leading system message opens the conversation; a later one stands where a user turn would.
        return prompt + (_header(index, conversation, thinks) if index > 0 else "")
    if role == "user":
        return prompt + user_token + "\n\n".join(message["content_blocks"]) + _header(index, conversation, thinks)
    if role == "latest_reminder":
        return prompt + latest_reminder_token + message["content"]
    return prompt + _assistant_text(message, thinks)


def _system_text(message: dict[str, Any]) -> str:
    text = str(message["content"])
    if message.get("tools"):
        text += "\n\n" + render_tools(message["tools"])
    if message.get("response_format"):
        text += "\n\n" + RESPONSE_FORMAT_TEMPLATE.format(schema=to_json(message["response_format"]))
    return text


def render_tools(tools: list[dict[str, Any]]) -> str:
    """The tools block: how to write calls, then one function object per line."""
    return TOOLS_TEMPLATE.replace("SCHEMAS", "\n".join(to_json(tool["function"]) for tool in tools), 1)


def _header(index: int, conversation: list[dict[str, Any]], thinks: bool) -> str:
    following = conversation[index + 1]["role"] if index + 1 < len(conversation) else None
    if following not in (None, "assistant", "latest_reminder"):
        return ""
    task = conversation[index].get("task")
    if task is not None and task not in TASK_TOKENS:
        raise ValueError(f"task is {task!r}; known tasks: {', '.join(TASK_TOKENS)}")
    if task is not None and task != "action":
        return TASK_TOKENS[task]
    header = assistant_token + (thinking_start_token if thinks else thinking_end_token)
    return header + (TASK_TOKENS["action"] if task == "action" else "")


def _assistant_text(message: dict[str, Any], thinks: bool) -> str:
    text = (message.get("reasoning_content") or "") + thinking_end_token if thinks else ""
    text += message["content"]
    if message.get("tool_calls"):
        text += "\n\n" + render_calls(message["tool_calls"])
    return text if message.get("wo_eos") else text + eos_token


def render_calls(tool_calls: list[dict[str, Any]]) -> str:
    """The calls block of one assistant message. String values are raw text, other values JSON."""
    lines = [_CALLS_OPEN]
    for call in tool_calls:
        function = call["function"]
        lines.append(f'{_INVOKE_OPEN} name="{function["name"]}">')
        lines.append("\n".join(_render_parameter(k, v) for k, v in _arguments(function.get("arguments")).items()))
        lines.append(_INVOKE_CLOSE)
    lines.append(_CALLS_CLOSE)
    return "\n".join(lines)


def _render_parameter(name: str, value: Any) -> str:
    is_string = isinstance(value, str)
    text = value if is_string else to_json(value)
    return f'{_PARAMETER_OPEN} name="{name}" string="{"true" if is_string else "false"}">{text}{_PARAMETER_CLOSE}'


def _arguments(arguments: Any) -> dict[str, Any]:
    """The arguments of a call as a dict. Accepts a dict, JSON text, or JSON text encoded twice."""
    value = arguments
    for _ in range(2):
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            break
    return value if isinstance(value, dict) else {"arguments": arguments}


def _prepare(messages: list[dict[str, Any]], calls: list[str] | None) -> tuple[list[dict[str, Any]], list[Any]]:
    """Copy, check, replace images by the placeholder, order tool results and merge them into user turns."""
    messages, images = process_image_messages(messages)
    merged: list[dict[str, Any]] = []
    order = calls or []
    for message in _sort_tool_results(messages, order):
        role = message["role"]
        if role not in ("user", "tool"):
            merged.append(message)
            continue
        block = message["content"] if role == "user" else f"<tool_result>{message['content']}</tool_result>"
        if not (merged and merged[-1]["role"] == "user"):
            merged.append({"role": "user", "content_blocks": []})
        merged[-1]["content_blocks"].extend(message.get("content_blocks") or [block])
        if message.get("task") is not None:
            merged[-1]["task"] = message["task"]
    return merged, images


def _latest_calls(messages: list[dict[str, Any]]) -> list[str]:
    for message in reversed(messages):
        if message.get("role") == "assistant":
            return [call.get("id") or "" for call in message.get("tool_calls") or []]
    return []


def _sort_tool_results(messages: list[dict[str, Any]], order: list[str]) -> list[dict[str, Any]]:
    """Order each run of tool messages by the calls of the assistant message before it."""
    result: list[dict[str, Any]] = []
    run: list[dict[str, Any]] = []
    for message in [*messages, None]:
        if message is not None and message["role"] == "tool":
            run.append(message)
            continue
        rank = {call_id: position for position, call_id in enumerate(order)}
        result.extend(sorted(run, key=lambda m: rank.get(str(m.get("tool_call_id")), len(rank))))
        run = []
        if message is None:
            break
        if message["role"] == "assistant":
            order = _latest_calls([message])
        result.append(message)
    return result


def process_image_messages(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Replace image parts by the placeholder. Returns (copied messages with text content, image parts in prompt order)."""
    images: list[Any] = []
    result = []
    for message in copy.deepcopy(messages):
        role = message.get("role")
        if role not in _ROLES:
            raise NotImplementedError(f"Unknown role: {role}")
        content = message.get("content")
        if isinstance(content, list):
            blocks = [_part_text(part, role, images) for part in content]
            message["content"] = "\n\n".join(blocks)
        else:
            message["content"] = _checked_text(content)
        result.append(message)
    return result, images


def _part_text(part: dict[str, Any], role: str, images: list[Any]) -> str:
    if part["type"] == "text":
        return _checked_text(part["text"])
    if part["type"] == "image_url" and role in ("user", "tool"):
        images.append(part)
        return IMAGE_PLACEHOLDER
    raise ValueError(f"a {role} message cannot hold a part of type {part['type']!r}")


def _checked_text(content: Any) -> str:
    if content is None:
        return ""
    if not isinstance(content, str):
        raise TypeError(f"message content must be a string or a list of parts, got {type(content).__name__}")
    if IMAGE_PLACEHOLDER in content:
        raise ValueError(f"Message content contains image special token {IMAGE_PLACEHOLDER!r}")
    return content


_INVOKE_HEAD = re.compile(re.escape(_INVOKE_OPEN) + r' name="([^\n]*?)">\n')
_PARAMETER_HEAD = re.compile(re.escape(_PARAMETER_OPEN) + r' name="([^\n]*?)" string="(true|false)">')


def parse_message_from_completion_text(text: str, thinking_mode: str) -> dict[str, Any]:
    """Parse a complete, well-formed completion that ends with EOS. Strict: anything unexpected raises ValueError."""
    if not text.endswith(eos_token):
        raise ValueError("the completion does not end with the end-of-sentence token")
    text = text[: -len(eos_token)]
    reasoning = ""
    if thinking_mode == "thinking":
        reasoning, end, text = text.partition(thinking_end_token)
        if not end:
            raise ValueError(f"the completion has no {thinking_end_token}")
    content, opener, block = text.partition(f"\n\n{_CALLS_OPEN}\n")
    for piece in (reasoning, content):
        spelled = [token for token in _CONTROL_SPELLINGS if token in piece]
        if spelled:
            raise ValueError(f"control token {spelled[0]!r} inside text")
    calls = _parse_calls(block) if opener else []
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}


def _parse_calls(block: str) -> list[dict[str, Any]]:
    calls = []
    position = 0
    while not block.startswith(_CALLS_CLOSE, position):
        head = _INVOKE_HEAD.match(block, position)
        if head is None:
            raise ValueError(f"expected a call at {block[position : position + 40]!r}")
        arguments, position = _parse_parameters(block, head.end())
        calls.append({"type": "function", "function": {"name": head.group(1), "arguments": arguments}})
    if position + len(_CALLS_CLOSE) != len(block):
        raise ValueError("unexpected text behind the calls block")
    return calls


def _parse_parameters(block: str, position: int) -> tuple[str, int]:
    """Returns (arguments as JSON text, position behind the call's closing line)."""
    members = []
    if block.startswith("\n" + _INVOKE_CLOSE, position):
        position += 1
    while not block.startswith(_INVOKE_CLOSE + "\n", position):
        head = _PARAMETER_HEAD.match(block, position)
        end = block.find(_PARAMETER_CLOSE + "\n", position)
        if head is None or end < 0:
            raise ValueError(f"expected a parameter at {block[position : position + 40]!r}")
        value = block[head.end() : end]
        members.append(f"{to_json(head.group(1))}: {to_json(value) if head.group(2) == 'true' else value}")
        position = end + len(_PARAMETER_CLOSE) + 1
    return "{" + ", ".join(members) + "}", position + len(_INVOKE_CLOSE) + 1


def load_cases(path: str) -> list[dict[str, Any]]:
    """Read a `test_input_N.json`: one case or a list of cases."""
    with open(path, encoding="utf-8") as file:
        data = json.load(file)
    return data if isinstance(data, list) else [data]


def encode_case(case: dict[str, Any], mode: str) -> str:
    """Render one case. `mode` is the thinking mode of cases that do not name their own."""
    messages = copy.deepcopy(case["messages"])
    if case.get("tools"):
        if not messages or messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        messages[0]["tools"] = case["tools"]
    prompt = encode_messages(messages, case.get("thinking_mode", mode), reasoning_effort=case.get("reasoning_effort"))
    return str(prompt)
