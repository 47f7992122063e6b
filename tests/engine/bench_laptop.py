"""All figures of the CPU path, one after the other, each in processes of its own. Not a test.

    python -m tests.engine.bench_laptop [--only steps,null] [--short]

Run it on a quiet machine with two cores: it takes about ten minutes, with --short three.
"""

import argparse
import os
import subprocess
import sys
import time

# Name -> what it shows, the module, its arguments, and those of a short run.
PARTS = {
    "steps": ("compiled steps over eager ones", "tests.engine.bench_decode", [], ["--samples", "10"]),
    "spec": ("speculation over none, whole answers, one stream", "tests.engine.bench_conversations", ["--rounds", "20"], ["--rounds", "5"]),
    "draws": (
        "drawn tokens over the most likely ones",
        "tests.engine.bench_draws",
        ["--answers", "4"],
        ["--streams", "1", "--rounds", "8"],
    ),
    "peer": ("transformers at equal dimensions", "tests.engine.bench_transformers", [], ["--rounds", "3"]),
    "null": ("the engine's own cost", "tests.engine.bench_engine", [], []),
    "neighbour": ("busy neighbour, engine", "tests.engine.bench_neighbour", [], ["--rounds", "4"]),
    "served": ("busy neighbour, server", "tests.engine.bench_neighbour", ["--served"], ["--rounds", "4"]),
    "front": ("the server's cost", "tests.server.bench_front", ["--streams", "1,16", "--rounds", "3"], ["--rounds", "1"]),
    "start": ("from typing to the first token", "tests.server.bench_start", [], ["--repeats", "1"]),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--short", action="store_true")
    args = parser.parse_args()
    failed = []
    for name in args.only.split(","):
        title, module, arguments, short = PARTS[name]
        print(f"== {name}: {title} (load {os.getloadavg()[0]:.1f})", flush=True)
        began = time.perf_counter()
        command = [sys.executable, "-m", module, *arguments, *(short if args.short else [])]
        if subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode:
            failed.append(name)
        print(f"   {time.perf_counter() - began:.0f} s", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
