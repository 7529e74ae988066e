#include "wire.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

namespace {

constexpr uint64_t kArenaBytes = uint64_t{1} << 40;

[[noreturn]] void end(const char *message) {
    fflush(nullptr);
    if (message)
        fprintf(stderr, "%s\n", message);
    _exit(1);
}

// The other process has gone, which says why; so does this one.
void send_all(const void *bytes, size_t size) {
    for (size_t done = 0; done < size;) {
        const ssize_t n =
            send(link().socket, static_cast<const char *>(bytes) + done, size - done, MSG_NOSIGNAL);
        if (n <= 0)
            end(nullptr);
        done += n;
    }
}

void receive_all(void *bytes, size_t size) {
    for (size_t done = 0; done < size;) {
        const ssize_t n = recv(link().socket, static_cast<char *>(bytes) + done, size - done, 0);
        if (n <= 0)
            end(nullptr);
        done += n;
    }
}

void on_bad_access(int signal_number, siginfo_t *info, void *) {
    const uint64_t address = reinterpret_cast<uint64_t>(info->si_addr);
    if (address - link().arena_base < kArenaBytes) {
        fprintf(stderr,
                "the program itself reads or writes device memory at 0x%llx: copy it with "
                "cudaMemcpy, or allocate it with cudaMallocManaged\n",
                static_cast<unsigned long long>(address));
        end(nullptr);
    }
    signal(signal_number, SIG_DFL); // happens again, and ends the program as ever
}

Link opened() {
    const char *text = getenv("FLASH_HELPERS_HOST_LINK");
    Link link{};
    unsigned long long base = 0;
    if (!text || sscanf(text, "%d,%d,%llu", &link.socket, &link.arena, &base) != 3)
        end("this CUDA runtime is a stub: start the program with python -m flash_helpers.ptx run");
    link.arena_base = base;
    struct sigaction action{};
    action.sa_sigaction = on_bad_access;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    return link;
}

} // namespace

const Link &link() {
    static const Link link = opened();
    return link;
}

Answer ask(const char *request, const char *caller, const std::vector<uint64_t> &numbers,
           const void *bytes, size_t size) {
    static std::mutex mutex; // of a program with several threads
    const std::lock_guard<std::mutex> lock(mutex);
    const uint64_t sizes[4] = {strlen(request), strlen(caller), numbers.size(), size};
    send_all(sizes, sizeof sizes);
    send_all(request, sizes[0]);
    send_all(caller, sizes[1]);
    send_all(numbers.data(), 8 * numbers.size());
    send_all(bytes, size);
    uint64_t answered[3]; // error, numbers, bytes
    receive_all(answered, sizeof answered);
    Answer answer{static_cast<int>(answered[0]), std::vector<uint64_t>(answered[1]),
                  std::string(answered[2], '\0')};
    receive_all(answer.numbers.data(), 8 * answered[1]);
    receive_all(&answer.bytes[0], answered[2]);
    return answer;
}

void not_there(const char *function) {
    fflush(nullptr);
    const bool is_runtime = !strncmp(function, "cuda", 4) || !strncmp(function, "__cuda", 6);
    fprintf(stderr, "the stub of %s has no %s: the program cannot run in the simulator\n",
            is_runtime ? "libcudart" : "libcuda", function);
    end(nullptr);
}
