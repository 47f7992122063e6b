"""Whose memory lies on the GPUs, with a driver made of a shell script: this machine need not have one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from server import gpu
from server.errors import MachineError
from server.launch import BOOT_VARIABLE
from server.processes import rank_gpu

GPUS = ["GPU-a", "GPU-b"]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi that prints two GPUs, and the compute processes in a file."""
    tool = tmp_path / "nvidia-smi"
    listing = tmp_path / "processes"
    listing.write_text("")
    tool.write_text(f'#!/bin/sh\ncase "$1" in --query-gpu=uuid) printf "GPU-a\\nGPU-b\\n";; *) cat {listing};; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu.glob, "glob", lambda _pattern: ["/dev/nvidia0"])
    return listing


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_without_a_driver_there_is_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.shutil, "which", lambda _name: None)
    assert gpu.gpu_uuids() == []
    assert gpu.gpu_processes() == []
    assert gpu.still_on_gpu([1]) == []


def test_a_broken_driver_is_a_warning_not_a_failure(driver: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver.with_name("nvidia-smi").write_text("#!/bin/sh\necho Driver/library version mismatch\nexit 18\n")
    assert gpu.gpu_processes() == []
    assert "version mismatch" in caplog.text


def test_a_foreign_program_on_a_chosen_gpu_is_named_and_left_alone(driver: Path, stranger: subprocess.Popen[bytes]) -> None:
    driver.write_text(f"{stranger.pid}, 70656, GPU-b\n")
    with pytest.raises(MachineError) as caught:
        gpu.check_unoccupied(gpu.gpu_processes(), gpu.gpu_uuids())
    assert f"sleep (pid {stranger.pid}, 69.0 GiB)" in str(caught.value)
    assert caught.value.exit_code == 3
    assert stranger.poll() is None
    gpu.check_unoccupied(gpu.gpu_processes(), ["GPU-a"])


def test_own_ancestors_other_servers_and_pids_of_other_containers_do_not_count(driver: Path) -> None:
    server = subprocess.Popen(["sleep", "60"], env={**os.environ, BOOT_VARIABLE: "other"})
    try:
        driver.write_text(f"{os.getpid()}, 100, GPU-a\n{os.getppid()}, 100, GPU-a\n{server.pid}, 100, GPU-a\n4194304, [N/A], GPU-a\n")
        assert len(gpu.gpu_processes()) == 4
        gpu.check_unoccupied(gpu.gpu_processes(), GPUS)
    finally:
        server.kill()
        server.wait()


def test_processes_that_stay_on_the_gpu_after_stop_are_reported(driver: Path) -> None:
    driver.write_text("77, 10, GPU-a\n78, 20, GPU-b\n")
    assert [process.pid for process in gpu.still_on_gpu({78, 79}, limit_s=0.0)] == [78]
    assert gpu.still_on_gpu({79}, limit_s=0.0) == []


def test_ranks_are_matched_to_gpus_by_index_or_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-a")
    assert [rank_gpu(rank, GPUS) for rank in range(3)] == ["GPU-b", "GPU-a", "GPU-b"]
