"""From what the user asked and what the server is to a resolved plan. Nothing is measured here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from deepinfer_cli.bench.agentx_preflight import Preflight
from deepinfer_cli.bench.agentx_sets import default_set, open_traces
from deepinfer_cli.bench.aiperf_command import FAST_S, LEAST_S, OFFICIAL_S, AgentxPlan
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.models import is_tiny, make_ready
from deepinfer_cli.outputs import output
from hicache.errors import ConfigError
from server.launch import load_launch
from server.state import list_servers

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
BASE_SEED = 42
CACHES = ("cold", "warm", "asis")
SLO_KEYS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line, parsed. None: not given. Times in seconds."""

    traces: str | None = None
    duration_s: float | None = None
    fast: bool = False
    concurrency: int = 8
    grace_s: float | None = None
    start: tuple[float, float] = (0.25, 0.75)
    warmup_s: float | None = None
    cache: str = "cold"
    max_failed: float = 0.10
    slo: Mapping[str, float] = field(default_factory=dict)
    tokenizer: Path | None = None
    metrics_urls: tuple[str, ...] = ()
    raw: bool = False
    extra: Mapping[str, object] = field(default_factory=dict)
    harness: str = "aiperf"


def resolve_plan(call: Invocation, asked: Asked, found: Preflight) -> tuple[AgentxPlan, list[str]]:
    """The plan, and what was decided for the user, to be said aloud. Raises: ConfigError."""
    said = []
    spec = asked.traces
    if spec is None:
        spec, why = default_set(is_tiny(found.model), call.environ)
        said.append(f"traces {spec}: {why}")
    traces = open_traces(spec, call.paths.cache)
    duration_s = asked.duration_s if asked.duration_s is not None else FAST_S if asked.fast else OFFICIAL_S
    short = duration_s < LEAST_S
    plan = AgentxPlan(
        url=found.url,
        model=found.model,
        tokenizer=keep_tokenizer(asked.tokenizer or find_tokenizer(call, found), call.paths.cache),
        traces=traces,
        concurrency=asked.concurrency,
        duration_s=duration_s,
        # The harness waits out the whole grace when a session is parked, so short windows get a short one.
        grace_s=asked.grace_s if asked.grace_s is not None else 10.0 if short else 30.0,
        seed=BASE_SEED,
        start=asked.start,
        warmup_s=asked.warmup_s if asked.warmup_s is not None else min(60.0, duration_s / 10),
        cache=asked.cache,
        max_failed=asked.max_failed,
        max_context=found.max_context,
        slo=asked.slo,
        metrics_urls=asked.metrics_urls,
        raw=asked.raw,
        extra=asked.extra,
        harness=asked.harness,
    )
    return plan, said


def settle_cache(plan: AgentxPlan, found: Preflight) -> AgentxPlan:
    """A cold start only where the server can empty its cache; preflight has said so otherwise."""
    return replace(plan, cache="asis") if plan.cache == "cold" and not found.can_reset else plan


def repeat(plan: AgentxPlan, index: int) -> AgentxPlan:
    """The same work with the next seed."""
    return replace(plan, seed=plan.seed + index)


def recipe_hash(plan: AgentxPlan, base_seed: int = BASE_SEED) -> str:
    """Changes with anything that changes the requests. Repeats share it: their seeds follow from the first."""
    facts = {
        "traces": plan.traces.digest or plan.traces.public,
        "seed": base_seed,
        "start": plan.start,
        "warmup_s": plan.warmup_s,
        "concurrency": plan.concurrency,
        "duration_s": plan.duration_s,
        "cache": plan.cache,
        "max_context": plan.max_context,
        "extra": plan.extra,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def plain(plan: AgentxPlan) -> dict[str, object]:
    """For `config.json`."""
    names = "url model concurrency duration_s grace_s seed start warmup_s cache max_failed max_context harness tokenizer metrics_urls"
    out: dict[str, object] = {name: getattr(plan, name) for name in names.split()}
    traces = {"name": plan.traces.name, "folder": plan.traces.folder, "public": plan.traces.public, "digest": plan.traces.digest}
    return out | {"traces": traces, "slo": dict(plan.slo), "extra": dict(plan.extra)}


def find_tokenizer(call: Invocation, found: Preflight) -> Path:
    """The running server's checkpoint, or the embedded model's. Raises: ConfigError when neither is the served model."""
    for state in list_servers(call.paths.state):
        if state.base_url == found.url:
            model = Path(load_launch(Path(state.server_dir) / "launch.json").engine.model)
            if (model / TOKENIZER_FILES[0]).is_file():
                return model
    if is_tiny(found.model):
        return make_ready(call)
    raise ConfigError(f"the tokenizer of {found.model!r} at {found.url} is not known here", hint="--tokenizer DIR with its tokenizer.json")


def keep_tokenizer(source: Path, cache: Path) -> Path:
    """Copy the two files that the harness needs into a directory named by their content, because it caches by name."""
    if not (source / TOKENIZER_FILES[0]).is_file():
        raise ConfigError(f"{source} holds no tokenizer.json", hint="--tokenizer takes the directory of the served model")
    files = {name: (source / name).read_bytes() for name in TOKENIZER_FILES if (source / name).is_file()}
    digest = hashlib.sha256(b"\0".join(name.encode() + data for name, data in files.items())).hexdigest()[:16]
    folder = cache / "tokenizers" / f"tokenizer-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != len(data):
            with output(folder / name) as place:
                place.write_bytes(data)
    return folder
