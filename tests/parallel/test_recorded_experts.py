"""Recorded steps of ranks that share experts: the same size on every rank, padding that reaches no expert, and all ranks or none.

A recorder that records nothing runs the same code on the CPU, with the ranks' collectives between threads.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch, StepKind
from engine.cuda_graph import Made, NullRecorder, Replay
from engine.distributed import GroupError
from engine.engine import Engine
from engine.model_runner import ModelRunner
from engine.parallel.expert_exchange import Route
from engine.parallel.placement import Placement
from hicache.config import HiCacheConfig
from tests.engine.simulation import run_ranks
from tests.models.golden import PROMPTS, Seq, prefill
from tests.parallel.peer_threads import peers_are_threads
from tests.parallel.test_expert_exchange import LAYERS, Weights, make_exchange, rows_of
from tests.parallel.test_expert_parallel import golden_config, mixed_requests, run_group, serve

EXACT = 1e-4
START = 20  # prompt tokens in front of the steps
EAGER = {"enforce_eager": True}


class Listening(NullRecorder):
    """Notes which recording was replayed, in order of recording. refuses: the recording that fails here, with `failure`; unprepared: the
    buffers that cannot be made, in order of making."""

    def __init__(self, refuses: int = -1, failure: type[Exception] = RuntimeError, unprepared: int = -1) -> None:
        self.replayed: list[int] = []
        self._count, self._refuses, self._failure = 0, refuses, failure
        self._prepared, self._unprepared = 0, unprepared

    def prepare(self, make: Callable[[], Made]) -> Made:
        number, self._prepared = self._prepared, self._prepared + 1
        if number == self._unprepared:
            raise self._failure("no memory for buffers")
        return super().prepare(make)

    def record(self, run: Callable[[], None]) -> Replay:
        number, self._count = self._count, self._count + 1
        replay = super().record(run)
        if number == self._refuses:
            raise self._failure("operation not permitted when stream is capturing")

        def listened() -> None:
            self.replayed.append(number)
            replay()

        return listened


@pytest.fixture(scope="module", autouse=True)
def any_route():
    with peers_are_threads():
        yield


@pytest.fixture(scope="module")
def alone():
    """Logits of every position of a prompt, by a rank with all experts."""
    seq = Seq(ModelRunner(golden_config(**EAGER)), PROMPTS[3][:80], 1)
    return prefill(seq, [80])


def run_steps(group, rows: list[int], recorder: NullRecorder | None, alone: torch.Tensor, route: str = "auto") -> ModelRunner:
    """A prompt and steps of `rows` tokens, whose logits are compared; 0 means to help the other ranks."""
    torch.set_num_threads(1)
    runner = ModelRunner(golden_config(dp=group.size, ep=group.size, expert_exchange=route, **EAGER), group=group, recorder=recorder)
    seq = Seq(runner, PROMPTS[3], 1)
    logits = [runner.run(Batch(StepKind.PREFILL, [seq.slice(START + group.rank)])).clone()]
    for count in rows:
        if count:
            kind = StepKind.DECODE if count == 1 else StepKind.VERIFY
            logits.append(runner.run(Batch(kind, [seq.slice(seq.done + count)])).clone())
        else:
            runner.join(StepKind.DECODE)
    assert (torch.cat(logits) - alone[: seq.done]).abs().max() <= EXACT
    return runner


@settings(max_examples=5, deadline=None)
@given(
    steps=st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), min_size=1, max_size=6),
    ranks=st.sampled_from([2, 4]),
    route=st.sampled_from(list(Route)),
)
def test_every_rank_replays_the_size_of_the_rank_with_the_most_rows(alone, steps, ranks, route):
    def rank_main(group):
        recorder = Listening()
        runner = run_steps(group, [step[group.rank] for step in steps], recorder, alone, route)
        assert runner.path == "graphs"
        sizes = list(reversed(runner.recordings[0].sizes))  # recorded from large to small
        return [sizes[number] for number in recorder.replayed]

    wanted = [min(size for size in (1, 2, 4) if size >= most) for step in steps if (most := max(step[:ranks]))]
    assert run_ranks(ranks, rank_main) == [wanted] * ranks


@settings(max_examples=10, deadline=None)
@given(
    counts=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    route=st.sampled_from(list(Route)),
    exact=st.booleans(),
    seed=st.integers(0, 100),
)
def test_padding_changes_no_row_and_is_counted_nowhere(counts, route, exact, seed):
    capacity, extra = 5, 1
    layers, placement = [Weights(seed + layer) for layer in range(LAYERS)], Placement.initial(6, extra, 2)

    def rank_main(world):
        exchange = make_exchange(world, 2, placement, exact=exact, route=route, peer_rows=capacity)
        exchange.counting = True
        for number, weights in enumerate(layers):
            exchange.attach(number, weights.share(placement, world.rank))
        count = counts[world.rank]
        exchange.restart(capacity, torch.arange(capacity) < count)
        for number in range(LAYERS):
            x, ids, shares = rows_of(world.rank, capacity, seed + number)
            got = exchange.run(number, x, ids, shares)
            wanted = layers[number].all_here(x, ids, shares)
            torch.testing.assert_close(got[:count], wanted[:count], rtol=1e-4, atol=1e-3)
            assert bool(got.isfinite().all())
        return exchange.counts.sum(1)

    totals = sum(run_ranks(2, rank_main))
    assert totals.tolist() == [sum(counts) * 2] * LAYERS, "two experts for every row that is no padding"


def test_a_step_that_one_rank_cannot_replay_is_eager_on_all(alone):
    """A rank that asks for a probe looks at every layer, which only eager steps show."""

    class Nothing:
        def record(self, name, layer, value):
            return None

    def rank_main(group):
        recorder = Listening()
        runner = run_steps(group, [1], recorder, alone)
        seq = Seq(runner, PROMPTS[2], 2)
        runner.run(Batch(StepKind.PREFILL, [seq.slice(10)]))
        seen = []
        for observed in (0, 1, 2):
            runner.run(Batch(StepKind.DECODE, [seq.slice(seq.done + 1)]), Nothing() if observed == group.rank else None)
            seen.append(len(recorder.replayed))
        return seen

    assert run_ranks(2, rank_main) == [[1, 1, 2]] * 2


@pytest.mark.parametrize(("failing", "failure"), [(0, RuntimeError), (2, RuntimeError), (1, GroupError)])
def test_all_ranks_stay_eager_when_one_cannot_record(failing, failure, alone, caplog):
    """A collective of this rank may fail as well, while the group lives: its communicator may lack memory."""

    def rank_main(group):
        return run_steps(group, [1, 0, 2], Listening(failing if group.rank == 1 else -1, failure), alone).path

    assert run_ranks(2, rank_main) == ["eager"] * 2
    assert "not permitted when stream is capturing" in caplog.text
    assert "another rank could not record this step" in caplog.text


@pytest.mark.parametrize("unprepared", [0, 1, 2])  # inputs, logits, buffers of drafts
def test_all_ranks_stay_eager_when_one_cannot_make_the_buffers_of_its_recordings(unprepared, caplog):
    requests = mixed_requests(4, 500, 40)
    changes = {"num_draft_tokens": 4, "enable_mtp_varlen": False, **EAGER}
    expected = run_group(1, requests, golden_config(**changes))

    def rank_main(group):
        torch.set_num_threads(1)
        config = golden_config(dp=2, ep=2, **changes)
        recorder = Listening(unprepared=unprepared if group.rank == 1 else -1)
        runner = ModelRunner(config, draft=True, group=group, recorder=recorder)
        tokens = serve(Engine(config, HiCacheConfig(size_gb=0), group, runner=runner), requests[group.rank :: 2])
        return tokens, runner.path, len(recorder.replayed)

    (first, *mine), (second, *theirs) = run_ranks(2, rank_main)
    assert first | second == expected
    assert mine == theirs == ["eager", 0]
    assert "another rank could not prepare its recordings" in caplog.text


def test_a_rank_without_a_recorder_keeps_the_others_from_recording(alone):
    assert run_ranks(2, lambda group: run_steps(group, [1], Listening() if group.rank else None, alone).path) == ["eager"] * 2


def test_dropped_recordings_leave_eager_steps(alone):
    def rank_main(group):
        recorder = Listening()
        runner = run_steps(group, [1, 1], recorder, alone)
        runner.drop_recordings()
        seq = Seq(runner, PROMPTS[2], 2)
        runner.run(Batch(StepKind.PREFILL, [seq.slice(10)]))
        runner.run(Batch(StepKind.DECODE, [seq.slice(11)]))
        return runner.path, len(recorder.replayed)

    assert run_ranks(2, rank_main) == [("eager", 2)] * 2


@pytest.mark.parametrize("spec", [False, True])
def test_engines_write_the_same_text_while_experts_move(spec):
    """Arrivals, idle ranks, drafts and the balancer's moves between replays."""
    requests = mixed_requests(8, 500, 40)
    options = {"override_num_extra_experts": 4, "expert_rearrangement_step_interval": 4, "expert_count_window_size": 4}
    changes = {"spec": spec, "num_draft_tokens": 4, "enable_mtp_varlen": False}
    expected = run_group(1, requests, golden_config(**EAGER, **changes))

    def rank_main(group):
        torch.set_num_threads(1)
        config = golden_config(dp=2, ep=2, **EAGER, **changes, **options)
        recorder = Listening()
        runner = ModelRunner(config, draft=spec, group=group, recorder=recorder)
        engine = Engine(config, HiCacheConfig(size_gb=0), group, runner=runner)
        tokens = serve(engine, requests[group.rank :: 2])
        figures = runner.expert_stats
        engine.close()
        return tokens, len(recorder.replayed), figures["moved_layers_total"], runner.path

    (first, replays, moved, path), (second, *_) = run_ranks(2, rank_main)
    assert first | second == expected
    assert replays > 5
    assert moved > 0
    assert path == "eager", "closing gives the recordings up"
