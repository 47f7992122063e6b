"""A feeder process: writes packed batches to its standard output for ever. Imports no torch.

`python -m recipes.tiny.feed --seed 1 --worker 0 --rows 65536 --mixture short --min 60 --max 1024 --truncated 0`
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import subprocess
import sys
import threading

from recipes.tiny.corpus import samples
from recipes.tiny.packing import Packed, batch_bytes, batches, from_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("seed", "worker", "rows", "min", "max"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--mixture", required=True)
    parser.add_argument("--truncated", type=float, required=True)
    a = parser.parse_args()
    stream = samples(a.seed, a.worker, a.mixture, a.min, a.max)
    for packed in batches(stream, a.rows, a.truncated, random.Random(f"pack/{a.seed}/{a.worker}")):
        try:
            sys.stdout.buffer.write(packed.to_bytes())
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os._exit(0)


class Feed:
    """Batches from several feeder processes in a fixed order: batch k comes from worker k modulo their number."""

    def __init__(self, workers: int, seed: int, rows: int, mixture: str, lengths: tuple[int, int], truncated: float) -> None:
        self.rows, self.turn = rows, 0
        settings = {"seed": seed, "rows": rows, "mixture": mixture, "min": lengths[0], "max": lengths[1], "truncated": truncated}
        flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "recipes.tiny.feed", *flags, "--worker"]
        self.processes = [subprocess.Popen([*command, str(w)], stdout=subprocess.PIPE, env=env) for w in range(workers)]
        self.queues: list[queue.Queue[Packed]] = [queue.Queue(maxsize=8) for _ in range(workers)]
        for process, waiting in zip(self.processes, self.queues, strict=True):
            threading.Thread(target=self._read, args=(process, waiting), daemon=True).start()

    def _read(self, process: subprocess.Popen[bytes], waiting: queue.Queue[Packed]) -> None:
        assert process.stdout is not None
        size = batch_bytes(self.rows)
        while len(data := process.stdout.read(size)) == size:
            waiting.put(from_bytes(data, self.rows))

    def next(self, timeout_s: float = 90.0) -> Packed:
        """Raises queue.Empty when the worker whose turn it is has delivered nothing in time."""
        packed = self.queues[self.turn % len(self.queues)].get(timeout=timeout_s)
        self.turn += 1
        return packed

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
