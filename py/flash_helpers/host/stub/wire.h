// Requests to the process that runs the simulator, and its answers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct Answer {
    int error; // as cudaError_t and CUresult number it; 0 for none
    std::vector<uint64_t> numbers;
    std::string bytes;
};

struct Link {
    int socket;
    int arena; // the file with all of device memory
    uint64_t arena_base; // the device address of its first byte
};

const Link &link();

// `caller`: the function of CUDA, for messages.
Answer ask(const char *request, const char *caller, const std::vector<uint64_t> &numbers,
           const void *bytes = nullptr, size_t size = 0);

// Ends the program: it has called a function that is not there.
extern "C" [[noreturn]] void not_there(const char *function);
