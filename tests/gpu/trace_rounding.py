"""Where two devices first round a cached value differently: `python -m tests.gpu.trace_rounding [PROMPT]`, profile Fq, golden model.

Both devices run the same prompt over packed rows. Layers run in order, so the first layer with different bytes holds the deciding sum;
everything behind it follows. Prints per layer how many numbers differ.
"""

from __future__ import annotations

import sys

import torch

from engine.ops.cache_rows import unpack_entry_rows, unpack_window_rows
from tests.models.golden import PROMPTS, Recorder, Seq, golden_runner, prefill


def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu", "cpu")
    runners, probes = [], []
    for device in devices:
        runner, probe = golden_runner("Fq", device=device, cache_rows="packed", enforce_eager=True), Recorder()
        prefill(Seq(runner, PROMPTS[number], 1), [len(PROMPTS[number])], probe)
        runners.append(runner)
        probes.append(probe)
    text, length = runners[0].model_config.text, len(PROMPTS[number])
    rings = [r.kv.rings.cpu() for r in runners]
    rows = runners[0].kv.ring_rows + torch.arange(max(0, length - runners[0].kv.ring_rows), length) % runners[0].kv.ring_rows
    for layer in range(text.num_hidden_layers):
        show(f"layer {layer} window", [unpack_window_rows(r[layer, rows], torch.float32) for r in rings])
        if layer in text.kv_source_layer_ids:
            kv = runners[0].kv
            count = length // text.ratio(layer)
            entry = torch.arange(count)
            block = torch.tensor(Seq(runners[0], [], 1).table)[entry // kv.layout.entries[layer]]
            places = block * kv.layout.kv_stride + kv.layout.kv_offset[layer] + entry % kv.layout.entries[layer]
            show(f"layer {layer} entries", [unpack_entry_rows(r.kv.kv_rows.cpu()[places], torch.float32) for r in runners])
            table = torch.tensor([Seq(runners[0], [], 1).table])
            show(f"layer {layer} index", [r.kv.index_keys(layer, table.to(r.kv.blocks.device), count).cpu()[0] for r in runners])
        for name in ("attn_out", "ffn_out", "hidden"):
            pair = [torch.cat([part.cpu() for part in probe.seen[name, layer]]) for probe in probes]
            print(f"  {name} {layer}: devices differ by {(pair[0] - pair[1]).abs().max():.2e}")


def show(name: str, pair: list[torch.Tensor]) -> None:
    """How many numbers differ, and the first of them."""
    places = (pair[0] != pair[1]).nonzero()
    if not len(places):
        print(f"{name}: equal")
        return
    first = ", ".join(f"row {r} channel {c}: {pair[0][r, c]:.8g} and {pair[1][r, c]:.8g}" for r, c in places[:6].tolist())
    print(f"{name}: {len(places)} of {pair[0].numel()} differ; {first}")


if __name__ == "__main__":
    main()
