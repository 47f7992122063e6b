// Rows of a layer on their way to their experts on other GPUs of the host and back: two kernels that write into the ranks' memory.
//
// Trip n of a rank is `send_rows`, then its experts, then `bring_home`, in stream order; a rank makes all trips of its group, with rows or
// without. One copy of every buffer is enough, since between two writes lies an answer from the reader:
// - Rows of trip n + 1 come from a rank that has ended its `bring_home` n, so it has seen our flag of results n, which we set behind our
//   experts, the last readers of the rows of trip n.
// - Results of trip n + 1 come from a rank that has ended its `send_rows` n + 1, so it has seen our flag of rows n + 1, which we set behind
//   everything that read the results of trip n.
// A flag that is waited for at n is therefore n - 1 or n, never more. The number of the trip is counted in the rank's own memory, where
// recorded kernels find it. `send_rows` counts on when all blocks have met, so that all have read what was there.
//
// Waiting blocks hold their multiprocessor; what they wait for needs some too, here and elsewhere: kMostBlocks is far fewer than there are.
#include "peer.cuh"

namespace dix {

constexpr int kPeerThreads = 256;               // of a block, at most
constexpr int kLoads = 4, kPart = 32 * kLoads;  // units of 16 bytes that a warp has on the way at once

// What `send_rows` gets; also `SendArguments` of engine/ops/cuda/library.py.
struct SendRows {
    PeerMemory peers;
    const void* x;                // [num_rows, 16 * quads bytes]
    const int64_t *ids, *slots, *copies;
    const float* weights;
    const uint8_t* real;          // [num_rows], or null: all are
    int64_t* local_slots;         // [ranks * capacity, chosen], as `local_choices` finds them
    float* local_weights;
    int* wanted;                  // [num_rows]: bit r for rank r, which computes something for this row
    int num_rows, capacity, chosen, most_copies, slots_per_rank, quads, row_quads;
};

// What `bring_home` gets; also `HomeArguments` there.
struct BringHome {
    PeerMemory peers;
    const void* computed;         // [ranks * capacity, chosen if parts else 1, 16 * quads bytes]
    const int64_t* local_slots;
    const int* wanted;
    const void* shared;           // [num_rows, 16 * quads bytes] bf16, or fp32 if `wide`; null when nothing is to be added up
    void* out;                    // as `shared`
    int num_rows, capacity, chosen, quads, parts, wide;
};

__device__ __forceinline__ int64_t all_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }
__device__ __forceinline__ int64_t this_thread() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

// The last trip that has begun.
__device__ __forceinline__ uint64_t& counter(const PeerMemory& peers) {
    return *reinterpret_cast<uint64_t*>(peers.boxes[peers.rank] + peers.counter);
}

// One part of a row on its way through the registers of a warp: units [32 i + lane] of those from `part * kPart` on.
struct Part {
    uint4 held[kLoads];
    int first, end;

    __device__ __forceinline__ Part(int part, int quads) : first(part * kPart + static_cast<int>(threadIdx.x) % 32), end(quads) {}

    __device__ __forceinline__ void load(const uint4* row) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            if (first + 32 * i < end) held[i] = load_global16(row + first + 32 * i);
        }
    }
    __device__ __forceinline__ void store(unsigned char* row) const {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            if (first + 32 * i < end) reinterpret_cast<uint4*>(row)[first + 32 * i] = held[i];
        }
    }
};

