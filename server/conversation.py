"""Client messages, checked and brought into the one form that the checkpoint's encoder understands. Every refusal names its field."""

from __future__ import annotations

import json
from typing import Any

from server.errors import BadRequest

MAX_MESSAGES = 10_000

_ROLES = ("system", "user", "assistant", "tool", "latest_reminder")
_TEXT_PARTS = ("text", "input_text", "output_text")
_NULLABLE = ("assistant", "tool")

Message = dict[str, Any]


def normalise_messages(raw: Any, *, images: bool, lenient_tool_history: bool = False) -> list[Message]:
    """Checked copies of `body["messages"]`: known roles, string content (a list of parts where images are), no empty system messages.

    A last assistant message that asks for continuation keeps `prefix: True`.
    Raises:
        BadRequest: `param` names the message and the field.
    """
    if not isinstance(raw, list) or not raw:
        raise BadRequest("messages", "messages must be a non-empty list", "missing_field" if raw is None else "invalid_value")
    if len(raw) > MAX_MESSAGES:
        raise BadRequest("messages", f"messages has {len(raw)} entries; at most {MAX_MESSAGES} are accepted")
    messages = [_message(message, f"messages[{i}]", is_last=i == len(raw) - 1, images=images) for i, message in enumerate(raw)]
    if not lenient_tool_history:
        check_tool_history(messages)
    return [message for message in messages if message["role"] != "system" or message["content"]]


def _message(raw: Any, where: str, *, is_last: bool, images: bool) -> Message:
    if not isinstance(raw, dict):
        raise BadRequest(where, f"{where} must be an object")
    role = "system" if raw.get("role") == "developer" else raw.get("role")
    if role not in _ROLES:
        hint = "; use tools and role tool" if role == "function" else ""
        raise BadRequest(f"{where}.role", f"{where}.role must be one of system, developer, user, assistant, tool, latest_reminder{hint}")
    message: Message = {"role": role, "content": _content(raw.get("content"), role, f"{where}.content", images)}
    calls = raw.get("tool_calls")
    if calls == []:
        calls = None
    if calls is not None and role != "assistant":
        raise BadRequest(f"{where}.tool_calls", f"{where}.tool_calls belongs to assistant messages only")
    if role == "assistant":
        message |= _assistant_fields(raw, calls, where)
    if role == "tool":
        message["tool_call_id"] = _text(raw.get("tool_call_id"), f"{where}.tool_call_id")
    if _flag(raw.get("prefix"), f"{where}.prefix"):
        if role != "assistant" or not is_last or calls is not None:
            raise BadRequest(f"{where}.prefix", f"{where}.prefix is for a last assistant message without tool_calls")
        message["prefix"] = True
    return message


def _assistant_fields(raw: Message, calls: Any, where: str) -> Message:
    fields: Message = {}
    for name in ("reasoning_content", "reasoning"):
        value = raw.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise BadRequest(f"{where}.{name}", f"{where}.{name} must be a string")
        fields.setdefault("reasoning_content", value)
    if calls is not None:
        fields["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    return fields


def _content(content: Any, role: str, where: str, images: bool) -> Any:
    if isinstance(content, str):
        return content
    if content is None:
        if role in _NULLABLE:
            return ""
        raise BadRequest(where, f"{where} must be a string or a list of parts for role {role}", "missing_field")
    if not isinstance(content, list):
        raise BadRequest(where, f"{where} must be a string, null or a list of parts")
    parts = [_part(part, role, f"{where}[{i}]", images) for i, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n\n".join(part["text"] for part in parts)
    return parts


def _part(part: Any, role: str, where: str, images: bool) -> Message:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": _text(part.get("text"), f"{where}.text", empty=True)}
    if kind == "refusal" and role == "assistant":
        return {"type": "text", "text": _text(part.get("refusal"), f"{where}.refusal", empty=True)}
    if kind == "image_url" and role in ("user", "tool"):
        if not images:
            raise BadRequest(where, "this server takes no images: the model runs without its vision part", "unsupported_parameter")
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else None
        return {"type": "image_url", "image_url": {"url": _text(url, f"{where}.image_url.url")}}
    raise BadRequest(f"{where}.type", f"{where}.type is not a kind of part that a {role} message can hold")


def _calls(calls: Any, where: str) -> list[Message]:
    if not isinstance(calls, list):
        raise BadRequest(where, f"{where} must be a list")
    result = [_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]
    seen: set[str] = set()
    for i, call in enumerate(result):
        if call["id"] in seen:
            raise BadRequest(f"{where}[{i}].id", f"{where}[{i}].id occurs twice in one message")
        seen.add(call["id"])
    return result


def _call(call: Any, where: str) -> Message:
    if not isinstance(call, dict) or call.get("type", "function") != "function" or not isinstance(call.get("function"), dict):
        raise BadRequest(where, f"{where} must be an object of type function")
    function = call["function"]
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        arguments = "{}"
    if not isinstance(arguments, str | dict):
        raise BadRequest(f"{where}.function.arguments", f"{where}.function.arguments must be a JSON string or an object")
    name = _text(function.get("name"), f"{where}.function.name")
    return {"id": _text(call.get("id"), f"{where}.id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def call_arguments(arguments: Any) -> Any:
    """The arguments of a history call as an object where they are one, also when encoded twice; else unchanged."""
    value = arguments
    for _ in range(2):
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return arguments
    return value if isinstance(value, dict) else arguments


def check_tool_history(messages: list[Message]) -> None:
    """Every call is answered once, right behind its message, and nothing else is answered.

    Raises:
        BadRequest: names the first message that breaks this.
    """
    open_ids: set[str] = set()
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_ids:
                raise BadRequest(f"{where}.tool_call_id", f"{where}.tool_call_id answers no open call of the assistant message before it")
            open_ids.remove(message["tool_call_id"])
            continue
        if open_ids:
            raise BadRequest(where, f"{where} comes before the results of {len(open_ids)} tool calls")
        open_ids = {call["id"] for call in message.get("tool_calls") or []}
    if open_ids:
        raise BadRequest("messages", f"the results of {len(open_ids)} tool calls are missing at the end")


def _text(value: Any, where: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise BadRequest(
            where, f"{where} must be a {'' if empty else 'non-empty '}string", "missing_field" if value is None else "invalid_value"
        )
    return value


def _flag(value: Any, where: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise BadRequest(where, f"{where} must be a boolean")
    return bool(value)
