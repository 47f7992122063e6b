// Page-lock memory that somebody else mapped, and let the device address it. All return a cudaError_t.
#include <cuda_runtime.h>

#include <cstddef>

extern "C" int dix_host_register(void* address, size_t num_bytes) {
    return cudaHostRegister(address, num_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
}

extern "C" int dix_host_unregister(void* address) { return cudaHostUnregister(address); }

// The device's address of a registered host address; not necessarily the same number.
extern "C" int dix_host_device_pointer(void* address, void** device) { return cudaHostGetDevicePointer(device, address, 0); }

// The current device's PCI address as text, for its memory node.
extern "C" int dix_pci_address(char* text, int num_bytes) {
    int device = 0;
    const auto status = cudaGetDevice(&device);
    return status == cudaSuccess ? cudaDeviceGetPCIBusId(text, num_bytes, device) : status;
}

extern "C" int dix_error_text(int error, char* text, size_t num_bytes) {
    const char* message = cudaGetErrorString(static_cast<cudaError_t>(error));
    size_t i = 0;
    for (; message[i] != 0 && i + 1 < num_bytes; ++i) text[i] = message[i];
    if (num_bytes > 0) text[i] = 0;
    return cudaSuccess;
}
