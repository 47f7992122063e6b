"""The report on drafts: counts that add up, and temperatures that correct confidences."""

import numpy as np
import pytest

from engine.errors import ConfigError
from engine.request import SamplingParams
from engine.spec_lengths import FixedLength
from engine.spec_stats import DraftRecorder, calibration_error, fit_temperature, measure_drafts
from tests.engine.test_spec_decode import sequence
from tests.engine.test_speculation import make_engine, prompt


def outcomes(num: int, distortion: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Raw confidences that are `distortion` times the true log-odds, and what happened."""
    rng = np.random.default_rng(seed)
    odds = rng.normal(0.5, 1.5, num)
    return odds * distortion, (rng.random(num) < 1 / (1 + np.exp(-odds))).astype(float)


@pytest.mark.parametrize("distortion", [0.4, 1.0, 3.0])
def test_the_fitted_temperature_undoes_a_distortion(distortion):
    confidence, accepted = outcomes(20_000, distortion)
    temperature = fit_temperature(confidence, accepted)
    assert temperature == pytest.approx(distortion, rel=0.1)
    fitted = calibration_error(confidence, accepted, temperature)
    assert fitted < 0.02
    assert fitted <= calibration_error(confidence, accepted) + 0.002
    assert (calibration_error(confidence, accepted) > 0.05) == (distortion != 1.0)


def test_too_few_drafts_fit_nothing():
    assert fit_temperature(*outcomes(19, 3.0)) == 1.0


def test_the_calibration_error_is_the_mean_gap():
    assert calibration_error(np.zeros(4), np.array([1.0, 1.0, 1.0, 0.0])) == pytest.approx(0.25)
    assert calibration_error(np.array([60.0, -60.0]), np.array([1.0, 0.0])) == pytest.approx(0.0, abs=1e-9)


def test_nothing_counts_behind_a_refused_draft():
    recorder = DraftRecorder()
    seqs = [sequence(i, [], seeded=False) for i in range(3)]
    recorder.on_draft(seqs, [[1.0, 2.0, 3.0]] * 3)
    recorder.on_verified(seqs, [3, 2, 0], [1, 2, 0])
    report = recorder.report()
    assert (report.rounds, report.drafted, report.accepted) == (2, 5, 3)
    assert [(place.drafts, place.accepted) for place in report.places] == [(2, 2), (2, 1)]
    assert report.tokens_per_round == pytest.approx(2.5)


@pytest.mark.parametrize(("noise", "low", "high"), [(0.0, 1.0, 1.0), (2.0, 0.02, 0.9)])
def test_measuring_over_prompts(noise, low, high):
    engine = make_engine(noise)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    report = measure_drafts(engine, [prompt(i) for i in range(12)], params)
    assert report.drafted >= report.accepted > 0
    assert low <= report.places[0].acceptance <= high
    assert report.accepted == engine.stats()["spec"]["accepted_tokens_total"]
    assert report.temperatures.count(",") == len(report.places) - 1
    assert engine.drafter.recorder is None
    assert isinstance(engine.drafter.policy, FixedLength)


def test_an_engine_without_drafts_has_no_report():
    with pytest.raises(ConfigError, match="drafts nothing"):
        measure_drafts(make_engine(spec=False), [[3]])
