"""The model against numbers of independent implementations, through the paged cache."""

import pytest
import torch

from engine.batch import Batch, LogitRows, StepKind
from engine.models.draft import DraftSlice
from tests.models.golden import PROMPTS, Recorder, Seq, decode, golden_runner, prefill, vectors

EXACT = 1e-4


def sorted_rows(index, width):
    """Sets of indices as ascending rows of `width`, -1 first."""
    rows = torch.full((len(index), width), -1)
    rows[:, : index.shape[1]] = index
    return rows.sort(1).values


def observed(mode, precision, number, chunk, checkpoint="tiny-a-bf16"):
    """Stored numbers, what a probe saw of the eager path, and the logits of the compiled one."""
    stored = {k.removeprefix(f"p{number}."): v for k, v in vectors(mode).items() if k.startswith(f"p{number}.")}
    runner, probe = golden_runner(precision, checkpoint), Recorder()
    seq, again = Seq(runner, PROMPTS[number], 1), Seq(runner, PROMPTS[number], 2)
    chunks = [chunk] * -(-len(seq.ids) // chunk)
    eager = prefill(seq, chunks, probe)
    if precision == "F":
        assert (eager[stored["logits_positions"].long()] - stored["logits"]).abs().max() <= EXACT
    return stored, probe, prefill(again, chunks)


def differing_rows(stored, probe, name, layer):
    """How many rows of a stored integer or set tensor differ from what was observed."""
    theirs = stored[f"{name}.{layer}"].long()
    if name == "candidate_blocks":
        ours = torch.zeros_like(theirs)
        row = 0
        for part in probe.seen[name, layer]:
            ours[row : row + len(part), : part.shape[1]] = part.long()
            row += len(part)
        return int((ours != theirs).any(1).sum())
    parts = probe.seen[name, layer]
    if name == "engram_ids":
        return int((torch.cat(parts) != theirs).any(1).sum())
    ours = torch.cat([sorted_rows(part, theirs.shape[1]) for part in parts])
    return int((ours != theirs.sort(1).values).any(1).sum())


@pytest.mark.parametrize("chunk", [300, 16])
@pytest.mark.parametrize("number", range(4))
def test_fp32_prefill_reproduces_every_stored_number(number, chunk):
    stored, probe, logits = observed("fp32", "F", number, chunk)
    assert (logits[stored["logits_positions"].long()] - stored["logits"]).abs().max() <= EXACT
    checked = 0
    for key, theirs in stored.items():
        name, _, layer = key.partition(".")
        if name in ("index", "candidate_blocks", "router_ids", "engram_ids"):
            assert differing_rows(stored, probe, name, int(layer)) == 0, key
        elif name in ("hidden", "pre_mix", "attn_out", "ffn_out", "engram_out", "main_hidden"):
            ours = torch.cat(probe.seen[name, int(layer) if layer else -1])
            assert (ours - theirs).abs().max() <= EXACT, key
        elif name == "stream_rms":
            ours = torch.stack([torch.cat(probe.seen["hidden", i]).square().mean((1, 2)).sqrt() for i in range(len(theirs))])
            assert (ours - theirs).abs().max() <= EXACT
        elif name == "router_w":
            ids, weights = torch.cat(probe.seen["router_ids", int(layer)]), torch.cat(probe.seen["router_w", int(layer)])
            assert (weights.gather(1, ids.argsort(1)) - theirs).abs().max() <= 1e-5
        else:
            continue
        checked += 1
    assert checked >= 8 + 4 + 1 + 16 + 2 - 8


@pytest.mark.parametrize("number", range(4))
def test_fake_quantised_prefill_selects_the_stored_sets(number):
    stored, probe, logits = observed("fp32-qdq", "Fq", number, 64)
    error = (logits[stored["logits_positions"].long()] - stored["logits"]).abs().amax(1)
    assert (error <= 1e-3).float().mean() >= 0.9
    assert error.max() <= 0.5
    for key, theirs in stored.items():
        name, _, layer = key.partition(".")
        if name in ("index", "candidate_blocks", "router_ids"):
            assert differing_rows(stored, probe, name, int(layer)) <= 0.01 * len(theirs), key


@pytest.mark.parametrize(("mode", "precision"), [("fp32", "F"), ("fp32-qdq", "Fq")])
def test_quantised_checkpoint_gives_the_same_fp32_numbers(mode, precision):
    stored, _, logits = observed(mode, precision, 1, 300, checkpoint="tiny-a-fp8")
    assert (logits[stored["logits_positions"].long()] - stored["logits"]).abs().max() <= EXACT


def run_with_drafts(precision, checkpoint, stored, number):
    """Prefill and decode along the stored tokens, drafting after every step."""
    runner = golden_runner(precision, checkpoint, draft=True)
    seq = Seq(runner, PROMPTS[number], 1)
    length, tokens = len(seq.ids), stored[f"p{number}.gen_tokens"].tolist()
    rows = [prefill(seq, [64] * -(-length // 64))[-1]]
    seq.ids += tokens
    drafts = []
    for step in range(len(tokens)):
        drafts.append(runner.draft([DraftSlice(tokens[step], length + step - 1, 1)]))
        if step + 1 < len(tokens):
            rows.append(decode([seq])[0, 0])
    return torch.stack(rows), drafts


@pytest.mark.parametrize("number", range(4))
def test_fp32_continuation_and_drafts_are_the_stored_ones(number):
    stored = vectors("fp32")
    rows, drafts = run_with_drafts("F", "tiny-a-bf16", stored, number)
    assert rows.argmax(-1).tolist() == stored[f"p{number}.gen_tokens"].tolist()
    assert (rows - stored[f"p{number}.gen_logits"]).abs().max() <= EXACT
    assert torch.cat([d.token_ids for d in drafts]).tolist() == stored[f"p{number}.draft_tokens"][:, 1:].tolist()
    assert (torch.cat([d.confidence for d in drafts]) - stored[f"p{number}.draft_confidence"]).abs().max() <= 1e-3
    assert (torch.cat([d.logits for d in drafts[:3]]) - stored[f"p{number}.draft_logits_first3"]).abs().max() <= EXACT


@pytest.mark.parametrize(("mode", "precision", "checkpoint"), [("bf16", "B", "tiny-a-bf16"), ("fp8", "R", "tiny-a-fp8")])
def test_rounded_profiles_stay_within_the_noise_of_the_release(mode, precision, checkpoint):
    stored = vectors(mode)
    rows, _ = run_with_drafts(precision, checkpoint, stored, 1)
    theirs = stored["p1.gen_logits"]
    assert (rows - theirs).square().mean().sqrt() <= 0.25
    assert (theirs.softmax(-1) * (theirs.log_softmax(-1) - rows.log_softmax(-1))).sum(-1).mean() <= 0.03


def test_drafts_of_a_batch_equal_single_drafts():
    stored, runner = vectors("fp32"), golden_runner("F", draft=True)
    seqs = [Seq(runner, PROMPTS[n], slot) for slot, n in enumerate((0, 2), start=1)]
    for seq in seqs:
        prefill(seq, [300])
    first = [stored[f"p{n}.gen_tokens"][0].item() for n in (0, 2)]
    both = runner.draft([DraftSlice(t, len(s.ids) - 1, s.slot) for t, s in zip(first, seqs, strict=True)])
    assert both.token_ids.tolist() == [stored[f"p{n}.draft_tokens"][0, 1:].tolist() for n in (0, 2)]


def test_draft_after_decode_equals_draft_after_prefill():
    runner = golden_runner("F", draft=True)
    slow, fast = Seq(runner, PROMPTS[2], 1), Seq(runner, PROMPTS[2], 2)
    prefill(slow, [61, 38])
    for _ in range(31):
        decode([slow])
    prefill(fast, [130])
    one, two = (runner.draft([DraftSlice(9, 129, s.slot)]) for s in (slow, fast))
    assert (one.logits - two.logits).abs().max() <= EXACT


def test_draft_after_a_compact_prefill_equals_draft_after_a_masked_one():
    drafts = {}
    for mode in ("mask", "compact"):
        runner = golden_runner("F", draft=True, yoco_mode=mode, yoco_keep_tokens=24)
        seq = Seq(runner, PROMPTS[2], 1)
        for end in (90, 120, 130):
            runner.run(Batch(StepKind.PREFILL, [seq.slice(end, LogitRows.NONE)]))
        drafts[mode] = runner.draft([DraftSlice(9, 129, 1)])
    assert drafts["mask"].token_ids.tolist() == drafts["compact"].token_ids.tolist()
    assert (drafts["mask"].logits - drafts["compact"].logits).abs().max() <= EXACT
