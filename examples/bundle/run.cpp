// Runs a bundle, a forward that flash_attention.export_bundle has written, by the CUDA driver
// alone. Nothing of CUDA is linked; cuda.h is in a toolkit, and in nvidia-cuda-runtime from PyPI.
//
//   g++ -std=c++20 -O2 -I CUDA/include run.cpp -o run
//   ./run BUNDLE TENSORS [REPLAYS [cubin|ptx]]
//
// TENSORS is a folder. Each input is read from NAME.in, and each output is written to NAME.out: the
// bytes of a contiguous tensor. An output that has NAME.ref, the result of another program, is
// compared with it. Then a CUDA graph of the launches is replayed REPLAYS times, 100 by default;
// with 0 there is no graph. Exit status: 0 right, 1 wrong, 2 wrong usage, 3 no driver.

#include "bundle.h"
#include <bit>
#include <cmath>

static double number(const Port &port, const std::string &bytes, size_t i) {
    if (port.dtype == "float32") {
        float value;
        memcpy(&value, &bytes[4 * i], sizeof value);
        return value;
    }
    uint16_t bits;
    memcpy(&bits, &bytes[2 * i], sizeof bits);
    if (port.dtype == "bfloat16")
        return std::bit_cast<float>(uint32_t{bits} << 16);
    const int exponent = bits >> 10 & 31, fraction = bits & 1023; // float16
    if (exponent == 31)
        return fraction ? NAN : bits >> 15 ? -INFINITY : INFINITY;
    const double size = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return bits >> 15 ? -size : size;
}

// Whether the root mean square of the difference is less than 2% of the reference's.
static bool is_close(const Port &port, const std::string &found, const std::string &wanted) {
    if (wanted.size() != found.size())
        refuse("%s.ref has %zu bytes and the output has %zu, %s", port.name.c_str(), wanted.size(),
               found.size(), port.text().c_str());
    if (port.dtype.find("float") == std::string::npos) { // whole numbers
        printf("%s: %s\n", port.name.c_str(), found == wanted ? "right" : "wrong");
        return found == wanted;
    }
    const size_t count = found.size() / (port.dtype == "float32" ? 4 : 2);
    double error = 0, size = 0, most = 0;
    for (size_t i = 0; i < count; ++i) {
        const double right = number(port, wanted, i), difference = number(port, found, i) - right;
        error += difference * difference, size += right * right;
        most = std::isnan(difference) ? NAN : fmax(most, fabs(difference));
    }
    const bool is_right = sqrt(error) < 0.02 * sqrt(size); // not with NaN
    printf("%s: %s, the error is %.6f of the reference, at most %.6f\n", port.name.c_str(),
           is_right ? "right" : "wrong", sqrt(error / size), most);
    return is_right;
}

// Microseconds of a replay of a CUDA graph of the launches.
static double replayed_us(const Bundle &bundle, CUstream stream, int replays) {
    CUgraph graph;
    CUgraphExec executable;
    CUevent begin, end;
    DRIVER(cuCtxSynchronize); // of what is not on the stream
    DRIVER(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    bundle.launch(stream);
    DRIVER(cuStreamEndCapture, stream, &graph);
    DRIVER(cuGraphInstantiateWithFlags, &executable, graph, 0);
    DRIVER(cuEventCreate, &begin, 0);
    DRIVER(cuEventCreate, &end, 0);
    for (int i = -5; i < replays; ++i) { // five to warm up
        if (i == 0)
            DRIVER(cuEventRecord, begin, stream);
        DRIVER(cuGraphLaunch, executable, stream);
    }
    DRIVER(cuEventRecord, end, stream);
    DRIVER(cuStreamSynchronize, stream);
    float ms;
    DRIVER(cuEventElapsedTime, &ms, begin, end);
    return 1000.0 * ms / replays;
}

int main(int count, char **arguments) {
    if (count < 3 || count > 5)
        refuse("give the folders of the bundle and of its tensors: run BUNDLE TENSORS [REPLAYS "
               "[cubin|ptx]]");
    const std::string folder = std::string(arguments[2]) + "/";
    const int replays = count > 3 ? atoi(arguments[3]) : 100;
    CUdevice device;
    CUcontext context;
    CUstream stream;
    DRIVER(cuInit, 0);
    DRIVER(cuDeviceGet, &device, 0);
    DRIVER(cuDevicePrimaryCtxRetain, &context, device);
    DRIVER(cuCtxSetCurrent, context);
    DRIVER(cuStreamCreate, &stream, CU_STREAM_DEFAULT);
    Bundle bundle(arguments[1], count > 4 ? arguments[4] : "cubin");

    std::map<std::string, CUdeviceptr> tensors;
    for (const std::vector<Port> *ports : {&bundle.inputs, &bundle.outputs})
        for (const Port &port : *ports)
            DRIVER(cuMemAlloc, &tensors[port.name], port.bytes);
    for (const Port &port : bundle.inputs) {
        const std::string bytes = read_file(folder + port.name + ".in");
        if (bytes.size() != port.bytes)
            refuse(
                "%s.in has %zu bytes and the bundle takes %zu, %s: give such a tensor, or export "
                "the module for other shapes",
                port.name.c_str(), bytes.size(), port.bytes, port.text().c_str());
        DRIVER(cuMemcpyHtoD, tensors[port.name], bytes.data(), bytes.size());
    }
    bundle.bind(tensors);
    bundle.launch(stream);
    DRIVER(cuStreamSynchronize, stream);

    const auto downloaded = [&](const Port &port) {
        std::string bytes(port.bytes, '\0');
        DRIVER(cuMemcpyDtoH, bytes.data(), tensors[port.name], bytes.size());
        return bytes;
    };
    bool is_right = true;
    std::vector<std::string> found;
    for (const Port &port : bundle.outputs) {
        found.push_back(downloaded(port));
        const std::string path = folder + port.name;
        std::ofstream(path + ".out", std::ios::binary) << found.back();
        if (std::ifstream(path + ".ref"))
            is_right &= is_close(port, found.back(), read_file(path + ".ref"));
    }
    printf("%zu launches\n", bundle.launches());
    if (replays > 0) {
        for (const Port &port : bundle.outputs)
            DRIVER(cuMemsetD8, tensors[port.name], 0xff, port.bytes);
        printf("%.2f us for a replay of the CUDA graph\n", replayed_us(bundle, stream, replays));
        for (size_t i = 0; i < found.size(); ++i)
            if (downloaded(bundle.outputs[i]) != found[i]) {
                printf("%s: wrong, a replay has other bits\n", bundle.outputs[i].name.c_str());
                is_right = false;
            }
    }
    return is_right ? 0 : 1;
}
