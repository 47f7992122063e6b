"""JSON schemas of request bodies and answers, for the OpenAPI document. A constraint stands here only when the server enforces it."""

from __future__ import annotations

from typing import Any

from hicache.ranking import MOST_PRIORITY
from server.conversation import MAX_MESSAGES
from server.fields import INT64_MAX, INT64_MIN
from server.schemas import MAX_BIASES, MAX_CHOICES, MAX_HINT, MAX_PIN_S, MAX_PROMPTS, MAX_STOP_LENGTH, MAX_STOPS
from server.tools import MAX_TOOLS

Schema = dict[str, Any]


def nullable(kind: str, **limits: Any) -> Schema:
    """null in an optional field means that it is absent."""
    return {"type": [kind, "null"], **limits}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def record(required: list[str] | None = None, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def answer(**properties: Schema) -> Schema:
    """An object that always has exactly these properties."""
    return {**record(list(properties), **properties), "additionalProperties": False}


def array(items: Schema, **limits: Any) -> Schema:
    return {"type": "array", "items": items, **limits}


STRING: Schema = {"type": "string"}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}


def common_fields(vocab_size: int, max_tokens_limit: int) -> dict[str, Schema]:
    """Fields of chat and plain completions."""
    token_id: Schema = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    limit = nullable("integer", minimum=1, maximum=max_tokens_limit)
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
    hint = nullable("string", maxLength=MAX_HINT)
    switches = record(read=nullable("boolean"), write=nullable("boolean"))
    timed_priority = record(
        ["priority"],
        priority={"type": "integer", "minimum": 0, "maximum": MOST_PRIORITY},
        seconds=nullable("number", exclusiveMinimum=0, maximum=MAX_PIN_S),
    )
    return {
        "model": {"type": ["string", "null"], "description": "A served name; absent: the only one."},
        "max_tokens": limit,
        "max_completion_tokens": limit,
        "min_tokens": nullable("integer", minimum=0, maximum=max_tokens_limit),
        "ignore_eos": nullable("boolean"),
        "temperature": nullable("number", minimum=0, maximum=2),
        "top_p": nullable("number", exclusiveMinimum=0, maximum=1),
        "top_k": {"anyOf": [nullable("integer", minimum=1, maximum=2**31 - 1), {"const": -1}]},
        "min_p": nullable("number", minimum=0, maximum=1),
        "repetition_penalty": nullable("number", exclusiveMinimum=0, maximum=10),
        "presence_penalty": nullable("number", minimum=-2, maximum=2),
        "frequency_penalty": nullable("number", minimum=-2, maximum=2),
        "seed": nullable("integer", minimum=INT64_MIN, maximum=INT64_MAX),
        "n": nullable("integer", minimum=1, maximum=MAX_CHOICES),
        "stop": {"anyOf": [{"type": "null"}, stop, array(stop, maxItems=MAX_STOPS)]},
        "stop_token_ids": nullable("array", items=token_id, maxItems=MAX_BIASES),
        "logit_bias": nullable(
            "object",
            maxProperties=MAX_BIASES,
            propertyNames={"pattern": "^[0-9]{1,9}$"},
            additionalProperties=nullable("number", minimum=-100, maximum=100),
        ),
        "stream": nullable("boolean"),
        "stream_options": nullable(
            "object", properties={"include_usage": nullable("boolean"), "continuous_usage_stats": nullable("boolean")}
        ),
        "session_id": hint,
        "prompt_cache_key": hint,
        "user": hint,
        "prefix_cache": {"anyOf": [nullable("boolean"), switches]},
        "cache_salt": hint,
        "cache_priority": {"anyOf": [nullable("integer", minimum=0, maximum=MOST_PRIORITY), timed_priority]},
    }


