"""Speculation off, with every draft verified, and with chosen lengths, side by side over loads. Not a test.

    OMP_NUM_THREADS=1 python -m tests.engine.bench_speculation [MODEL_DIR] [--streams 1,2,4,8,16,32,64] [--rounds 10]

All use the same compiled step. Prints tokens per second and paired ratios with 95 % intervals.
"""

import argparse
import time

from tests.engine.paired import compare, make_engine, model_dir, show, start

CONTENDERS = {"off": {"spec": False}, "fixed": {"enable_mtp_varlen": False}, "varlen": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", default="1,2,4,8,16,32,64")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=12, help="requests of a round, more at many streams")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: this thread's time, for a machine with neighbours")
    args = parser.parse_args()
    start()
    model = model_dir(args.model)
    counts = [int(part) for part in args.streams.split(",")]
    clock = time.thread_time if args.clock == "cpu" else time.perf_counter
    engines = {name: make_engine(model, max(counts), device=args.device, **changes) for name, changes in CONTENDERS.items()}
    for count in counts:
        comparison = compare(engines, model, count, args.rounds, args.requests, clock, temperature=args.temperature)
        show(f"{count} streams", comparison, "off")
        middle, low, high = comparison.ratio("varlen", "fixed")
        print(f"    varlen / fixed: {middle:.3f} [{low:.3f}, {high:.3f}]", flush=True)


if __name__ == "__main__":
    main()
