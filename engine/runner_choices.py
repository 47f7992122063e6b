"""What a runner decides once at start, with its reasons: whether weights and cache rows are packed, whether decode steps are recorded."""

from __future__ import annotations

import logging

from engine.config import EngineConfig, Precision
from engine.errors import ConfigError
from engine.models.config import ModelConfig
from engine.models.numerics import Numerics

log = logging.getLogger(__name__)

# Ops whose references read results on the host, which a recorded step cannot; experts, alone and shared.
_RECORDED_OPS = ("index_search", "row_attention")
_EXPERT_OPS, _SHARED_EXPERT_OPS = ("packed_experts",), ("routed_experts", "shared_expert")


def keeps_packed_weights(config: EngineConfig, model: ModelConfig, precision: Precision, device: str, ops: dict[str, str]) -> bool:
    """Whether quantised weights stay as stored. ops: op -> backend. Raises: ConfigError when they cannot although they shall."""
    if config.weights == "dense":
        return False
    if precision in (Precision.F, Precision.FQ):
        reason = f"precision {precision} computes in fp32"
    elif not model.quantized:
        reason = "the checkpoint is not quantised"
    elif config.weights == "auto" and (device != "cuda" or ops["packed_experts"] == "reference"):
        reason = "there is no kernel for packed weights here"
    else:
        return True
    if config.weights == "packed":
        raise ConfigError(f"engine.weights is packed but {reason}", hint="--set engine.weights=auto")
    log.info("weights are decoded at start: %s", reason)
    return False


def keeps_packed_rows(config: EngineConfig, precision: Precision, device: str) -> bool:
    """Whether cache rows are kept in the released formats. Raises: ConfigError when they shall, but the profile does not round to them."""
    if config.cache_rows == "packed" and precision is Precision.F:
        raise ConfigError("engine.cache_rows is packed but precision F keeps all digits", hint="--set engine.cache_rows=auto")
    wanted = config.cache_rows == "packed" or (config.cache_rows == "auto" and device == "cuda")
    return wanted and precision is not Precision.F


def why_not_recorded(config: EngineConfig, model: ModelConfig, numerics: Numerics, device: str, ops: dict[str, str]) -> str:
    """Why decode steps stay eager; "" when they can be recorded. ops: op -> backend."""
    if device != "cuda":
        return f"the device is {device}"
    if config.enforce_eager:
        return "engine.enforce_eager is set"
    if not (numerics.packed_rows and numerics.packed_weights):
        return "weights or cache rows are not packed"
    needed = (*(_EXPERT_OPS if config.ep == 1 else _SHARED_EXPERT_OPS), *_RECORDED_OPS)
    slow = [op for op in needed if ops.get(op, "reference") == "reference"]
    return f"no kernel for {', '.join(slow)}" if slow else ""
