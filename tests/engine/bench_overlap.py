"""Overlapped scheduling on against off, side by side. Not a test.

    OMP_NUM_THREADS=1 python -m tests.engine.bench_overlap [MODEL_DIR] [--streams 1,8,32] [--rounds 12] [--device cpu]

Between two steps the loop does what a server's rank does with outputs. Prints tokens per second and ratios with 95 % intervals.
"""

import argparse

from tests.engine.paired import compare, make_engine, model_dir, show, start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=12, help="requests of a round, more at many streams")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    start()
    model = model_dir(args.model)
    counts = [int(part) for part in args.streams.split(",")]
    for spec in (False, True):
        engines = {
            name: make_engine(model, max(counts), spec=spec, device=args.device, zero_overhead_scheduling=on)
            for name, on in (("off", False), ("on", True))
        }
        for count in counts:
            for what, params in (("greedy", {"temperature": 0.0}), ("seeded", {"temperature": 1.0, "top_p": 0.95, "seed": 7})):
                if what == "greedy" or count == 8:
                    comparison = compare(engines, model, count, args.rounds, args.requests, **params)
                    show(f"{count} streams, {what}, speculation {'on' if spec else 'off'}", comparison, "off")
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