def chat_request(vocab_size: int, max_tokens_limit: int, efforts: list[str]) -> Schema:
    kwargs = record(thinking=nullable("boolean"), enable_thinking=nullable("boolean"))
    effort = effort_schema(efforts)
    switch = {"enum": ["enabled", "disabled", "adaptive", None]}
    return record(
        ["messages"],
        messages=array(ref("Message"), minItems=1, maxItems=MAX_MESSAGES),
        tools=nullable("array", items=ref("Tool"), maxItems=MAX_TOOLS),
        tool_choice={"anyOf": [{"enum": ["auto", "none", "required", None]}, ref("NamedTool")]},
        parallel_tool_calls=nullable("boolean"),
        response_format={"anyOf": [{"type": "null"}, ref("ResponseFormat")]},
        reasoning_effort=effort,
        thinking=nullable("object", properties={"type": switch, "effort": effort}),
        reasoning=nullable("object", properties={"effort": effort}),
        chat_template_kwargs={"anyOf": [{"type": "null"}, kwargs]},
        continue_final_message=nullable("boolean"),
        logprobs=nullable("boolean"),
        top_logprobs=nullable("integer", minimum=0, maximum=20),
        **common_fields(vocab_size, max_tokens_limit),
    )


def effort_schema(names: list[str]) -> Schema:
    numeric = {"type": "string", "pattern": "^(0{0,2}[1-9]|0?[1-9][0-9]|100)$"}
    return {"anyOf": [{"enum": [*names, None]}, numeric, {"type": "integer", "minimum": 1, "maximum": 100}]}


def plain_request(vocab_size: int, max_tokens_limit: int) -> Schema:
    ids = array({"type": "integer", "minimum": 0, "maximum": vocab_size - 1}, minItems=1)
    prompt = [STRING, array(STRING, minItems=1, maxItems=MAX_PROMPTS), ids, array(ids, minItems=1, maxItems=MAX_PROMPTS)]
    return record(
        ["prompt"],
        prompt={"anyOf": [*prompt, array({"anyOf": [STRING, ids]}, minItems=1, maxItems=MAX_PROMPTS)]},
        logprobs=nullable("integer", minimum=0, maximum=20),
        echo={"enum": [False, None]},
        suffix={"enum": ["", None]},
        best_of=nullable("integer", minimum=1, maximum=MAX_CHOICES),
        **common_fields(vocab_size, max_tokens_limit),
    )


def message_schema() -> Schema:
    """Per role. What no schema can say: tool messages answer the calls of the assistant message before them."""
    text = record(["type", "text"], type={"enum": ["text", "input_text", "output_text"]}, text=STRING)
    refusal = record(["type", "refusal"], type={"const": "refusal"}, refusal=STRING)
    name = {"type": "string", "minLength": 1}
    call = record(["id", "function"], id=name, type={"const": "function"}, function=ref("CalledFunction"))
    asked = record(
        ["role", "content"],
        role={"enum": ["system", "developer", "user", "latest_reminder"]},
        content={"anyOf": [STRING, array(text)]},
        tool_calls=nullable("array", maxItems=0),
        prefix={"enum": [False, None]},
    )
    said = record(
        ["role"],
        role={"const": "assistant"},
        content={"anyOf": [TEXT_OR_NULL, array({"anyOf": [text, refusal]})]},
        reasoning_content=TEXT_OR_NULL,
        reasoning=TEXT_OR_NULL,
        tool_calls=nullable("array", items=call),
        prefix=nullable("boolean"),
    )
    told = record(
        ["role", "tool_call_id"],
        role={"const": "tool"},
        content={"anyOf": [TEXT_OR_NULL, array(text)]},
        tool_call_id=name,
        tool_calls=nullable("array", maxItems=0),
        prefix={"enum": [False, None]},
    )
    return {"anyOf": [asked, said, told]}


