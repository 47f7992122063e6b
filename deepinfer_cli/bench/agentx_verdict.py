"""Whether an AgentX run may be believed: valid or not, comparable or not, and why. The harness's exit code decides nothing by being 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepinfer_cli.bench.aiperf_command import LEAST_S, AgentxPlan
from deepinfer_cli.bench.aiperf_outputs import Aggregate, LogFacts, ServerCounters
from deepinfer_cli.bench.aiperf_records import CANCELLED, FAILED, OK, TRUNCATED, WARMUP, WINDOW, RequestRow

MAX_TRUNCATED = 0.001
MAX_OVERFLOWS = 0.01
MAX_WRONG_LENGTH = 0.01
LEAST_COVERAGE = 0.95
MAX_DRIFT = 0.03
DRIFT_FROM_TOKENS = 2000  # below, the role headers alone are more than the limit
MAX_HIT_GAP = 0.01
MAX_START_DELAY_MS = 50.0
MAX_CLIENT_CPU = 0.90
MAX_CLOCK_STEP_S = 0.5
HEADER_TOKENS = 64  # role headers and markers around the declared system tokens
HANG_FACTOR, LEAST_HANG_S = 5.0, 1.0


@dataclass(frozen=True, slots=True)
class Reason:
    """One finding: a stable code, and a sentence with the numbers."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything a verdict rests on. `clock_step_s`: largest jump of the wall clock that we saw during the run."""

    plan: AgentxPlan
    rows: Sequence[RequestRow]
    exit_code: int | None
    aggregate: Aggregate | None
    counters: ServerCounters | None = None
    server_hit_share: float | None = None
    log: LogFacts = field(default_factory=LogFacts)
    interrupted: bool = False
    clock_step_s: float = 0.0
    client_cpu: float = 0.0
    answering_model: str = ""
    server_restarts: int = 0
    server_errors: int | None = None
    our_server: bool = False


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests of the window. `lost`: sent, but in no record, because they never ended."""

    ok: int
    failed: int
    truncated: int
    cancelled: int
    overflows: int
    lost: int

    @property
    def total(self) -> int:
        return self.ok + self.failed + self.truncated + self.cancelled + self.lost

    @property
    def failed_share(self) -> float:
        return (self.failed + self.truncated + self.cancelled + self.lost) / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`official` repeats the harness's own mark and is never set by us."""

    valid: bool
    comparable: bool
    reasons: tuple[Reason, ...]
    not_comparable: tuple[Reason, ...]
    warnings: tuple[Reason, ...]
    counts: Counts
    coverage: float
    official: bool | None = None


def judge(evidence: Evidence) -> Verdict:
    """Apply every rule; all that fail are named, not only the first."""
    window = [r for r in evidence.rows if r.phase == WINDOW]
    counts, covered = count(evidence, window), coverage(evidence, window)
    reasons = [*_harness(evidence), *_clock(evidence, window), *_counts(evidence, counts, window), *_lengths(evidence, window)]
    if window and covered < LEAST_COVERAGE:
        text = f"the last answer came {covered:.1%} into the {evidence.plan.duration_s:g} s window, {LEAST_COVERAGE:.0%} is needed"
        reasons.append(Reason("coverage", text))
    reasons += [*_warmup(evidence), *_tokens(evidence, window), *_cold(evidence), *_metrics(evidence), *_client(evidence)]
    if evidence.server_restarts:
        reasons.append(Reason("server_restarted", f"{evidence.server_restarts} rank(s) or servers restarted during the run"))
    apart = _not_comparable(evidence)
    return Verdict(
        valid=not reasons,
        comparable=not reasons and not apart,
        reasons=tuple(reasons),
        not_comparable=tuple(apart),
        warnings=tuple(_warnings(evidence, window, counts)),
        counts=counts,
        coverage=covered,
        official=evidence.aggregate.submission_valid if evidence.aggregate else None,
    )


