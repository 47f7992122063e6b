"""`dix cache explain`: what a prompt finds in a live server's prefix cache, and where it parts from what is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from deepinfer_cli.api import RequestRefused
from deepinfer_cli.commands.render import read_body
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.options import Port, Url, command
from deepinfer_cli.servers import connect
from hicache.errors import ConfigError

MISSES = {
    "": "",
    "short": "too short: its last tokens are always computed, and less than a page is left",
    "no_page": "nothing of it is stored",
    "no_state": "pages are stored, but no window state among them",
    "keep_cap": "the only states lie within the last tokens, which are always computed",
    "tenant": "it is stored under another cache_salt of this API key",
    "aborted": "the prefill that would have left a window state for it was aborted",
    "off": "the prefix cache is off",
}


def _explain(
    call: Invocation,
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON body of a chat request; - reads stdin.", show_default=False)] = "",
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="A plain prompt instead.", show_default=False)] = "",
    port: Port = None,
    url: Url = None,
) -> int:
    """Show what a prompt would take from the prefix cache now, and the first token where it parts from a stored prompt.

      dix cache explain body.json
      dix cache explain --prompt "Once upon a time"

    Nothing is generated. Next: dix cache stats
    """
    if bool(file) == bool(prompt):
        raise ConfigError("say what to explain", hint="FILE with a chat body, or --prompt TEXT")
    body = {"prompt": prompt} if prompt else read_body(file)
    api = connect(call, port, url)
    answer = api.post("/deepinfer/cache/explain", body)
    if "ranks" not in answer:
        raise RequestRefused(200, "/deepinfer/cache/explain names no rank: not a server of dix")
    if call.json:
        call.ui.document("dix.cache.explain/1", {"url": api.url, **answer})
        return ExitCode.OK
    for rank in answer["ranks"]:
        show(call, rank, len(answer["ranks"]) > 1)
    return ExitCode.OK


def show(call: Invocation, record: Mapping[str, Any], with_rank: bool) -> None:
    """One rank's answer in sentences."""
    head = f"rank {record['rank']}: " if with_rank else ""
    restored, prompt = record.get("restore_tokens", 0), record["prompt_tokens"]
    call.ui.print(f"{head}{restored:,} of {prompt:,} tokens would be restored", "good" if restored else "")
    if miss := record.get("miss", ""):
        call.ui.print(f"  why not more: {MISSES.get(miss, miss)}", prose=True)
    if replay := record.get("replay"):
        how = (
            "rebuild the window approximately; what follows is not stored" if replay["mode"] == "bounded" else "rebuild the window exactly"
        )
        call.ui.print(f"  no state at {replay['end']:,}: {replay['tokens']:,} tokens before it are computed again and {how}", prose=True)
    priority = f", priority {record['priority']}" if record.get("priority") is not None else ""
    call.ui.print(f"  stored pages match up to token {record.get('matched_tokens', 0):,}{priority}")
    if states := record.get("states"):
        call.ui.print("  states at " + ", ".join(f"{s['position']:,} ({s['reason']})" for s in states), prose=True)
    if difference := record.get("first_difference"):
        where = place_of(difference["place"])
        how = " (same text, other tokens)" if difference.get("kind") == "split" else ""
        call.ui.print(f"  parts from a stored prompt at token {difference['index']:,}, {where}{how}", prose=True)
        call.ui.print(f"    stored {difference['stored_text']!r}")
        call.ui.print(f"    asked  {difference['asked_text']!r}")


def place_of(place: Mapping[str, Any]) -> str:
    """Where in a conversation two prompts part. A plain prompt has no turns, and what stands before the first one belongs to none."""
    if "tool" in place:
        return f"in tool {place['tool']!r}"
    return f"in turn {place['turn']} ({place['opened_by']})" if place["opened_by"] else "before the first turn"


explain = command(_explain)
