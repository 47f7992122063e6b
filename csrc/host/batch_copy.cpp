// One submission of many copies to the copy engines. Sizes may differ; every copy lies within one allocation on both sides.
//
// The signature of cudaMemcpyBatchAsync changed with CUDA 13; headers and the statically linked runtime come from the same toolkit, so
// the choice below is right by construction. The legacy default stream is rejected by the driver. Returns a cudaError_t.
#include <cuda_runtime.h>

#include <cstddef>

extern "C" int dix_batch_copy(const void* const* sources, void* const* targets, const size_t* sizes, size_t count, void* stream) {
    if (count == 0) return cudaSuccess;
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
    const auto where = static_cast<cudaStream_t>(stream);
#if CUDART_VERSION >= 13000
    return cudaMemcpyBatchAsync(targets, sources, sizes, count, &attributes, &first, 1, where);
#else
    size_t failed = 0;
    return cudaMemcpyBatchAsync(const_cast<void**>(targets), const_cast<void**>(const_cast<const void**>(sources)), const_cast<size_t*>(sizes), count,
                                &attributes, &first, 1, &failed, where);
#endif
}
