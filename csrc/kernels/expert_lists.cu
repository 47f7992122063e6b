// Which tokens each expert gets, without sorting and without a word to the host: one pass of one thread block over all choices.
//
// ids: [num_choices] int64, the chosen expert of each (token, choice); negative for none. Writes
//   slots: [num_choices] indexes of choices, expert after expert,
//   items: [*, 4] int32 (expert, first entry of slots, number of entries <= item_rows, 0), in the order of experts,
//   num_items: [1] int32.
// The order of entries within an expert is whatever the counters gave: no result depends on it.
#include "warp.cuh"

namespace dix {

constexpr int kThreads = 1024;

// Inclusive sum over the block's threads. buffer: kThreads ints.
__device__ __forceinline__ int scan(int value, int* buffer) {
    const int thread = threadIdx.x;
    buffer[thread] = value;
    sync_block();
    for (int step = 1; step < kThreads; step *= 2) {
        const int below = thread >= step ? buffer[thread - step] : 0;
        sync_block();
        buffer[thread] += below;
        sync_block();
    }
    const int sum = buffer[thread];
    sync_block();
    return sum;
}

__global__ void __launch_bounds__(kThreads) expert_lists(const int64_t* ids, int num_choices, int num_experts, int item_rows, int* slots,
                                                         int* items, int* num_items) {
    int* counts = reinterpret_cast<int*>(shared_memory());
    int* buffer = counts + kThreads;
    const int thread = threadIdx.x;
    counts[thread] = 0;
    sync_block();
    for (int i = thread; i < num_choices; i += kThreads) {
        if (ids[i] >= 0) atomic_add_shared(&counts[ids[i]], 1);
    }
    sync_block();
    const int count = counts[thread], pieces = (count + item_rows - 1) / item_rows;
    const int end = scan(count, buffer), last = scan(pieces, buffer);
    for (int piece = 0; piece < pieces; ++piece) {
        int* item = items + 4 * (last - pieces + piece);
        const int left = count - piece * item_rows;
        item[0] = thread;
        item[1] = end - count + piece * item_rows;
        item[2] = left < item_rows ? left : item_rows;
        item[3] = 0;
    }
    if (thread == kThreads - 1) *num_items = last;
    counts[thread] = end - count;  // where the next entry of this expert goes
    sync_block();
    for (int i = thread; i < num_choices; i += kThreads) {
        if (ids[i] >= 0) slots[atomic_add_shared(&counts[ids[i]], 1)] = i;
    }
}

}  // namespace dix

// num_experts <= 1024. Returns a cudaError_t.
extern "C" int dix_expert_lists(const int64_t* ids, int num_choices, int num_experts, int item_rows, int* slots, int* items, int* num_items,
                                void* stream) {
    using namespace dix;
    if (num_experts > kThreads || item_rows < 1 || num_choices < 0) return cudaErrorInvalidValue;
    DIX_LAUNCH(expert_lists, 1, kThreads, 2 * kThreads * static_cast<int>(sizeof(int)), static_cast<cudaStream_t>(stream), ids, num_choices,
               num_experts, item_rows, slots, items, num_items);
    return cudaGetLastError();
}
