"""The compiled map of pages against the dictionary, with keys that fight for the same slots."""

from __future__ import annotations

import logging
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.native_page_map import open_page_map
from hicache.page_map import KEY_BYTES, DictPageMap, PageMap

Make = Callable[[int], PageMap]
# The first four bytes choose the slot: little-endian tags at the very end wrap around, equal ones collide.
TAGS = [b"\xff\xff\xff\xff", b"\xfe\xff\xff\xff", b"\0\0\0\0", b"\x01\0\0\0", b"\0\0\0\x80"]
keys_of_few_slots = st.builds(lambda tag, rest: tag + bytes([rest]) * (KEY_BYTES - 4), st.sampled_from(TAGS), st.integers(0, 5))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Make:
    make = open_page_map(tmp_path_factory.mktemp("native"))
    if make is None:
        pytest.skip("no compiler")
    return make


def agree(maps: tuple[PageMap, PageMap], keys: list[bytes]) -> None:
    slow, fast = maps
    assert len(slow) == len(fast)
    assert sorted(slow.frames()) == sorted(fast.frames())
    assert slow.match(keys) == fast.match(keys)
    for key in keys:
        assert slow.match([key]) == fast.match([key])
    assert [slow.key(frame) for frame in slow.frames()] == [fast.key(frame) for frame in slow.frames()]


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.lists(keys_of_few_slots, max_size=6, unique=True)), max_size=30))
def test_native_map_agrees_with_the_dictionary(native: Make, num_frames: int, steps: list[tuple[bool, list[bytes]]]) -> None:
    maps = DictPageMap(num_frames), native(num_frames)
    free = list(range(num_frames))
    asked: list[bytes] = []
    for adds, keys in steps:
        asked = keys or asked
        if adds:
            new = [key for key in keys if not maps[0].match([key])][: len(free)]
            frames = [free.pop() for _ in new]
            for each in maps:
                each.insert(new, frames)
        else:
            gone = [frame for key in keys for frame in maps[0].match([key])]
            for each in maps:
                each.remove(gone)
            free += gone
        agree(maps, asked)


def test_native_map_agrees_while_it_is_full(native: Make) -> None:
    rng, num_frames = random.Random(3), 500
    maps = DictPageMap(num_frames), native(num_frames)
    keys = [rng.randbytes(KEY_BYTES) for _ in range(num_frames)]
    for each in maps:
        each.insert(keys, list(range(num_frames)))
    for _ in range(300):
        frames = rng.sample(range(num_frames), rng.randrange(1, 60))
        new = [rng.randbytes(KEY_BYTES) for _ in frames]
        for each in maps:
            each.remove(frames)
            each.insert(new, frames)
        for frame, key in zip(frames, new, strict=True):
            keys[frame] = key
        agree(maps, rng.sample(keys, 20))
    assert maps[1].match(keys) == list(range(num_frames))


@pytest.mark.parametrize("kind", ["python", "native"])
def test_defects_of_the_caller_are_noticed(native: Make, kind: str) -> None:
    pages = DictPageMap(4) if kind == "python" else native(4)
    assert pages.name == kind
    first, second, third = (bytes([i]) * KEY_BYTES for i in range(3))
    pages.insert([first, second], [0, 3])
    with pytest.raises(AssertionError, match="inserted twice"):
        pages.insert([third, second], [1, 2])
    assert pages.match([third]) == []  # nothing of a refused call stays
    pages.remove([3])
    with pytest.raises(AssertionError, match="frame 3 holds no page"):
        pages.remove([3])
    assert (len(pages), pages.match([first, second])) == (1, [0])


def test_native_map_refuses_frames_that_do_not_exist(native: Make) -> None:
    for frames in ([4], [-1], [0, 7]):
        with pytest.raises(AssertionError, match="none of 4"):
            native(4).insert([bytes([i]) * KEY_BYTES for i in range(len(frames))], frames)


def test_native_map_takes_44_bytes_a_page_and_the_dictionary_says_what_it_takes(native: Make) -> None:
    num_pages = 20_000
    keys = [i.to_bytes(8, "big") * 4 for i in range(num_pages)]
    for make, most in ((native, 44.1), (DictPageMap, 250)):
        tracemalloc.start()
        pages = make(num_pages)
        pages.insert([bytes(bytearray(key)) for key in keys], list(range(num_pages)))
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert pages.num_bytes <= most * num_pages
        assert taken == pytest.approx(pages.num_bytes, rel=0.05)


def test_without_a_compiler_the_dictionary_stays_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO):
        assert open_page_map(tmp_path) is None
    assert "not in PATH" in caplog.text
