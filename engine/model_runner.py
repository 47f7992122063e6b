"""Runs the model over batches: loads weights, sizes the cache, turns a `Batch` into logits."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import Batch, StepKind
from engine.choices import Choices, Drawing
from engine.config import EngineConfig, Precision, TruncationMode
from engine.cuda_graph import CudaRecorder, GroupRecorder, Recorder, RecordingReport, bucket_sizes
from engine.distributed import Group
from engine.exact_sums import ExactSums
from engine.kv_cache import KVCache
from engine.limits import check_settings, resolve_cache_shape, resolve_device, resolve_limits, resolve_precision
from engine.model_weights import load_model, rotary_frequencies
from engine.models.config import load_config
from engine.models.draft import Choose, DraftOutput, DraftSlice
from engine.models.inputs import InputBuilder, StepInputs, Truncation
from engine.models.native_experts import NativeExperts
from engine.models.native_model import NativeModel
from engine.models.native_weights import NativeWeights, Tables, unsupported
from engine.models.numerics import Numerics
from engine.models.probe import Probe
from engine.models.shared_inputs import SharedPrefill, make_shared_prefill
from engine.models.static_inputs import StaticInputs
from engine.native_start import NativeStart
from engine.ops.registry import failing_op, select
from engine.parallel.balancer import Balancer, BalanceSettings
from engine.parallel.expert_exchange import ExpertExchange
from engine.parallel.expert_setup import make_exchange
from engine.path_agreement import PathAgreement
from engine.process_env import prefill_threads
from engine.readout import Largest
from engine.recorded_steps import RecordedDecode, RecordedDraft
from engine.runner_choices import keeps_packed_rows, keeps_packed_weights, why_not_recorded

log = logging.getLogger(__name__)


class ModelRunner:
    """One rank's model and cache. Knows nothing of scheduling: every step is described completely by its `Batch`.

    Raises:
        CheckpointError, ConfigError: the directory or a setting does not fit the model.
        NotEnoughMemory: weights or cache do not fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        draft: bool = False,
        on_progress: Callable[[str, float], None] | None = None,
        recorder: Recorder | None = None,
        group: Group | None = None,
    ) -> None:
        """draft: also keep the draft stages' windows up to date, so that `draft` can be called. recorder: makes decode steps recorded ones
        on any device; without it they are on GPUs whose ops allow it. group: the ranks of which `config.ep` consecutive ones share
        experts and `config.cp` prefill together; all make their runners together, and each calls `run` or `join` once per step.
        """
        path = Path(config.model)
        model = load_config(path)
        check_settings(config, model)
        device = resolve_device(config.device)
        precision = resolve_precision(config.precision, device)
        chosen = select(config.ops, device, config.batch_invariant)
        log.debug("ops: %s", chosen)
        packed_weights = keeps_packed_weights(config, model, precision, device, chosen)
        numerics = Numerics.of(precision, packed_weights, keeps_packed_rows(config, precision, device), config.batch_invariant)
        self.config, self.model_config = config, model
        self._exchange = make_exchange(config, model.text, numerics, device, group)
        self.backbone, self._draft, self.token_map = load_model(path, config, model, numerics, device, on_progress, self._exchange)
        self._drafting = draft and self._draft is not None
        shape = resolve_cache_shape(config, model, numerics, device, self._drafting)
        self.limits = resolve_limits(config, model, shape, precision, device, path, 0 if group is None else group.rank % config.cp)
        self.kv = KVCache(model.text, numerics, shape, device)
        self._truncation = Truncation(self.limits.mode, self.limits.keep_tokens)
        self.frequencies = rotary_frequencies(model, device)
        self._inputs = InputBuilder(model.text, self.kv, self.token_map, *self.frequencies)
        self._shared = make_shared_prefill(config, group, model.text, self.kv, self.token_map, self.frequencies)
        self._decode: RecordedDecode | None = None
        self._drafts: RecordedDraft | None = None
        reason = why_not_recorded(config, model, numerics, device, chosen)
        if recorder is None and not reason:
            recorder = CudaRecorder()
        # Before steps are recorded: it decides what they count.
        self._balancer = None if self._exchange is None else Balancer(self._exchange, BalanceSettings.of(config))
        if self._exchange is not None and self._exchange.group.max([int(recorder is None)]) != [0]:
            recorder, reason = None, reason or "another rank cannot record them"
        if recorder is not None:
            self._try_to_record(recorder)
        elif device == "cuda":
            log.info("steps are not recorded: %s", reason)

        together = self._exchange is not None or self._shared is not None
        agreement = PathAgreement(group if together else None)

        def bind(library: ctypes.CDLL) -> NativeModel:
            agreement.reach(True)
            draft_model = self._draft if self._drafting else None
            tables = Tables(*self.frequencies, self.token_map)
            weights = NativeWeights(library, self.backbone, draft_model, self.kv, numerics, tables, self._exchange)
            experts = None
            if self._exchange is not None:
                experts = NativeExperts(library, weights, self._exchange, model.text.num_experts_per_tok)
            native = NativeModel(library, weights, model.text, self.kv.block_size, experts)
            native.set_threads(prefill_threads(config.num_threads, config.dp))
            return native

        reason = "engine.enforce_eager is set" if config.enforce_eager else unsupported(model.text, numerics, device)
        self.native = NativeStart(config.build_dir, bind, reason)
        if together:
            self.native.wait()  # the ranks change their path together: never in the middle of serving
            agreement.conclude(self.native)
        if config.batch_invariant:
            self.native.wait()  # a row's bits may not change when the build ends
            log.info("batch-invariant steps: %s", self.path)

    def _try_to_record(self, recorder: Recorder) -> None:
        """Record, or stay eager and say which op stood in the way: a model that runs slowly is better than one that does not start."""
        try:
            self._record(recorder if self._exchange is None else GroupRecorder(recorder, self._exchange.group))
        except RuntimeError as error:
            self._decode = self._drafts = None
            if self._exchange is not None:
                self._exchange.pass_over()
            op = failing_op(error)
            log.warning("decode steps stay eager, several times slower: recording failed%s: %s", f" in op {op}" if op else "", error)

    @torch.inference_mode()
    def _record(self, recorder: Recorder) -> None:
        """Record decode, verify and draft steps of every size that a batch can have."""
        limits, text = self.limits, self.model_config.text
        interval = None if isinstance(self.config.cudagraph_batch_size_interval, str) else self.config.cudagraph_batch_size_interval
        verified = 1 + (min(self.config.num_draft_tokens, limits.draft_block_size) if self._drafting else 0)
        sizes = bucket_sizes(limits.max_num_seqs * verified, interval)
        longest = limits.max_model_len + self.config.backtracking_tokens
        inputs = recorder.prepare(lambda: StaticInputs(text, self.kv, self.token_map, self.frequencies, sizes[-1], longest))
        draft = self._draft if self._drafting else None
        self._decode = RecordedDecode(self.backbone, draft, self.kv, inputs, sizes, recorder, self._exchange)
        if draft is not None:
            sizes = bucket_sizes(limits.max_num_seqs, interval)
            self._drafts = RecordedDraft(draft, self.backbone, self.kv, self.frequencies[0], sizes, recorder)

    @property
    def path(self) -> str:
        """How steps run at present; it changes when the compiled step is ready."""
        if self._decode is not None:
            return "graphs"
        return "eager" if self.native.model is None else "compiled"

    @property
    def recordings(self) -> list[RecordingReport]:
        """What was recorded at start-up, and what that took."""
        return [graphs.report for graphs in (self._decode, self._drafts) if graphs is not None]

    def drop_recordings(self) -> None:
        """From now on steps are eager. Also before the group is closed: communicators wait for the graphs that hold them."""
        for graphs in (self._decode, self._drafts):
            if graphs is not None:
                graphs.close()
        self._decode = self._drafts = None

    def close(self) -> None:
        """Behind the last step and before the group is closed; all ranks of a group close their runners together."""
        self.drop_recordings()
        if self._exchange is not None:
            self._exchange.close()

    @torch.inference_mode()
    def run(self, batch: Batch, probe: Probe | None = None) -> Tensor:
        """Run one step. Returns [R, V] fp32 logits of the requested rows, in slice order.

        PREFILL obeys the truncation mode; DECODE and VERIFY read the rings as they are. `probe` observes intermediate results, which
        only the eager path can show.
        """
        if self._shared is not None and batch.kind is StepKind.PREFILL:
            return self._run_shared(self._shared, batch)
        if self._exchange is not None:
            return self._run_together(self._exchange, batch, probe)
        if self._decode is not None and probe is None and self._decode.takes(batch):
            return self._decode.run(batch)
        return self._forward(batch, probe)

    def run_greedy(self, batch: Batch) -> Tensor | Largest:
        """As `run`, for a caller that wants the largest logit of every row only: the compiled step then makes no tensor at all.

        Worth it where a step takes a millisecond: each call of torch finds its code outside the caches, which costs 20 to 70 us.
        """
        native = self.native.model
        if native is None or self._shared is not None or self._exchange is not None:
            return self.run(batch)
        return native.step_greedy(batch, self._truncation, self.limits.tokenizer_size)

    def run_drawn(self, batch: Batch, choices: Choices) -> Tensor | Largest:
        """As `run`, or the tokens that the rows choose and their largest logits where the compiled step computes all of it."""
        native = self.native.model
        if native is None or self._shared is not None or self._exchange is not None:
            return self.run(batch)
        return native.step_drawn(batch, self._truncation, self.limits.tokenizer_size, choices)

    @property
    def drawing(self) -> Drawing | None:
        """Who draws tokens in compiled code, if there is somebody and `engine.compiled_draws` wants it."""
        return self.native.model if self.config.compiled_draws else None

    @torch.inference_mode()
    def join(self, kind: StepKind) -> None:
        """Take part in a step without rows of this rank: other ranks may need its experts, or its part of their prompts."""
        if self._shared is not None and kind is StepKind.PREFILL:
            self._run_shared(self._shared, Batch(kind, []))
        elif self._exchange is not None:
            self._run_together(self._exchange, Batch(kind, []))

    def _run_together(self, exchange: ExpertExchange, batch: Batch, probe: Probe | None = None) -> Tensor:
        """A step of ranks that share experts, this one perhaps without rows. It is a recorded one on all of them or on none."""
        may = self._decode is not None and probe is None and self._decode.takes(batch)
        recorded = exchange.begin(*self._count_rows(batch), may)
        if recorded and exchange.most_rows > 0:
            assert self._decode is not None
            logits = self._decode.run(batch)
        else:
            logits = self._forward(batch, probe) if batch.slices else torch.empty(0, self.limits.vocab_size, device=self.limits.device)
        self._end_step(batch.kind)
        return logits

    def _meet_experts(self, rows: tuple[int, int], step: Callable[[], Tensor]) -> Tensor:
        """A shared prompt step whose experts may be on other ranks. rows: of this rank, in encoder and in decoder layers."""
        if self._exchange is None:
            return step()
        self._exchange.begin(*rows)
        logits = step()
        self._end_step(StepKind.PREFILL)
        return logits

    def _end_step(self, kind: StepKind) -> None:
        """The layers of other ranks' rows, then what the balancer does between steps."""
        assert self._exchange is not None and self._balancer is not None  # noqa: PT018
        self._exchange.finish()
        self._balancer.end_step(kind is StepKind.PREFILL)

    @property
    def compiling(self) -> bool:
        """Whether steps run eagerly only until the compiled step is built."""
        return self._decode is None and self.native.building

    @property
    def expert_stats(self) -> dict[str, float]:
        """Balance and movement of shared experts, see `engine/metrics.py`; empty when every rank has all."""
        if self._balancer is None:
            return {}
        figures = self._balancer.figures
        return {
            "balance": figures.balance,
            "plans_total": figures.plans,
            "moved_layers_total": figures.moved_layers,
            "moved_bytes_total": figures.moved_bytes,
        }

    def _count_rows(self, batch: Batch) -> tuple[int, int]:
        """Rows of encoder and of decoder layers."""
        encoder = sum(len(s.token_ids) for s in batch.slices)
        if batch.kind is not StepKind.PREFILL or self.limits.mode is not TruncationMode.COMPACT:
            return encoder, encoder
        keep = self.limits.keep_tokens
        return encoder, sum(min(len(s.token_ids), max(0, s.end - max(0, s.total_len - keep))) for s in batch.slices)

    def _forward(self, batch: Batch, probe: Probe | None) -> Tensor:
        """A step that is not recorded."""
        native = self.native.model
        if native is not None and probe is None:
            return native.step(batch, self._truncation)
        with self._arithmetic():
            return self._eager(batch, probe)

    def _eager(self, batch: Batch, probe: Probe | None) -> Tensor:
        inputs = self.build_inputs(batch)
        output = self.backbone(inputs, self.kv, want_taps=self._drafting, probe=probe)
        if self._drafting and output.taps is not None:
            assert self._draft is not None
            text = self.model_config.text
            rows = inputs.decoder if text.dspark_target_layer_ids[0] >= text.boundary else inputs.encoder
            self._draft.store_taps(output.taps, rows, self.kv)
        return self.backbone.logits(output.hidden.index_select(0, inputs.logit_rows))

    def _run_shared(self, shared: SharedPrefill, batch: Batch) -> Tensor:
        """This rank's share of the prompts of all ranks; its own logits. batch: its own prompts, none when it only helps."""
        everything, own = shared.join(batch)
        native = self.native.model
        if not everything.slices:
            logits = self._meet_experts((0, 0), lambda: torch.empty(0, self.limits.vocab_size, device=self.limits.device))
        elif native is not None:
            part = shared.builder.divide(everything, own, self._truncation)
            gathers = shared.builder.gathers(part)
            logits = self._meet_experts(
                part.rows(shared.exchange.group.rank), lambda: native.step_shared(everything, own, part, gathers, self._truncation)
            )
        else:
            inputs = shared.builder.build_share(everything, own, self._truncation, drafting=self._drafting)
            with self._arithmetic():
                logits = self._meet_experts((len(inputs.encoder), len(inputs.decoder)), lambda: self._eager_share(inputs))
        return logits

    def _eager_share(self, inputs: StepInputs) -> Tensor:
        assert inputs.share is not None
        output = self.backbone(inputs, self.kv, want_taps=self._drafting)
        if self._drafting and output.taps is not None:
            assert self._draft is not None
            rows = inputs.decoder if inputs.share.own_rows is None else inputs.share.own_rows
            self._draft.store_taps(output.taps, rows, self.kv)
        return self.backbone.logits(output.hidden.index_select(0, inputs.logit_rows))

    def build_inputs(self, batch: Batch) -> StepInputs:
        """The tensors of an eager step, which `backbone` reads."""
        return self._inputs.build(batch, self._truncation)

    @torch.inference_mode()
    def draft(self, slices: list[DraftSlice], choose: Choose | None = None) -> DraftOutput:
        """Draft a block of tokens for each slice, greedily unless `choose` picks them. Needs a runner made with `draft=True`."""
        assert self._drafting, "this runner was made without draft=True, or the model has no draft stages"
        assert self._draft is not None
        if self._drafts is not None:
            return self._drafts.run(slices, choose)
        native = self.native.model
        if native is not None:
            states, logits = native.draft(slices)
            if choose is None:
                return DraftOutput(*native.propose(slices, states, logits), logits.unflatten(0, (len(slices), -1)))
            return self._draft.propose(states, torch.tensor([s.token_id for s in slices]), logits, choose)
        with self._arithmetic():
            return self._draft(slices, self.backbone, self.kv, self.frequencies[0], choose)

    def draft_greedy(self, slices: list[DraftSlice]) -> tuple[list[list[int]], list[list[float]]]:
        """Ids and confidences of `draft` without a choice, as plain numbers and in one native call where there is one."""
        native = self.native.model
        if native is not None and self._drafts is None:
            return native.draft_greedy(slices)
        output = self.draft(slices)
        return output.token_ids.tolist(), output.confidence.tolist()

    def _arithmetic(self) -> AbstractContextManager[object]:
        """How eager steps multiply: fp32 profiles are references, and on a GPU only exact sums keep a library's order out of them."""
        reference = self.limits.device == "cuda" and self.limits.precision in (Precision.F, Precision.FQ)
        return ExactSums() if reference else nullcontext()
