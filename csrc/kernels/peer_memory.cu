// Memory of a GPU that other processes of the host write to.
#include <cuda_runtime.h>

#include <cstring>

static_assert(sizeof(cudaIpcMemHandle_t) == 64);

// Zeroed memory on the current device, and what lets other processes open it. It is an allocation of its own: a handle stands for a
// whole one. Returns a cudaError_t.
extern "C" int dix_peer_allocate(size_t bytes, void** memory, unsigned char* handle) {
    cudaIpcMemHandle_t made;
    *memory = nullptr;
    cudaError_t status = cudaMalloc(memory, bytes);
    if (status == cudaSuccess) status = cudaMemset(*memory, 0, bytes);
    if (status == cudaSuccess) status = cudaDeviceSynchronize();
    if (status == cudaSuccess) status = cudaIpcGetMemHandle(&made, *memory);
    if (status == cudaSuccess) {
        std::memcpy(handle, &made, sizeof made);
    } else {
        if (*memory != nullptr) cudaFree(*memory);
        *memory = nullptr;
        cudaGetLastError();  // reported here; the next launch must not find it
    }
    return status;
}

// Another process's memory at an address of this one; its device need not be visible here. Fails where the devices cannot reach each other.
extern "C" int dix_peer_open(const unsigned char* handle, void** memory) {
    cudaIpcMemHandle_t theirs;
    std::memcpy(&theirs, handle, sizeof theirs);
    const cudaError_t status = cudaIpcOpenMemHandle(memory, theirs, cudaIpcMemLazyEnablePeerAccess);
    if (status != cudaSuccess) cudaGetLastError();
    return status;
}

extern "C" int dix_peer_close(void* memory) { return cudaIpcCloseMemHandle(memory); }

extern "C" int dix_peer_free(void* memory) { return cudaFree(memory); }

extern "C" const char* dix_cuda_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
