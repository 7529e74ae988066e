#pragma once
// A kernel in an image that nvcc did not register, made known to a CUDA runtime before 12.8, which
// has no cudaLibraryLoadData: by the calls that nvcc puts into the host code of a unit (the
// toolkit's crt/host_runtime.h). Clang makes the same calls (clang/lib/CodeGen/CGCUDANV.cpp).

extern "C" {
void **__cudaRegisterFatBinary(void *wrapper);
void __cudaRegisterFunction(void **handle, const char *host_function, char *device_function,
                            const char *device_name, int thread_limit, void *thread, void *block,
                            void *block_size, void *grid_size, int *warp_size);
void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaUnregisterFatBinary(void **handle);
}

// The runtime knows a kernel by an address of the host's, and here it is that of this object.
class RegisteredKernel {
  public:
    // symbol: of the kernel, in the image.
    RegisteredKernel(const void *image, const char *symbol)
        : wrapper_{0x466243b1, 1, image, nullptr}, handle_(__cudaRegisterFatBinary(&wrapper_)) {
        __cudaRegisterFunction(handle_, reinterpret_cast<const char *>(this),
                               const_cast<char *>(symbol), symbol, -1, nullptr, nullptr, nullptr,
                               nullptr, nullptr);
        __cudaRegisterFatBinaryEnd(handle_);
    }
    ~RegisteredKernel() { __cudaUnregisterFatBinary(handle_); }
    RegisteredKernel(const RegisteredKernel &) = delete;
    RegisteredKernel &operator=(const RegisteredKernel &) = delete;

  private:
    struct Wrapper { // __fatBinC_Wrapper_t of the toolkit's fatbinary_section.h
        int magic, version;
        const void *image;
        void *unused;
    };
    Wrapper wrapper_;
    void **handle_;
};
