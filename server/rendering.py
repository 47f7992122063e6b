"""From a chat request to the prompt's token ids: adapter, checkpoint encoder, and the rule which spellings may be control tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engine.tokenizer import Tokenizer
from server.conversation import Message, normalise_messages
from server.encoding import Encoder
from server.errors import BadRequest
from server.neutral import neutralise, spells_control
from server.sampled_ids import Known
from server.thinking import Thinking, parse_thinking
from server.tools import ResponseFormat, Tools, parse_response_format, parse_tools
from server.turn_memory import Turns
from server.turn_splice import encode_around, find_regions

_ACTION = "action"


class ParseStart(StrEnum):
    """Where the output parser begins: inside reasoning, in the answer, or inside a calls block that the prompt opened."""

    REASONING = "reasoning"
    CONTENT = "content"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What this server can do and assumes. `constrained`: the engine forces grammars. `images`: the vision part is loaded."""

    default_thinking: bool = True
    constrained: bool = False
    images: bool = False
    lenient_tool_history: bool = False


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt and what its answer will look like.

    control_ranges: half-open code point ranges of `prompt` that are control tokens. parse_tools: calls are recognised in the output.
    anchor_tokens: leading tokens up to the first user turn, the part that other conversations are likely to share.
    spliced: stretches and whole turns of history that carry the ids they were sampled with.
    keeps_answer: the next turn's prompt will hold the whole answer. Without tools, reasoning of earlier turns is left out.
    missing_reasoning: assistant turns that render with an empty think block because the client sent none back.
    """

    prompt: str
    token_ids: list[int]
    control_ranges: list[tuple[int, int]]
    thinking: Thinking
    start: ParseStart
    parse_tools: bool
    tools: Tools
    response_format: ResponseFormat
    images: list[Any] = field(default_factory=list)
    anchor_tokens: int = 0
    spliced: int = 0
    missing_reasoning: int = 0
    keeps_answer: bool = False


@dataclass(frozen=True, slots=True)
class EncoderCall:
    """What the checkpoint's `encode_messages` gets, and what the adapter changes in its result.

    strip: text removed at the end. append: text added behind it.
    """

    messages: list[Message]
    thinking: Thinking
    start: ParseStart
    tools: Tools
    response_format: ResponseFormat
    task: str | None = None
    strip: str = ""
    append: str = ""


def render_chat(
    encoder: Encoder,
    tokenizer: Tokenizer,
    body: dict[str, Any],
    options: RenderOptions | None = None,
    known: Known | None = None,
    turns: Turns | None = None,
) -> RenderedPrompt:
    """Render the body of a chat request. CPU work of milliseconds to seconds: call it in a worker thread.

    known: ids with which a stretch of text was sampled, see `server/sampled_ids.py`. turns: those with tool calls that were generated
    here, see `server/turn_memory.py`.

    Raises:
        BadRequest: the first problem, with the field that has it.
    """
    call = encoder_call(encoder, body, options or RenderOptions())
    spellings = list(tokenizer.added)
    prompt, images = _encode(encoder, call, call.messages)
    ranges = control_ranges(_reference(encoder, call, prompt, spellings), spellings)
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest("messages", "the conversation holds lone surrogates, which no text encoding has", "invalid_json") from error
    regions = find_regions(prompt, ranges, call.messages, encoder.dialect, turns or {})
    spliced = len(regions)

    def splice(text: str) -> Sequence[int] | None:
        nonlocal spliced
        ids = known(text) if known is not None else None
        spliced += ids is not None
        return ids

    token_ids = encode_around(tokenizer, prompt, ranges, regions, splice)
    return RenderedPrompt(
        prompt=prompt,
        token_ids=token_ids,
        control_ranges=ranges,
        thinking=call.thinking,
        start=call.start,
        parse_tools=bool(call.tools.declared) and call.task is None,
        tools=call.tools,
        response_format=call.response_format,
        images=images,
        spliced=spliced,
        anchor_tokens=_leading_tokens(token_ids, tokenizer.added.get(encoder.dialect.user)),
        missing_reasoning=_missing_reasoning(call),
        keeps_answer=call.task is None and (not call.thinking.enabled or bool(call.tools.declared)),
    )


def encoder_call(encoder: Encoder, body: dict[str, Any], options: RenderOptions) -> EncoderCall:
    """Check the request and work out the call. Raises BadRequest."""
    dialect = encoder.dialect
    thinking = parse_thinking(body, default=options.default_thinking, efforts=dialect.efforts, default_effort=dialect.default_effort)
    messages = normalise_messages(body.get("messages"), images=options.images, lenient_tool_history=options.lenient_tool_history)
    tools = parse_tools(body, constrained=options.constrained)
    response_format = parse_response_format(body.get("response_format"), constrained=options.constrained)
    task = _task(body.get("task"), messages, dialect.tasks)
    messages, start, strip = _open_end(body, messages, thinking, dialect.think_end)
    if messages and messages[-1]["role"] == "latest_reminder":
        raise BadRequest("messages", "a latest_reminder must be followed by a user or system message")
    _attach(messages, tools, response_format)
    if not messages:
        raise BadRequest("messages", "messages holds no text")
    append = ""
    if _lacks_header(messages):
        append = dialect.header_thinking if thinking.enabled else dialect.header_chat
    if task is not None:
        messages[-1] = {**messages[-1], "task": task}
        start = start if task == _ACTION else ParseStart.CONTENT
    if tools.forced:
        if task is not None or messages[-1].get("wo_eos"):
            raise BadRequest("tool_choice", "a forced tool choice cannot be combined with a task or a continued message")
        if not thinking.enabled:
            append += dialect.spell(f"\n\n{dialect.tags.calls_open}\n")
            start = ParseStart.BLOCK
    return EncoderCall(messages, thinking, start, tools, response_format, task, strip, append)


def _leading_tokens(token_ids: list[int], user_id: int | None) -> int:
    """Tokens in front of the first user turn. Text of a client never becomes a control id, so the first such id is the encoder's."""
    return token_ids.index(user_id) if user_id in token_ids else 0