def count(evidence: Evidence, window: Sequence[RequestRow]) -> Counts:
    outcomes = Counter(r.outcome for r in window)
    overflows = evidence.aggregate.num_overflows if evidence.aggregate else 0
    lost = max(0, (evidence.log.sent or 0) - len(window) - overflows)
    return Counts(outcomes[OK], outcomes[FAILED], outcomes[TRUNCATED], outcomes[CANCELLED], overflows, lost)


def coverage(evidence: Evidence, window: Sequence[RequestRow]) -> float:
    """(Last first-token time or last response with a TPOT − window start) over the planned window, at most 1."""
    seen = [r.start_s + r.ttft_ms / 1e3 for r in window if r.ttft_ms is not None]
    seen += [r.start_s + (r.e2e_ms or 0.0) / 1e3 for r in window if r.tpot_ms is not None]
    return min(1.0, max(seen, default=0.0) / evidence.plan.duration_s)


def _harness(evidence: Evidence) -> list[Reason]:
    found = []
    if evidence.interrupted:
        found.append(Reason("interrupted", "the run was interrupted; what was measured until then is kept"))
    if evidence.exit_code not in (0, None):
        found.append(
            Reason("harness_exit", f"the harness ended with code {evidence.exit_code}: {evidence.log.last_error or 'see harness.log'}")
        )
    aggregate = evidence.aggregate
    if aggregate is None:
        return [*found, Reason("no_result", "the harness wrote no result of this run")]
    if (aggregate.was_cancelled or not aggregate.is_complete) and not evidence.interrupted:
        found.append(Reason("incomplete", f"the harness stopped before the end: {aggregate.incomplete_reason or 'cancelled'}"))
    return found


def _clock(evidence: Evidence, window: Sequence[RequestRow]) -> list[Reason]:
    """The harness's time stamps are wall-clock times, its latencies are not: where they part, no rate and no order can be trusted."""
    if evidence.clock_step_s > MAX_CLOCK_STEP_S:
        return [Reason("clock_jump", f"the wall clock jumped by {evidence.clock_step_s:.1f} s during the run")]
    apart = [abs((r.end_ns - r.start_ns) / 1e9 - r.e2e_ms / 1e3) for r in window if r.e2e_ms is not None]
    backwards = sum(r.end_ns < r.start_ns for r in window)
    if backwards or max(apart, default=0.0) > MAX_CLOCK_STEP_S:
        text = f"time stamps and latencies of records differ by up to {max(apart, default=0.0):.1f} s, {backwards} end before they start"
        return [Reason("clock_jump", text)]
    return []


def _counts(evidence: Evidence, counts: Counts, window: Sequence[RequestRow]) -> list[Reason]:
    found = []
    if counts.total == 0:
        return [Reason("no_requests", "no request of the window ended")]
    limit = evidence.plan.max_failed
    if counts.failed_share > limit:
        text = (
            f"{counts.failed} failed, {counts.truncated} truncated, {counts.cancelled + counts.lost} cancelled of {counts.total} requests"
        )
        found.append(Reason("failed", f"{text}: {counts.failed_share:.1%}, limit {limit:.0%}; {first_errors(window)}".removesuffix("; ")))
    broken = sum(r.outcome == TRUNCATED and r.output_tokens is None for r in window)
    if broken and not any(r.output_tokens is not None for r in window):
        found.append(Reason("no_usage", "the server counted no tokens in any answer"))
    elif broken > MAX_TRUNCATED * counts.total:
        found.append(Reason("truncated", f"{broken} of {counts.total} answers broke off without an error and without a token count"))
    if counts.overflows > MAX_OVERFLOWS * (counts.total + counts.overflows):
        found.append(Reason("context_overflow", f"{counts.overflows} prompts were longer than the server's context"))
    found += _hung(evidence, counts, window)
    return found


def gave_up(evidence: Evidence) -> bool:
    """Whether open requests were cut off on purpose, by the user or by the harness."""
    return evidence.interrupted or (evidence.aggregate is not None and evidence.aggregate.was_cancelled)


