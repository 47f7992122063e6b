"""Which kernel of a case takes the time: `python -m tests.gpu.kernel_times PATTERN ...` prints the device time of every kernel of one call.

Cases of kernels and, by names that begin with `l.`, of layers. Layers of batch-invariant mode want a process of their own.

Times come from the profiler, with cold inputs in turn; they hold without the gaps between kernels, so their sum is below the case's time.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from deepinfer_cli.opbench.case import Case, Setting, choose
from deepinfer_cli.opbench.registry import all_cases

_CALLS = 24


def times_of(case: Case, setting: Setting) -> dict[str, list[float]]:
    """Kernel -> microseconds of each of its launches, over a few calls of one case."""
    setting.restart()
    calls = case.prepare(setting).calls
    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for number in range(_CALLS):
            calls[number % len(calls)]()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in trace.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.time_range.end - event.time_range.start)
    return found


@torch.inference_mode()
def main() -> None:
    setting = Setting("cuda")
    groups = {"layers" if pattern.startswith("l.") else "kernels" for pattern in sys.argv[1:]} or {"kernels"}
    for case in choose([case for group in sorted(groups) for case in all_cases(group)], sys.argv[1:]):
        print(case.name)
        found = times_of(case, setting)
        for name, times in sorted(found.items(), key=lambda item: -sum(item[1])):
            each, per_call = statistics.median(times), len(times) / _CALLS
            print(f"  {each:9.1f} us x {per_call:4.1f}  {name[:110]}", flush=True)
        print(f"  {sum(map(sum, found.values())) / _CALLS:9.1f} us in all")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
