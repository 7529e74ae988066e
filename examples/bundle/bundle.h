// A bundle, which flash_attention.export_bundle has written: loaded, bound to tensors and launched
// by the CUDA driver alone. py/flash_helpers/export/bundle.py has the format of bundle.txt.
//
//   Bundle bundle("folder");
//   bundle.bind({{"x", x}, {"output", output}}); // addresses on the device
//   bundle.launch(stream);                       // as often as needed, in a CUDA graph too

#pragma once

#include "../driver_launch/driver_calls.h"
#include <cstdarg>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

// Ends the program with exit status 2.
[[noreturn]] inline void refuse(const char *text, ...) {
    va_list values;
    va_start(values, text);
    vfprintf(stderr, text, values);
    va_end(values);
    fputc('\n', stderr);
    exit(2);
}

inline std::string read_file(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file)
        refuse("%s cannot be read: give the folder that has it", path.c_str());
    return {std::istreambuf_iterator<char>(file), {}};
}

struct Port { // a contiguous tensor of the caller
    std::string name, dtype;
    size_t bytes = 0;
    std::vector<int64_t> shape;
    std::string text() const {
        std::string sizes;
        for (int64_t size : shape)
            sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
        return dtype + " (" + sizes + ")";
    }
};

struct Place {
    std::string buffer;
    size_t offset = 0;
};

// A launch, memory that is filled with zeros, or a change of stream: the second one begins, the
// first one goes on, the first one waits for the second.
struct Step {
    enum Kind { kLaunch, kZero, kSide, kMain, kJoin } kind = kLaunch;
    struct Address {
        size_t member;
        Place place;
    };
    struct Map : Address {
        int data_type, swizzle, l2_promotion;
        std::vector<cuuint64_t> dims, strides;
        std::vector<cuuint32_t> box;
    };
    CUfunction function = nullptr;
    unsigned grid[3], cluster[3], block, shared;
    bool programmatic;
    std::vector<Address> addresses;
    std::vector<Map> maps;
    std::vector<uint64_t> words; // of the arguments
    std::vector<uint8_t> unbound;
    Place zeroed;
    size_t zeroed_bytes = 0;
};

class Bundle {
  public:
    std::vector<Port> inputs, outputs;

    // The context of the device is current. kind: "cubin", or "ptx", which the driver compiles.
    explicit Bundle(const std::string &folder, const std::string &kind = "cubin")
        : folder(folder), kind(kind) {
        DRIVER(cuStreamCreate, &side, CU_STREAM_NON_BLOCKING);
        DRIVER(cuEventCreate, &forked, CU_EVENT_DISABLE_TIMING);
        DRIVER(cuEventCreate, &done, CU_EVENT_DISABLE_TIMING);
        std::istringstream text(read_file(folder + "/bundle.txt"));
        for (std::string word; text >> word;)
            read(word, text);
        if (alignment == 0 || text.bad())
            refuse("%s/bundle.txt is not whole: export the bundle again", folder.c_str());
        DRIVER(cuCtxSynchronize); // the weights are there for every stream
    }

    // Fills in the addresses of all inputs and outputs, on the device, by name.
    void bind(const std::map<std::string, CUdeviceptr> &tensors) {
        for (const auto &[ports, prefix] : {std::pair(&inputs, "input:"), {&outputs, "output:"}})
            for (const Port &port : *ports) {
                const auto found = tensors.find(port.name);
                if (found == tensors.end())
                    refuse("%s is not given: pass its address", port.name.c_str());
                if (found->second % alignment != 0)
                    refuse("%s begins at %llx, which is no multiple of %zu bytes",
                           port.name.c_str(), (unsigned long long)found->second, alignment);
                buffers[prefix + port.name] = found->second;
            }
        for (Step &step : steps)
            fill(step);
    }

