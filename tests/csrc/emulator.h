// Runs kernels written against csrc/include/warp.cuh on a CPU, for tests: every thread of a block is a coroutine, warps meet at an mma,
// blocks at a barrier. Slow and literal. Asynchronous copies happen as late as the kernel allows, so that a missing wait shows.
#pragma once

#include <sched.h>
#include <ucontext.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
struct Dim {
    unsigned x;
};
// One GPU per thread of the host.
inline thread_local Dim threadIdx, blockIdx, blockDim, gridDim;

using cudaStream_t = void*;
using cudaError_t = int;
constexpr int cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719, cudaFuncAttributeMaxDynamicSharedMemorySize = 0;
template <class Kernel>
int cudaFuncSetAttribute(Kernel, int, int bytes) {
    return bytes <= 227 * 1024 ? cudaSuccess : cudaErrorInvalidValue;
}

namespace dix {
namespace emulator {

inline thread_local bool failed = false;  // a thread of this kernel has trapped: none goes on

struct Copy {
    void* to;
    const void* from;
    int bytes;
};

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
    std::deque<std::vector<Copy>> groups;
    std::vector<Copy> open;
};

// Operands that the lanes of a warp brought to their current mma.
struct Meeting {
    int arrived = 0, round = 0;
    float* d[32];
    uint32_t a[32][4], b[32][2];
    uint64_t shuffled[2][32];  // by turns: a lane may bring its next number before another has read the last
};

struct Barrier {
    int arrived = 0, round = 0;
};

// The blocks of one cluster run together; without clusters that is one block.
inline thread_local std::vector<Thread> threads;
inline thread_local std::vector<Meeting> meetings;
inline thread_local std::vector<Barrier> barriers;
inline thread_local std::vector<std::vector<unsigned char>> shared;
inline thread_local Barrier of_cluster;
inline thread_local int current = 0, num_blocks = 1, first_block = 0, alive = 0;
inline thread_local ucontext_t scheduler;
inline thread_local std::function<void()> body;

inline void pass() { swapcontext(&threads[current].context, &scheduler); }

inline void entry() {
    body();
    threads[current].done = true;
    --alive;
    pass();
}

inline int block() { return current / static_cast<int>(blockDim.x); }

inline void meet(Barrier& barrier, int size) {
    const int round = barrier.round;
    if (++barrier.arrived == size) {
        barrier.arrived = 0;
        ++barrier.round;
    } else {
        while (barrier.round == round) pass();
    }
}

// Runs the blocks from `first` on that form a cluster, each with so many bytes of shared memory.
inline void run_cluster(int first, int blocks, size_t bytes) {
    constexpr size_t kStack = 128 * 1024;
    const int size = blocks * static_cast<int>(blockDim.x);
    first_block = first;
    num_blocks = blocks;
    threads.resize(size);
    alive = size;
    meetings = std::vector<Meeting>(size / 32);
    barriers = std::vector<Barrier>(blocks);
    of_cluster = {};
    // Shared memory starts as garbage: all ones are NaN in bf16 and fp32.
    shared.assign(blocks, std::vector<unsigned char>(bytes, 0xFF));
    for (Thread& thread : threads) {
        getcontext(&thread.context);
        thread.done = false;
        thread.groups.clear();
        thread.open.clear();
        if (!thread.stack) thread.stack = std::make_unique_for_overwrite<char[]>(kStack);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = kStack;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, entry, 0);
    }
    for (bool any = true; any && !failed;) {
        any = false;
        for (current = 0; current < size; ++current) {
            if (threads[current].done) continue;
            any = true;
            threadIdx.x = current % static_cast<int>(blockDim.x);
            blockIdx.x = first + block();
            swapcontext(&scheduler, &threads[current].context);
        }
    }
}

inline float value(uint32_t pair, int half) { return std::bit_cast<float>(half ? pair & 0xFFFF0000u : pair << 16); }

inline void multiply(Meeting& m) {
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
            float sum = 0;
            for (int k = 0; k < 16; ++k) {
                const int of_a = row % 8 * 4 + k % 8 / 2, of_b = column * 4 + k % 8 / 2;
                sum += value(m.a[of_a][row / 8 + k / 8 * 2], k % 2) * value(m.b[of_b][k / 8], k % 2);
            }
            m.d[lane][i] += sum;
        }
    }
}

inline uint16_t round_bits(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if (std::isnan(x)) return 0x7FFF;
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

}  // namespace emulator
}  // namespace dix

