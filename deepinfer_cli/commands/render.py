"""`dix render`: the exact prompt string and token ids of a chat body, offline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.options import command
from hicache.errors import ConfigError


def _render(
    call: Invocation,
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON body of a chat request; - reads stdin.")],
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="tiny, a directory, or a hub id.  [default: tiny]")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Print the token ids instead of the text.")] = False,
) -> int:
    """Show the exact prompt that a chat body becomes.

      dix render body.json
      echo '{"messages":[{"role":"user","content":"Hi"}]}' | dix render - --ids

    Next: dix chat
    """
    body = read_body(file)
    from deepinfer_cli.models import resolve_model

    directory, name = resolve_model(call, model)
    rendered = render_body(call, directory, body)
    token_ids = list(rendered.token_ids)
    if call.json:
        call.ui.document("dix.render/1", {"model": name, "prompt": rendered.prompt, "token_ids": token_ids, "count": len(token_ids)})
    elif ids:
        call.ui.print(" ".join(map(str, token_ids)))
    else:
        call.ui.write(rendered.prompt + "\n")
        call.ui.note(f"{len(token_ids):,} tokens", "quiet")
    return ExitCode.OK


def read_body(file: str) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        body = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", hint="name a file with a JSON body, or - for stdin") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}", hint='it should look like {"messages": [...]}') from None
    if not isinstance(body, dict):
        raise ConfigError(f"{file} holds no JSON object", hint='it should look like {"messages": [...]}')
    return body


def render_body(call: Invocation, directory: Path, body: dict[str, Any]) -> Any:
    """The rendered prompt. Raises: ConfigError with the field that is wrong."""
    from server.encoding import load_chat_format
    from server.errors import BadRequest
    from server.rendering import render_chat

    settings = call.settings
    tokenizer, encoder = load_chat_format(directory, settings.server.trust_checkpoint_code, dummy=settings.engine.load_format == "dummy")
    try:
        return render_chat(encoder, tokenizer, body)
    except BadRequest as error:
        where = f"{error.param}: " if error.param else ""
        raise ConfigError(f"{where}{error.message}", hint="the server would answer 400") from None


render = command(_render, sections=())
