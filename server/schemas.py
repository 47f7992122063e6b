"""What a generation request may say, checked field by field. Every field is honoured, refused, or on the ignore list."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.request import SamplingParams
from hicache.ranking import DEFAULT_PRIORITY, MOST_PRIORITY
from server.errors import ApiError, BadRequest
from server.fields import INT64_MAX, INT64_MIN, Fields, as_integer, token_id

MAX_CHOICES = 8
MAX_STOPS, MAX_STOP_LENGTH = 16, 512
MAX_BIASES = 1024
MAX_PROMPTS = 16
MAX_HINT = 256
MAX_PIN_S, DEFAULT_PIN_S = 604_800, 3_600  # a pinned prefix: a week, an hour
DEFAULT_TOKENS_CHAT, DEFAULT_TOKENS_THINKING, DEFAULT_TOKENS_MAX_EFFORT = 8_192, 65_536, 131_072

IGNORED = frozenset(["metadata", "store", "service_tier", "safety_identifier", "verbosity", "prediction", "modalities"])
RENDERED = frozenset(
    [
        "messages",
        "tools",
        "tool_choice",
        "reasoning_effort",
        "thinking",
        "reasoning",
        "chat_template_kwargs",
        "task",
        "prefix",
        "continue_final_message",
        "response_format",
    ]
)
READ = frozenset(
    [
        "model",
        "max_completion_tokens",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "n",
        "stop",
        "stop_token_ids",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "stream",
        "stream_options",
        "parallel_tool_calls",
        "ignore_eos",
        "min_tokens",
        "session_id",
        "prompt_cache_key",
        "user",
        "prefix_cache",
        "cache_salt",
        "cache_priority",
        "functions",
        "function_call",
        "regex",
        "ebnf",
        "prompt",
        "echo",
        "suffix",
        "best_of",
    ]
)
UNSUPPORTED = ("structural_tag", "structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice")


@dataclass(frozen=True, slots=True)
class CommonRequest:
    """What chat and plain completions share. `max_tokens` None: the server's default for the mode."""

    model: str
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: list[str]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int
    cache_read: bool
    cache_write: bool
    cache_salt: str
    cache_priority: int
    cache_priority_s: float
    session: str | None
    user: str
    unknown: list[str] = field(default_factory=list)

    def params(self, choice: int, max_tokens: int) -> SamplingParams:
        """Sampling of one choice; choice i uses seed + i."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias),
            seed=None if self.seed is None else _wrap_int64(self.seed + choice),
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the server allows: names that clients may use, vocabulary size, largest max_tokens, salts for the prefix cache."""

    served_names: tuple[str, ...]
    vocab_size: int
    max_tokens_limit: int
    salted: bool = False


def parse_common(body: dict[str, Any], bounds: Bounds, *, chat: bool) -> CommonRequest:
    """Check every field of a generation request except those that rendering checks.

    Raises:
        BadRequest: names the field. ApiError: 404 for another model.
    """
    f = Fields(body)
    _refuse_unsupported(f)
    min_tokens, max_tokens = _token_limits(f, bounds.max_tokens_limit)
    stream, include_usage, continuous = _stream(f)
    logprobs, top_logprobs = _chat_logprobs(f) if chat else _plain_logprobs(f)
    read, write = _prefix_cache(f)
    priority, priority_s = _cache_priority(f)
    return CommonRequest(
        model=check_model(f, bounds.served_names),
        n=f.integer("n", 1, MAX_CHOICES, 1) or 1,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=f.number("temperature", 0, 2, 1.0),
        top_p=f.number("top_p", 0, 1, 1.0, above=True),
        top_k=_top_k(f),
        min_p=f.number("min_p", 0, 1, 0.0),
        repetition_penalty=f.number("repetition_penalty", 0, 10, 1.0, above=True),
        presence_penalty=f.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=f.number("frequency_penalty", -2, 2, 0.0),
        logit_bias=_logit_bias(f, bounds.vocab_size),
        seed=f.integer("seed", INT64_MIN, INT64_MAX),
        stop=_stop(f),
        stop_token_ids=f.token_ids("stop_token_ids", bounds.vocab_size, MAX_BIASES),
        ignore_eos=f.boolean("ignore_eos", False),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        cache_read=read,
        cache_write=write,
        cache_salt=cache_salt(f, bounds.salted),
        cache_priority=priority,
        cache_priority_s=priority_s,
        session=_session(f),
        user=f.string("user", MAX_HINT) or "",
        unknown=[name for name in body if name not in READ | RENDERED | IGNORED],
    )