inline int cudaGetLastError() {
    const bool failed = dix::emulator::failed;
    dix::emulator::failed = false;
    return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

namespace dix {

inline unsigned char* shared_memory() { return emulator::shared[emulator::block()].data(); }
inline int cluster_rank() { return emulator::block(); }
// Nobody waits for threads that have ended.
inline void sync_cluster(bool) {
    auto& barrier = emulator::of_cluster;
    const int round = barrier.round;
    for (++barrier.arrived; barrier.round == round; emulator::pass()) {
        if (barrier.arrived < emulator::alive) continue;
        barrier.arrived = 0;
        ++barrier.round;
        break;
    }
}
template <class T>
T* of_rank(T* shared, int rank) {
    const auto offset = reinterpret_cast<unsigned char*>(shared) - shared_memory();
    return reinterpret_cast<T*>(emulator::shared[rank].data() + offset);
}
inline void copy_async16(void* to, const void* from) { emulator::threads[emulator::current].open.push_back({to, from, 16}); }
inline void copy_async4(void* to, const void* from) { emulator::threads[emulator::current].open.push_back({to, from, 4}); }
inline void copy_async8(void* to, const void* from) { emulator::threads[emulator::current].open.push_back({to, from, 8}); }
inline void commit_copies() {
    auto& thread = emulator::threads[emulator::current];
    thread.groups.push_back(std::move(thread.open));
    thread.open.clear();
}
template <int kPending>
void wait_copies() {
    auto& groups = emulator::threads[emulator::current].groups;
    for (; static_cast<int>(groups.size()) > kPending; groups.pop_front()) {
        for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
    }
}
template <class T>
T load(const void* from) {
    T result;
    std::memcpy(&result, from, sizeof(T));
    return result;
}
inline uint4 load_shared16(const void* from) { return load<uint4>(from); }
inline uint2 load_shared8(const void* from) { return load<uint2>(from); }
inline uint4 load_global16(const void* from) { return load<uint4>(from); }
inline uint2 load_global8(const void* from) { return load<uint2>(from); }
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    auto& m = emulator::meetings[emulator::current / 32];
    const int lane = emulator::current % 32, round = m.round;
    m.d[lane] = d;
    std::memcpy(m.a[lane], a, sizeof a);
    m.b[lane][0] = b0;
    m.b[lane][1] = b1;
    if (++m.arrived == 32) {
        emulator::multiply(m);
        m.arrived = 0;
        ++m.round;
    } else {
        while (m.round == round) emulator::pass();
    }
}
// Every lane of the warp has to come. from: the lane whose number this one takes.
template <class T>
T shuffle(T x, int from) {
    auto& m = emulator::meetings[emulator::current / 32];
    const int lane = emulator::current % 32, round = m.round;
    std::memcpy(&m.shuffled[round % 2][lane], &x, sizeof x);
    if (++m.arrived == 32) {
        m.arrived = 0;
        ++m.round;
    } else {
        while (m.round == round) emulator::pass();
    }
    std::memcpy(&x, &m.shuffled[round % 2][from], sizeof x);
    return x;
}
template <class T>
T shuffle_xor(T x, int mask) {
    return shuffle(x, (emulator::current % 32) ^ mask);
}
template <class T>
T shuffle_up(T x, int lanes) {
    const int lane = emulator::current % 32;
    return shuffle(x, lane < lanes ? lane : lane - lanes);
}
inline bool any_lane(bool x) {
    int any = x;
    for (int mask = 1; mask < 32; mask *= 2) any |= shuffle_xor(any, mask);
    return any != 0;
}
inline float bf16_value(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
inline uint16_t bf16_bits(float x) { return emulator::round_bits(x); }
inline float bf16_round(float x) { return bf16_value(bf16_bits(x)); }
inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
    using emulator::value;
    return bf16_bits(value(a, 0) * value(b, 0)) | static_cast<uint32_t>(bf16_bits(value(a, 1) * value(b, 1))) << 16;
}
inline uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}
inline uint32_t rotate_left(uint32_t x, int bits) { return std::rotl(x, bits); }
inline uint32_t multiply_high(uint32_t a, uint32_t b) { return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32); }
inline uint32_t shift_right(uint32_t low, uint32_t high, int bits) {
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> bits);
}
inline void atomic_add_shared(unsigned* counter, unsigned value) { *counter += value; }
inline float quick_log(float x) { return std::log(x); }

inline float power_of_two(float x) { return std::exp2(x); }
inline int bits_of(float x) { return std::bit_cast<int>(x); }
inline float value_of(int bits) { return std::bit_cast<float>(bits); }
inline int atomic_add_shared(int* counter, int value) { return (*counter += value) - value; }
// Other GPUs run meanwhile. What they wrote before their release is read behind this acquire.
inline uint64_t load_acquire(const uint64_t* flag) {
    emulator::pass();
    sched_yield();
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
inline void store_release(uint64_t* flag, uint64_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
inline uint32_t load_written(const uint32_t* word) { return *word; }
inline uint4 load_written16(const uint4* quad) { return *quad; }
inline int64_t nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline void fail_kernel() {
    for (emulator::failed = true;;) emulator::pass();
}
inline void sync_block() { emulator::meet(emulator::barriers[emulator::block()], static_cast<int>(blockDim.x)); }

}  // namespace dix

#define DIX_CLUSTER(size)
#define DIX_LAUNCH_CLUSTERS(kernel, cluster, grid, block, bytes, stream, ...)            \
    do {                                                                                 \
        gridDim.x = (grid);                                                              \
        blockDim.x = (block);                                                            \
        dix::emulator::body = [&] { kernel(__VA_ARGS__); };                              \
        for (unsigned first = 0; first < gridDim.x; first += (cluster)) {                \
            dix::emulator::run_cluster(static_cast<int>(first), (cluster), (bytes));     \
        }                                                                                \
    } while (false)
#define DIX_LAUNCH(kernel, ...) DIX_LAUNCH_CLUSTERS(kernel, 1, __VA_ARGS__)
#define DIX_LAUNCH_TOGETHER(kernel, grid, ...) DIX_LAUNCH_CLUSTERS(kernel, grid, grid, __VA_ARGS__)
