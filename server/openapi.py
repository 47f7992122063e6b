"""The OpenAPI document of this server: written by hand next to the checks it describes, and tested against the running server."""

from __future__ import annotations

from typing import Any

from server.openapi_schemas import (
    STRING,
    TEXT_OR_NULL,
    Schema,
    answer,
    answer_schemas,
    array,
    chat_request,
    message_schema,
    nullable,
    plain_request,
    record,
    ref,
    tool_schemas,
)
from server.schemas import MAX_PIN_S

COMMON_FAILURES = ("401", "403", "405", "408", "431", "500")
BODY_FAILURES = ("400", "404", "413", "415", "429", "503", "504")
FAILURE_NAMES = {
    "400": "The request is wrong; `param` names the field.",
    "401": "An API key is missing or wrong.",
    "403": "A page of another site calls a server without API keys.",
    "404": "No such model or path.",
    "405": "The path has no such method.",
    "408": "The request did not arrive in time.",
    "409": "Another change is pending.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "The queue is full; see Retry-After.",
    "431": "The headers are too large.",
    "500": "A defect of the server.",
    "503": "Not ready, draining, or an engine process failed; see Retry-After.",
    "504": "The request's deadline passed.",
}


def document(served_name: str, vocab_size: int, max_tokens_limit: int, efforts: list[str], *, render: bool, faults: bool) -> dict[str, Any]:
    """What /openapi.json answers. `render`, `faults`: whether those optional routes exist."""
    schemas: dict[str, Schema] = {
        "Message": message_schema(),
        "ChatRequest": chat_request(vocab_size, max_tokens_limit, efforts),
        "CompletionRequest": plain_request(vocab_size, max_tokens_limit),
        "TokenizeRequest": _prompt_request(model=TEXT_OR_NULL, add_special_tokens=nullable("boolean")),
        "ExplainRequest": _prompt_request(),
        "PinRequest": _pin_request(vocab_size),
        **tool_schemas(),
        **answer_schemas(),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "dix", "version": "0.1.0", "description": f"Serves the model `{served_name}`."},
        "paths": {**_open_paths(), **_generation_paths(vocab_size), **_admin_paths(), **_optional_paths(render, faults)},
        "components": {
            "schemas": schemas,
            "responses": {f"Failure{status}": _failure(text) for status, text in FAILURE_NAMES.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _failure(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": ref("Error")}}}


def _operation(
    summary: str, success: dict[str, Schema], failures: tuple[str, ...] = (), body: Schema | None = None, **extra: Any
) -> dict[str, Any]:
    """One method of a path. `success`: media type -> schema of the answer 200."""
    content = {media: {"schema": schema} for media, schema in success.items()}
    answers: dict[str, Any] = {"200": {"description": "Success.", "content": content}}
    for status in sorted({*COMMON_FAILURES, *failures}):
        answers[status] = {"$ref": f"#/components/responses/Failure{status}"}
    operation: dict[str, Any] = {"summary": summary, "responses": answers, **extra}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def _json(name: str) -> dict[str, Schema]:
    return {"application/json": ref(name)}


def _open_paths() -> dict[str, Any]:
    health = _operation("503 when an engine process is dead, hung or not ready.", _json("Health"), ("503",))
    return {
        "/": {"get": _operation("The page for people.", {"text/html": STRING})},
        "/health": {"get": health},
        "/ping": {"get": health},
        "/health/live": {"get": _operation("200 while the process runs.", _json("Health"))},
        "/health/ready": {"get": _operation("As /health, and 503 while draining.", _json("Health"), ("503",))},
        "/version": {"get": _operation("Name and version.", _json("Version"))},
        "/metrics": {"get": _operation("Prometheus text.", {"text/plain": STRING})},
        "/deepinfer/metrics": {"get": _operation("The same as JSON, per rank.", _json("Metrics"))},
    }


def _generation_paths(vocab_size: int) -> dict[str, Any]:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    token_id = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    chat = {**_json("ChatCompletion"), "text/event-stream": ref("Event")}
    plain = {**_json("Completion"), "text/event-stream": ref("Event")}
    ids = record(["tokens"], tokens=array(token_id))
    return {
        "/v1/chat/completions": {"post": _operation("Answer a conversation.", chat, BODY_FAILURES, ref("ChatRequest"))},
        "/v1/completions": {"post": _operation("Continue plain prompts.", plain, BODY_FAILURES, ref("CompletionRequest"))},
        "/v1/models": {"get": _operation("The served models.", _json("ModelList"))},
        "/v1/models/{name}": {"get": _operation("One served model.", _json("Model"), ("404",), parameters=[name])},
        "/tokenize": {
            "post": _operation("Token ids of a prompt or a conversation.", _json("Tokens"), BODY_FAILURES, ref("TokenizeRequest"))
        },
        "/detokenize": {"post": _operation("Text of token ids.", _json("Text"), BODY_FAILURES, ids)},
    }


def _admin_paths() -> dict[str, Any]:
    interval = nullable("integer", minimum=1, maximum=1_000_000)
    change = {**record(prefill_any_interval=interval, prefill_attempt_interval=interval), "additionalProperties": False, "minProperties": 1}
    failures = ("400", "409", "413", "415", "503")
    return {
        "/reset_prefix_cache": {"post": _operation("Forget all cached prefixes.", {"application/json": answer()}, ("400", "503"))},
        "/hicache/pin": {
            "post": _operation(
                "Keep what is stored of a conversation or prompt from being evicted, for ttl_s seconds; 0 lets go of it.",
                {"application/json": record(["ranks"], ranks=array({"type": "object"}), prompt_tokens={"type": "integer"})},
                BODY_FAILURES,
                ref("PinRequest"),
            )
        },
        "/deepinfer/cache/explain": {
            "post": _operation(
                "What a conversation or prompt would find in the prefix cache.",
                {"application/json": {"type": "object"}},
                BODY_FAILURES,
                ref("ExplainRequest"),
            )
        },
        "/deepinfer/scheduling": {
            "get": _operation(
                "The prefill intervals in force, the rule that they serve, and the tokens of a prompt step.", _json("Scheduling"), ("503",)
            ),
            "post": _operation("Change them on all ranks at the same step.", _json("Scheduling"), failures, change),
        },
    }


def _optional_paths(render: bool, faults: bool) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    if render:
        body = record(["messages"], messages=array(ref("Message"), minItems=1))
        paths["/deepinfer/render"] = {"post": _operation("The exact prompt of a chat body.", _json("Rendered"), BODY_FAILURES, body)}
    if faults:
        body = record(["kind"], kind={"type": "string", "maxLength": 64}, rank=nullable("integer", minimum=0))
        success = {"application/json": record(["ranks"], ranks=array({"type": "object"}), sent={"const": True})}
        paths["/deepinfer/debug/fault"] = {"post": _operation("Break a rank on purpose.", success, ("400", "413", "415", "503"), body)}
    return paths


def _pin_request(vocab_size: int) -> Schema:
    """A conversation, token ids or a plain prompt, and how long it stays."""
    ttl_s = nullable("number", minimum=0, maximum=MAX_PIN_S)
    token_id = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    null = {"type": "null"}
    chat = record(["messages"], messages=array(ref("Message"), minItems=1), tools=nullable("array", items=ref("Tool")), ttl_s=ttl_s)
    ids = record(["token_ids"], token_ids=array(token_id), messages=null, ttl_s=ttl_s)
    return {"anyOf": [chat, ids, record(["prompt"], prompt=STRING, messages=null, token_ids=null, ttl_s=ttl_s)]}


def _prompt_request(**plain: Schema) -> Schema:
    """A conversation, or a plain prompt with the fields `plain`."""
    chat = record(["messages"], messages=array(ref("Message"), minItems=1), tools=nullable("array", items=ref("Tool")))
    return {"anyOf": [record(["prompt"], prompt=STRING, messages={"type": "null"}, **plain), chat]}