def _hung(evidence: Evidence, counts: Counts, window: Sequence[RequestRow]) -> list[Reason]:
    """A request still open long after every other would have ended. With slow answers the grace time proves nothing."""
    open_ended = counts.cancelled + counts.lost
    usual_s = sorted(r.e2e_ms or 0.0 for r in window if r.ok)[-1] / 1e3 if counts.ok else 0.0
    if not open_ended or gave_up(evidence):
        return []
    if evidence.plan.grace_s < max(LEAST_HANG_S, HANG_FACTOR * usual_s):
        return []
    text = (
        f"{open_ended} request(s) never ended, {evidence.plan.grace_s:g} s after the window; the slowest good answer took {usual_s:.2f} s"
    )
    return [Reason("hung", text)]


def _lengths(evidence: Evidence, window: Sequence[RequestRow]) -> list[Reason]:
    told = [r for r in window if r.outcome in (OK, TRUNCATED) and r.output_tokens is not None and r.requested_tokens is not None]
    short = sum((r.output_tokens or 0) < (r.requested_tokens or 0) for r in told)
    long = sum((r.output_tokens or 0) > (r.requested_tokens or 0) for r in told)
    found = []
    if short > MAX_TRUNCATED * len(told):
        blame = "streams that broke off, or a server that cuts answers short"
        if evidence.server_errors is not None:
            blame = f"the server counted {evidence.server_errors} failed requests"
        found.append(Reason("short_answers", f"{short} of {len(told)} answers have fewer tokens than asked for: {blame}"))
    if long > MAX_WRONG_LENGTH * len(told):
        found.append(Reason("long_answers", f"{long} of {len(told)} answers have more tokens than asked for"))
    return found


def first_errors(window: Sequence[RequestRow], most: int = 3) -> str:
    """The first distinct errors, in order of appearance."""
    told = [f"{r.error_code or r.error_type}: {shorten(r.error_text)}" for r in window if r.outcome == FAILED]
    return " · ".join(list(dict.fromkeys(told))[:most])


def shorten(text: str, width: int = 100) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _warmup(evidence: Evidence) -> list[Reason]:
    bad = [r for r in evidence.rows if r.phase == WARMUP and r.outcome in (FAILED, CANCELLED)]
    return [Reason("warmup_failed", f"{len(bad)} warm-up request(s) failed: {shorten(bad[0].error_text or bad[0].outcome)}")] if bad else []


def _tokens(evidence: Evidence, window: Sequence[RequestRow]) -> list[Reason]:
    found = []
    long = [r for r in window if r.ok and (r.recorded_prompt_tokens or 0) > DRIFT_FROM_TOKENS and r.prompt_tokens is not None]
    recorded = sum(r.recorded_prompt_tokens or 0 for r in long)
    drift = abs(sum(r.prompt_tokens or 0 for r in long) - recorded) / recorded if recorded else 0.0
    if drift > MAX_DRIFT:
        found.append(Reason("token_drift", f"the server counts {drift:.1%} other prompt tokens than the traces: a wrong tokenizer"))
    if evidence.answering_model and evidence.answering_model != evidence.plan.model:
        found.append(Reason("wrong_model", f"{evidence.answering_model!r} answered, {evidence.plan.model!r} was asked"))
    return found


def _cold(evidence: Evidence) -> list[Reason]:
    """On a cold start nothing but a shared system message can be cached when a lane sends its first request."""
    if evidence.plan.cache != "cold":
        return []
    first: dict[str, RequestRow] = {}
    for row in evidence.rows:
        first.setdefault(row.root_id, row)
    lanes = sorted(first.values(), key=lambda r: r.start_ns)[: evidence.plan.concurrency]
    warm = [r for r in lanes if (r.cached_tokens or 0) > evidence.plan.traces.declared_tokens(r.trace) + HEADER_TOKENS]
    if not warm:
        return []
    worst = max(warm, key=lambda r: r.cached_tokens or 0)
    text = f"{len(warm)} of {len(lanes)} lanes found a warm cache on their first request, up to {worst.cached_tokens:,} tokens"
    return [Reason("not_cold", text)]


