// The operations of a forward step. Rows are contiguous fp32 unless a stride is given; every row is computed on its own.
#pragma once

#include <vector>

#include "cpu_model.h"
#include "cpu_vector.h"

namespace dix {

constexpr int kStreams = 4;                              // residual streams; the engine falls back to eager for other numbers
constexpr int kMixes = (2 + kStreams) * kStreams;        // read weights, write weights, stream matrix
constexpr int kLanes = 8;                                // heads that share a vector

// Memory that only grows. Contents are unspecified after `get`.
template <class T>
class Buffer {
   public:
    T* get(size_t count) {
        if (data_.size() < count) data_.resize(count + count / 4);
        return data_.data();
    }

   private:
    std::vector<T> data_;
};

// y[r] = w x[r] for `count` rows at distances ldx and ldy.
void linear(const Matrix& w, const float* x, int64_t ldx, float* y, int64_t ldy, int count);
// The same for matrix number `index` of a stack.
void linear(const Matrix& first, int index, const float* x, int64_t ldx, float* y, int64_t ldy, int count);

// y = x / rms(x) * weight. n is a multiple of 16; y may be x.
void rms_norm(const float* x, const float* weight, float eps, int n, float* y);

// Cosines, then sines, of position * frequency. table: 2 * half floats.
void rotation(int64_t position, const float* frequencies, int half, float* table);
// Rotate pairs (2i, 2i+1) of x[0 .. 2*half); direction -1 undoes it.
void rotate(float* x, const float* table, int half, float direction);
// The same for kLanes vectors side by side: x[i * kLanes + lane].
void rotate_lanes(float* x, const float* table, int half);

// Round trips through the storage formats, in place. n is a multiple of 32.
void q8(float* x, int n);
void q4_index(float* x, int n);
void q4_kv(float* x, int n);
// q4_index of kLanes vectors of n values side by side.
void q4_index_lanes(float* x, int n);

// Read weights, write weights and stream matrix of each row. h: [count, 4*C]; pre, post: [count, 4]; comb: [count, 16].
void mixes(const Mix& mix, const Model& model, const float* h, int count, float* scratch, float* pre, float* post, float* comb);
// x = rms_norm(sum of streams weighted by pre).
void read_streams(const float* h, const float* pre, const float* norm, float eps, int hidden, int count, float* x);
// sum of streams weighted by pre.
void collapse(const float* h, const float* pre, int hidden, float* x);
// h[k] = post[k] * y + sum over j of comb[j, k] * h[j], for each row.
void write_streams(float* h, const float* y, const float* post, const float* comb, int hidden, int count);

// Repeat the last of `count` > 0 keys up to a multiple of kLanes, so that the last group needs no case of its own.
void pad_keys(const float** keys, int count);

// What one row attends to: vectors of D values, each with a number that names it and rises along the list.
struct KeyList {
    const float** keys;
    int32_t* names;
    int count = 0;

    void add(const float* key, int32_t name) {
        keys[count] = key;
        names[count++] = name;
    }
};

// Shape of an attention, and room for its intermediate results.
struct AttentionShape {
    int heads, head_dim;
    const float* sink;
};

struct AttentionScratch {
    Buffer<float> weights, queries;
    Buffer<const float*> keys[3];
    Buffer<int32_t> names[2];
    Buffer<uint8_t> seen;

    // An empty list, the first or the second, for up to `most` keys.
    KeyList list(int number, int most) { return {keys[number].get(most + kLanes), names[number].get(most)}; }
};

// Attention of one row. q: [groups of heads, D, kLanes]; out: [H, D].
void attend(const AttentionShape& shape, const float* q, const KeyList& list, AttentionScratch& scratch, float* out);
// The same for two rows, quicker the more keys they share. A row's result does not depend on the other.
void attend(const AttentionShape& shape, const float* const q[2], const KeyList lists[2], AttentionScratch& scratch, float* const out[2]);

// One row that asks an index. q: [groups of heads, Di, kLanes]; weights: [heads]; scores: one for each of the first `count` keys.
struct IndexRow {
    const float *q, *weights;
    int count;
    float* scores;
};

// Relevance of each key to one row, or to two at a time. The list of keys is readable up to a multiple of kLanes; what lies behind a row's
// `count` has no influence on it.
void index_scores(const IndexRow& row, const float* const* keys, int heads, int dim, AttentionScratch& scratch);
void index_scores(const IndexRow rows[2], const float* const* keys, int heads, int dim, AttentionScratch& scratch);
// The best `limit` > 0 of scores[0..count) that are not -inf, ascending; ties go to the lower index. Returns how many.
// ranks: room for `count` rounded up to a multiple of 16.
int select_top(const float* scores, int count, int limit, uint32_t* ranks, int32_t* picked);

struct ExpertScratch {
    Buffer<float> logits, weights, gathered, both, act, out;
    Buffer<int32_t> ids, order;
};

// The choices of every row, best first, and their weights: [count, chosen].
void route(const Experts& e, const Model& model, const float* x, int count, ExpertScratch& scratch, int32_t* ids, float* weights);
// What every choice gives: out [count, choices, C]. ids: held experts, `held` for the shared one, below 0 for none.
void expert_parts(const Experts& e, const Model& model, const float* x, int count, int choices, const int32_t* ids, const float* weights,
                  ExpertScratch& scratch, float* out);
// Routed and shared experts of all rows, all of them here. x, y: [count, C].
void experts(const Experts& e, const Model& model, const float* x, int count, ExpertScratch& scratch, float* y);

// Adds looked-up values to the streams of one row. grams: compressed ids, newest first; values, kv: scratch of columns * dim and 5*C floats.
void engram_lookup(const Engram& e, const Model& model, const int32_t* grams, float* values);
void engram_gate(const Engram& e, const Model& model, const float* kv, float* h);

}  // namespace dix
