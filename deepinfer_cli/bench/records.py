"""What the load generator writes down about one request. Standard library only: the generator's process imports little."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """ok is the only good one. truncated: the stream ended without a finish reason, or shorter than asked."""

    OK = "ok"
    FAILED = "failed"
    TRUNCATED = "truncated"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class RequestRecord:
    """Times in seconds from the start of the run; None where it did not come to that.

    scheduled_s: when the workload wanted it; start_s: when it was sent. gaps_s: between output chunks.
    rank: the server's `X-DeepInfer-Rank`, where it answers with one. server: our server's own account of the request's times.
    """

    request_id: str
    conversation: int
    turn: int
    scheduled_s: float
    start_s: float
    first_s: float | None = None
    last_s: float | None = None
    end_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    chunks: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    requested_tokens: int = 0
    finish_reason: str | None = None
    rank: int | None = None
    outcome: str = Outcome.FAILED
    error_code: str = ""
    error_text: str = ""
    server: dict[str, Any] = field(default_factory=dict)
