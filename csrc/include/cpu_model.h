// What the model's description looks like in memory. `engine/models/native_layout.py` declares the same structures, in the same order.
//
// Everything is owned by the caller and stays alive as long as the model. Letters: T rows of a step, C hidden size, D head width,
// H heads, V vocabulary, E experts.
#pragma once

#include <cstdint>

namespace dix {

// A packed matrix [rows, cols], see cpu_linear.cpp. format: 0 bf16, 1 fp32, 2 fp4; its values are exact. bytes: of one packed matrix.
struct Matrix {
    const char* data;
    int64_t bytes;
    int32_t rows, cols, format, unused;
};

// Mixes of a sublayer. fn [24, 4*C]; base, scale [24].
struct Mix {
    Matrix fn;
    const float *base, *scale;
};

// wq_b packs query heads eight side by side: row (group, d, lane). wo_a: first of `groups` matrices. wkv: last rows of wq_a_wkv, draft stages
// only. sink [H rounded up to 8].
struct Attention {
    Matrix wq_a_wkv, wq_b, wo_a, wo_b, wkv;
    const float *q_norm, *kv_norm, *sink;
};

// count experts exist, of which a row takes `chosen`; w13, w2: first of `held` matrices, all of them unless other ranks hold some. layer: the
// number under which the experts of several ranks are exchanged, -1 when all are here.
struct Experts {
    Matrix gate, w13, w2, shared_w13, shared_w2;
    const float* bias;
    int32_t count, chosen, held, layer;
};

// partial: rows of values and gates of earlier tokens, ratio 2 only. kv_offset, index_offset: first row inside a block.
struct Compressor {
    Matrix wkv, wk;
    const float *norm, *k_norm;
    float* partial;
    int64_t kv_offset, index_offset;
};

// wq_b packs heads like Attention's. publishes: candidate blocks for later indexers; restricted: obeys them.
struct Indexer {
    Matrix wq_b, weights;
    int64_t kv_offset, index_offset;
    int32_t publishes, restricted;
};

// table: rows of head_dim e4m3 with scales per 32 (format 0), bf16 (1) or fp32 (2). multipliers [G], primes and offsets [columns].
struct Engram {
    Matrix wkv;
    const void* table;
    const uint8_t* scale;
    const float* weight;
    const int64_t *multipliers, *primes, *offsets;
    int32_t format, pad_id;
};

struct Layer {
    Attention attention;
    Experts experts;
    Mix attn_mix, ffn_mix;
    const float *attn_norm, *ffn_norm;
    const Compressor* compressor;
    const Indexer* indexer;
    const Engram* engram;
    float* ring;
    int32_t ratio, tap;
};

// The draft stages' head. markov_embed [V, rank], confidence [C + rank]. taps: of each state slot `tap_places` rows of main_proj's inputs, those of
// its newest positions that no stage has read yet; position p in row p % tap_places.
struct Draft {
    Matrix main_proj, markov_head;
    const float *main_norm, *norm, *markov_embed, *confidence;
    float* taps;
    int32_t markov_rank, block_size, noise_id, tap_places;
};

// Routed and shared experts of `count` rows where several ranks share them. x, y: [count, C].
using Exchange = void (*)(int32_t layer, const float* x, int32_t count, float* y);

struct Model {
    const Layer* layers;
    const Layer* stages;
    const Draft* draft;
    const float* embed;
    const float* norm;
    Matrix head;
    const float *plain_frequencies, *scaled_frequencies;
    const int32_t* token_map;
    Exchange exchange;
    float *kv_rows, *index_rows;
    int64_t kv_stride, index_stride;
    float rms_eps, hc_eps, swiglu_limit, routed_scale, gate_temperature;
    int32_t num_layers, num_stages, boundary, hidden, vocab, heads, head_dim, rope_dim, q_rank, groups, group_rank, inner;
    int32_t index_heads, index_dim, index_topk, candidate_blocks, candidate_size, sinkhorn_iters;
    int32_t ngrams, engram_columns, engram_dim, window, ring_rows, partial_rows, block_size, quantize_kv;
};

}  // namespace dix
