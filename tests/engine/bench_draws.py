"""What it costs to draw tokens instead of taking the most likely ones: plain steps, drafts and verify steps. Not a test.

    OMP_NUM_THREADS=1 python -m tests.engine.bench_draws [MODEL_DIR] [--streams 1,8] [--rounds 30] [--by torch] [--answers 6] [--ids 129280]

The same sequences under different parameters, interleaved in bursts of one process. Prints medians of this thread's CPU time per call, and
the paired ratio to greedy. --by torch: with `engine.compiled_draws` off. --answers: rounds of whole answers at temperature 1 as well, drawn
by compiled code and by torch, with every draft and without. --ids: also what the sampler takes for rows of so many ids, without a model.
"""

import argparse
import statistics
import time
from dataclasses import replace
from functools import partial

import torch

from engine.batch import SequenceSlice, StepKind
from engine.draft_sampling import DraftPoint
from engine.request import Request, SamplingParams
from engine.spec_decode import Proposals
from engine.spec_lengths import FixedLength
from engine.step import Step
from engine.step_runner import StepRunner
from tests.engine.paired import compare, make_engine, model_dir, prompts_of, show, start
from tests.models.test_native_draws import Compiled, samplers, sequence

KINDS = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "seeded": {"seed": 7},
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 40},
    "min_p": {"min_p": 0.05},
    "seeded top_p": {"seed": 7, "top_p": 0.95},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
    "logprobs": {"top_logprobs": 5},
}
BURST = 6


def running(engine, model, streams):
    """Sequences in the middle of their answers, with room for a block of drafts."""
    prompts = [ids for ids in prompts_of(model) if 60 <= len(ids) % engine.runner.kv.block_size <= 90]
    asked = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    for i in range(streams):
        engine.add_request(Request(f"{streams}-{i}", prompts[i % len(prompts)], asked))
    while len(engine.scheduler.running) < streams:
        engine.step()
    return list(engine.scheduler.running)


def step_of(engine, seqs):
    """A decode step of the sequences as they are."""
    back, slices, rooms = engine.limits.ngram_history, [], []
    for seq in seqs:
        ids, count = seq.token_ids, len(seq.token_ids)
        slices.append(SequenceSlice(ids[-1:], count - 1, count, seq.block_table, seq.state_slot, tuple(ids[max(0, count - 1 - back) : -1])))
        rooms.append(len(seq.block_table) * engine.runner.kv.block_size - count)
    return Step(StepKind.DECODE, seqs, slices, seqs, rooms=rooms)


class Calls:
    """The three calls on sequences of one kind."""

    def __init__(self, engine, seqs, params):
        self.seqs = [
            replace(seq, request=replace(seq.request, params=SamplingParams(max_tokens=300, ignore_eos=True, **params))) for seq in seqs
        ]
        self.step = step_of(engine, self.seqs)
        self.points = [DraftPoint(seq, seq.token_ids[-1], len(seq.token_ids)) for seq in self.seqs]
        self.drafter, runner, sampler = engine.drafter, engine.runner, engine._step_runner.sampler
        self.undrafted = StepRunner(runner, sampler, None, engine.limits.ngram_history)
        self.drafted = StepRunner(runner, sampler, engine.drafter, engine.limits.ngram_history)
        self.draft()

    def plain(self):
        self.undrafted.sample(self.undrafted.forward(self.step))

    def draft(self):
        self.drafts = self.drafter.propose(self.points, [min(self.drafter.max_drafts, room) for room in self.step.rooms])
        self.proposals = self.drafter.proposals
        assert all(self.drafts), "no room for drafts"

    def verify(self):
        self.drafter.proposals = self.proposals
        self.drafted.sample(self.drafted.run(self.step, self.drafts))


def measure(calls, rounds):
    """[what][kind] -> seconds a call, by round."""
    times = {what: {kind: [] for kind in calls} for what in ("plain", "draft", "verify")}
    for _ in range(rounds):
        for kind, one in calls.items():
            for what, by_kind in times.items():
                call = getattr(one, what)
                call()  # finds the caches cold
                began = time.thread_time()
                for _ in range(BURST):
                    call()
                by_kind[kind].append((time.thread_time() - began) / BURST)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--by", choices=("compiled", "torch"), default="compiled")
    parser.add_argument("--answers", type=int, default=0)
    parser.add_argument("--ids", type=int, default=0)
    args = parser.parse_args()
    start()
    if args.ids:
        many_ids(args.ids, args.rounds)
    model = model_dir(args.model)
    for streams in map(int, args.streams.split(",")):
        engine = make_engine(model, streams, compiled_draws=args.by == "compiled")
        seqs = running(engine, model, streams)
        engine.drafter.policy = FixedLength()  # the engine's own came with its first step
        calls = {kind: Calls(engine, seqs, KINDS[kind]) for kind in args.kinds.split(",")}
        for what, by_kind in measure(calls, args.rounds).items():
            for kind, seconds in by_kind.items():
                ratio = statistics.median(own / base for own, base in zip(seconds, by_kind["greedy"], strict=True))
                middle = 1e3 * statistics.median(seconds)
                print(f"{streams} streams, {what:<6} {kind:<12} {middle:7.3f} ms, {ratio:5.2f} of greedy", flush=True)
        engine.close()
        if args.answers:
            whole_answers(model, streams, args.answers)


def many_ids(num_ids, rounds):
    """One row, and six of a sequence with five drafts, by torch and by compiled code."""
    drawing = Compiled()
    slow, fast = samplers(drawing)
    logits = torch.randn(6, num_ids) * 3
    table = torch.softmax(logits[:5] + torch.randn(5, num_ids), -1)[None].contiguous()
    for kind in ("drawn", "seeded", "top_p", "top_k"):
        params = KINDS[kind]
        seq = sequence(7, "seed" in params, **{name: value for name, value in params.items() if name != "seed"})
        drafts, proposals = [torch.multinomial(table[0], 1)[:, 0].tolist()], Proposals({seq.seq_id: 0}, table)
        calls = {
            (what, by): call
            for by, sampler in (("torch", slow), ("compiled", fast))
            for what, call in (
                ("1 row", partial(sampler, logits[:1], [seq])),
                ("6 rows", partial(sampler.verify, logits, [seq], drafts, proposals)),
            )
        }
        times = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                began = time.thread_time()
                call()
                times[name].append(time.thread_time() - began)
        middle = {name: f"{1e3 * statistics.median(seconds):.2f}" for name, seconds in times.items()}
        for what in ("1 row", "6 rows"):
            print(f"{num_ids:,} ids, {kind:<7} {what:<6} torch {middle[what, 'torch']}, compiled {middle[what, 'compiled']} ms", flush=True)
    drawing.close()


def whole_answers(model, streams, rounds):
    kinds = {"torch": {"compiled_draws": False}, "compiled": {}}
    for what, changes in (("every draft", {"enable_mtp_varlen": False}), ("no drafts", {"spec": False})):
        engines = {name: make_engine(model, streams, **kind, **changes) for name, kind in kinds.items()}
        show(f"{streams} streams, {what}", compare(engines, model, streams, rounds, 12, time.thread_time, temperature=1.0), "torch")


if __name__ == "__main__":
    main()
