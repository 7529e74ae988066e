#pragma once
// The part of DLPack 1.x that describes a tensor to C: dlpack.h of https://github.com/dmlc/dlpack,
// version 1.3, "DLPackExchangeAPI". Names and layouts are its own; functions and values
// without a use here are left out.

#include <cstdint>

struct DLPackVersion {
    uint32_t major; // another one has another layout
    uint32_t minor;
};

struct DLDevice {
    int32_t device_type; // kDLCPU 1, kDLCUDA 2
    int32_t device_id;
    friend bool operator==(const DLDevice &, const DLDevice &) = default;
};

struct DLDataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
    friend bool operator==(const DLDataType &, const DLDataType &) = default;
};

struct DLTensor {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides; // in elements
    uint64_t byte_offset; // of the first element, from data
};

// Functions return 0, or -1 with a Python exception set.
struct DLPackExchangeAPI {
    DLPackVersion version;
    DLPackExchangeAPI *prev_api;
    void *managed_tensor_allocator;
    void *managed_tensor_from_py_object_no_sync;
    void *managed_tensor_to_py_object_no_sync;
    // What it fills in belongs to the object. May be null.
    int (*dltensor_from_py_object_no_sync)(void *py_object, DLTensor *out);
    int (*current_work_stream)(int32_t device_type, int32_t device_id, void **out);
};

static_assert(sizeof(DLTensor) == 48 && sizeof(DLPackExchangeAPI) == 56);