def _lacks_header(messages: list[Message]) -> bool:
    """The encoder writes the header behind user turns only."""
    if messages[-1]["role"] == "assistant":
        return not messages[-1].get("wo_eos")
    return len(messages) == 1 and messages[0]["role"] == "system"


def _encode(encoder: Encoder, call: EncoderCall, messages: list[Message]) -> tuple[str, list[Any]]:
    prompt, images = encoder.encode(messages, thinking=call.thinking.enabled, effort=call.thinking.effort)
    return prompt.removesuffix(call.strip) + call.append, images


def _reference(encoder: Encoder, call: EncoderCall, prompt: str, spellings: list[str]) -> str:
    """A text as long as `prompt` in which every control spelling is the encoder's own. Raises BadRequest when there is none."""
    try:
        if not spells_control(call.messages, spellings):
            return prompt
        reference, _ = _encode(encoder, call, neutralise(call.messages, spellings))
    except RecursionError as error:  # a body is flat enough, but arguments are JSON inside a string of it
        raise BadRequest("messages", "the arguments of a tool call are nested too deeply") from error
    if len(reference) != len(prompt):
        raise BadRequest("messages", "control-token spellings in the text cannot be told from the format's own")
    return reference


def _open_end(body: dict[str, Any], messages: list[Message], thinking: Thinking, think_end: str) -> tuple[list[Message], ParseStart, str]:
    """How the prompt ends. Returns (messages, parser start, text that the encoder writes too much)."""
    start = ParseStart.REASONING if thinking.enabled else ParseStart.CONTENT
    wanted = body.get("continue_final_message")
    if wanted is not None and not isinstance(wanted, bool):
        raise BadRequest("continue_final_message", "continue_final_message must be a boolean")
    last = messages[-1] if messages else {}
    if not (wanted or last.get("prefix")):
        return messages, start, ""
    if last.get("role") != "assistant" or last.get("tool_calls"):
        raise BadRequest("continue_final_message", "continue_final_message needs a last assistant message without tool_calls")
    reasoning, content = last.get("reasoning_content", "") if thinking.enabled else "", last["content"]
    if not reasoning and not content:
        return messages[:-1], start, ""
    if (
        len(messages) < 2
        or messages[-2]["role"] in ("assistant", "latest_reminder")
        or (len(messages) == 2 and messages[0]["role"] == "system")
    ):
        # The message in front writes the header, and these do not.
        raise BadRequest(f"messages[{len(messages) - 1}]", "a continued assistant message must follow a user or tool message")
    last = {name: value for name, value in last.items() if name != "prefix"} | {"wo_eos": True}
    messages = [*messages[:-1], last]
    if not content:
        return messages, ParseStart.REASONING, think_end
    return messages, ParseStart.CONTENT, ""


def _attach(messages: list[Message], tools: Tools, response_format: ResponseFormat) -> None:
    """Hang tools and response format on system message 0, which is made when it is missing."""
    rendered = response_format.rendered
    if not tools.declared and rendered is None:
        return
    if not messages or messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": ""})
    extra: Message = {}
    if tools.declared:
        extra["tools"] = list(tools.declared)
    if rendered is not None:
        extra["response_format"] = rendered
    messages[0] = messages[0] | extra


def _task(task: Any, messages: list[Message], tasks: dict[str, str]) -> str | None:
    if task is None:
        return None
    if not isinstance(task, str) or task not in tasks:
        raise BadRequest("task", f"task must be one of: {', '.join(tasks)}")
    if not messages or messages[-1]["role"] != "user":
        raise BadRequest("task", "task needs a last message of role user")
    return task


def _missing_reasoning(call: EncoderCall) -> int:
    if not (call.thinking.enabled and call.tools.declared):
        return 0
    return sum(1 for message in call.messages if message["role"] == "assistant" and not message.get("reasoning_content"))


def control_ranges(text: str, spellings: list[str]) -> list[tuple[int, int]]:
    """Ascending half-open ranges of all control spellings in `text`, the longest first where two begin together."""
    pattern = re.compile("|".join(re.escape(spelling) for spelling in sorted(spellings, key=len, reverse=True)))
    return [match.span() for match in pattern.finditer(text)] if spellings else []
