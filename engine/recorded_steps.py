"""Decode, verify and draft steps of one runner as recorded graphs over fixed buffers. Prefill stays eager: its kernels are long."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import Batch
from engine.cuda_graph import Recorder, RecordingReport, StepGraphs
from engine.kv_cache import KVCache
from engine.models.deepseek_v41 import DeepseekV41
from engine.models.draft import Choose, DraftModel, DraftOutput, DraftSlice, draft_columns, most_likely
from engine.models.row_buffers import StagedRows
from engine.models.static_inputs import StaticInputs
from engine.parallel.expert_exchange import ExpertExchange


def forward(backbone: DeepseekV41, draft: DraftModel | None, inputs: StaticInputs, size: int, cache: KVCache, out: Tensor) -> None:
    """One step of `size` rows: logits into `out[:size]`, window keys of the draft stages when there is a draft model."""
    step = inputs.step_inputs(size)
    output = backbone(step, cache, want_taps=draft is not None)
    if draft is not None and output.taps is not None:
        draft.store_taps(output.taps, step.encoder, cache)
    backbone.logits(output.hidden, out[:size])


class RecordedDecode:
    """Decode and verify steps, keyed by their number of query rows. The logits of a step are valid until the next one.

    Ranks that share experts replay the same size in the same step, that of the rank with the most rows: a recorded collective has the
    capacity of its recording.
    """

    def __init__(
        self,
        backbone: DeepseekV41,
        draft: DraftModel | None,
        cache: KVCache,
        inputs: StaticInputs,
        sizes: list[int],
        recorder: Recorder,
        exchange: ExpertExchange | None = None,
    ) -> None:
        """draft: None when its windows need not be kept. exchange: the layers' own, when ranks share experts. Raises: NotEnoughMemory."""
        self._inputs, self._exchange = inputs, exchange
        self._logits = recorder.prepare(lambda: torch.empty(sizes[-1], backbone.text.vocab_size, device=backbone.embed.device))

        def step(size: int) -> None:
            if exchange is not None:
                exchange.restart(size, inputs.real_rows(size))
            forward(backbone, draft, inputs, size, cache, self._logits)

        self._graphs = StepGraphs("decode" if draft is None else "decode and verify", step, sizes, recorder)

    @property
    def report(self) -> RecordingReport:
        return self._graphs.report

    def takes(self, batch: Batch) -> bool:
        """Whether a batch has the recorded form and size. One without rows has, for a rank that others need."""
        return batch.num_tokens <= self._graphs.max_rows and StaticInputs.fits(batch)

    def run(self, batch: Batch) -> Tensor:
        """[rows, V] fp32 logits, a view of the fixed buffer. With an exchange, in a step that all ranks have agreed to replay."""
        size = self._graphs.size_for(batch.num_tokens if self._exchange is None else self._exchange.most_rows)
        if self._exchange is not None:
            self._exchange.pass_over()
        self._inputs.load(batch, size)
        self._graphs.replay(size)
        return self._logits[: batch.num_tokens]

    def close(self) -> None:
        self._graphs.close()


class RecordedDraft:
    """Draft steps, keyed by their number of sequences: stages, head, and greedy proposals."""

    def __init__(
        self, draft: DraftModel, backbone: DeepseekV41, cache: KVCache, frequencies: Tensor, sizes: list[int], recorder: Recorder
    ) -> None:
        """frequencies: [R/2] of the plain rotary table. Raises: NotEnoughMemory."""
        self._draft, self._block = draft, draft.text.dspark_block_size
        recorder.prepare(lambda: self._make_buffers(sizes[-1], frequencies.device))

        def step(size: int) -> None:
            columns = self._columns.values[:size].t().long()
            rows = size * self._block
            self._states[:rows], self._base[:rows] = draft.stages_output(columns, backbone, cache, frequencies)
            proposed = draft.propose(self._states[:rows], columns[0], self._base[:rows], most_likely)
            self._greedy.token_ids[:size], self._greedy.confidence[:size] = proposed.token_ids, proposed.confidence
            self._greedy.logits[:size] = proposed.logits

        self._graphs = StepGraphs("draft", step, sizes, recorder)

    def _make_buffers(self, seqs: int, device: torch.device) -> None:
        """Fixed memory for the inputs and outputs of `seqs` sequences."""
        text, block = self._draft.text, self._block
        self._columns = StagedRows(seqs, 4, device)
        self._states = torch.empty(seqs * block, text.hidden_size, dtype=self._draft.numerics.dtype, device=device)
        self._base = torch.empty(seqs * block, text.vocab_size, device=device)
        self._greedy = DraftOutput(
            torch.zeros(seqs, block, dtype=torch.int64, device=device),
            torch.zeros(seqs, block, device=device),
            torch.empty(seqs, block, text.vocab_size, device=device),
        )

    @property
    def report(self) -> RecordingReport:
        return self._graphs.report

    def close(self) -> None:
        self._graphs.close()

    def run(self, slices: list[DraftSlice], choose: Choose | None) -> DraftOutput:
        """Greedy proposals come from the graph; `choose` may look at the host, so it runs behind it on the recorded logits."""
        count = len(slices)
        size = self._graphs.size_for(count)
        self._columns.upload(draft_columns(slices), size)
        self._graphs.replay(size)
        if choose is None:
            return DraftOutput(self._greedy.token_ids[:count], self._greedy.confidence[:count], self._greedy.logits[:count])
        rows = count * self._block
        first = self._columns.values[:count, 0].long()
        return self._draft.propose(self._states[:rows], first, self._base[:rows], choose)
