"""From settings to the exchange of one rank."""

from __future__ import annotations

import logging

import torch

from engine.config import EngineConfig
from engine.distributed import Group
from engine.models.config import TextConfig
from engine.models.numerics import Numerics
from engine.ops.peer_rows import PeerLayout
from engine.parallel.expert_exchange import ExpertExchange, Route
from engine.parallel.forced_routing import ForcedRouting
from engine.parallel.peer_memory import MOST_ROWS, OpenPeers, Peers, check_peers
from engine.parallel.placement import Placement
from engine.parallel.tensor_group import TensorGroup

log = logging.getLogger(__name__)


def make_exchange(config: EngineConfig, text: TextConfig, numerics: Numerics, device: str, group: Group | None) -> ExpertExchange | None:
    """None when every rank has all experts. All ranks of `group` call it together.

    Draft stages are not shared: few and small, and each rank drafts when it likes.
    """
    return None if config.ep == 1 else build_exchange(config, text, numerics, device, group)


def build_exchange(config: EngineConfig, text: TextConfig, numerics: Numerics, device: str, group: Group | None) -> ExpertExchange:
    """The exchange of `config.ep` ranks, which may be one."""
    assert group is not None, f"engine.ep is {config.ep} without a group"
    assert group.size == config.dp, f"engine.dp is {config.dp} in a group of {group.size}"
    placement = Placement.initial(text.n_routed_experts, config.override_num_extra_experts, config.ep)
    exact, tensors = device == "cpu" or config.batch_invariant, group.split(config.ep, device)
    # `auto` stays a collective until several GPUs have shown what peers bring.
    route = Route.GATHER if config.expert_exchange == "auto" else Route(config.expert_exchange)
    exchange = ExpertExchange(
        tensors,
        placement,
        text.num_hidden_layers,
        text.boundary,
        exact=exact,
        route=route,
        device=device,
        hidden=text.hidden_size,
        dtype=numerics.dtype,
        num_chosen=text.num_experts_per_tok,
        peers=make_peers(config, text, numerics.dtype, device, tensors, exact) if route is Route.PEERS else None,
    )
    exchange.forced = forced_routing(config, text.n_routed_experts, len(set(placement.held_by(0))))
    log.info("experts %s of %d are here; rows travel by %s", exchange.local_experts, text.n_routed_experts, exchange.route)
    return exchange


def make_peers(config: EngineConfig, text: TextConfig, dtype: torch.dtype, device: str, group: TensorGroup, exact: bool) -> Peers:
    """Memory for the rows of all layers. Raises: ConfigError where this group has none."""
    hidden, chosen = text.hidden_size, text.num_experts_per_tok
    check_peers(group.size, hidden, dtype.itemsize, chosen, device)
    layout = PeerLayout.of(group.size, MOST_ROWS, hidden, dtype.itemsize, chosen, exact)
    return OpenPeers(group, layout, config.collective_timeout_s)


def forced_routing(config: EngineConfig, num_experts: int, first: int) -> ForcedRouting | None:
    """first: experts of the first rank."""
    ratio = 1.0 if config.force_load_balance else config.force_imbalance_ratio
    if not ratio:
        return None
    log.warning("routing is forced for measurements: the first rank gets %g times the mean, and outputs mean nothing", ratio)
    return ForcedRouting(ratio, config.ep, first, num_experts)