def tool_schemas() -> dict[str, Schema]:
    function = record(
        ["name"],
        name={"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
        description=TEXT_OR_NULL,
        parameters=nullable("object", description="A JSON schema of type object."),
        strict=nullable("boolean"),
    )
    named = record(["type", "function"], type={"const": "function"}, function=record(["name"], name=STRING))
    schema = record(["type", "json_schema"], type={"const": "json_schema"}, json_schema=record(["schema"], schema={"type": "object"}))
    return {
        "Tool": record(["type", "function"], type={"const": "function"}, function=function),
        "NamedTool": named,
        "CalledFunction": record(["name"], name={"type": "string", "minLength": 1}, arguments={"type": ["string", "object", "null"]}),
        "ResponseFormat": {"anyOf": [record(["type"], type={"enum": ["text", "json_object"]}), schema]},
    }


def answer_schemas() -> dict[str, Schema]:
    """Everything that a success or a failure answers with."""
    finish = {"enum": ["stop", "length", "tool_calls"]}
    stop_reason = {"type": ["string", "integer"]}
    call = answer(id=STRING, type={"const": "function"}, function=answer(name=STRING, arguments=STRING))
    message = record(
        ["role", "content"],
        role={"const": "assistant"},
        content=TEXT_OR_NULL,
        reasoning_content=STRING,
        reasoning=STRING,
        tool_calls=array(call, minItems=1),
    )
    logprobs = {"type": ["object", "null"]}
    explain: Schema = {"cache_explain": {"type": "object"}}
    head = {"id": STRING, "created": COUNT, "model": STRING, "system_fingerprint": STRING, "usage": ref("Usage")}
    chat = record(["index", "message", "logprobs", "finish_reason"], index=COUNT, message=message, logprobs=logprobs, finish_reason=finish,
                  stop_reason=stop_reason)  # fmt: skip
    plain = record(["index", "text", "logprobs", "finish_reason"], index=COUNT, text=STRING, logprobs=logprobs, finish_reason=finish,
                   stop_reason=stop_reason)  # fmt: skip
    model = record(["id", "object", "created", "owned_by"], id=STRING, object={"const": "model"}, created=COUNT, owned_by=STRING,
                   max_model_len=COUNT)  # fmt: skip
    return {
        "Usage": answer(
            prompt_tokens=COUNT,
            completion_tokens=COUNT,
            total_tokens=COUNT,
            prompt_tokens_details=answer(cached_tokens=COUNT),
            completion_tokens_details=answer(reasoning_tokens=COUNT),
            prompt_cache_hit_tokens=COUNT,
            prompt_cache_miss_tokens=COUNT,
        ),
        "ChatCompletion": record(
            [*head, "object", "choices"], **head, object={"const": "chat.completion"}, choices=array(chat, minItems=1), **explain
        ),
        "Completion": record(
            [*head, "object", "choices"], **head, object={"const": "text_completion"}, choices=array(plain, minItems=1), **explain
        ),
        # Of each event of a stream: a chunk, [DONE], or with the event name "error" a failure.
        "Event": record(["data"], event={"enum": ["message", "error"]}, data=STRING),
        "Model": model,
        "ModelList": answer(object={"const": "list"}, data=array(ref("Model"))),
        "Tokens": answer(tokens=array(COUNT), count=COUNT, max_model_len=COUNT),
        "Text": answer(prompt=STRING),
        "Rendered": answer(prompt=STRING, tokens=array(COUNT), count=COUNT),
        "Health": record(["status"], status={"const": "ok"}, ranks=answer(ready=COUNT, total=COUNT)),
        "Version": answer(name={"const": "dix"}, version=STRING),
        "Scheduling": answer(
            prefill_any_interval=COUNT,
            prefill_attempt_interval=COUNT,
            prefill_vote=STRING,
            max_num_batched_tokens=nullable("integer", minimum=1),
        ),
        "Error": answer(error=answer(message={"type": "string", "minLength": 1}, type=STRING, param=TEXT_OR_NULL, code=TEXT_OR_NULL)),
        "Metrics": record(
            [
                "schema",
                "time",
                "boot_id",
                "uptime_s",
                "model",
                "state",
                "requests",
                "routing",
                "watchdog",
                "first_tokens",
                "ranks",
                "totals",
            ],
            schema={"const": 1},
            time=NUMBER,
            boot_id=STRING,
            uptime_s=NUMBER,
            model=STRING,
            state={"enum": ["starting", "ready", "degraded", "draining", "dead"]},
            requests={"type": "object"},
            routing={"type": "object"},
            watchdog={"type": "object"},
            first_tokens={"type": "object"},
            ranks=array({"type": "object"}),
            totals={"type": "object"},
        ),
    }
