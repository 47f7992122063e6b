// One token per row of logits without sorting and without the host: the largest logit, or a draw from the tempered distribution with
// given random numbers (engine/draws.py is the definition).
//
// Three launches, or four. `survey` finds each row's maximum and the sum of its exponentials, `find_cuts` the least probable id that top-k and
// top-p leave (a search over the digits of the probabilities), `weigh` turns logits into probabilities on the way and lets them race, or
// adds their fixed-point weights, `decide` picks. Rows are cut into kSplits pieces of ids; what the pieces find
// is combined in their order, so a row's token depends on that row alone.
#include "sample_rows.cuh"

namespace dix {

__global__ void __launch_bounds__(kSampleThreads) survey(const SampleRows p) {
    const int row = blockIdx.x / kSplits, split = blockIdx.x % kSplits, thread = threadIdx.x;
    const float* logits = p.logits + row * p.row_stride;
    const Piece piece = piece_of(p.num_ids, split);
    const bool greedy = p.modes[row] == kGreedy;
    const float temperature = greedy ? 1.0f : p.temperature[row], inverse = 1.0f / temperature;
    float top = -INFINITY, sum = 0;
    int top_id = 0x7FFFFFFF;
    for_logits(logits, piece.begin, piece.end, kSampleThreads, [&](int id, float logit) {
        if (above(logit, id, top, top_id)) {
            sum = rescaled(sum, top, logit, temperature) + (logit > -INFINITY ? 1.0f : 0.0f);
            top = logit;
            top_id = id;
        } else if (!greedy && logit > -INFINITY) {
            sum += expf((logit - top) * inverse);
        }
    });
    float* tops = reinterpret_cast<float*>(shared_memory());
    float* sums = tops + kSampleThreads;
    int* ids = reinterpret_cast<int*>(sums + kSampleThreads);
    tops[thread] = top;
    sums[thread] = sum;
    ids[thread] = top_id;
    for (int half = kSampleThreads / 2; half > 0; half /= 2) {
        sync_block();
        if (thread < half) {
            const int other = thread + half;
            const bool theirs = above(tops[other], ids[other], tops[thread], ids[thread]);
            const float high = theirs ? tops[other] : tops[thread];
            sums[thread] = rescaled(sums[thread], tops[thread], high, temperature) + rescaled(sums[other], tops[other], high, temperature);
            tops[thread] = high;
            ids[thread] = theirs ? ids[other] : ids[thread];
        }
    }
    if (thread == 0) {
        const int at = row * kSplits + split;
        p.tops[at] = tops[0];
        p.top_ids[at] = ids[0];
        p.sums[at] = sums[0];
    }
}

__device__ __forceinline__ uint64_t number_of(int64_t key, int id) {
    uint64_t x = static_cast<uint64_t>(key) + (static_cast<uint64_t>(id) + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return (x ^ (x >> 31)) >> 11;
}

// -log(1 - number / 2^53), less at most a thousandth of it; 0 where fp32 has too few digits for it.
__device__ __forceinline__ float rough_time(uint64_t number) {
    const float u = static_cast<float>(number) * 1.1102230246251565e-16f;  // 2^-53
    if (u < 0.05f) return u * (1.0f + u * (0.5f + u * 0.33333f)) * 0.9999f;
    return u < 0.99f ? -quick_log(1.0f - u) * 0.9999f : 0.0f;
}

constexpr int kCutThreads = 1024;
constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;  // 31 bits of a positive number: digits of 11, 11 and 9 bits

// Sums over the threads before this one. buffer: kCutThreads numbers.
__device__ __forceinline__ int64_t sum_before(int64_t value, int64_t* buffer) {
    const int thread = threadIdx.x;
    buffer[thread] = value;
    sync_block();
    for (int step = 1; step < kCutThreads; step *= 2) {
        const int64_t below = thread >= step ? buffer[thread - step] : 0;
        sync_block();
        buffer[thread] += below;
        sync_block();
    }
    const int64_t sum = buffer[thread] - value;
    sync_block();
    return sum;
}

// In the order of falling probability, ties by id, every filter keeps a prefix: an id stays when fewer than top_k ids are before it and
// their weights do not exceed top_p. Three rounds find the level at which that ends, digit by digit; ties at that level are counted off.
__global__ void __launch_bounds__(kCutThreads) find_cuts(const SampleRows p) {
    const int row = blockIdx.x, thread = threadIdx.x;
    const int64_t most = p.top_p[row], count_limit = p.top_k[row];
    if (p.modes[row] == kGreedy || (most >= (int64_t{1} << 32) && count_limit >= p.num_ids)) {
        if (thread == 0) {
            p.cuts[2 * row] = 0;
            p.cuts[2 * row + 1] = 0x7FFFFFFF;
        }
        return;
    }
    const float temperature = p.temperature[row];
    const Summary summary = summarise(p, row, temperature);
    const float* logits = p.logits + row * p.row_stride;
    const Probabilities probability = {1.0f / temperature, summary.top, 1.0f / summary.sum, 0.0f, 0, 0};
    int64_t* buffer = reinterpret_cast<int64_t*>(shared_memory());
    int64_t* found = buffer + kCutThreads;  // digit, and count and weight before it
    unsigned* counts = reinterpret_cast<unsigned*>(found + 3);
    unsigned* masses = counts + kBins;  // the weights of a row add up to less than 2^32
    int prefix = 0;
    int64_t count_before = 0, mass_before = 0;
    for (int shift = 20; shift >= 0; shift = shift == 20 ? 9 : shift - 9) {
        const int bits = shift == 0 ? 9 : kDigitBits, bins = 1 << bits;
        for (int bin = thread; bin < kBins; bin += kCutThreads) counts[bin] = masses[bin] = 0;
        if (thread == 0) found[0] = -1;
        sync_block();
        for_logits(logits, 0, p.num_ids, kCutThreads, [&](int, float logit) {
            const float value = probability.all(logit);
            const int level = bits_of(value);
            if ((level >> (shift + bits)) != prefix) return;
            const int bin = bins - 1 - (level >> shift & (bins - 1));  // the most probable first
            atomic_add_shared(&counts[bin], 1u);
            const unsigned weight = static_cast<unsigned>(fixed_point(value));
            if (weight != 0) atomic_add_shared(&masses[bin], weight);
        });
        sync_block();
        const int first = 2 * thread;
        const int64_t count = int64_t{counts[first]} + counts[first + 1], mass = int64_t{masses[first]} + masses[first + 1];
        int64_t count_here = count_before + sum_before(count, buffer), mass_here = mass_before + sum_before(mass, buffer);
        for (int bin = first; bin < first + 2; ++bin) {
            const int64_t count_after = count_here + counts[bin], mass_after = mass_here + masses[bin];
            const bool open = count_here < count_limit && mass_here <= most;
            if (open && counts[bin] != 0 && (count_after >= count_limit || mass_after > most)) {
                found[0] = bins - 1 - bin;
                found[1] = count_here;
                found[2] = mass_here;
            }
            count_here = count_after;
            mass_here = mass_after;
        }
        sync_block();
        if (found[0] < 0) break;  // in the first round only: everything stays
        prefix = prefix << bits | static_cast<int>(found[0]);
        count_before = found[1];
        mass_before = found[2];
        sync_block();
    }
    if (found[0] < 0) {
        if (thread == 0) {
            p.cuts[2 * row] = 0;
            p.cuts[2 * row + 1] = 0x7FFFFFFF;
        }
        return;
    }
    // How many ids of exactly this probability stay: those with fewer than top_k before them and at most top_p of weight.
    const float value = value_of(prefix);
    const int64_t weight = fixed_point(value);
    int64_t stay = count_limit - count_before;
    if (weight > 0 && (most - mass_before) / weight + 1 < stay) stay = (most - mass_before) / weight + 1;
    const int share = (p.num_ids + kCutThreads - 1) / kCutThreads;
    const int begin = thread * share, end = begin + share < p.num_ids ? begin + share : p.num_ids;
    int64_t ties = 0;
    for (int id = begin; id < end; ++id) ties += bits_of(probability.all(logits[id])) == prefix;
    int64_t before = sum_before(ties, buffer);
    if (thread == 0) {
        p.cuts[2 * row] = prefix;
        p.cuts[2 * row + 1] = 0x7FFFFFFF;
    }
    sync_block();
    if (before < stay && stay <= before + ties) {
        for (int id = begin; id < end; ++id) {
            if (bits_of(probability.all(logits[id])) == prefix && ++before == stay) {
                p.cuts[2 * row + 1] = id;
                break;
            }
        }
    }
}

__global__ void __launch_bounds__(kSampleThreads) weigh(const SampleRows p) {
    const int row = blockIdx.x / kSplits, split = blockIdx.x % kSplits, thread = threadIdx.x, mode = p.modes[row];
    if (mode == kGreedy) return;
    const float* logits = p.logits + row * p.row_stride;
    const Piece piece = piece_of(p.num_ids, split);
    const float temperature = p.temperature[row];
    const Probabilities probability = probabilities_of(p, row, summarise(p, row, temperature), temperature);
    unsigned char* shared = shared_memory();
    if (mode == kInverse) {
        int64_t* sums = reinterpret_cast<int64_t*>(shared);
        int64_t sum = 0;
        for_logits(logits, piece.begin, piece.end, kSampleThreads, [&](int id, float logit) { sum += fixed_point(probability(id, logit)); });
        sums[thread] = sum;
        for (int half = kSampleThreads / 2; half > 0; half /= 2) {
            sync_block();
            if (thread < half) sums[thread] += sums[thread + half];
        }
        if (thread == 0) p.weights[row * kSplits + split] = sums[0];
        return;
    }
    const int64_t key = p.numbers[row];
    // First the rough times of all ids: exact ones cost so much more that only ids that may still win get theirs.
    float bar = INFINITY;
    for_logits(logits, piece.begin, piece.end, kSampleThreads, [&](int id, float logit) {
        const float chance = probability(id, logit), rough = rough_time(number_of(key, id));
        if (chance > 0.0f && rough > 0.0f) bar = fminf(bar, rough / chance);
    });
    float* bars = reinterpret_cast<float*>(shared);
    bars[thread] = bar;
    for (int half = kSampleThreads / 2; half > 0; half /= 2) {
        sync_block();
        if (thread < half) bars[thread] = fminf(bars[thread], bars[thread + half]);
    }
    sync_block();
    bar = bars[0] * 1.001f;
    sync_block();  // the same memory holds the exact times below
    double best = INFINITY;
    int best_id = 0x7FFFFFFF;
    for_logits(logits, piece.begin, piece.end, kSampleThreads, [&](int id, float logit) {
        const float chance = probability(id, logit);
        if (!(chance > 0.0f)) return;
        const uint64_t number = number_of(key, id);
        if (rough_time(number) > bar * chance) return;
        const double time = -log1p(-((static_cast<double>(number) + 0.5) * 0x1p-53)) / static_cast<double>(chance);
        if (time < best || (time == best && id < best_id)) {
            best = time;
            best_id = id;
        }
    });
    double* times = reinterpret_cast<double*>(shared);
    int* ids = reinterpret_cast<int*>(times + kSampleThreads);
    times[thread] = best;
    ids[thread] = best_id;
    for (int half = kSampleThreads / 2; half > 0; half /= 2) {
        sync_block();
        if (thread < half) {
            const int other = thread + half;
            if (times[other] < times[thread] || (times[other] == times[thread] && ids[other] < ids[thread])) {
                times[thread] = times[other];
                ids[thread] = ids[other];
            }
        }
    }
    if (thread == 0) {
        p.times[row * kSplits + split] = times[0];
        p.time_ids[row * kSplits + split] = ids[0];
    }
}

// The first id of a piece whose cumulated weight exceeds what is left of the target.
__device__ __forceinline__ int locate(const SampleRows& p, int row, int split, int64_t left, const Summary& all, float temperature) {
    const Probabilities probability = probabilities_of(p, row, all, temperature);
    const Piece piece = piece_of(p.num_ids, split);
    const int thread = threadIdx.x, share = (piece.end - piece.begin + kSampleThreads - 1) / kSampleThreads;
    const int begin = piece.begin + thread * share, end = begin + share < piece.end ? begin + share : piece.end;
    const float* logits = p.logits + row * p.row_stride;
    const auto weight = [&](int id) { return fixed_point(probability(id, logits[id])); };
    int64_t* sums = reinterpret_cast<int64_t*>(shared_memory());
    int* found = reinterpret_cast<int*>(sums + kSampleThreads);
    int64_t sum = 0;
    for (int id = begin; id < end; ++id) sum += weight(id);
    sums[thread] = sum;
    if (thread == 0) *found = piece.end - 1;
    sync_block();
    int64_t before = 0;
    for (int other = 0; other < thread; ++other) before += sums[other];
    if (before <= left && left < before + sum) {
        int id = begin;
        for (int64_t passed = before; id < end; ++id) {
            passed += weight(id);
            if (passed > left) break;
        }
        *found = id;
    }
    sync_block();
    return *found;
}

__global__ void __launch_bounds__(kSampleThreads) decide(const SampleRows p) {
    const int row = blockIdx.x, thread = threadIdx.x, mode = p.modes[row];
    const float temperature = mode == kGreedy ? 1.0f : p.temperature[row];
    const Summary all = summarise(p, row, temperature);
    int id = all.id;
    if (mode == kRace && all.top == all.top) {
        double best = INFINITY;
        for (int s = 0; s < kSplits; ++s) {
            const double time = p.times[row * kSplits + s];
            if (time < best) {
                best = time;
                id = p.time_ids[row * kSplits + s];
            }
        }
    } else if (mode == kInverse && all.top == all.top) {
        int64_t total = 0;
        for (int s = 0; s < kSplits; ++s) total += p.weights[row * kSplits + s];
        const int64_t number = p.numbers[row];
        // floor(number / 2^53 * total) without overflow: 31 high bits and 22 low bits of the number.
        int64_t left = ((number >> 22) * total + (((number & ((1 << 22) - 1)) * total) >> 22)) >> 31;
        int split = 0;
        while (split < kSplits - 1 && left >= p.weights[row * kSplits + split]) left -= p.weights[row * kSplits + split++];
        id = locate(p, row, split, left, all, temperature);
    }
    if (thread == 0) {
        // A row without a finite maximum has no token; the id has to exist all the same.
        p.ids[row] = id >= 0 && id < p.num_ids ? id : 0;
        p.best[row] = all.top;
    }
}

}  // namespace dix

// Returns a cudaError_t.
extern "C" int dix_sample_rows(const dix::SampleRows* p, void* stream) {
    using namespace dix;
    const auto s = static_cast<cudaStream_t>(stream);
    if (p->num_ids < 1) return cudaErrorInvalidValue;
    if (p->num_rows == 0) return cudaSuccess;
    DIX_LAUNCH(survey, p->num_rows * kSplits, kSampleThreads, kSampleThreads * 12, s, *p);
    if (p->top_p != nullptr) {
        constexpr int kShared = (kCutThreads + 3) * 8 + 2 * kBins * 4;
        DIX_LAUNCH(find_cuts, p->num_rows, kCutThreads, kShared, s, *p);
    }
    DIX_LAUNCH(weigh, p->num_rows * kSplits, kSampleThreads, kSampleThreads * 12, s, *p);
    DIX_LAUNCH(decide, p->num_rows, kSampleThreads, kSampleThreads * 8 + 8, s, *p);
    return cudaGetLastError();
}
