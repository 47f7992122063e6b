"""Faulting an arena in and page-locking it in slices, beside a driver that is only pretended."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import pytest

from hicache.errors import MachineError
from hicache.host_pool import HostArena
from hicache.pinning import PinnedArena, pin, touch
from hicache.segment import CacheHome, Layout, open_segment

LAYOUT = Layout(num_frames=7, frame_bytes=4096, frames_per_state=2, page_tokens=4, ranks=1, proof=b"p" * 32)
SHIFT = 1 << 40  # the pretended device sees host addresses there


class FakeDriver:
    """The functions of `host_memory.cpp`. refuse_after: registrations that succeed. gap: frame bytes lost before the second slice."""

    def __init__(self, refuse_after: int = 99, gap: int = 0) -> None:
        self.registered: dict[int, int] = {}
        driver = self

        def dix_host_register(address: int, num_bytes: int) -> int:
            if len(driver.registered) >= refuse_after:
                return 2
            assert address not in driver.registered
            driver.registered[address] = num_bytes
            return 0

        def dix_host_unregister(address: int) -> int:
            del driver.registered[address]
            return 0

        def dix_host_device_pointer(address: int, device: object) -> int:
            late = gap if address != min(driver.registered) else 0
            device._obj.value = address + SHIFT + late  # type: ignore[attr-defined]
            return 0

        def dix_error_text(status: int, text: ctypes.Array[ctypes.c_char], num_bytes: int) -> int:
            text.value = b"out of memory"
            return 0

        self.dix_host_register, self.dix_host_unregister = dix_host_register, dix_host_unregister
        self.dix_host_device_pointer, self.dix_error_text = dix_host_device_pointer, dix_error_text


def arena(directory: Path) -> HostArena:
    segment = open_segment(CacheHome(directory, "dix-test", 0, 1, b"s"), LAYOUT)
    made = HostArena(LAYOUT.num_frames, LAYOUT.frame_bytes, segment)
    segment.close()
    return made


def wait_for_frames(pinned: PinnedArena, count: int) -> list[range]:
    fresh: list[range] = []
    deadline = time.monotonic() + 10
    while sum(map(len, fresh)) < count and time.monotonic() < deadline:
        fresh += pinned.take_fresh()
        time.sleep(0.001)
    return fresh


def test_bytes_of_a_former_owner_survive_and_new_memory_is_zero(tmp_path: Path) -> None:
    first = arena(tmp_path)
    touch(first, range(7), threads=3)
    assert not first.inherited
    assert not first.rows.any()
    first.rows.fill_(7)
    second = arena(tmp_path)
    assert second.inherited
    touch(second, range(7), threads=3)
    assert (second.rows == 7).all()


def test_touching_a_slice_leaves_the_rest_alone() -> None:
    private = HostArena(7, 4096)
    private.rows.fill_(9)
    touch(private, range(2, 5), threads=2)
    assert [int(row[0]) for row in private.rows] == [9, 9, 0, 0, 0, 9, 9]


def test_blocking_registers_every_slice_and_close_gives_each_back_once() -> None:
    driver, private = FakeDriver(), HostArena(7, 4096)
    pinned = pin(private, driver, piece_bytes=3 * 4096)  # type: ignore[arg-type]
    assert sorted(driver.registered.values()) == [4096, 3 * 4096, 3 * 4096]
    assert pinned.num_bytes == private.num_bytes
    assert pinned.pointer == private.rows.data_ptr() + SHIFT
    assert pinned.take_fresh() == []
    pinned.close()
    pinned.close()
    assert driver.registered == {}


def test_in_the_background_the_first_slice_is_there_at_once_and_the_rest_follows() -> None:
    driver, private = FakeDriver(), HostArena(7, 4096)
    pinned = pin(private, driver, piece_bytes=3 * 4096, background=True)  # type: ignore[arg-type]
    assert pinned.num_bytes == 3 * 4096
    pinned.register_rest()
    assert wait_for_frames(pinned, 4) == [range(3, 6), range(6, 7)]
    assert pinned.num_bytes == private.num_bytes
    pinned.close()
    assert driver.registered == {}


def test_driver_that_refuses_in_the_background_leaves_a_smaller_cache(caplog: pytest.LogCaptureFixture) -> None:
    driver, private = FakeDriver(refuse_after=2), HostArena(7, 4096)
    pinned = pin(private, driver, piece_bytes=3 * 4096, background=True)  # type: ignore[arg-type]
    pinned.register_rest()
    assert wait_for_frames(pinned, 3) == [range(3, 6)]
    pinned.close()
    assert "stays at" in caplog.text
    assert "out of memory" in caplog.text
    assert driver.registered == {}


@pytest.mark.parametrize("driver", [FakeDriver(refuse_after=1), FakeDriver(gap=4096)])
def test_refusal_at_start_gives_everything_back(driver: FakeDriver) -> None:
    with pytest.raises(MachineError):
        pin(HostArena(7, 4096), driver, piece_bytes=3 * 4096)  # type: ignore[arg-type]
    assert driver.registered == {}
