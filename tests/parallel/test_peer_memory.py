"""Memory of peers is opened by all ranks or by none, and given back in order. CUDA's part is played by the host."""

import ctypes
from dataclasses import dataclass, field

import pytest
import torch

from engine.distributed import GroupError
from engine.errors import ConfigError
from engine.model_runner import ModelRunner
from engine.ops.peer_rows import BRING_HOME, SEND_ROWS, PeerLayout
from engine.parallel import peer_memory
from engine.parallel.peer_memory import OpenPeers, check_peers
from tests.engine.simulation import run_ranks
from tests.parallel.test_expert_parallel import golden_config

LAYOUT = PeerLayout.of(3, 2, 8, 4, 2, False)


@dataclass
class Device:
    """What a process does to the memory of its GPU and of those it has mapped. Handles are addresses."""

    refuses: str = ""
    log: list[tuple[str, int]] = field(default_factory=list)
    memory: list[ctypes.Array] = field(default_factory=list)

    def allocate(self, num_bytes, address, handle):
        if self.refuses == "allocate":
            return 2
        self.memory.append((ctypes.c_uint8 * num_bytes)())
        address._obj.value = ctypes.addressof(self.memory[-1])
        handle.raw = address._obj.value.to_bytes(8, "little").ljust(64, b"\0")
        return 0

    def open(self, handle, address):
        if self.refuses == "open":
            return 217
        address._obj.value = int.from_bytes(handle[:8], "little")
        self.log.append(("open", address._obj.value))
        return 0

    def close(self, address):
        self.log.append(("close", address))
        return 0

    def free(self, address):
        self.log.append(("free", address.value))
        return 0

    def text(self, status):
        return {2: b"out of memory", 217: b"peer access is not supported between these two devices"}[status]


def on_host(address: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(peer_memory, "_tensor_at", on_host)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)


class Elsewhere(OpenPeers):
    @staticmethod
    def _host() -> list[int]:
        return [1]


def test_every_rank_finds_every_memory_and_gives_back_what_it_opened():
    devices = [Device() for _ in range(3)]

    def rank_main(world):
        peers = OpenPeers(world.split(3, "cpu"), LAYOUT, 1.0, devices[world.rank])
        memory = peers.memory
        assert bool((memory.own == 0).all())
        memory.own[world.rank] = 7
        world.max([0])
        assert [ctypes.c_uint8.from_address(address + rank).value for rank, address in enumerate(memory.addresses)] == [7] * 3
        peers.close()
        peers.close()
        with pytest.raises(AssertionError, match="given back"):
            _ = peers.memory
        return memory.addresses

    addresses = run_ranks(3, rank_main)
    assert addresses[0] == addresses[1] == addresses[2]
    for rank, device in enumerate(devices):
        others = [address for other, address in enumerate(addresses[0]) if other != rank]
        assert device.log == [("open", a) for a in others] + [("close", a) for a in others] + [("free", addresses[0][rank])]


@pytest.mark.parametrize(
    ("refuses", "reason"),
    [
        ("allocate", "MiB cannot be shared: out of memory"),
        ("open", "cannot reach that of rank 0 of its group: peer access is not supported"),
    ],
)
def test_all_ranks_give_up_when_one_cannot_take_part(refuses, reason):
    devices = [Device(refuses if rank == 1 else "") for rank in range(3)]

    def rank_main(world):
        with pytest.raises(ConfigError) as raised:
            OpenPeers(world.split(3, "cpu"), LAYOUT, 1.0, devices[world.rank])
        assert raised.value.hint.endswith("--set engine.expert_exchange=gather")
        return str(raised.value)

    said = run_ranks(3, rank_main)
    assert reason in said[1]
    assert "another rank of this group cannot take part" in said[0]
    assert said[0] == said[2]
    for device in devices:
        taken = [what for what, _ in device.log]
        assert taken.count("open") == taken.count("close")
        assert taken.count("free") == len(device.memory), "nothing stays taken"


def test_ranks_of_two_hosts_are_refused():
    def rank_main(world):
        kind = Elsewhere if world.rank == 1 else OpenPeers
        with pytest.raises(ConfigError, match=f"ranks \\[{1 - world.rank}\\] of its group are on another host"):
            kind(world.split(2, "cpu"), LAYOUT, 1.0, Device())

    run_ranks(2, rank_main)


def test_memory_stays_until_the_process_ends_when_a_peer_is_gone(caplog):
    device = Device()

    class Lost:
        rank, size = 0, 1

        def gather_ints(self, mine):
            return [mine]

        def max(self, values):
            if self.size == 0:
                raise GroupError("rank 0 of 2 lost a peer")
            return values

    group = Lost()
    peers = OpenPeers(group, LAYOUT, 1.0, device)
    group.size = 0
    peers.close()
    assert device.log == []
    assert "memory of peers is not given back: rank 0 of 2 lost a peer" in caplog.text


def test_a_runner_without_a_gpu_refuses_the_route():
    def rank_main(world):
        with pytest.raises(ConfigError, match="there is no peer memory on device cpu"):
            ModelRunner(golden_config(dp=2, ep=2, expert_exchange="peers", enforce_eager=True), group=world)

    run_ranks(2, rank_main)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 64, 2, 6, "cpu"), "no peer memory on device cpu"),
        ((4, 64, 2, 6, "cuda"), "needs kernels for send_rows and bring_home"),
    ],
)
def test_a_machine_without_the_kernels_is_told_so(arguments, message):
    with pytest.raises(ConfigError, match=message) as raised:
        check_peers(*arguments)
    assert "engine.expert_exchange=gather" in raised.value.hint


@pytest.mark.parametrize(
    ("arguments", "message"), [((16, 64, 2, 6, "cuda"), "engine.ep is 16"), ((4, 60, 2, 6, "cuda"), "rows of this model")]
)
def test_groups_and_models_that_do_not_fit_are_told_so(arguments, message, monkeypatch):
    for op in (SEND_ROWS, BRING_HOME):
        monkeypatch.setattr(op, "backend", "cuda")
    with pytest.raises(ConfigError, match=message):
        check_peers(*arguments)
    check_peers(8, 64, 2, 6, "cuda")
