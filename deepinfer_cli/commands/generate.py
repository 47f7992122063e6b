"""`dix generate`: text from the engine in this process, without a server."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.options import command
from deepinfer_cli.ui import stdin_is_piped
from hicache.errors import ConfigError

# One batch of prompts has nothing to find in a cache.
OFFLINE_DEFAULTS: dict[str, Any] = {"hicache.size_gb": 0.0}


def _generate(
    call: Invocation,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts; without any, one per line of stdin.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="tiny, a directory, or a hub id.  [default: tiny]")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", metavar="X", min=0, help="0 always takes the likeliest token.")] = 0.0,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Send each prompt as a user message, or as it is.")] = False,
) -> int:
    """Generate text offline, without a server.

      dix generate --chat "Tell me a joke." "Count to five."
      dix generate "The capital of France is" --max-tokens 16
      cat prompts.txt | dix generate --json

    Next: dix serve
    """
    texts = list(prompts or ()) or ([line.rstrip("\n") for line in sys.stdin if line.strip()] if stdin_is_piped() else [])
    if not texts:
        raise ConfigError("there is no prompt", hint='dix generate --chat "Tell me a joke.", or one prompt per line on stdin')
    if "" in texts:
        raise ConfigError(f"prompt {texts.index('') + 1} of {len(texts)} is empty", hint='dix generate --chat "Tell me a joke."')
    from deepinfer_cli.models import resolve_model

    directory, name = resolve_model(call, model)
    started_s = time.perf_counter()
    results = run_offline(call, directory, texts, chat, max_tokens, temperature)
    took_s = time.perf_counter() - started_s
    if call.json:
        items = [
            {"prompt": text, "text": r.text, "token_ids": list(r.token_ids), "finish_reason": str(r.finish_reason)}
            for text, r in zip(texts, results, strict=True)
        ]
        call.ui.document("dix.generate/1", {"model": name, "results": items, "total_s": took_s})
        return ExitCode.OK
    for text, result in zip(texts, results, strict=True):
        call.ui.print(result.text if chat else text + result.text)
    count = sum(len(r.token_ids) for r in results)
    call.ui.note(f"{count:,} tokens in {took_s:.1f} s, loading included", "quiet")
    return ExitCode.OK


def run_offline(call: Invocation, directory: Path, texts: list[str], chat: bool, max_tokens: int, temperature: float) -> list[Any]:
    """Results in the order of the prompts."""
    from deepinfer_cli.models import open_engine
    from engine.request import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    with call.ui.progress("loading", 1.0) as bar:
        llm = open_engine(call, directory, hicache=call.settings.hicache, on_progress=lambda stage, share: bar.update(share, stage))
    try:
        if chat:
            return list(llm.generate(prompt_token_ids=[_chat_ids(directory, text, call) for text in texts], params=params))
        return list(llm.generate(texts, params=params))
    finally:
        llm.close()


def _chat_ids(directory: Path, text: str, call: Invocation) -> list[int]:
    from deepinfer_cli.commands.render import render_body

    body = {"messages": [{"role": "user", "content": text}], "thinking": {"type": "disabled"}}
    return list(render_body(call, directory, body).token_ids)


generate = command(_generate, sections=("engine", "hicache"), defaults=OFFLINE_DEFAULTS, leave_out=("engine.model", "engine.dp"))
