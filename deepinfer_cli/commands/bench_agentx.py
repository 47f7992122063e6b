"""`dix bench agentx`: replay recorded coding-agent sessions against a server and keep the run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.options import AnyUrl, Label, Port, command
from deepinfer_cli.servers import DEFAULT_PORT, connect, read_key
from deepinfer_cli.units import parse_duration, parse_fraction
from hicache.errors import ConfigError

Traces = Annotated[str | None, typer.Option("--traces", metavar="NAME|DIR", help="bundled, small, long, public, public-256k, or files.")]
Concurrency = Annotated[int, typer.Option("--concurrency", metavar="N", min=1, help="Sessions replayed at once.")]
Duration = Annotated[
    str | None,
    typer.Option("--duration", metavar="TIME", help="Measured window; under 900 s: not comparable.", show_default="3600s"),
]
Fast = Annotated[bool, typer.Option("--fast", help="A window of 20 minutes.")]
Repeats = Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Runs; several give intervals between runs.")]
Cache = Annotated[str, typer.Option("--cache", metavar="STATE", help="cold: emptied before; warm, asis: as it is.")]
Grace = Annotated[
    str | None,
    typer.Option("--grace", metavar="TIME", help="Wait for running answers after the window.", show_default="30s, 10s under 900s"),
]
Warmup = Annotated[
    str | None,
    typer.Option("--warmup-duration", metavar="TIME", help="Cache warm-up before the window.", show_default="60s, at most a tenth"),
]
Start = Annotated[str, typer.Option("--start", metavar="A:B", help="Where in their traces sessions start, in percent.")]
MaxFailed = Annotated[str, typer.Option("--max-failed", metavar="PCT", help="Share of failed requests that a valid run may have.")]
Slo = Annotated[str, typer.Option("--slo", metavar="LIMITS", help="Limits for goodput, such as ttft=2s,tpot=50ms.")]
TokenizerDir = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="DIR", help="The served model's tokenizer.", show_default="the server's checkpoint"),
]
MetricsUrls = Annotated[
    list[str] | None, typer.Option("--metrics-url", metavar="URL", help="A further Prometheus endpoint; may be repeated.")
]
HarnessName = Annotated[str, typer.Option("--harness", metavar="NAME", help="aiperf, or fork in its own environment.")]
Extra = Annotated[str, typer.Option("--extra", metavar="JSON", help="Fields merged into every request body.")]
Raw = Annotated[bool, typer.Option("--raw", help="Keep every streamed event.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the harness's environment and command, start nothing.")]


def _agentx(
    call: Invocation,
    port: Port = None,
    url: AnyUrl = None,
    traces: Traces = None,
    concurrency: Concurrency = 8,
    duration: Duration = None,
    fast: Fast = False,
    repeats: Repeats = 1,
    cache: Cache = "cold",
    grace: Grace = None,
    warmup_duration: Warmup = None,
    start: Start = "25:75",
    max_failed: MaxFailed = "10%",
    slo: Slo = "",
    tokenizer: TokenizerDir = None,
    metrics_url: MetricsUrls = None,
    harness: HarnessName = "aiperf",
    extra: Extra = "",
    raw: Raw = False,
    label: Label = None,
    dry_run: DryRun = False,
) -> int:
    """Replay recorded coding-agent sessions against a server and keep the run.

      dix bench agentx                                  the one running server, 8 sessions at a time, 60 min
      dix bench agentx --concurrency 32 --repeats 5     enough for intervals between runs
      dix bench agentx --fast                           20 min look
      dix bench agentx --traces bundled --duration 60s  a check of two minutes

    Exit code 5 when the run is not valid, 4 when the server is not there.

    Next: dix report last
    """
    from deepinfer_cli.bench import agentx_plan
    from deepinfer_cli.commands.bench import parse_labels

    asked = agentx_plan.Asked(
        traces=traces,
        duration_s=parse_duration(duration, "--duration") if duration else None,
        fast=fast,
        concurrency=concurrency,
        grace_s=parse_duration(grace, "--grace") if grace else None,
        start=parse_start(start),
        warmup_s=parse_duration(warmup_duration, "--warmup-duration") if warmup_duration else None,
        cache=choose("--cache", cache, agentx_plan.CACHES),
        max_failed=parse_fraction(max_failed, "--max-failed"),
        slo=parse_slo(slo),
        tokenizer=tokenizer,
        metrics_urls=tuple(metrics_url or ()),
        raw=raw,
        extra=parse_extra(extra),
        harness=choose("--harness", harness, ("aiperf", "fork")),
    )
    if dry_run:
        return show_command(call, asked, port, url)
    return measure(call, asked, port, url, repeats, parse_labels(label or []))


def measure(call: Invocation, asked: object, port: int | None, url: str | None, repeats: int, labels: dict[str, str]) -> int:
    """Preflight and all repeats. Returns the worst exit code."""
    from deepinfer_cli.bench import agentx_plan, agentx_preflight
    from deepinfer_cli.bench.agentx_run import AgentxRun
    from deepinfer_cli.bench.aiperf_command import overrides
    from deepinfer_cli.bench.aiperf_harness import find_harness
    from deepinfer_cli.bench.compiled import await_compiled
    from deepinfer_cli.commands.bench import show_run

    assert isinstance(asked, agentx_plan.Asked)
    found_harness = find_harness(asked.harness, call.paths.cache)
    api, key = connect(call, port, url), read_key(call)
    found = agentx_preflight.reach(api)
    await_compiled(api, call.ui)
    plan, said = agentx_plan.resolve_plan(call, asked, found)
    call.paths.runs.mkdir(parents=True, exist_ok=True)
    agentx_preflight.check(api, key, found, plan.tokenizer, plan.traces, plan.cache, call.paths.runs)
    plan = agentx_plan.settle_cache(plan, found)
    for text in [*said, *(f"scenario overridden: {reason}" for reason in overrides(plan))]:
        call.ui.note(text, "quiet")
    for note in found.notes:
        call.ui.warn(note)
    worst = int(ExitCode.OK)
    for index in range(repeats):
        if index and plan.cache == "cold" and found.can_reset:
            api.post("/reset_prefix_cache", {})
        run = AgentxRun(call, agentx_plan.repeat(plan, index), found_harness, found, api, labels, key)
        head = f"agentx · {found.model} at {found.url} · {plan.traces.name} · {plan.concurrency} sessions · {plan.duration_s:g} s"
        call.ui.note(f"{head} · run {index + 1} of {repeats} · unofficial", "quiet")
        verdict, code = run.execute()
        for reason in verdict.reasons:
            call.ui.warn(f"not valid: {reason.text}")
        show_run(call, run.folder)
        worst = max(worst, code)
        if code == ExitCode.INTERRUPTED:
            break
    return worst


def show_command(call: Invocation, asked: object, port: int | None, url: str | None) -> int:
    """Print what would be started. A server is asked for its model when it answers; nothing is sent otherwise."""
    from deepinfer_cli.bench import agentx_plan, agentx_preflight
    from deepinfer_cli.bench.aiperf_command import OFFLINE_TRAPS, arguments, command_text, overrides, special_environment
    from server.errors import ServerUnreachable

    assert isinstance(asked, agentx_plan.Asked)
    try:
        found = agentx_preflight.reach(connect(call, port, url))
    except ServerUnreachable:
        found = agentx_preflight.Preflight(url or f"http://127.0.0.1:{port or DEFAULT_PORT}", "tiny")
        call.ui.note(f"{found.url} does not answer: model and tokenizer are those of the embedded model", "warning")
    plan, said = agentx_plan.resolve_plan(call, asked, found)
    folder = call.paths.runs / "NEW-RUN"
    rows = arguments(plan, folder / "harness")
    special = special_environment(call.environ, folder, plan.traces)
    program = "agentx" if plan.harness == "fork" else "aiperf"
    for text in [*said, *(f"scenario overridden: {reason}" for reason in overrides(plan))]:
        call.ui.note(text, "quiet")
    if call.json:
        flat = [program, *(word for row in rows for word in row)]
        call.ui.document("dix.agentx-command/1", {"environment": special, "unset": list(OFFLINE_TRAPS), "arguments": flat})
    else:
        call.ui.print(command_text(program, rows, special))
    return ExitCode.OK


def choose(flag: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(f"{flag} is {value!r}", hint=f"one of: {', '.join(known)}")
    return value


def parse_start(text: str) -> tuple[float, float]:
    """`25:75` -> (0.25, 0.75)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", text)
    if match is None or not 0 <= float(match[1]) <= float(match[2]) <= 100:
        raise ConfigError(f"--start is {text!r}", hint="two percentages such as 25:75, the smaller one first")
    return float(match[1]) / 100, float(match[2]) / 100


def parse_slo(text: str) -> dict[str, float]:
    """`ttft=2s,tpot=50ms` -> seconds."""
    from deepinfer_cli.bench.agentx_plan import SLO_KEYS

    out = {}
    for part in filter(None, text.split(",")):
        key, sign, value = part.partition("=")
        if not sign or key not in SLO_KEYS:
            raise ConfigError(f"--slo {part!r} is not KEY=TIME", hint=f"keys: {', '.join(SLO_KEYS)}; for example ttft=2s,tpot=50ms")
        out[key] = parse_duration(value, f"--slo {key}")
    return out


def parse_extra(text: str) -> dict[str, object]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra is not JSON: {error}", hint="""for example '{"temperature": 0}'""") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--extra is {text!r}", hint="a JSON object")
    return value


agentx = command(_agentx)