def check_model(f: Fields, served_names: tuple[str, ...]) -> str:
    """The name a client asked for, or the only served one. Compared with the served names and nothing else."""
    name = f.raw("model")
    if name is None:
        return served_names[0]
    if not isinstance(name, str):
        raise f.fail("model", "must be a string")
    if name not in served_names:
        raise ApiError(404, "model_not_found", f"no model {name[:64]!r} here; served: {', '.join(served_names)}", param="model")
    return name


def default_max_tokens(thinking: bool, max_effort: bool) -> int:
    """Output limit of a request that sets none. Source: the model vendor's own API defaults."""
    if not thinking:
        return DEFAULT_TOKENS_CHAT
    return DEFAULT_TOKENS_MAX_EFFORT if max_effort else DEFAULT_TOKENS_THINKING


def _refuse_unsupported(f: Fields) -> None:
    for name in ("functions", "function_call"):
        if f.raw(name) is not None:
            raise f.fail(name, "is not supported: use tools and tool_choice", "unsupported_parameter")
    for name in UNSUPPORTED:
        if f.raw(name) is not None:
            raise f.fail(name, "is not supported: use response_format, regex or ebnf", "unsupported_parameter")
    if f.raw("prediction") is not None:
        raise f.fail("prediction", "is not supported", "unsupported_parameter")
    if f.raw("modalities") not in (None, ["text"]):
        raise f.fail("modalities", 'must be ["text"]', "unsupported_parameter")


def _token_limits(f: Fields, limit: int) -> tuple[int, int | None]:
    """(least, most) tokens of the answer; of the two names of the limit the newer one wins."""
    plain = f.integer("max_tokens", 1, limit)
    most = f.integer("max_completion_tokens", 1, limit, plain)
    least = f.integer("min_tokens", 0, limit, 0) or 0
    if most is not None and least > most:
        raise f.fail("min_tokens", "must not exceed max_tokens")
    return least, most


def _top_k(f: Fields) -> int:
    value = f.integer("top_k", -1, 2**31 - 1, -1)
    if value == 0 or value is None:
        raise f.fail("top_k", "must be -1 or at least 1")
    return value


def _stream(f: Fields) -> tuple[bool, bool, bool]:
    stream = f.boolean("stream", False)
    options = f.object("stream_options")
    if options is None:
        return stream, False, False
    if not stream:
        raise f.fail("stream_options", "is only allowed with stream: true")
    return stream, options.boolean("include_usage", False), options.boolean("continuous_usage_stats", False)


def _stop(f: Fields) -> list[str]:
    value = f.raw("stop")
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(stop, str) for stop in stops):
        raise f.fail("stop", f"must be a string or a list of at most {MAX_STOPS} strings")
    if not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise f.fail("stop", f"must hold strings of 1 to {MAX_STOP_LENGTH} characters")
    return stops


def _logit_bias(f: Fields, vocab_size: int) -> dict[int, float]:
    biases = f.object("logit_bias")
    if biases is None:
        return {}
    if len(biases.body) > MAX_BIASES:
        raise f.fail("logit_bias", f"must have at most {MAX_BIASES} entries")
    result = {}
    for key in biases.body:
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise f.fail("logit_bias", "must have decimal token ids as keys")
        result[token_id(f, "logit_bias", int(key), vocab_size)] = biases.number(key, -100, 100, 0.0)
    return result


def _chat_logprobs(f: Fields) -> tuple[bool, int]:
    wanted = f.boolean("logprobs", False)
    top = f.integer("top_logprobs", 0, 20, 0) or 0
    if f.raw("top_logprobs") is not None and not wanted:
        raise f.fail("top_logprobs", "is only allowed with logprobs: true")
    return wanted, top


