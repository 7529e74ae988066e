// Attention in bf16 on the CPU: inputs and the right result. Tensors are (length, heads, size).

#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

inline std::string read_file(const char *path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

struct Shape {
    int heads, length, size;
    bool causal; // a query sees the keys up to its own
    int row() const { return heads * size; }
};

inline float number(uint16_t bf16) {
    return std::bit_cast<float>(uint32_t{bf16} << 16);
}

// Numbers from 0.5 to 2; those of q have either sign, so that keys differ in weight.
inline std::vector<uint16_t> inputs(const Shape &shape, uint32_t seed, bool has_signs) {
    std::vector<uint16_t> found(shape.length * shape.row());
    for (uint16_t &value : found) {
        seed = seed * 1664525 + 1013904223;
        value = 0x3f00 + (seed >> 24) + (has_signs ? seed >> 8 & 0x8000 : 0);
    }
    return found;
}

// The largest difference of o from softmax(Q K^T / sqrt(size)) V. tensors: q, k, v and o.
inline double largest_error(const Shape &shape, const std::vector<uint16_t> *tensors) {
    const auto &q = tensors[0], &k = tensors[1], &v = tensors[2], &o = tensors[3];
    double most = 0;
    for (int at = 0; at < shape.length * shape.row(); at += shape.size) {
        const int head = at % shape.row();
        std::vector<double> weighted(shape.size);
        double sum = 0;
        const int end = shape.causal ? at + 1 : shape.length * shape.row();
        for (int key = head; key < end; key += shape.row()) {
            double score = 0;
            for (int i = 0; i < shape.size; ++i)
                score += number(q[at + i]) * number(k[key + i]);
            const double weight = exp(score / sqrt(shape.size));
            sum += weight;
            for (int i = 0; i < shape.size; ++i)
                weighted[i] += weight * number(v[key + i]);
        }
        for (int i = 0; i < shape.size; ++i)
            most = fmax(most, fabs(weighted[i] / sum - number(o[at + i])));
    }
    return most;
}
