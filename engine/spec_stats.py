"""How good drafts are: acceptance by place of the block, how well confidences predict it, and temperatures that correct them."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.drafter import Drafter
from engine.engine import Engine
from engine.errors import ConfigError
from engine.request import Request, SamplingParams, Sequence
from engine.spec_lengths import MAX_CONFIDENCE, FixedLength

NUM_BINS = 10
LOWEST_T, HIGHEST_T, NUM_T = 0.05, 20.0, 400  # temperatures tried when fitting, evenly spaced in their logarithm
LEAST_SAMPLES = 20  # drafts of a place before a temperature is fitted to it

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlaceReport:
    """Drafts at one place of the block, those before it kept.

    drafts, accepted: counts. mean_confidence: what sigmoid(confidence) predicted. calibration_error: mean distance of prediction and
    acceptance over bins of equal width, weighted by their drafts. temperature: divisor of the raw confidences with the least
    log-loss, and calibration_error_fitted: the error with it.
    """

    place: int
    drafts: int
    accepted: int
    mean_confidence: float
    calibration_error: float
    temperature: float
    calibration_error_fitted: float

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafts if self.drafts else 0.0


@dataclass(frozen=True, slots=True)
class DraftReport:
    """rounds: verifications of one sequence. Tokens per round are the kept drafts and the one behind them."""

    rounds: int
    drafted: int
    accepted: int
    calibration_error: float
    places: list[PlaceReport]

    @property
    def accepted_per_round(self) -> float:
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_round(self) -> float:
        """The kept drafts and the token behind them."""
        return 1 + self.accepted_per_round if self.rounds else 0.0

    @property
    def temperatures(self) -> str:
        """The value for `engine.dflash_confidence_head_temperature`."""
        return ",".join(f"{place.temperature:.3g}" for place in self.places)


@dataclass(slots=True)
class DraftRecorder:
    """Collects raw confidences and outcomes from a drafter: assign it to `Drafter.recorder`."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    _confidence: dict[int, list[float]] = field(default_factory=dict)
    _samples: list[list[tuple[float, bool]]] = field(default_factory=list)

    def on_draft(self, seqs: list[Sequence], confidence: list[list[float]]) -> None:
        """confidence: [B][N], raw."""
        self._confidence = {seq.seq_id: row for seq, row in zip(seqs, confidence, strict=True)}

    def on_verified(self, seqs: list[Sequence], verified: list[int], accepted: list[int]) -> None:
        for seq, count, kept in zip(seqs, verified, accepted, strict=True):
            if count == 0:
                continue
            self.rounds += 1
            self.drafted += count
            self.accepted += kept
            # Behind a refused draft nothing was tested.
            for place in range(min(count, kept + 1)):
                while len(self._samples) <= place:
                    self._samples.append([])
                self._samples[place].append((self._confidence[seq.seq_id][place], place < kept))

    def add(self, other: DraftRecorder) -> None:
        """Count another recorder's rounds as well."""
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        for place, samples in enumerate(other._samples):
            while len(self._samples) <= place:
                self._samples.append([])
            self._samples[place] += samples

    def report(self) -> DraftReport:
        places = [_place_report(place, samples) for place, samples in enumerate(self._samples, 1)]
        everything = [sample for samples in self._samples for sample in samples]
        error = calibration_error(*_arrays(everything)) if everything else 0.0
        return DraftReport(self.rounds, self.drafted, self.accepted, error, places)


def measure_drafts(
    engine: Engine, prompts: Items[Items[int]], params: SamplingParams | None = None, recorder: DraftRecorder | None = None
) -> DraftReport:
    """Generate behind every prompt and verify every draft. Without `params`: 64 greedy tokens each. recorder: where to count.

    Raises:
        ConfigError: the engine drafts nothing.
        RequestError: a prompt cannot be served.
    """
    drafter = engine.drafter
    if not isinstance(drafter, Drafter):
        raise ConfigError("this engine drafts nothing", hint="a checkpoint with draft stages, --spec, --num-draft-tokens above 0")
    recorder, policy = recorder or DraftRecorder(), drafter.policy
    drafter.recorder, drafter.policy = recorder, FixedLength()
    try:
        for number, ids in enumerate(prompts):
            engine.add_request(Request(f"drafts-{number}", list(ids), params or SamplingParams(temperature=0.0, max_tokens=64)))
        engine.step()
        while not engine.idle:
            engine.step()
    finally:
        drafter.recorder, drafter.policy = None, policy
    return recorder.report()


def calibration_error(confidence: Floats, accepted: Floats, temperature: float = 1.0) -> float:
    """Expected calibration error. confidence: [n] raw; accepted: [n] 0 or 1.

    Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", with bins of equal width.
    """
    predicted = _sigmoid(confidence / temperature)
    bins = np.minimum((predicted * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = [abs(predicted[bins == b].sum() - accepted[bins == b].sum()) for b in range(NUM_BINS)]
    return float(sum(gaps) / len(predicted))


def fit_temperature(confidence: Floats, accepted: Floats) -> float:
    """The divisor of raw confidences with the least log-loss, 1 when there is too little to learn from."""
    if len(confidence) < LEAST_SAMPLES:
        return 1.0
    candidates = np.geomspace(LOWEST_T, HIGHEST_T, NUM_T)
    return float(min(candidates, key=lambda t: _log_loss(confidence / t, accepted)))


def _log_loss(scaled: Floats, accepted: Floats) -> float:
    signed = np.clip(np.where(accepted > 0, scaled, -scaled), -MAX_CONFIDENCE, MAX_CONFIDENCE)
    return float(np.log1p(np.exp(-signed)).mean())


def _sigmoid(scaled: Floats) -> Floats:
    result: Floats = 1 / (1 + np.exp(-np.clip(scaled, -MAX_CONFIDENCE, MAX_CONFIDENCE)))
    return result


def _arrays(samples: list[tuple[float, bool]]) -> tuple[Floats, Floats]:
    return np.array([c for c, _ in samples], dtype=np.float64), np.array([a for _, a in samples], dtype=np.float64)


def _place_report(place: int, samples: list[tuple[float, bool]]) -> PlaceReport:
    confidence, accepted = _arrays(samples)
    temperature = fit_temperature(confidence, accepted)
    return PlaceReport(
        place=place,
        drafts=len(samples),
        accepted=int(accepted.sum()),
        mean_confidence=float(_sigmoid(confidence).mean()),
        calibration_error=calibration_error(confidence, accepted),
        temperature=temperature,
        calibration_error_fitted=calibration_error(confidence, accepted, temperature),
    )