def _plain_logprobs(f: Fields) -> tuple[bool, int]:
    value = f.integer("logprobs", 0, 20)
    return value is not None, value or 0


def _prefix_cache(f: Fields) -> tuple[bool, bool]:
    value = f.raw("prefix_cache")
    if isinstance(value, dict):
        switches = Fields(value, "prefix_cache.")
        return switches.boolean("read", True), switches.boolean("write", True)
    if value is not None and not isinstance(value, bool):
        raise f.fail("prefix_cache", "must be true, false or an object with read and write")
    return value is not False, value is not False


def _cache_priority(f: Fields) -> tuple[int, float]:
    """(priority, seconds until it ends): a number, or an object with `priority` and `seconds`, which only a raised one may have."""
    value = f.object("cache_priority") if isinstance(f.raw("cache_priority"), dict) else None
    if value is None:
        return _or_default(f.integer("cache_priority", 0, MOST_PRIORITY)), math.inf
    if value.raw("priority") is None:
        raise value.fail("priority", "is missing", "missing_field")
    priority = _or_default(value.integer("priority", 0, MOST_PRIORITY))
    if value.raw("seconds") is None:
        return priority, math.inf
    if priority <= DEFAULT_PRIORITY:
        raise value.fail("seconds", f"is only allowed with a priority above {DEFAULT_PRIORITY}, the one that it falls back to")
    return priority, value.number("seconds", 0, MAX_PIN_S, 0.0, above=True)


def _or_default(priority: int | None) -> int:
    return DEFAULT_PRIORITY if priority is None else priority


def cache_salt(f: Fields, offered: bool) -> str:
    """The request's own part of its cache salt, "" without. Raises BadRequest when the server does not offer it."""
    salt = f.string("cache_salt", MAX_HINT)
    if salt is not None and not offered:
        raise f.fail("cache_salt", "is not supported: this server does not run with hicache.isolation=field", "unsupported_parameter")
    return salt or ""


def _session(f: Fields) -> str | None:
    session = f.string("session_id", MAX_HINT)
    key = f.string("prompt_cache_key", MAX_HINT)
    return session or key or None


def _wrap_int64(value: int) -> int:
    return (value - INT64_MIN) % 2**64 + INT64_MIN


def parse_prompts(body: dict[str, Any], vocab_size: int) -> list[str | list[int]]:
    """The `prompt` of a plain completion: a string, strings (<= 16), ids, or lists of ids (<= 16).

    Raises:
        BadRequest: anything else.
    """
    f = Fields(body)
    value = f.raw("prompt")
    if value is None:
        raise f.fail("prompt", "is missing", "missing_field")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise f.fail("prompt", "must be a string, a list of strings, a list of token ids or a list of such lists")
    if as_integer(value[0]) is not None:
        return [[token_id(f, "prompt", item, vocab_size) for item in value]]
    if len(value) > MAX_PROMPTS:
        raise f.fail("prompt", f"must have at most {MAX_PROMPTS} entries")
    return [_one_prompt(f, item, vocab_size) for item in value]


def _one_prompt(f: Fields, item: Any, vocab_size: int) -> str | list[int]:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and item:
        return [token_id(f, "prompt", number, vocab_size) for number in item]
    raise f.fail("prompt", "must hold non-empty strings or lists of token ids")


def refuse_plain_extras(body: dict[str, Any]) -> None:
    """`echo`, `suffix` and `best_of` of plain completions: neutral values pass, others are refused."""
    f = Fields(body)
    if f.boolean("echo", False):
        raise f.fail("echo", "is not supported", "unsupported_parameter")
    if f.raw("suffix") not in (None, ""):
        raise f.fail("suffix", "is not supported", "unsupported_parameter")
    if f.integer("best_of", 1, MAX_CHOICES, 1) != (f.integer("n", 1, MAX_CHOICES, 1) or 1) and f.raw("best_of") not in (None, 1):
        raise BadRequest("best_of", "best_of is not supported: use n", "unsupported_parameter")