    void launch(CUstream stream) const {
        CUstream current = stream;
        for (const Step &step : steps) {
            if (step.kind == Step::kZero) {
                DRIVER(cuMemsetD8Async, at(step.zeroed), 0, step.zeroed_bytes, current);
            } else if (step.kind == Step::kSide) {
                DRIVER(cuEventRecord, forked, stream);
                DRIVER(cuStreamWaitEvent, side, forked, 0);
                current = side;
            } else if (step.kind == Step::kMain) {
                DRIVER(cuEventRecord, done, side);
                current = stream;
            } else if (step.kind == Step::kJoin) {
                DRIVER(cuStreamWaitEvent, stream, done, 0);
            }
            if (step.kind != Step::kLaunch)
                continue;
            const auto &[x, y, z] = step.grid;
            CUlaunchAttribute found[2] = {};
            unsigned n = 0;
            if (step.cluster[0] * step.cluster[1] * step.cluster[2] > 1) {
                found[n].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
                found[n++].value.clusterDim = {step.cluster[0], step.cluster[1], step.cluster[2]};
            }
            if (step.programmatic) {
                found[n].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
                found[n++].value.programmaticStreamSerializationAllowed = 1;
            }
            const CUlaunchConfig config = {x, y,           z,      step.block, 1,
                                           1, step.shared, stream, found,      n};
            void *parameters[] = {const_cast<uint64_t *>(step.words.data())};
            DRIVER(cuLaunchKernelEx, &config, step.function, parameters, nullptr);
        }
    }

    size_t launches() const {
        size_t count = 0;
        for (const Step &step : steps)
            count += step.kind == Step::kLaunch;
        return count;
    }

  private:
    struct Kernel {
        CUfunction function;
        unsigned block, shared;
    };

    std::string folder, kind;
    size_t alignment = 0;
    std::vector<Kernel> kernels;
    std::map<std::string, CUdeviceptr> buffers; // their addresses
    std::vector<Step> steps;
    CUstream side;
    CUevent forked, done;

    // One entry of bundle.txt, whose first word has been read.
    void read(const std::string &word, std::istream &text) {
        if (word == "flash_attention_bundle") {
            int version;
            if (!(text >> version) || version != 1)
                refuse("%s/bundle.txt has another version than 1: use the bundle.h of the package "
                       "that has written it",
                       folder.c_str());
        } else if (word == "target") {
            check_target(text);
        } else if (word == "sms") {
            int needed, own = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
            if (text >> needed; own < needed)
                refuse("the GPU has %d streaming multiprocessors and the bundle is made for %d: "
                       "export it with sms=%d",
                       own, needed, own);
        } else if (word == "alignment") {
            text >> alignment;
        } else if (word == "arena" || word == "zeros" || word == "weights") {
            size_t bytes;
            text >> bytes;
            allocate(word, bytes);
        } else if (word == "input" || word == "output") {
            (word == "input" ? inputs : outputs).push_back(port(text));
        } else if (word == "kernel") {
            load_kernel(text);
        } else if (word == "zero") {
            Step step;
            step.kind = Step::kZero;
            step.zeroed = place(text);
            text >> step.zeroed_bytes;
            steps.push_back(step);
        } else if (word == "side" || word == "main" || word == "join") {
            Step step;
            step.kind = word == "side" ? Step::kSide : word == "main" ? Step::kMain : Step::kJoin;
            steps.push_back(step);
        } else if (word == "launch") {
            steps.push_back(read_launch(text));
        } else {
            refuse("%s/bundle.txt has %s, which is unknown: use the bundle.h of the package that "
                   "has written it",
                   folder.c_str(), word.c_str());
        }
    }

