"""From cases to records: prepare, check, time beside the peers, compare with the targets. One record is one JSON line (`dix.bench/1`)."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from deepinfer_cli.opbench.case import Case, NotMeasured, Prepared, Setting, Target
from deepinfer_cli.opbench.ceilings import Ceilings
from deepinfer_cli.opbench.timing import Times, kernels_of, time_side_by_side

SCHEMA = "dix.bench/1"
AIM, MUST, BELOW, WRONG, FAILED, SKIPPED = "aim", "must", "below", "wrong", "failed", "skipped"
SMALL_NOTE = "functional check, not performance"


def run_cases(
    cases: Iterable[Case], setting: Setting, ceilings: Ceilings, on_record: Callable[[dict[str, Any]], None] = lambda record: None
) -> list[dict[str, Any]]:
    """Measure every case. A case that raises yields a record with the level `failed`, one that has nothing to measure here
    `skipped`; the others still run.
    """
    env, records = environment(), []
    for case in cases:
        try:
            record = measure(case, setting, ceilings)
        except NotMeasured as reason:
            record = _head(case) | {"level": SKIPPED, "error": {"message": str(reason)}}
        except Exception as error:  # one broken op must not take the other figures with it; the record carries the error
            record = _head(case) | {"level": FAILED, "error": {"message": f"{type(error).__name__}: {error}"}}
        if setting.device == "cuda":
            # A failed case leaves cycles behind that hold its tensors.
            gc.collect()
            torch.cuda.empty_cache()
        if setting.small or setting.device == "cpu":
            record["note"] = SMALL_NOTE
        records.append(record | {"ceilings": ceilings.plain(), "env": env})
        on_record(records[-1])
    return records


@torch.inference_mode()
def measure(case: Case, setting: Setting, ceilings: Ceilings) -> dict[str, Any]:
    """One record. The op is checked before it is timed: a fast wrong kernel has no time."""
    setting.restart()
    prepared = case.prepare(setting)
    record = _head(case) | {"params": {**case.params, **prepared.params}, "bytes": prepared.num_bytes, "flops": prepared.flops}
    if prepared.check is not None:
        error, limit = prepared.check()
        record["error"] = {"rel": error, "limit": limit}
        if not error <= limit:
            return record | {"level": WRONG}
    contenders = {"ours": prepared.calls, "ours again": prepared.calls}
    contenders |= {f"peer {name}": calls for name, calls in prepared.peers.items()}
    times = time_side_by_side(contenders, setting.device)
    ours = times["ours"]
    peers = {name: _against(times[f"peer {name}"], ours) for name in prepared.peers}
    spread = abs(times["ours again"].median - ours.median) / ours.median
    record |= {"time_us": ours.plain(), "captured": ours.captured, "same_twice_spread": spread, **prepared.extra}
    if prepared.count_kernels and setting.device == "cuda":
        record["kernels"] = kernels_of(prepared.calls[0])
    if peers:
        best = min(peers, key=lambda name: peers[name]["time_us"]["median"])
        record |= {"peer": {"name": best, **peers[best]}, "peers": peers}
    value = reached(case.target, ours.median, prepared, ceilings)
    record["share"] = {"of": case.target.of, "value": value, "must": case.target.must, "aim": case.target.aim}
    if not (setting.small or setting.device == "cpu"):
        record["level"] = level(case.target, value, {name: peer["ratio"] for name, peer in peers.items()})
    return record


def _head(case: Case) -> dict[str, Any]:
    return {"schema": SCHEMA, "id": case.id, "params": dict(case.params)}


def _against(peer: Times, ours: Times) -> dict[str, Any]:
    """ratio: how many times as fast as the peer ours is."""
    return {"time_us": peer.plain(), "ratio": peer.median / ours.median, "captured": peer.captured}


def reached(target: Target, median_us: float, prepared: Prepared, ceilings: Ceilings) -> float | None:
    """A share of the ceiling, the time itself in us, or the time over its floor."""
    if target.of == "time":
        return median_us
    least = ceilings.least_us(target.of, prepared.num_bytes, prepared.flops)
    if least is None or not least:
        return None
    return median_us / least if target.of == "over_floor" else least / median_us


def level(target: Target, value: float | None, ratios: dict[str, float]) -> str | None:
    """Which of the two bounds is met, the least speed-ups over peers included. None when nothing is asked."""
    if value is None or target.must is None:
        return None
    sign = -1 if target.smaller_is_better else 1
    if sign * value < sign * target.must or any(ratios.get(peer, 0.0) < least for peer, least in target.peers.items()):
        return BELOW
    return AIM if target.aim is not None and sign * value >= sign * target.aim else MUST


def environment() -> dict[str, Any]:
    """What a figure needs beside it."""
    found: dict[str, Any] = {"gpu": None, "driver": None, "torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": _driver()}
    try:
        found["triton"] = version("triton")
    except PackageNotFoundError:
        found["triton"] = None
    return found | {"threads": torch.get_num_threads(), "load": os.getloadavg()[0], "commit": _commit()}


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    return _first_line(command)


def _commit() -> str | None:
    return _first_line(["git", "describe", "--always", "--dirty"])


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False, cwd=os.path.dirname(__file__))
    except OSError:
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None
