// y[t] = sum over the K choices of token t, in their order, plus what every token gets (the shared expert): fp32 sums, bf16 result.
#include "warp.cuh"

namespace dix {

constexpr int kSumThreads = 256;

__global__ void __launch_bounds__(kSumThreads) expert_sum(const float* parts, const uint16_t* shared, uint16_t* y, int num_tokens, int num_choices,
                                                          int width) {
    const int quads = width / 4;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x; i < static_cast<int64_t>(num_tokens) * quads;
         i += static_cast<int64_t>(gridDim.x) * kSumThreads) {
        const int64_t token = i / quads;
        const int column = static_cast<int>(i - token * quads) * 4;
        float sum[4] = {};
        for (int k = 0; k < num_choices; ++k) {
            const float4 part = *reinterpret_cast<const float4*>(parts + (token * num_choices + k) * width + column);
            sum[0] += part.x;
            sum[1] += part.y;
            sum[2] += part.z;
            sum[3] += part.w;
        }
        if (shared != nullptr) {
            const uint2 both = *reinterpret_cast<const uint2*>(shared + token * width + column);
            sum[0] += bf16_value(both.x & 0xFFFF);
            sum[1] += bf16_value(both.x >> 16);
            sum[2] += bf16_value(both.y & 0xFFFF);
            sum[3] += bf16_value(both.y >> 16);
        }
        uint2 result;
        result.x = bf16_bits(sum[0]) | static_cast<uint32_t>(bf16_bits(sum[1])) << 16;
        result.y = bf16_bits(sum[2]) | static_cast<uint32_t>(bf16_bits(sum[3])) << 16;
        *reinterpret_cast<uint2*>(y + token * width + column) = result;
    }
}

}  // namespace dix

// parts: [num_tokens * num_choices, width] fp32; shared: [num_tokens, width] bf16 or null; y: [num_tokens, width] bf16. width: multiple of 4.
// Returns a cudaError_t.
extern "C" int dix_expert_sum(const float* parts, const uint16_t* shared, uint16_t* y, int num_tokens, int num_choices, int width, int num_blocks,
                              void* stream) {
    using namespace dix;
    if (width % 4 != 0 || num_blocks < 1) return cudaErrorInvalidValue;
    if (num_tokens == 0) return cudaSuccess;
    DIX_LAUNCH(expert_sum, num_blocks, kSumThreads, 0, static_cast<cudaStream_t>(stream), parts, shared, y, num_tokens, num_choices, width);
    return cudaGetLastError();
}