// Values go to the ranks that want them, choices to all: there a rank finds that it is not wanted.
__device__ __forceinline__ void send_part(const SendRows& a, int row, int part, int parts) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t choice = static_cast<int64_t>(row) * a.chosen + lane;
    const bool chooses = lane < a.chosen, given = row < a.num_rows;
    Part values(part, a.quads);
    if (given) values.load(static_cast<const uint4*>(a.x) + static_cast<int64_t>(row) * a.quads);  // comes while choices are looked up
    int slot = -1;
    if (chooses && given && (a.real == nullptr || a.real[row] != 0)) {
        const int64_t expert = a.ids[choice];
        const int64_t copy = a.most_copies == 1 ? 0 : (a.peers.rank + row) % a.copies[expert];
        slot = static_cast<int>(a.slots[expert * a.most_copies + copy]);
    }
    unsigned wanted = slot >= 0 ? 1u << slot / a.slots_per_rank : 0u;
    for (int mask = 16; mask > 0; mask /= 2) wanted |= shuffle_xor(wanted, mask);
    const int64_t to = a.peers.rows + (static_cast<int64_t>(a.peers.rank) * a.capacity + row) * a.row_quads * 16;
    for (int rank = 0; rank < a.peers.num_ranks; ++rank) {
        if (wanted >> rank & 1) values.store(a.peers.boxes[rank] + to);
    }
    if (part != parts - 1) return;
    const uint32_t share = chooses && given ? static_cast<uint32_t>(bits_of(a.weights[choice])) : 0u;
    for (int rank = 0; rank < a.peers.num_ranks && chooses; ++rank) {
        auto* words = reinterpret_cast<uint32_t*>(a.peers.boxes[rank] + to) + 4 * a.quads;
        words[lane] = static_cast<uint32_t>(slot);
        words[a.chosen + lane] = share;
    }
    if (given && lane == 0) a.wanted[row] = static_cast<int>(wanted);
}

__device__ __forceinline__ void find_choices(const SendRows& a) {
    const auto* rows = reinterpret_cast<const uint32_t*>(a.peers.boxes[a.peers.rank] + a.peers.rows);
    const int64_t count = static_cast<int64_t>(a.peers.num_ranks) * a.capacity * a.chosen;
    for (int64_t i = this_thread(); i < count; i += all_threads()) {
        const uint32_t* words = rows + (i / a.chosen * a.row_quads + a.quads) * 4 + i % a.chosen;
        const int slot = static_cast<int>(load_written(words)) - a.peers.rank * a.slots_per_rank;
        a.local_slots[i] = slot >= 0 && slot < a.slots_per_rank ? slot : -1;
        a.local_weights[i] = value_of(static_cast<int>(load_written(words + a.chosen)));
    }
}

__global__ void __launch_bounds__(kPeerThreads) send_rows(const SendRows a) {
    const uint64_t trip = counter(a.peers) + 1;
    const int parts = (a.quads + kPart - 1) / kPart, items = a.capacity * parts;
    for (int64_t item = this_thread() / 32; item < items; item += all_threads() / 32) {
        send_part(a, static_cast<int>(item) / parts, static_cast<int>(item) % parts, parts);
    }
    meet_peers(a.peers, 0, trip);
    if (blockIdx.x == 0 && threadIdx.x == 0) counter(a.peers) = trip;
    find_choices(a);
}

// A part of what was computed here for a row goes home, if there is something.
__device__ __forceinline__ void return_part(const BringHome& a, int64_t row, int group, int part) {
    const int lane = static_cast<int>(threadIdx.x) % 32, home = static_cast<int>(row / a.capacity), groups = a.parts ? a.chosen : 1;
    if (!any_lane(lane < a.chosen && (!a.parts || lane == group) && a.local_slots[row * a.chosen + lane] >= 0)) return;
    const int64_t at_home = row - static_cast<int64_t>(home) * a.capacity;
    const int64_t place = a.parts ? at_home * a.chosen + group : static_cast<int64_t>(a.peers.rank) * a.capacity + at_home;
    Part values(part, a.quads);
    values.load(static_cast<const uint4*>(a.computed) + (row * groups + group) * a.quads);
    values.store(a.peers.boxes[home] + a.peers.home + place * a.quads * 16);
}

template <class T>
__device__ __forceinline__ void add(float (&total)[16 / sizeof(T)], const uint4& quad) {
    const uint32_t words[4] = {quad.x, quad.y, quad.z, quad.w};
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
            total[i] += value_of(static_cast<int>(words[i]));
        } else {
            total[2 * i] += bf16_value(static_cast<uint16_t>(words[i] & 0xFFFF));
            total[2 * i + 1] += bf16_value(static_cast<uint16_t>(words[i] >> 16));
        }
    }
}

