"""What each number of a report means: definition, formula, and what it does not say. Read by `dix report --explain`."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_cli.settings import suggest
from hicache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Meaning:
    """One number. metric: its name in exports."""

    name: str
    metric: str
    unit: str
    what: str
    formula: str
    beware: str = ""


MEANINGS = (
    Meaning(
        "TTFT", "ttft", "ms", "Time to first token: from sending a request to the first chunk that carries output.",
        "first chunk − start, per good request", "A chunk may hold several tokens. Failed requests are not in it: look at their share.",
    ),
    Meaning(
        "ITL", "itl", "ms", "Inter-token latency: the gap between two chunks of a stream, all gaps of all good requests together.",
        "chunk[i + 1] − chunk[i]", "With speculation a chunk holds several tokens, so gaps alone flatter or blame: compare TPOT.",
    ),
    Meaning(
        "TPOT", "tpot", "ms", "Time per output token after the first, one number per request.",
        "(last chunk − first chunk) / (output tokens − 1)", "The number that comparisons use for decoding.",
    ),
    Meaning("End to end", "e2e", "ms", "From sending a request to the end of its stream.", "end − start, per good request"),
    Meaning(
        "Queue", "ttft_queue", "ms", "What the engine says a request waited before its first prompt step.",
        "admitted − arrived, on the rank's clock", "With several ranks an idle group waits for a vote: see dix tune prefill-interval.",
    ),
    Meaning(
        "Restore", "ttft_restore", "ms", "Copying the part of the prompt that the prefix cache held.",
        "restored − admitted, on the rank's clock",
    ),
    Meaning(
        "Prefill and first token", "ttft_prefill", "ms", "Computing the rest of the prompt, to the first token.",
        "first token − restored, on the rank's clock", "A long prompt runs in chunks; what other steps take in between is in it.",
    ),
    Meaning(
        "Server outside the engine", "ttft_front", "ms", "Routing and the way between front and rank.",
        "first output at the front − dispatch − queue − restore − prefill",
    ),
    Meaning(
        "Way to the client", "ttft_client", "ms", "HTTP, rendering and tokenising before dispatch, and sending the first chunk.",
        "client's TTFT − the front's time to first output", "On one machine the load generator competes with the server for the processor.",
    ),
    Meaning(
        "Hit rate", "hit_rate_client", "share", "Share of prompt tokens that came from the prefix cache, as the answers' usage says.",
        "Σ cached tokens / Σ prompt tokens", "Sum over sum, not a mean of ratios: long prompts count more.",
    ),
    Meaning(
        "Hit rate by counters", "hit_rate_server", "share", "The same by the server's counters, over the run, per rank and together.",
        "growth of hit tokens / growth of looked-up tokens", "Differs from the client's when others use the server.",
    ),
    Meaning(
        "Output tok/s", "output_rate", "tok/s", "Output tokens of good requests over the time from the first start to the last end.",
        "Σ output tokens / window",
    ),
    Meaning(
        "Input tok/s", "input_rate", "tok/s", "Prompt tokens likewise, cached ones included.", "Σ prompt tokens / window",
        "Mostly cached input is no work: see uncached.",
    ),
    Meaning(
        "Uncached input tok/s", "uncached_input_rate", "tok/s", "Prompt tokens that had to be computed.",
        "Σ (prompt − cached) / window",
    ),
    Meaning("Tok/s per user", "user_rate", "tok/s", "What one user sees while an answer comes.", "1 / median TPOT"),
    Meaning(
        "Acceptance", "speculation", "share", "Share of drafted tokens that verification kept, by the server's counters.",
        "growth of accepted / growth of drafted tokens", "Depends on the text: synthetic text is not yours.",
    ),
    Meaning(
        "Percentile", "p50", "", "Linear, over good requests; printed only with at least ten requests beyond it.", "numpy.percentile",
        "p99 of one run is a matter of luck: repeat runs and look at the interval.",
    ),
    Meaning(
        "Verdict", "verdict", "", "better, worse, same or cannot tell, from whole runs: requests of one run are not independent.",
        "Welch's interval on the logarithms of per-run values; better or worse share the risk over all questions asked (Bonferroni)",
        "same: the interval lies inside ±margin. One run a side: a block bootstrap, which holds within these runs only.",
    ),
)  # fmt: skip


def explain(word: str) -> list[Meaning]:
    """The meanings whose name or metric holds a word. Raises: ConfigError with the nearest name."""
    asked = word.lower().strip()
    exact = [m for m in MEANINGS if asked in (m.name.lower(), m.metric)]
    found = exact or [m for m in MEANINGS if asked in m.name.lower() or asked in m.metric]
    if not found:
        names = [m.name for m in MEANINGS]
        raise ConfigError(f"no metric {word!r}", hint=suggest(word, names, ", ".join(names)))
    return found
