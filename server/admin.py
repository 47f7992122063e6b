"""Routes that are not generation: health, metrics, models, tokenisation, cache and scheduling operations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server import protocol
from server.answers import FINGERPRINT
from server.cache_explain import described
from server.docs_page import POLICY, docs_page
from server.errors import ApiError, BadRequest, Unavailable
from server.fields import Fields
from server.front_state import Front
from server.json_response import JsonResponse
from server.metrics import json_document
from server.prometheus import CONTENT_TYPE, exposition
from server.schemas import DEFAULT_PIN_S, MAX_PIN_S, cache_salt, check_model
from server.tools import Tools

PAGE_PATH = Path(__file__).with_name("page.html")
OWN_FAULTS = frozenset({"exit", "raise", "hang"})  # these leave no rank that could answer


async def page(_front: Front, _http: HttpRequest) -> Response:
    """The web page: one file without external assets. The routes that it calls need the key."""
    policy = "default-src 'self'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'none'"
    return Response(PAGE_PATH.read_bytes(), media_type="text/html; charset=utf-8", headers={"Content-Security-Policy": policy})


def docs(document: Mapping[str, Any]) -> Response:
    """The OpenAPI document as a web page."""
    return Response(docs_page(document), media_type="text/html; charset=utf-8", headers={"Content-Security-Policy": POLICY})


async def live(_front: Front, _http: HttpRequest) -> Response:
    return JsonResponse({"status": "ok"})


async def ready(front: Front, http: HttpRequest) -> Response:
    """Readiness: `health`, and 503 while draining too."""
    front.pool.check_available()
    return await health(front, http)


async def health(front: Front, _http: HttpRequest) -> Response:
    """Raises Unavailable: a rank is dead, hung or not ready."""
    total = len(front.pool.ranks)
    if not front.pool.draining:
        front.pool.check_available()
    if complaint := front.pool.complaint():
        raise Unavailable("engine_dead", f"not healthy: {complaint}", retry_after_s=2)
    return JsonResponse({"status": "ok", "ranks": {"ready": total, "total": total}})


async def version(_front: Front, _http: HttpRequest) -> Response:
    return JsonResponse({"name": "dix", "version": FINGERPRINT.partition("-")[2]})


async def prometheus(front: Front, _http: HttpRequest) -> Response:
    return Response(exposition(front.metrics.registry), media_type=CONTENT_TYPE)


async def metrics(front: Front, _http: HttpRequest) -> Response:
    return JsonResponse(json_document(front.metrics, front.pool, front.state))


def model_entry(front: Front) -> dict[str, Any]:
    limits = front.pool.limits
    created = int(front.metrics.started_unix_s)
    entry: dict[str, Any] = {"id": front.launch.served_name, "object": "model", "created": created, "owned_by": "dix"}
    if limits is not None:
        entry["max_model_len"] = limits.max_model_len
    return entry


async def models(front: Front, _http: HttpRequest) -> Response:
    return JsonResponse({"object": "list", "data": [model_entry(front)]})


async def model(front: Front, http: HttpRequest) -> Response:
    check_model(Fields({"model": http.path_params["name"]}), (front.launch.served_name,))
    return JsonResponse(model_entry(front))


async def tokenize(front: Front, http: HttpRequest) -> Response:
    """Ids of a chat body or of a plain prompt.

    Raises:
        ApiError: as for the generation routes.
    """
    body = await front.bodies.read_object(http)
    fields = Fields(body)
    check_model(fields, (front.launch.served_name,))
    text = front.text
    if body.get("messages") is not None:
        ids = (await front.workers.run(text.render_chat, body)).token_ids
    else:
        prompt = fields.string("prompt", front.config.max_body_bytes)
        if prompt is None:
            raise fields.fail("prompt", "is missing: send messages or prompt", "missing_field")
        ids = await front.workers.run(text.tokenizer.encode, prompt, fields.boolean("add_special_tokens", True))
    return JsonResponse({"tokens": ids, "count": len(ids), "max_model_len": front.limits.max_model_len})


async def detokenize(front: Front, http: HttpRequest) -> Response:
    body = await front.bodies.read_object(http)
    fields = Fields(body)
    if body.get("tokens") is None:
        raise fields.fail("tokens", "is missing", "missing_field")
    ids = fields.token_ids("tokens", front.limits.vocab_size, front.config.max_body_bytes)
    return JsonResponse({"prompt": await front.workers.run(front.text.tokenizer.decode, list(ids))})


async def render(front: Front, http: HttpRequest) -> Response:
    body = await front.bodies.read_object(http)
    rendered = await front.workers.run(front.text.render_chat, body)
    return JsonResponse({"prompt": rendered.prompt, "tokens": rendered.token_ids, "count": len(rendered.token_ids)})


async def reset_prefix_cache(front: Front, _http: HttpRequest) -> Response:
    """200 when every rank has forgotten its prefixes; the router forgets where they were."""
    await front.pool.operate(protocol.ResetCache)
    front.pool.router.forget(view.rank for view in front.pool.ranks)
    return JsonResponse({})


async def explain_cache(front: Front, http: HttpRequest) -> Response:
    """What a chat body (or {"prompt": ...}) would restore on every rank, and where it parts from what is stored. Generates nothing."""
    body = await front.bodies.read_object(http)
    ids, salt, tools = await _prompt(front, http, body)
    text = front.text
    scope = front.tenants.scope(http.state.key_id)
    records = await front.pool.operate(lambda operation: protocol.ExplainPrompt(operation, ids, salt, scope))
    ranks = [{"rank": rank, **described(record, text, ids, tools)} for rank, record in enumerate(records)]
    return JsonResponse({"prompt_tokens": len(ids), "ranks": ranks})


async def pin_prefix(front: Front, http: HttpRequest) -> Response:
    """Keep what the ranks hold of a chat body, {"prompt": ...} or {"token_ids": ...} for `ttl_s` seconds; 0 lets go of it.

    Raises:
        ApiError: as for the generation routes; 400 also when no rank has room for it or a cache at all.
    """
    body = await front.bodies.read_object(http)
    ttl_s = Fields(body).number("ttl_s", 0, MAX_PIN_S, DEFAULT_PIN_S)
    ids, salt, _ = await _prompt(front, http, body)
    ranks = range(len(front.pool.ranks))
    records = await front.pool.operate(lambda operation: protocol.KeepPrefix(operation, ids, salt, ttl_s))
    return JsonResponse(
        {"prompt_tokens": len(ids), "ranks": [{"rank": rank, **record} for rank, record in zip(ranks, records, strict=True)]}
    )


async def _prompt(front: Front, http: HttpRequest, body: dict[str, Any]) -> tuple[list[int], str, Tools | None]:
    """(ids, cache salt, tools) of a body that names a conversation, a text or token ids."""
    text, fields = front.text, Fields(body)
    salt = front.tenants.salt(http.state.key_id, cache_salt(fields, front.tenants.mode == "field"))
    if body.get("messages") is not None:
        rendered = await front.render_chat(body, salt)
        return rendered.token_ids, salt, rendered.tools
    if body.get("token_ids") is not None:
        return list(fields.token_ids("token_ids", front.limits.vocab_size, front.config.max_body_bytes)), salt, None
    prompt = fields.string("prompt", front.config.max_body_bytes)
    if prompt is None:
        raise fields.fail("prompt", "is missing: send messages, prompt or token_ids", "missing_field")
    return await front.workers.run(text.tokenizer.encode, prompt, True), salt, None


async def scheduling(front: Front, _http: HttpRequest) -> Response:
    """What decides about prompt steps, and how long one can be (null before the ranks are ready)."""
    engine, limits = front.launch.engine, front.pool.limits
    return JsonResponse(
        {
            "prefill_any_interval": engine.prefill_any_interval,
            "prefill_attempt_interval": engine.prefill_attempt_interval,
            **front.intervals,
            "prefill_vote": engine.prefill_vote,
            "max_num_batched_tokens": limits.max_num_batched_tokens if limits is not None else None,
        }
    )


async def set_scheduling(front: Front, http: HttpRequest) -> Response:
    """All ranks switch at the same decode step: the value travels with a vote.

    Raises:
        ApiError: 409 while a change is pending.
    """
    body = await front.bodies.read_object(http)
    fields = Fields(body)
    names = ("prefill_any_interval", "prefill_attempt_interval")
    values = {name: fields.integer(name, 1, 1_000_000) for name in names}
    chosen = {name: value for name, value in values.items() if value is not None}
    unknown = [name for name in body if name not in names]
    if unknown or not chosen:
        raise BadRequest(unknown[0][:64] if unknown else None, f"send {' or '.join(names)}")
    if front.interval_change_pending:
        raise ApiError(409, "change_pending", "another change is pending: try again")
    front.interval_change_pending = True
    try:
        await front.pool.operate(
            lambda operation: protocol.SetScheduling(operation, values["prefill_attempt_interval"], values["prefill_any_interval"])
        )
    finally:
        front.interval_change_pending = False
    front.intervals.update(chosen)
    return await scheduling(front, http)


async def debug_fault(front: Front, http: HttpRequest) -> Response:
    """Break a rank on purpose: {"kind": ..., "rank": 0 or absent for all}. Kinds: exit, raise, hang; nan; and for the host cache
    flip (target, page, byte, count), drop, short (count) and delay (count, seconds).
    """
    body = await front.bodies.read_object(http)
    fields = Fields(body)
    kind = fields.string("kind", 64)
    if kind is None:
        raise fields.fail("kind", "is missing", "missing_field")
    rank = fields.integer("rank", 0, len(front.pool.ranks) - 1)
    ranks = None if rank is None else [rank]
    if kind in OWN_FAULTS:
        front.pool.send_fault(kind, ranks)
        return JsonResponse({"ranks": [], "sent": True})
    # With several ranks the fault hits wherever it can: a rank that has nothing stored has nothing to flip.
    arguments = _fault_arguments(fields)
    done = await front.pool.operate(lambda operation: protocol.Fault(operation, kind, arguments), ranks, any_suffices=True)
    return JsonResponse({"ranks": done})


def _fault_arguments(fields: Fields) -> dict[str, Any]:
    """Where and how often; what is absent is left to the engine."""
    limit = 2**31 - 1
    given: dict[str, Any] = {
        "target": fields.string("target", 64),
        "page": fields.integer("page", -limit, limit),
        "byte": fields.integer("byte", 0, limit),
        "count": fields.integer("count", 1, limit),
        "seconds": fields.number("seconds", 0, 60, 0.005) if fields.raw("seconds") is not None else None,
    }
    return {name: value for name, value in given.items() if value is not None}