template <class T>
__device__ __forceinline__ uint4 rounded(const float (&total)[16 / sizeof(T)]) {
    uint32_t words[4];
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
            words[i] = static_cast<uint32_t>(bits_of(total[i]));
        } else {
            words[i] = bf16_bits(total[2 * i]) | static_cast<uint32_t>(bf16_bits(total[2 * i + 1])) << 16;
        }
    }
    return {words[0], words[1], words[2], words[3]};
}

// The ranks' sums in rank order in fp32, then the shared expert's, rounded once. A rank that was not wanted has nothing to add.
template <class T>
__device__ __forceinline__ void add_up(const BringHome& a) {
    const auto* sums = reinterpret_cast<const uint4*>(a.peers.boxes[a.peers.rank] + a.peers.home);
    const int64_t count = static_cast<int64_t>(a.num_rows) * a.quads;
    for (int64_t i = this_thread(); i < count; i += all_threads()) {
        const int64_t row = i / a.quads;
        const unsigned wanted = static_cast<unsigned>(a.wanted[row]);
        float total[16 / sizeof(T)] = {};
        for (int rank = 0; rank < a.peers.num_ranks; ++rank) {
            if (wanted >> rank & 1) add<T>(total, load_written16(sums + static_cast<int64_t>(rank) * a.capacity * a.quads + i));
        }
        add<T>(total, load_global16(static_cast<const uint4*>(a.shared) + i));
        static_cast<uint4*>(a.out)[i] = rounded<T>(total);
    }
}

__global__ void __launch_bounds__(kPeerThreads) bring_home(const BringHome a) {
    const uint64_t trip = counter(a.peers);
    const int parts = (a.quads + kPart - 1) / kPart, per_row = parts * (a.parts ? a.chosen : 1);
    const int64_t items = static_cast<int64_t>(a.peers.num_ranks) * a.capacity * per_row;
    for (int64_t item = this_thread() / 32; item < items; item += all_threads() / 32) {
        const int of_row = static_cast<int>(item % per_row);
        return_part(a, item / per_row, of_row / parts, of_row % parts);
    }
    meet_peers(a.peers, a.peers.returned, trip);
    if (a.shared == nullptr) return;
    if (a.wide) {
        add_up<float>(a);
    } else {
        add_up<uint16_t>(a);
    }
}

// One item per warp, at most so many blocks. It depends on what all ranks of a trip have in common.
inline int peer_blocks(int64_t items, int threads) {
    const int64_t blocks = (items * 32 + threads - 1) / threads;
    return static_cast<int>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

inline bool fits(const PeerMemory& peers, int capacity, int chosen, int quads, int threads) {
    if (threads < 32 || threads > kPeerThreads || threads % 32 != 0) return false;
    return peers.num_ranks > 0 && peers.num_ranks <= kMostRanks && capacity > 0 && chosen > 0 && chosen <= 32 && quads > 0;
}

}  // namespace dix

// threads: of a block, the same on all ranks. Returns a cudaError_t. Waits until the peers have sent too: on the device, never on the host.
extern "C" int dix_send_rows(const dix::SendRows* arguments, int threads, void* stream) {
    using namespace dix;
    const SendRows a = *arguments;
    if (!fits(a.peers, a.capacity, a.chosen, a.quads, threads) || a.num_rows > a.capacity) return cudaErrorInvalidValue;
    const int blocks = peer_blocks(static_cast<int64_t>(a.capacity) * ((a.quads + kPart - 1) / kPart), threads);
    DIX_LAUNCH_TOGETHER(send_rows, blocks, threads, 0, static_cast<cudaStream_t>(stream), a);
    return cudaGetLastError();
}

// As above.
extern "C" int dix_bring_home(const dix::BringHome* arguments, int threads, void* stream) {
    using namespace dix;
    const BringHome a = *arguments;
    if (!fits(a.peers, a.capacity, a.chosen, a.quads, threads) || a.num_rows > a.capacity) return cudaErrorInvalidValue;
    const int64_t per_row = static_cast<int64_t>((a.quads + kPart - 1) / kPart) * (a.parts ? a.chosen : 1);
    const int blocks = peer_blocks(a.peers.num_ranks * a.capacity * per_row, threads);
    DIX_LAUNCH_TOGETHER(bring_home, blocks, threads, 0, static_cast<cudaStream_t>(stream), a);
    return cudaGetLastError();
}
