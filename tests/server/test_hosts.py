"""What torchrun's variables mean for a server."""

import pytest

from engine.config import EngineConfig
from hicache.config import HiCacheConfig
from server.config import ServerConfig
from server.errors import ConfigError
from server.hosts import Hosts, hosts_from
from server.plan import ServerPlan

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.1.1.1",
    "MASTER_PORT": "29400",
}


def test_each_process_of_torchrun_is_one_host():
    assert hosts_from(TORCHRUN) == Hosts(number=1, count=2, address="10.1.1.1", port=29401)


def test_without_torchrun_or_with_one_host_nothing_changes():
    assert hosts_from({"RANK": "1", "WORLD_SIZE": "2"}) is None
    assert hosts_from({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [({"LOCAL_WORLD_SIZE": "2"}, "2 processes on this host"), ({"MASTER_PORT": "x"}, "not usable"), ({"RANK": ""}, "not usable")],
)
def test_what_cannot_work_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        hosts_from({**TORCHRUN, **change})


def plan(dp, directory, hosts):
    return ServerPlan(EngineConfig(model="m", dp=dp), HiCacheConfig(), ServerConfig(), "tiny", directory, directory, hosts=hosts)


def test_ranks_are_shared_out_and_numbered_over_all_hosts(tmp_path):
    launch = plan(4, tmp_path, Hosts(1, 2, "10.1.1.1", 29401)).launch()
    assert (launch.name, launch.local_ranks) == ("tiny-host1", 2)
    assert [launch.group_rank(rank) for rank in range(2)] == [2, 3]


def test_ranks_that_do_not_divide_over_the_hosts_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"engine.dp is 3 on 2 hosts"):
        plan(3, tmp_path, Hosts(0, 2, "a", 1)).launch()
