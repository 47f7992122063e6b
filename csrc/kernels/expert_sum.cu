// y[t] = sum over the K choices of token t, in their order, plus what every token gets (the shared expert): fp32 sums, bf16 result.
// Nothing is read of choices with a negative id: another rank has computed them.
#include "warp.cuh"

namespace dix {

constexpr int kSumThreads = 256;

__device__ __forceinline__ void add(float (&sum)[4], const float* part) {
    const float4 four = *reinterpret_cast<const float4*>(part);
    sum[0] += four.x;
    sum[1] += four.y;
    sum[2] += four.z;
    sum[3] += four.w;
}

__device__ __forceinline__ void add(float (&sum)[4], const uint16_t* part) {
    const uint2 both = *reinterpret_cast<const uint2*>(part);
    sum[0] += bf16_value(both.x & 0xFFFF);
    sum[1] += bf16_value(both.x >> 16);
    sum[2] += bf16_value(both.y & 0xFFFF);
    sum[3] += bf16_value(both.y >> 16);
}

template <class Part>
__global__ void __launch_bounds__(kSumThreads) expert_sum(const Part* parts, const int64_t* ids, const uint16_t* shared, uint16_t* y, int num_tokens,
                                                          int num_choices, int width) {
    const int quads = width / 4;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x; i < static_cast<int64_t>(num_tokens) * quads;
         i += static_cast<int64_t>(gridDim.x) * kSumThreads) {
        const int64_t token = i / quads;
        const int column = static_cast<int>(i - token * quads) * 4;
        float sum[4] = {};
        for (int k = 0; k < num_choices; ++k) {
            if (ids == nullptr || ids[token * num_choices + k] >= 0) add(sum, parts + (token * num_choices + k) * width + column);
        }
        if (shared != nullptr) add(sum, shared + token * width + column);
        uint2 result;
        result.x = bf16_bits(sum[0]) | static_cast<uint32_t>(bf16_bits(sum[1])) << 16;
        result.y = bf16_bits(sum[2]) | static_cast<uint32_t>(bf16_bits(sum[3])) << 16;
        *reinterpret_cast<uint2*>(y + token * width + column) = result;
    }
}

}  // namespace dix

// parts: [num_tokens * num_choices, width] fp32, or bf16 where parts_bf16 is not 0; ids: [num_tokens * num_choices] or null;
// shared: [num_tokens, width] bf16 or null; y: [num_tokens, width] bf16. width: multiple of 4.
// Returns a cudaError_t.
extern "C" int dix_expert_sum(const void* parts, int parts_bf16, const int64_t* ids, const uint16_t* shared, uint16_t* y, int num_tokens,
                              int num_choices, int width, int num_blocks, void* stream) {
    using namespace dix;
    if (width % 4 != 0 || num_blocks < 1) return cudaErrorInvalidValue;
    if (num_tokens == 0) return cudaSuccess;
    const auto s = static_cast<cudaStream_t>(stream);
    if (parts_bf16) {
        const auto halves = static_cast<const uint16_t*>(parts);
        DIX_LAUNCH(expert_sum<uint16_t>, num_blocks, kSumThreads, 0, s, halves, ids, shared, y, num_tokens, num_choices, width);
    } else {
        const auto floats = static_cast<const float*>(parts);
        DIX_LAUNCH(expert_sum<float>, num_blocks, kSumThreads, 0, s, floats, ids, shared, y, num_tokens, num_choices, width);
    }
    return cudaGetLastError();
}
