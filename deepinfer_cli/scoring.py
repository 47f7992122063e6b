"""`dix model eval`: the embedded model's held-out scores, through an engine in this process or over HTTP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_cli.api import Api
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.models import open_engine
from deepinfer_cli.sse import cached_tokens
from deepinfer_cli.ui import Column

if TYPE_CHECKING:
    from engine.eval_prompts import EvalPrompt, Reply
    from engine.evaluate import Evaluation, Score

CONCURRENCY = 8


@dataclass(slots=True)
class CacheProof:
    """Every prompt asked from the cache and past it. hits: prompts of which something was restored; different: answers that differ."""

    prompts: int = 0
    prompt_tokens: int = 0
    hits: int = 0
    hit_tokens: int = 0
    different: int = 0


def score(call: Invocation, directory: Path) -> Evaluation:
    """Ask every shipped prompt of an engine in this process. Raises: CheckpointError and others of the engine."""
    from engine.eval_prompts import load_prompts
    from engine.evaluate import ask_engine, score_answers, score_drafts, text_perplexity

    prompts, texts = load_prompts()
    with call.ui.progress("loading", 1.0) as bar, open_engine(call, directory) as llm:
        evaluation = score_answers(ask_engine(llm, lambda name, p: bar.update(p.finished / max(1, p.total), name)), prompts)
        drafts = score_drafts(llm, prompts, lambda name: bar.update(1.0, f"drafts {name}")) if llm.engine.drafter is not None else None
        return dataclasses.replace(evaluation, drafts=drafts, perplexity=text_perplexity(llm, texts))


def score_server(call: Invocation, api: Api) -> tuple[Evaluation, CacheProof]:
    """Ask every shipped prompt of a server, each from its prefix cache and past it. The answers from the cache are scored.

    Raises: ServerUnreachable, RequestRefused.
    """
    from engine.eval_prompts import load_prompts
    from engine.evaluate import score_answers

    prompts, _ = load_prompts()
    proof = CacheProof()
    with call.ui.progress("eval", 1.0) as bar:
        ask = ask_server(api, api.model(), proof, lambda name, share: bar.update(share, name))
        return score_answers(ask, prompts), proof


def ask_server(
    api: Api, model: str, proof: CacheProof, on_progress: Callable[[str, float], None]
) -> Callable[[str, list[EvalPrompt]], list[Reply | None]]:
    """Answers of a server: every prompt is stored by a first request, asked with the cache, and asked without."""

    def ask_one(job: tuple[str, int, EvalPrompt]) -> tuple[Reply, int, int, bool]:
        from engine.eval_prompts import Reply

        name, number, prompt = job
        body = {"model": model, "session_id": f"eval-{name}-{number}", **chat_body(prompt)}
        api.post("/v1/chat/completions", {**body, "max_tokens": 1})
        hit, without = (api.post("/v1/chat/completions", {**body, "prefix_cache": on}, timeout_s=600) for on in (True, False))
        said, past = (answer["choices"][0]["message"] for answer in (hit, without))
        same = _without_ids(said) == _without_ids(past)
        reply = Reply.of(said.get("content"), said.get("tool_calls"))
        return reply, hit["usage"]["prompt_tokens"], cached_tokens(hit["usage"]) or 0, same

    def ask(name: str, asked: list[EvalPrompt]) -> list[Reply | None]:
        replies: list[Reply | None] = []
        pool = ThreadPoolExecutor(CONCURRENCY)
        try:
            for reply, prompt_tokens, cached, same in pool.map(ask_one, [(name, i, prompt) for i, prompt in enumerate(asked)]):
                replies.append(reply)
                proof.prompts += 1
                proof.prompt_tokens += prompt_tokens
                proof.hits += cached > 0
                proof.hit_tokens += cached
                proof.different += not same
                on_progress(name, len(replies) / len(asked))
        finally:
            # After an interrupt or a failure only the requests under way are waited for, not those behind them.
            pool.shutdown(cancel_futures=True)
        return replies

    return ask


def chat_body(prompt: EvalPrompt) -> dict[str, Any]:
    """The request whose rendering is the prompt: tools and response format move from the system message to their fields."""
    from engine.evaluate import MAX_ANSWER_TOKENS

    system = prompt.messages[0]
    messages = [{k: v for k, v in system.items() if k not in ("tools", "response_format")}, *prompt.messages[1:]]
    body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": MAX_ANSWER_TOKENS}
    body |= (
        {"thinking": {"type": "disabled"}}
        if prompt.effort is None
        else {"thinking": {"type": "enabled"}, "reasoning_effort": prompt.effort}
    )
    if system.get("tools"):
        body["tools"] = system["tools"]
    if prompt.schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "record", "schema": prompt.schema}}
    elif system.get("response_format"):
        body["response_format"] = system["response_format"]
    return body


def _without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what is new in every answer."""
    return {**message, "tool_calls": [call["function"] for call in message.get("tool_calls") or ()]}


def show(call: Invocation, name: str, evaluation: Evaluation, proof: CacheProof | None = None) -> None:
    """One table of scores with their floors, then controls, drafts and the cache; or the JSON document."""
    if call.json:
        cache = None if proof is None else dataclasses.asdict(proof)
        call.ui.document("dix.eval/1", {"model": name, **evaluation.document(), "cache": cache})
        return
    columns = [Column("Family", right=False), Column("Right"), Column("Of"), Column("Share"), Column("Floor"), Column("", right=False)]
    rows = [_row(family, result) for family, result in evaluation.scores.items()]
    rows += [_row(f"{family}, context shuffled", result) for family, result in evaluation.control.items()]
    call.ui.table(columns, rows)
    drafts = evaluation.drafts
    if drafts is not None:
        kept = ", ".join(f"{family} {mean:.2f}" for family, mean in drafts.kept.items())
        call.ui.print(f"drafts kept of a block: {kept}", "good" if drafts.passed else "bad")
        errors = ", ".join(f"{error:.3f}" for error in drafts.calibration)
        call.ui.print(f"error of their confidences by place: {errors}")
    if evaluation.perplexity is not None:
        call.ui.print(f"perplexity of plain text: {evaluation.perplexity:.1f} per token")
    if proof is not None:
        share = f"{proof.hits:,} of {proof.prompts:,} prompts from the cache, {proof.hit_tokens:,} of {proof.prompt_tokens:,} tokens"
        verdict = "same answers without it" if proof.different == 0 else f"{proof.different} answers differ without it"
        call.ui.print(f"{share}; {verdict}", "good" if proof.different == 0 else "bad")


def _row(family: str, result: Score) -> tuple[str, ...]:
    floor = "" if result.floor is None else f"{result.floor:.0%}"
    verdict = "" if result.floor is None else ("ok" if result.passed else "below")
    return family, f"{result.right:,}", f"{result.count:,}", f"{result.share:.1%}", floor, verdict
