"""`dix chat`: talk to a running server, or to a model that is served for this talk only."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from deepinfer_cli.api import Answer, Api, Collector, RequestRefused
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.options import Url, command
from deepinfer_cli.servers import connect, read_key
from deepinfer_cli.ui import stdin_is_piped
from hicache.errors import ConfigError, DixError
from server.errors import ServerUnreachable
from server.state import list_servers, server_dir

THINK = {"auto": None, "on": {"type": "enabled"}, "off": {"type": "disabled"}}
ADDRESS = re.compile(r"[\w.-]+:\d+(/\S*)?")
LEAST_FOR_SPEED = 16  # tokens: a step with drafts gives up to six
HELP = "/reset forgets the talk · /exit or Ctrl-D ends it"


@dataclass(slots=True)
class Talk:
    """A conversation with one server."""

    call: Invocation
    api: Api
    base: dict[str, Any]
    messages: list[dict[str, str]]

    def say(self, text: str) -> Answer:
        """Send one message, print the answer as it comes, and remember both."""
        self.messages.append({"role": "user", "content": text})
        collector, ui = Collector(), self.call.ui
        thinking = False
        try:
            for chunk in self.api.stream({**self.base, "messages": self.messages}):
                collector.push(chunk)
                if self.call.json:
                    continue
                if chunk.reasoning and not ui.options.quiet:
                    ui.think(chunk.reasoning)
                    thinking = True
                if chunk.content:
                    if thinking:
                        ui.note("")
                        thinking = False
                    ui.write(chunk.content)
                for item in chunk.tool_calls:
                    function = item.get("function") or {}
                    ui.write(str(function.get("name") or function.get("arguments") or ""))
        except ServerUnreachable:
            self.messages.pop()
            raise
        answer = collector.answer()
        self.messages.append({"role": "assistant", "content": answer.content})
        self._after(answer)
        return answer

    def _after(self, answer: Answer) -> None:
        if self.call.json:
            return
        self.call.ui.write("\n")
        self.call.ui.note(stats_line(answer), "quiet")


def stats_line(answer: Answer) -> str:
    """`TTFT 0.21 s · 84.7 tok/s · 312 tokens · 1,024 from prefix cache`.

    An answer of one or two steps has no speed: its tokens come at once.
    """
    cut = " · cut at --max-tokens" if answer.finish_reason == "length" else ""
    speed = f" · {answer.tok_s:,.1f} tok/s" if answer.output_tokens >= LEAST_FOR_SPEED else ""
    return f"TTFT {answer.ttft_s:.2f} s{speed} · {answer.output_tokens:,} tokens · {answer.cached:,} from prefix cache{cut}"


def _chat(
    call: Invocation,
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL|URL", help="Model or server.  [default: the running server, else tiny]")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", metavar="P", help="Port of a server on this machine.")] = None,
    url: Url = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", metavar="X", min=0, help="0 always takes the likeliest token.")] = 1.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="Longest answer.")] = 2048,
    think: Annotated[str, typer.Option("--think", metavar="auto|on|off", help="Thinking mode; auto leaves it to the server.")] = "auto",
    once: Annotated[str | None, typer.Option("--once", metavar="TEXT", help="Send this, print the answer, end.")] = None,
) -> int:
    """Talk to a model. Piped text is sent as one message.

      dix chat tiny                        starts the embedded model for this talk
      dix chat --once "Tell me a joke."
      git diff | dix chat --system "Review this."

    Next: dix check-cache, dix bench run smoke
    """
    if think not in THINK:
        raise ConfigError(f"--think is {think!r}", hint="auto, on or off")
    text = once if once is not None else (sys.stdin.read().strip() if stdin_is_piped() else None)
    if text == "":
        raise ConfigError("there is nothing to send", hint='pipe some text, or --once "Hello"')
    with opened(call, target, port, url) as api:
        base: dict[str, Any] = {"model": api.model(), "temperature": temperature, "max_tokens": max_tokens, "session_id": "chat"}
        if THINK[think] is not None:
            base["thinking"] = THINK[think]
        talk = Talk(call, api, base, [{"role": "system", "content": system}] if system else [])
        if text is None:
            converse(talk)
        else:
            answer = talk.say(text)
            if call.json:
                call.ui.document("dix.chat/1", plain(base["model"], answer))
    return ExitCode.OK


def converse(talk: Talk) -> None:
    """Read lines until Ctrl-D. Ctrl-C while an answer comes stops the answer; at the prompt it ends the talk."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    talk.call.ui.note(f"{talk.base['model']} at {talk.api.url}", "quiet")
    talk.call.ui.note(HELP, "quiet")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            talk.call.ui.note("")
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            del talk.messages[1 if talk.messages and talk.messages[0]["role"] == "system" else 0 :]
        elif text:
            try:
                talk.say(text)
            except KeyboardInterrupt:
                talk.messages.pop()
                talk.call.ui.note("\nstopped", "quiet")
            except RequestRefused as refused:  # a talk that has grown too long, say: /reset goes on
                talk.messages.pop()
                talk.call.ui.error(str(refused), refused.hint or "/reset forgets the talk")


@contextlib.contextmanager
def opened(call: Invocation, target: str | None, port: int | None, url: str | None) -> Iterator[Api]:
    """A connection; a model that no server serves is started for as long as the talk lasts."""
    if target and ("://" in target or ADDRESS.fullmatch(target)):
        url, target = target, None
    running = list_servers(call.paths.state)
    match = next((s for s in running if target in (s.name, s.served_name)), None)
    if match is not None and port is None and url is None:
        yield Api(match.base_url, read_key(call))
    elif port is not None or url is not None or (target is None and running):
        yield connect(call, port, url)
    else:
        with own_server(call, target) as address:
            yield Api(address, read_key(call))


@contextlib.contextmanager
def own_server(call: Invocation, model: str | None) -> Iterator[str]:
    """A server on a free port that ends with the talk. Its directory goes as well, unless it failed: then its log may be wanted."""
    import os
    import shutil

    from deepinfer_cli.commands.serve import SERVER_DEFAULTS, plan_server
    from deepinfer_cli.invocation import Shared, prepare
    from server import launcher

    serving = prepare(Shared(quiet=call.ui.options.quiet), {"server.port": 0}, SERVER_DEFAULTS, call.environ)
    plan = plan_server(serving, model, f"chat-{os.getpid()}")
    call.ui.note(f"starting {plan.server.served_name} for this talk", "quiet")
    state = launcher.start(plan, lambda event: None, owned=True)
    failed = False
    try:
        yield state.base_url
    except DixError:
        failed = True
        raise
    finally:
        launcher.stop(plan.name, call.paths.state, 0.0)
        if not failed:
            shutil.rmtree(server_dir(call.paths.state, plan.name), ignore_errors=True)


def plain(model: str, answer: Answer) -> dict[str, Any]:
    return {
        "model": model,
        "content": answer.content,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "usage": dict(answer.usage),
        "ttft_s": answer.ttft_s,
        "total_s": answer.total_s,
        "tok_s": answer.tok_s,
    }


chat = command(_chat)
