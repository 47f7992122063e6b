"""Speculation over plain decoding on whole answers of the embedded model: held-out conversations, one stream, real ends. Not a test.

    OMP_NUM_THREADS=1 python -m tests.engine.bench_conversations [--rounds 10] [--prompts 16]

A round decodes the same conversations with every contender, in random order, on the same compiled step. Prints tokens per second between
an answer's first token and its end, and paired ratios with 95 % intervals, by the clock and by this thread's CPU time.
"""

import argparse
import random
import time

from engine.request import Request, SamplingParams
from tests.engine.bench_speculation import CONTENDERS
from tests.engine.paired import Comparison, make_engine, model_dir, prompts_of, show, start

MAX_TOKENS = 200


class Answers:
    """Tokens behind the first ones, and what they took."""

    def __init__(self):
        self.tokens = self.steps = 0
        self.wall = self.cpu = 0.0

    def add(self, engine, name, ids, temperature):
        engine.add_request(
            Request(name, ids, SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS), cache_read=False, cache_write=False)
        )
        began = None
        while True:
            outputs = engine.step()
            if began is not None:
                self.steps += bool(outputs)
                self.tokens += sum(len(output.token_ids) for output in outputs)
            elif outputs:
                began, cpu = time.perf_counter(), time.thread_time()
            if any(output.finish_reason is not None for output in outputs):
                break
        self.wall += time.perf_counter() - began
        self.cpu += time.thread_time() - cpu
        while not engine.idle:
            engine.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    start()
    model = model_dir(None)
    prompts, rng = prompts_of(model), random.Random(3)
    engines = {name: make_engine(model, 1, device="cpu", **changes) for name, changes in CONTENDERS.items()}
    clock, cpu = Comparison({name: [] for name in engines}), Comparison({name: [] for name in engines})
    for number in range(args.rounds + 1):
        some = rng.sample(prompts, args.prompts)
        for name in rng.sample(sorted(engines), len(engines)):
            answers = Answers()
            for i, ids in enumerate(some):
                answers.add(engines[name], f"{name}-{number}-{i}", ids, args.temperature)
            if number:  # the first round warms up
                for comparison, seconds in ((clock, answers.wall), (cpu, answers.cpu)):
                    comparison.speeds[name].append(answers.tokens / seconds)
                    comparison.steps[name] = comparison.steps.get(name, 0.0) + answers.tokens / answers.steps / args.rounds
    show("by the clock", clock, "off")
    show("by CPU time", cpu, "off")


if __name__ == "__main__":
    main()
