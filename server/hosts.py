"""A server over several hosts: one supervisor per host, started by `torchrun`, with the ranks and the HTTP front of its host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Hosts:
    """This host among those of a server. address, port: where global rank 0 serves the rendezvous of the ranks."""

    number: int
    count: int
    address: str
    port: int

    def local_ranks(self, ranks: int) -> int:
        """How many of all ranks run on one host.

        Raises:
            ConfigError: they do not divide evenly.
        """
        if ranks % self.count:
            raise ConfigError(f"engine.dp is {ranks} on {self.count} hosts", hint="--dp must be a multiple of the number of hosts")
        return ranks // self.count


def hosts_from(environment: Mapping[str, str]) -> Hosts | None:
    """The hosts that `torchrun --nnodes N --nproc-per-node 1` tells of; None when it did not start this process, or for one host.

    torchrun serves its own rendezvous at MASTER_PORT, the ranks meet one port higher.

    Raises:
        ConfigError: more than one process per host, or variables that are missing or no numbers.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    if environment.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"torchrun started {environment['LOCAL_WORLD_SIZE']} processes on this host",
            hint="--nproc-per-node 1: one server process per host starts the ranks of its host, --dp counts those of all hosts",
        )
    try:
        hosts = Hosts(
            int(environment["RANK"]), int(environment["WORLD_SIZE"]), environment["MASTER_ADDR"], int(environment["MASTER_PORT"]) + 1
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(f"torchrun's variables are not usable: {error!r}", hint="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT") from error
    return hosts if hosts.count > 1 else None