    void check_target(std::istream &text) {
        std::string target;
        int major, minor, exact;
        text >> target >> major >> minor >> exact;
        const int own[] = {attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                           attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)};
        const bool is_same = own[0] == major && own[1] == minor;
        const bool is_later = own[0] > major || (own[0] == major && own[1] > minor);
        if (!is_same && (exact || !is_later || (kind == "cubin" && own[0] != major)))
            refuse("the GPU has compute capability %d.%d and the bundle is for %s: export it with "
                   "arch=\"%d%d\"",
                   own[0], own[1], target.c_str(), own[0], own[1]);
    }

    void allocate(const std::string &name, size_t bytes) {
        if (bytes == 0)
            return;
        CUdeviceptr address;
        DRIVER(cuMemAlloc, &address, bytes);
        buffers[name] = address;
        if (name == "zeros")
            DRIVER(cuMemsetD8, address, 0, bytes);
        if (name != "weights")
            return;
        const std::string weights = read_file(folder + "/weights.bin");
        if (weights.size() != bytes)
            refuse("%s/weights.bin has %zu bytes instead of %zu: export the bundle again",
                   folder.c_str(), weights.size(), bytes);
        DRIVER(cuMemcpyHtoD, address, weights.data(), bytes);
    }

    void load_kernel(std::istream &text) {
        std::string name, entry;
        Kernel found;
        text >> name >> entry >> found.block >> found.shared;
        CUmodule module;
        const std::string image = read_file(folder + "/" + name + "." + kind); // PTX ends with 0
        DRIVER(cuModuleLoadData, &module, image.c_str());
        DRIVER(cuModuleGetFunction, &found.function, module, entry.c_str());
        DRIVER(cuFuncSetAttribute, found.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
               int(found.shared));
        kernels.push_back(found);
    }

    Step read_launch(std::istream &text) {
        Step step;
        size_t kernel, bytes, addresses, maps;
        std::string digits, word;
        text >> kernel;
        for (unsigned &blocks : step.grid)
            text >> blocks;
        for (unsigned &blocks : step.cluster)
            text >> blocks;
        text >> step.programmatic >> bytes >> addresses >> maps >> digits;
        if (!text || kernel >= kernels.size() || digits.size() != 2 * bytes)
            refuse("%s/bundle.txt has a launch that is not whole: export the bundle again",
                   folder.c_str());
        step.function = kernels[kernel].function;
        step.block = kernels[kernel].block, step.shared = kernels[kernel].shared;
        if (step.cluster[0] * step.cluster[1] * step.cluster[2] > 8)
            DRIVER(cuFuncSetAttribute, step.function,
                   CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1);
        for (size_t i = 0; i < bytes; ++i)
            step.unbound.push_back(uint8_t(std::stoi(digits.substr(2 * i, 2), nullptr, 16)));
        step.words.resize((bytes + 7) / 8);
        for (size_t i = 0; i < addresses; ++i) {
            size_t member;
            text >> word >> member;
            step.addresses.push_back({member, place(text)});
        }
        for (size_t i = 0; i < maps; ++i)
            step.maps.push_back(read_map(text));
        return step;
    }

    static Step::Map read_map(std::istream &text) {
        Step::Map map;
        std::string word;
        size_t rank;
        text >> word >> map.member;
        map.place = place(text);
        text >> map.data_type >> map.swizzle >> map.l2_promotion >> rank;
        map.dims.resize(rank), map.strides.resize(rank - 1), map.box.resize(rank);
        for (cuuint64_t &size : map.dims)
            text >> size;
        for (cuuint64_t &stride : map.strides)
            text >> stride;
        for (cuuint32_t &size : map.box)
            text >> size;
        return map;
    }

    static Place place(std::istream &text) {
        Place found;
        text >> found.buffer >> found.offset;
        return found;
    }

    static Port port(std::istream &text) {
        Port found;
        size_t rank;
        text >> found.name >> found.dtype >> found.bytes >> rank;
        found.shape.resize(rank);
        for (int64_t &size : found.shape)
            text >> size;
        return found;
    }

    static int attribute(CUdevice_attribute number) {
        CUdevice device;
        int value;
        DRIVER(cuCtxGetDevice, &device);
        DRIVER(cuDeviceGetAttribute, &value, number, device);
        return value;
    }

    CUdeviceptr at(const Place &place) const { return buffers.at(place.buffer) + place.offset; }

    void fill(Step &step) const {
        uint8_t *const arguments = reinterpret_cast<uint8_t *>(step.words.data());
        if (step.kind != Step::kLaunch)
            return;
        memcpy(arguments, step.unbound.data(), step.unbound.size());
        for (const Step::Address &address : step.addresses) {
            const uint64_t value = at(address.place);
            memcpy(arguments + address.member, &value, sizeof value);
        }
        for (const Step::Map &map : step.maps) {
            const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
            alignas(64) CUtensorMap encoded;
            DRIVER(cuTensorMapEncodeTiled, &encoded, CUtensorMapDataType(map.data_type),
                   cuuint32_t(map.dims.size()), reinterpret_cast<void *>(at(map.place)),
                   map.dims.data(), map.strides.data(), map.box.data(), ones,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CUtensorMapSwizzle(map.swizzle),
                   CUtensorMapL2promotion(map.l2_promotion), CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
            memcpy(arguments + map.member, &encoded, sizeof encoded);
        }
    }
};
