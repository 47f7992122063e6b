"""Settings of one engine process (section `engine`). Imports only the standard library and `hicache.knob`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hicache.errors import ConfigError
from hicache.knob import check_knobs, knob


class Precision(StrEnum):
    """Arithmetic and rounding profiles. Source: `v41-model` profiles F, Fq, B, R.

    F: fp32, no fake-quant. FQ: fp32 with KV and index fake-quant. B: bf16 with KV and index fake-quant.
    R: as B, and activations of quantised linears pass through fp8.
    """

    F = "F"
    FQ = "Fq"
    B = "B"
    R = "R"


class TruncationMode(StrEnum):
    """How much of a prompt the decoder layers see in prefill ("bounded replay")."""

    OFF = "off"
    MASK = "mask"
    COMPACT = "compact"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One frozen object that flows downwards; derived values are properties or resolved once in the model runner.

    `"auto"` values depend on the checkpoint and the device and are resolved when the engine starts; `Engine.limits` shows them.
    """

    model: str = knob("", "Model directory.")
    load_format: str = knob("auto", "Weights: read from the checkpoint, or random of the same shapes.", choices=("auto", "dummy"))
    device: str = knob("auto", "Where the model runs.", choices=("auto", "cpu", "cuda"), aliases=("DEEPINFER_ACCELERATOR",))
    precision: str = knob("auto", "Arithmetic profile; auto is F on CPU and B on GPUs.", choices=("auto", *Precision), common=True)
    ops: str = knob("auto", "Kernel choice: auto, or op:backend pairs, comma separated.", common=True)
    build_dir: str = knob("", "Where native model code for CPUs is built; empty is the user's cache directory.")
    seed: int = knob(0, "Seed of dummy weights and of requests without a seed of their own.")
    num_threads: int | str = knob("auto", "CPU threads of the model; auto is (cores - 1) / ranks, at least 1.", ge=1)

    max_model_len: int | str = knob("auto", "Longest prompt plus output; auto is the checkpoint's limit.", unit="tokens", ge=1, common=True)
    max_num_seqs: int | str = knob(
        "auto", "Most sequences in one decode step; auto is 256 on GPUs, 32 on CPU.", unit="sequences", ge=1, common=True
    )
    max_num_batched_tokens: int | str = knob(
        "auto", "Most tokens in one prefill step; auto is 8192 on GPUs, 512 on CPU.", unit="tokens", ge=1
    )
    chunked_prefill: bool = knob(True, "Split prompts that exceed max_num_batched_tokens.")
    block_size: int = knob(128, "Tokens per cache block; other sizes are for tests.", unit="tokens", ge=1)
    num_blocks: int | str = knob("auto", "Cache blocks, the reserved block 0 included.", unit="blocks", ge=2)
    weights: str = knob(
        "auto",
        "Quantised weights: decoded at start, or packed as they are stored; auto packs on GPUs that have the kernels.",
        choices=("auto", "dense", "packed"),
    )
    cache_rows: str = knob(
        "auto",
        "Cache rows of rounding profiles: elements of the profile, or the packed formats (890 bytes per token); auto packs on GPUs.",
        choices=("auto", "plain", "packed"),
    )
    memory_fraction: float = knob(0.90, "Share of GPU memory for weights and cache.", gt=0, le=1, common=True)
    kv_cache_gb: float = knob(0.125, "Device cache size on CPU.", unit="GiB", gt=0)
    state_slots_ratio: float = knob(1.2, "State slots per sequence.", ge=1, aliases=("DEEPINFER_NUM_STATE_SLOTS_RATIO",))
    stop_preempted_request: bool = knob(False, "End a preempted request with an error instead of recomputing it.")

    prefill_attempt_interval: int = knob(
        70,
        "Decode steps between prefill attempts when all ranks want one.",
        unit="steps",
        ge=1,
        aliases=("DEEPINFER_PREFILL_ATTEMPT_INTERVAL",),
    )
    prefill_any_interval: int = knob(
        100,
        "Decode steps between prefill attempts when any rank wants one; the server's default is 2.",
        unit="steps",
        ge=1,
        common=True,
        aliases=("DEEPINFER_PREFILL_ANY_ATTEMPT_INTERVAL",),
    )
    prefill_vote: str = knob(
        "intervals",
        "What decides about prompt steps: the intervals above, for the first chunk of a prompt or (reference) for every one, "
        "or whether a prompt is urgent (in progress, alone on its rank, or waiting).",
        choices=("intervals", "reference", "urgent"),
    )
    yoco_mode: str = knob(
        "off",
        "Decoder truncation in prefill; the server's default is compact.",
        choices=tuple(TruncationMode),
        aliases=("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",),
    )
    yoco_keep_tokens: int = knob(
        0,
        "Prompt tokens that decoder layers still see; the server's default is 140, 0 turns truncation off.",
        unit="tokens",
        ge=0,
        common=True,
        aliases=("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",),
    )
    spec: bool = knob(True, "Speculative decoding, when the checkpoint has draft stages.", common=True)
    num_draft_tokens: int = knob(
        5,
        "Most tokens drafted per step (window rings are sized for it); 0 turns drafting off.",
        unit="tokens",
        ge=0,
        aliases=("DEEPINFER_USE_NEXTN_DECODE",),
    )
    enable_mtp_varlen: bool = knob(
        True, "Verify only as many drafts as pay for themselves; off verifies all.", aliases=("DEEPINFER_ENABLE_MTP_VARLEN",)
    )
    dflash_confidence_head_temperature: str = knob(
        "1.0",
        "Calibration of draft confidences: one divisor, or one per drafted token, comma separated.",
        aliases=("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE",),
    )
    force_accept_length: float = knob(
        0.0,
        "Mean tokens of a verification, kept drafts and the one behind them, by count instead of by the model, every draft verified; "
        "for measurements with random weights, 0 is off.",
        unit="tokens",
        ge=0,
    )
    zero_overhead_scheduling: bool | str = knob(
        "auto",
        "Plan the next decode step while one is computed; auto: on GPUs without drafts, where it measured faster.",
        choices=("auto", True, False),
        aliases=("DEEPINFER_ZERO_OVERHEAD_SCHEDULING",),
    )
    batch_invariant: bool = knob(
        False, "Give a row the same bits whatever its batch, its chunks and the prefix cache are.", aliases=("DEEPINFER_BATCH_INVARIANT",)
    )
    cudagraph_batch_size_interval: int | str = knob(
        "auto",
        "Rows between recorded decode steps; auto is fine up to 64 and every 32 above.",
        unit="rows",
        ge=1,
        aliases=("DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL",),
    )
    compiled_draws: bool = knob(True, "Draw tokens in the compiled step of a CPU; off: with torch, many times slower.")
    enforce_eager: bool = knob(False, "Never capture graphs or run compiled steps.", aliases=("DEEPINFER_ENFORCE_EAGER",))

    dp: int = knob(1, "Data-parallel ranks, one process each.", unit="ranks", ge=1, common=True)
    ep: int = knob(1, "Consecutive ranks that share the experts; divides dp.", unit="ranks", ge=1, common=True)
    expert_exchange: str = knob(
        "auto",
        "How rows reach the experts of other ranks: all rows to all ranks, to the ranks that need them, or through the memory of peers.",
        choices=("auto", "gather", "all_to_all", "peers"),
    )
    cp: int = knob(1, "Consecutive ranks that prefill prompts together; divides dp.", unit="ranks", ge=1, common=True)
    override_num_extra_experts: int = knob(
        0,
        "Expert slots beyond one per expert, for copies of busy ones; rounded up so that all ranks have equally many.",
        unit="slots",
        ge=0,
        aliases=("DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS",),
    )
    expert_rearrangement_step_interval: int = knob(
        0,
        "Counted steps between new placements of shared experts; 0 never moves them.",
        unit="steps",
        ge=0,
        aliases=("DEEPINFER_EXPERT_REARRANGEMENT_STEP_INTERVAL",),
    )
    expert_count_window_size: int = knob(
        100, "Last counted steps that a placement is planned for.", unit="steps", ge=1, aliases=("DEEPINFER_EXPERT_COUNT_WINDOW_SIZE",)
    )
    rearrange_after_prefill_in_normal_engine: bool = knob(
        False,
        "Count prompt steps too, and place experts anew in the decode step behind them.",
        aliases=("DEEPINFER_REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE",),
    )
    moe_lb_stat_interval: int = knob(
        128,
        "Counted steps between figures of the experts' balance; 0 for none.",
        unit="steps",
        ge=0,
        aliases=("DEEPINFER_MOE_LB_STAT_INTERVAL",),
    )
    show_eplb_detail: bool = knob(
        False, "Log every plan of experts and every figure of their balance.", aliases=("DEEPINFER_SHOW_EPLB_DETAIL",)
    )
    force_load_balance: bool = knob(
        False,
        "Choose experts by turns instead of by the router; for measurements with random weights.",
        aliases=("DEEPINFER_FORCE_LOAD_BALANCE",),
    )
    force_imbalance_ratio: float = knob(
        0.0,
        "Likewise, with so many times the mean for the first rank of the experts; 0 leaves the choice to the router.",
        ge=0,
        aliases=("DEEPINFER_FORCE_IMBALANCE_RATIO",),
    )
    collective_timeout_s: float = knob(45.0, "Longest wait for a peer in a collective.", unit="s", gt=0)

    def __post_init__(self) -> None:
        check_knobs(self, "engine")
        self.confidence_temperatures(self.num_draft_tokens)
        if self.dp % self.ep:
            raise ConfigError(f"engine.ep is {self.ep} and engine.dp is {self.dp}", hint="--dp must be a multiple of --ep")
        if self.dp % self.cp:
            raise ConfigError(f"engine.cp is {self.cp} and engine.dp is {self.dp}", hint="--dp must be a multiple of --cp")
        if 0 < self.expert_rearrangement_step_interval < self.expert_count_window_size:
            raise ConfigError(
                f"engine.expert_count_window_size is {self.expert_count_window_size}",
                hint=f"at most engine.expert_rearrangement_step_interval, which is {self.expert_rearrangement_step_interval}",
            )
        self._check_forced_routing()
        self._check_forced_accept()
        if self.yoco_mode != TruncationMode.OFF and self.yoco_keep_tokens == 0:
            raise ConfigError(
                f"engine.yoco_mode is {self.yoco_mode} but engine.yoco_keep_tokens is 0",
                hint="--yoco-keep-tokens 140, or --set engine.yoco_mode=off",
            )

    def _check_forced_routing(self) -> None:
        ratio = self.force_imbalance_ratio
        if ratio == 0 and not self.force_load_balance:
            return
        name = "engine.force_imbalance_ratio" if ratio else "engine.force_load_balance"
        if ratio and self.force_load_balance:
            raise ConfigError("engine.force_load_balance and engine.force_imbalance_ratio are both set", hint="set one of them")
        if self.ep == 1:
            raise ConfigError(f"{name} is set but no experts are shared", hint="--ep 2 or more")
        if ratio and not 1 <= ratio <= self.ep:
            raise ConfigError(f"{name} is {ratio:g}", hint=f"from 1 to engine.ep, which is {self.ep}: the first rank gets all then")
        if self.load_format != "dummy":
            raise ConfigError(f"{name} replaces the router of a real model", hint="it is for measurements: --set engine.load_format=dummy")

    def _check_forced_accept(self) -> None:
        length = self.force_accept_length
        if length == 0:
            return
        if not self.spec or self.num_draft_tokens == 0:
            raise ConfigError("engine.force_accept_length is set but nothing is drafted", hint="--spec and --num-draft-tokens above 0")
        most = 1 + self.num_draft_tokens
        if not 1 <= length <= most:
            raise ConfigError(
                f"engine.force_accept_length is {length:g}", hint=f"from 1 to {most}: engine.num_draft_tokens and the token behind them"
            )
        if self.load_format != "dummy":
            raise ConfigError(
                "engine.force_accept_length replaces the verification of a real model",
                hint="it is for measurements: --set engine.load_format=dummy",
            )

    @property
    def chooses_draft_lengths(self) -> bool:
        """Whether steps verify as many drafts as pay for themselves: what confidences promise does not come of forced acceptance."""
        return self.enable_mtp_varlen and not self.force_accept_length

    @property
    def backtracking_tokens(self) -> int:
        """B: positions that a step may write beyond the committed end. Rings hold window + B rows."""
        return self.num_draft_tokens + 1

    def confidence_temperatures(self, num_drafts: int) -> list[float]:
        """`dflash_confidence_head_temperature` for the first `num_drafts` places of a block.

        Raises:
            ConfigError: not a positive number, nor as many as `num_draft_tokens`.
        """
        text = self.dflash_confidence_head_temperature
        try:
            values = [float(part) for part in text.split(",")]
        except ValueError:
            values = []
        if len(values) == 1:
            values *= max(1, self.num_draft_tokens)
        if len(values) != max(1, self.num_draft_tokens) or not all(0 < value < float("inf") for value in values):
            raise ConfigError(
                f"engine.dflash_confidence_head_temperature is {text!r}",
                hint=f"a number above 0, or {self.num_draft_tokens} of them separated by commas",
            )
        return values[:num_drafts]
