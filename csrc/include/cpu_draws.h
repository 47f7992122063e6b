// How a row chooses its token: the compiled twin of engine/random_keys.py, engine/distribution.py, engine/draws.py and of `reject` in
// engine/spec_decode.py, which define the rule. Every row is computed on its own, in an order that depends on the number of ids only.
#pragma once

#include "cpu_ops.h"

namespace dix {

enum class Mode : int32_t { kGreedy = 0, kRace = 1, kInverse = 2 };  // as in engine/ops/sample_rows.py

// How the `rows` rows of one sequence choose, the first for `position`. proposal: [places, V], what the sequence's drafts are drawn from; null
// where nobody needs to know. top_p: in fixed point, more than any sum for none; top_k: at least V for none; min_p: 0 for none.
struct Choice {
    float* proposal;
    uint64_t seed;
    int64_t position, top_p;
    float temperature, min_p;
    int32_t top_k;
    Mode mode;
    int32_t rows, unused;
};

struct DrawScratch {
    Buffer<float> probs;
    Buffer<uint64_t> keys;
};

// The first of the largest of `count` values, NaN before all others.
int largest(const float* x, int count, float* value);

// Tempered softmax of `count` logits, filtered ids at 0, not renormalised. best: the largest logit, finite. Padded with zeros to a multiple of 16.
const float* distribution(const float* logits, int count, float best, const Choice& c, DrawScratch& scratch);

// A token of the distribution, for the position of row number `row`.
int draw(const float* probs, int count, const Choice& c, int row);

// Tokens of the rows of `num_choices` sequences. logits: rows at a distance, of which the first `count` ids are chosen from. drafts: by row the
// draft that it judges, -1 for none; a sequence with a proposal [places, vocab] keeps or refuses it, without one it draws as always.
// values: the largest logits, null where nobody wants them; a row where it is not finite gets some id.
void choose_rows(const float* logits, int64_t distance, int count, const Choice* choices, int num_choices, const int32_t* drafts, int vocab,
                 DrawScratch& scratch, int32_t* ids, float* values);

}  // namespace dix