def _metrics(evidence: Evidence) -> list[Reason]:
    counters = evidence.counters
    if counters is None:
        return [Reason("metrics_missing", "the server's /metrics was never scraped")] if evidence.our_server and evidence.aggregate else []
    if counters.successful < counters.configured:
        return [Reason("metrics_missing", f"{counters.successful} of {counters.configured} metrics endpoints answered")]
    return []


def _client(evidence: Evidence) -> list[Reason]:
    delay = evidence.aggregate.start_delay_p99_ms if evidence.aggregate else None
    if delay is not None and delay > MAX_START_DELAY_MS:
        return [
            Reason(
                "client_slow",
                f"requests left {delay:.0f} ms late at p99, limit {MAX_START_DELAY_MS:.0f} ms: the load generator was the bottleneck",
            )
        ]
    if evidence.client_cpu > MAX_CLIENT_CPU:
        return [Reason("client_slow", f"a process of the load generator used {evidence.client_cpu:.0%} of a core")]
    return []


def _not_comparable(evidence: Evidence) -> list[Reason]:
    plan = evidence.plan
    found = []
    if plan.duration_s < LEAST_S:
        found.append(Reason("short_window", f"window {plan.duration_s:g} s, {LEAST_S:g} s is the least"))
    answered = [r for r in evidence.rows if r.ok]
    if answered and not any(r.rank is not None or r.cached_tokens is not None for r in answered):
        found.append(Reason("no_cached_tokens", "the server reports no cached tokens"))
    return found


def client_hit_share(rows: Sequence[RequestRow]) -> float | None:
    """Σ cached / Σ prompt over good rows of the window; None where the server reports no cached tokens."""
    told = [r for r in rows if r.phase == WINDOW and r.ok and r.cached_tokens is not None and r.prompt_tokens]
    prompt = sum(r.prompt_tokens or 0 for r in told)
    return sum(r.cached_tokens or 0 for r in told) / prompt if prompt else None


def _warnings(evidence: Evidence, window: Sequence[RequestRow], counts: Counts) -> list[Reason]:
    found = []
    if counts.lost and not gave_up(evidence):
        text = f"{counts.lost} request(s) still ran {evidence.plan.grace_s:g} s after the window and are in no record"
        found.append(Reason("lost", text))
    client, server = client_hit_share(window), evidence.server_hit_share
    if client is not None and server is not None and abs(client - server) > MAX_HIT_GAP:
        found.append(Reason("hit_rate_differs", f"hit rate {client:.1%} by the answers, {server:.1%} by the server's counters"))
    chunked = [r.tokens_per_chunk for r in window if r.ok and r.tokens_per_chunk]
    if chunked and max(chunked) > 1.5 and evidence.plan.harness == "fork":
        found.append(Reason("chunked", "several tokens per chunk and no usage per chunk: TPOT reads too low"))
    if evidence.aggregate and evidence.counters is None and not evidence.our_server:
        found.append(Reason("no_server_metrics", "no /metrics: hit rates are the client's only"))
    return found


def as_json(verdict: Verdict) -> dict[str, object]:
    """For `run.json`."""

    def plain(reasons: tuple[Reason, ...]) -> list[Mapping[str, str]]:
        return [{"code": r.code, "text": r.text} for r in reasons]

    counts = verdict.counts
    return {
        "valid": verdict.valid,
        "comparable": verdict.comparable,
        "official": verdict.official,
        "reasons": plain(verdict.reasons),
        "not_comparable": plain(verdict.not_comparable),
        "warnings": plain(verdict.warnings),
        "coverage": verdict.coverage,
        "counts": {name: getattr(counts, name) for name in ("ok", "failed", "truncated", "cancelled", "overflows", "lost")},
    }
