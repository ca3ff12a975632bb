// Measures state_copy.cu on this machine's first GPU: see kernel_probe.py, which builds and starts it.
//
//   kernel_probe STATE_COPY_CU ARCH [TRITON_LIST]
//
// Every kernel gathers (or scatters) 0.75 MiB states of pages of 27, and its bytes are checked before it is timed. Rows and
// packed buffers rotate, so that their total is well over the L2 cache.

#include <cuda.h>
#include <nvrtc.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

typedef uint64_t u64;
typedef uint32_t u32;

#define CHECK(call)                                                                              \
    do {                                                                                         \
        const CUresult result = (call);                                                          \
        if (result != CUDA_SUCCESS) {                                                            \
            const char* name = "?";                                                              \
            cuGetErrorName(result, &name);                                                       \
            std::fprintf(stderr, "line %d: %s: %s\n", __LINE__, #call, name ? name : "?");       \
            std::exit(1);                                                                        \
        }                                                                                        \
    } while (0)

constexpr u64 PAYLOAD = 786432, PAGE = 27 * PAYLOAD, ROWS = 512, LAYERS = 69, BATCH_SELECTED = 8;
constexpr u64 CALLS = 100;      // in one graph
constexpr u64 MEMCPY = 8ull << 30;

constexpr u32 INLINE = 1288;    // bytes of indices that travel with a launch; others beside it are for comparison

template <u32 BYTES> struct alignas(16) ArgumentsOf {
    u32 shape, first_row;
    u64 base, packed, page_stride, rows;
    unsigned char inline_bytes[BYTES];
    u64 payload, bases, flags, row_states;
    u32 selected, inline_flags_at, direction, index_width;
};
typedef ArgumentsOf<INLINE> Arguments;
static_assert(sizeof(Arguments) == 1376, "as in state_copy.cu");

// The last block tells the host that all are done: what a launch without a write behind it would need.
const char* const DONE_ENTRY = R"(
extern "C" __global__ void __launch_bounds__(THREADS, 2048 / THREADS)
gather_done(const __grid_constant__ Arguments a, u32* finished, volatile u64* word, u64 value) {
    state_copy(a, DIRECTION_GATHER, 4);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        if (atomicAdd(finished, 1) == gridDim.x * gridDim.y - 1) {
            *finished = 0;
            __threadfence_system();
            *word = value;
        }
    }
}
)";

double now_us() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        std::fprintf(stderr, "%s cannot be read\n", path.c_str());
        std::exit(1);
    }
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

CUmodule compile(const std::string& source, const std::string& arch, std::vector<std::string> options) {
    options.push_back("--gpu-architecture=" + arch);
    options.push_back("--std=c++17");
    nvrtcProgram program;
    nvrtcCreateProgram(&program, source.c_str(), "state_copy.cu", 0, nullptr, nullptr);
    std::vector<const char*> given;
    for (const auto& option : options) given.push_back(option.c_str());
    const nvrtcResult result = nvrtcCompileProgram(program, int(given.size()), given.data());
    if (result != NVRTC_SUCCESS) {
        size_t size = 0;
        nvrtcGetProgramLogSize(program, &size);
        std::string log(size, ' ');
        nvrtcGetProgramLog(program, &log[0]);
        std::fprintf(stderr, "%s\n%s\n", nvrtcGetErrorString(result), log.c_str());
        std::exit(1);
    }
    size_t size = 0;
    nvrtcGetCUBINSize(program, &size);
    std::vector<char> code(size);
    nvrtcGetCUBIN(program, code.data());
    nvrtcDestroyProgram(&program);
    CUmodule module;
    CHECK(cuModuleLoadData(&module, code.data()));
    return module;
}

CUfunction entry(CUmodule module, const char* name) {
    CUfunction function;
    CHECK(cuModuleGetFunction(&function, module, name));
    return function;
}

// --- memory -----------------------------------------------------------------------------------------------------------

CUdeviceptr arena, packed_memory, device_indices, bases, finished;
int* pinned_indices;
CUdeviceptr pinned_indices_at;
unsigned char* states;
CUdeviceptr states_at;
volatile u64* word;
CUdeviceptr word_at;
CUstream stream;
std::vector<int> rows;          // a permutation: set k of S rows begins at k * S

constexpr u64 FIRST = 2 * PAYLOAD;      // where the first layer lies in a page

u32 pattern(u64 row, u64 at) {
    return u32(at) * 2654435761u ^ u32(row) << 19;
}

void set_up() {
    CHECK(cuMemAlloc(&arena, std::max(ROWS * PAGE, 2 * MEMCPY)));
    CHECK(cuMemAlloc(&packed_memory, LAYERS * BATCH_SELECTED * PAYLOAD));
    CHECK(cuMemAlloc(&device_indices, ROWS * 4));
    CHECK(cuMemAlloc(&bases, LAYERS * 8));
    CHECK(cuMemAlloc(&finished, 4));
    CHECK(cuMemsetD8(finished, 0, 4));
    void* host;
    CHECK(cuMemHostAlloc(&host, ROWS * 4, CU_MEMHOSTALLOC_DEVICEMAP));
    pinned_indices = static_cast<int*>(host);
    CHECK(cuMemHostGetDevicePointer(&pinned_indices_at, host, 0));
    CHECK(cuMemHostAlloc(&host, 65536, CU_MEMHOSTALLOC_DEVICEMAP));
    states = static_cast<unsigned char*>(host);
    CHECK(cuMemHostGetDevicePointer(&states_at, host, 0));
    CHECK(cuMemHostAlloc(&host, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
    word = static_cast<volatile u64*>(host);
    *word = 0;
    CHECK(cuMemHostGetDevicePointer(&word_at, host, 0));
    int low, high;
    CHECK(cuCtxGetStreamPriorityRange(&low, &high));
    CHECK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, high));
    for (u64 row = 0; row < ROWS; row++) rows.push_back(int(row));
    std::shuffle(rows.begin(), rows.end(), std::mt19937_64(7));
    std::memcpy(pinned_indices, rows.data(), ROWS * 4);
    CHECK(cuMemcpyHtoD(device_indices, rows.data(), ROWS * 4));
    std::vector<u64> table;
    for (u64 layer = 0; layer < LAYERS; layer++) {
        table.push_back(arena + FIRST + layer % 25 * PAYLOAD + layer / 25 * 170 * PAGE);
    }
    CHECK(cuMemcpyHtoD(bases, table.data(), LAYERS * 8));
}

void fill_cache() {
    std::vector<u32> row_words(PAYLOAD / 4);
    for (u64 row = 0; row < ROWS; row++) {
        for (u64 at = 0; at < row_words.size(); at++) row_words[at] = pattern(row, at);
        CHECK(cuMemcpyHtoD(arena + FIRST + row * PAGE, row_words.data(), PAYLOAD));
    }
    CHECK(cuCtxSynchronize());
}

// --- kernels ----------------------------------------------------------------------------------------------------------

enum class From { Inline, Device, Pinned };

// One launch on the stream: S rows that begin at place `at` of the permutation, packed at the same place.
typedef std::function<void(u64 selected, u64 at)> Launch;

struct Kernel {
    std::string label;
    Launch launch;
    bool gather;
    double us[4];
};

template <u32 BYTES> ArgumentsOf<BYTES> arguments_of(u64 selected, u64 at, From from, bool row_states) {
    ArgumentsOf<BYTES> a;
    std::memset(&a, 0, sizeof a);
    a.base = arena + FIRST;
    a.packed = packed_memory + at * PAYLOAD;
    a.rows = ROWS;
    a.page_stride = PAGE;
    a.payload = PAYLOAD;
    a.selected = u32(selected);
    a.index_width = 4;
    a.row_states = row_states ? states_at : 0;
    a.shape = (row_states ? 16 : 0) | (from == From::Inline ? 2 : 0);
    const auto address = [&](u64 indices) {
        indices += at * 4;
        std::memcpy(a.inline_bytes, &indices, sizeof indices);
    };
    switch (from) {
    case From::Inline: std::memcpy(a.inline_bytes, rows.data() + at, selected * 4); break;
    case From::Device: address(device_indices); break;
    case From::Pinned: address(pinned_indices_at); break;
    }
    return a;
}

Arguments arguments(u64 selected, u64 at, From from, bool row_states) {
    return arguments_of<INLINE>(selected, at, from, row_states);
}

template <u32 BYTES>
void launch_ours(CUfunction function, u32 threads, u64 chunk, ArgumentsOf<BYTES>& a, u64 row_count) {
    void* parameters[] = {&a};
    CHECK(cuLaunchKernel(function, u32((PAYLOAD + chunk - 1) / chunk), u32(row_count), 1, threads, 1, 1, 0, stream,
                         parameters, nullptr));
}

template <u32 BYTES = INLINE>
Launch ours(CUfunction function, u32 threads, u64 chunk, From from, bool row_states) {
    return [=](u64 selected, u64 at) {
        auto a = arguments_of<BYTES>(selected, at, from, row_states);
        launch_ours(function, threads, chunk, a, selected);
    };
}

std::vector<std::string> options(u32 threads, u64 chunk, int load, int store, u32 inline_bytes = INLINE) {
    const auto define = [](const char* name, u64 value) { return "-D" + std::string(name) + "=" + std::to_string(value); };
    return {define("FUSED", 1), define("ITEM_BYTES", 4), define("VECTOR_BYTES", 16), define("EVEN", 1),
            define("THREADS", threads), define("CHUNK_BYTES", chunk), define("LOAD_HINT", u64(load)),
            define("STORE_HINT", u64(store)), define("INLINE_BYTES", inline_bytes)};
}

void check(const Kernel& kernel) {
    // A gather brings what the permutation names; a scatter of that puts it back, so that the cache stays as it is.
    const u64 selected = 8, at = 24;
    std::vector<u32> got(selected * PAYLOAD / 4);
    if (kernel.gather) {
        CHECK(cuMemsetD8(packed_memory + at * PAYLOAD, 0xee, selected * PAYLOAD));
        CHECK(cuCtxSynchronize());
        kernel.launch(selected, at);
        CHECK(cuStreamSynchronize(stream));
        CHECK(cuMemcpyDtoH(got.data(), packed_memory + at * PAYLOAD, selected * PAYLOAD));
    } else {
        for (u64 s = 0; s < selected; s++) {
            CHECK(cuMemcpyDtoD(packed_memory + (at + s) * PAYLOAD, arena + FIRST + rows[at + s] * PAGE, PAYLOAD));
            CHECK(cuMemsetD8(arena + FIRST + rows[at + s] * PAGE, 0xee, PAYLOAD));
        }
        CHECK(cuCtxSynchronize());
        kernel.launch(selected, at);
        CHECK(cuStreamSynchronize(stream));
        for (u64 s = 0; s < selected; s++) {
            CHECK(cuMemcpyDtoH(got.data() + s * PAYLOAD / 4, arena + FIRST + rows[at + s] * PAGE, PAYLOAD));
        }
    }
    for (u64 s = 0; s < selected; s++) {
        for (u64 word = 0; word < PAYLOAD / 4; word++) {
            if (got[s * PAYLOAD / 4 + word] != pattern(u64(rows[at + s]), word)) {
                std::fprintf(stderr, "%s: row %d, word %d is wrong\n", kernel.label.c_str(), int(s), int(word));
                std::exit(1);
            }
        }
    }
}

// 168 bytes hold 42 indices: with more the kernel reads them from the device.
constexpr u32 SMALL = 168, LARGE = 3912;

template <u32 BYTES> From from_of(u64 selected) {
    return selected * 4 <= BYTES ? From::Inline : From::Device;
}

template <u32 BYTES> CUfunction gather_with(const std::string& source, const std::string& arch) {
    return entry(compile(source, arch, options(128, 4096, 0, 0, BYTES)), "gather_int32");
}

template <u32 BYTES> Launch with_parameter(const std::string& source, const std::string& arch) {
    const CUfunction gather = gather_with<BYTES>(source, arch);
    return [=](u64 selected, u64 at) { ours<BYTES>(gather, 128, 4096, from_of<BYTES>(selected), false)(selected, at); };
}

// A kernel in an executable graph: its parameter is set, then the graph is launched.
template <u32 BYTES> struct KernelGraph {
    CUfunction function;
    CUgraphNode node;
    CUgraphExec executable;

    KernelGraph(const std::string& source, const std::string& arch) : function(gather_with<BYTES>(source, arch)) {
        CUgraph graph;
        CHECK(cuGraphCreate(&graph, 0));
        with(1, 0, [&](const CUDA_KERNEL_NODE_PARAMS& kernel) { CHECK(cuGraphAddKernelNode(&node, graph, nullptr, 0, &kernel)); });
        CHECK(cuGraphInstantiate(&executable, graph, 0));
        CHECK(cuGraphUpload(executable, stream));
        CHECK(cuStreamSynchronize(stream));
    }

    void with(u64 selected, u64 at, const std::function<void(const CUDA_KERNEL_NODE_PARAMS&)>& call) const {
        auto a = arguments_of<BYTES>(selected, at, from_of<BYTES>(selected), false);
        void* parameters[] = {&a};
        CUDA_KERNEL_NODE_PARAMS kernel;
        std::memset(&kernel, 0, sizeof kernel);
        kernel.func = function;
        kernel.gridDimX = u32(PAYLOAD / 4096);
        kernel.gridDimY = u32(selected);
        kernel.blockDimX = 128;
        kernel.gridDimZ = kernel.blockDimY = kernel.blockDimZ = 1;
        kernel.kernelParams = parameters;
        call(kernel);
    }

    void set(u64 selected, u64 at) const {
        with(selected, at, [&](const CUDA_KERNEL_NODE_PARAMS& kernel) {
            CHECK(cuGraphExecKernelNodeSetParams(executable, node, &kernel));
        });
    }

    void launch() const { CHECK(cuGraphLaunch(executable, stream)); }
};

std::vector<Kernel> our_kernels(const std::string& source, const std::string& arch) {
    std::vector<Kernel> kernels;
    const auto add = [&](const std::string& label, Launch launch, bool gather = true) {
        kernels.push_back({label, std::move(launch), gather, {}});
    };
    struct Shape { u32 threads; u64 chunk; int load, store; };
    const Shape shapes[] = {
        {128, 4096, 0, 0}, {256, 8192, 0, 0}, {128, 8192, 0, 0}, {256, 4096, 0, 0}, {256, 16384, 0, 0},
        {512, 8192, 0, 0}, {512, 16384, 0, 0}, {512, 32768, 0, 0}, {1024, 16384, 0, 0}, {1024, 32768, 0, 0},
        {256, 32768, 0, 0}, {128, 16384, 0, 0},
        {256, 8192, 1, 0}, {256, 8192, 2, 0}, {256, 8192, 3, 0}, {256, 8192, 4, 0}, {256, 8192, 5, 0},
        {256, 8192, 0, 1}, {256, 8192, 0, 2}, {256, 8192, 1, 1}, {256, 8192, 4, 1}, {256, 8192, 4, 2},
        {512, 16384, 1, 1}, {128, 8192, 4, 1}, {128, 4096, 4, 0}, {128, 4096, 1, 1}, {128, 4096, 4, 1},
    };
    for (const Shape& shape : shapes) {
        const CUmodule module = compile(source, arch, options(shape.threads, shape.chunk, shape.load, shape.store));
        const CUfunction gather = entry(module, "gather_int32");
        const std::string label = "ours " + std::to_string(shape.threads) + "x" + std::to_string(shape.chunk) + " ld" +
                                  std::to_string(shape.load) + " st" + std::to_string(shape.store);
        add(label, ours(gather, shape.threads, shape.chunk, From::Device, false));
        if (&shape == shapes) {
            add(label + " control", ours(gather, shape.threads, shape.chunk, From::Device, false));
            add(label + " inline", ours(gather, shape.threads, shape.chunk, From::Inline, false));
            add(label + " inline, row states", ours(gather, shape.threads, shape.chunk, From::Inline, true));
            add(label + " device, row states", ours(gather, shape.threads, shape.chunk, From::Device, true));
            add(label + " pinned indices", ours(gather, shape.threads, shape.chunk, From::Pinned, false));
            add("ours 128x4096 ld0 st0 256-byte argument", with_parameter<SMALL>(source, arch));
        }
        add(label, ours(entry(module, "scatter_int32"), shape.threads, shape.chunk, From::Device, false), false);
    }
    return kernels;
}

// Lines of: label, file of the code, entry, threads, bytes of shared memory, elements of a block, gather|scatter.
void add_triton(std::vector<Kernel>& kernels, const std::string& list) {
    std::istringstream lines(read(list));
    std::string label, file, name, direction;
    u32 threads, shared, block;
    while (lines >> label >> file >> name >> threads >> shared >> block >> direction) {
        CUmodule module;
        CHECK(cuModuleLoadData(&module, read(file).data()));
        const CUfunction function = entry(module, name.c_str());
        if (shared > 48 * 1024) {
            CHECK(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, int(shared)));
        }
        kernels.push_back({label, [=](u64 selected, u64 at) {
            CUdeviceptr cache = arena + FIRST, packed = packed_memory + at * PAYLOAD, indices = device_indices + at * 4;
            int row_limit = int(ROWS), page = int(PAGE / 4);
            u64 scratch = 0;
            // Newer compilers add pointers to scratch memory; surplus entries are not read.
            void* parameters[] = {&cache, &packed, &indices, &row_limit, &page, &scratch, &scratch, &scratch};
            CHECK(cuLaunchKernel(function, u32(PAYLOAD / 4 / block), u32(selected), 1, threads, 1, 1, shared, stream,
                                 parameters, nullptr));
        }, direction == "gather", {}});
    }
}

// --- kernel time ------------------------------------------------------------------------------------------------------

CUgraphExec graph_of(const Kernel& kernel, u64 selected) {
    const u64 sets = ROWS / selected;
    CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    for (u64 call = 0; call < CALLS; call++) kernel.launch(selected, call % sets * selected);
    CUgraph graph;
    CHECK(cuStreamEndCapture(stream, &graph));
    CUgraphExec executable;
    CHECK(cuGraphInstantiate(&executable, graph, 0));
    CHECK(cuGraphDestroy(graph));
    return executable;
}

void time_graphs(std::vector<Kernel>& kernels, size_t column, u64 selected, int rounds) {
    CUevent begin, end;
    CHECK(cuEventCreate(&begin, CU_EVENT_DEFAULT));
    CHECK(cuEventCreate(&end, CU_EVENT_DEFAULT));
    std::vector<CUgraphExec> graphs;
    for (const Kernel& kernel : kernels) graphs.push_back(graph_of(kernel, selected));
    std::vector<std::vector<double>> samples(kernels.size());
    std::vector<size_t> order(kernels.size());
    for (size_t at = 0; at < order.size(); at++) order[at] = at;
    std::mt19937_64 random(selected);
    for (int round = -1; round < rounds; round++) {
        std::shuffle(order.begin(), order.end(), random);
        for (const size_t at : order) {
            CHECK(cuEventRecord(begin, stream));
            CHECK(cuGraphLaunch(graphs[at], stream));
            CHECK(cuEventRecord(end, stream));
            CHECK(cuEventSynchronize(end));
            float ms;
            CHECK(cuEventElapsedTime(&ms, begin, end));
            if (round >= 0) samples[at].push_back(ms * 1000.0 / CALLS);
        }
    }
    for (size_t at = 0; at < kernels.size(); at++) {
        kernels[at].us[column] = median(samples[at]);
        CHECK(cuGraphExecDestroy(graphs[at]));
    }
}

void print_kernels(std::vector<Kernel> kernels) {
    std::stable_sort(kernels.begin(), kernels.end(), [](const Kernel& a, const Kernel& b) { return a.us[3] < b.us[3]; });
    for (const bool gather : {true, false}) {
        std::printf("\n%s, us a call in a replayed graph of %d (/TB/s read plus written)\n%-38s %12s %12s %12s %12s\n",
                    gather ? "gather" : "scatter", int(CALLS), "", "S=1", "S=8", "S=64", "S=256");
        for (const Kernel& kernel : kernels) {
            if (kernel.gather != gather) continue;
            std::printf("%-38s", kernel.label.c_str());
            const u64 selected[] = {1, 8, 64, 256};
            for (int at = 0; at < 4; at++) {
                std::printf(" %7.2f/%4.2f", kernel.us[at], 2.0 * selected[at] * PAYLOAD / kernel.us[at] / 1e6);
            }
            std::printf("\n");
        }
    }
}

void print_memcpy() {
    CUevent begin, end;
    CHECK(cuEventCreate(&begin, CU_EVENT_DEFAULT));
    CHECK(cuEventCreate(&end, CU_EVENT_DEFAULT));
    std::vector<double> samples;
    for (int round = 0; round < 8; round++) {
        CHECK(cuEventRecord(begin, stream));
        CHECK(cuMemcpyDtoDAsync(arena + MEMCPY, arena, MEMCPY, stream));
        CHECK(cuEventRecord(end, stream));
        CHECK(cuEventSynchronize(end));
        float ms;
        CHECK(cuEventElapsedTime(&ms, begin, end));
        if (round > 0) samples.push_back(ms);
    }
    std::printf("\ncudaMemcpy of 8 GiB: %.2f TB/s read plus written\n", 2.0 * MEMCPY / median(samples) / 1e9);
}

// --- host-completed ---------------------------------------------------------------------------------------------------

u64 ticket = 0;

void poll(u64 value) {
    // Words only grow, and a later one may stand there already.
    while (*word < value) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
}

void write_and_poll() {
    ticket++;
    CHECK(cuStreamWriteValue64(stream, word_at, ticket, CU_STREAM_WRITE_VALUE_DEFAULT));
    poll(ticket);
}

template <u32 BYTES> std::function<void(u64, u64)> by_graph(const std::string& source, const std::string& arch) {
    const KernelGraph<BYTES> graph(source, arch);
    return [=](u64 selected, u64 at) {
        graph.set(selected, at);
        graph.launch();
        write_and_poll();
    };
}

void print_host_completed(const std::string& source, const std::string& arch) {
    const CUmodule module = compile(source + DONE_ENTRY, arch, options(128, 4096, 0, 0));
    struct Scheme { const char* label; std::function<void(u64, u64)> run; };
    std::vector<Scheme> schemes;
    const CUfunction gather = entry(module, "gather_int32"), last_block = entry(module, "gather_done");
    const auto synchronised = [](Launch launch) {
        return [=](u64 selected, u64 at) {
            launch(selected, at);
            CHECK(cuStreamSynchronize(stream));
        };
    };
    const auto written = [](Launch launch) {
        return [=](u64 selected, u64 at) {
            launch(selected, at);
            write_and_poll();
        };
    };
    const Launch travelling = ours(gather, 128, 4096, From::Inline, false);
    schemes.push_back({"launch, synchronise            parameter 4000", synchronised(with_parameter<LARGE>(source, arch))});
    schemes.push_back({"launch, synchronise            parameter 1376", synchronised(travelling)});
    schemes.push_back({"launch, write word, poll       parameter 4000", written(with_parameter<LARGE>(source, arch))});
    schemes.push_back({"launch, write word, poll       parameter 1376", written(travelling)});
    schemes.push_back({"  the same again (control)", written(travelling)});
    schemes.push_back({"launch, write word, poll       parameter 256*", written(with_parameter<SMALL>(source, arch))});
    schemes.push_back({"graph, write word, poll        parameter 4000", by_graph<LARGE>(source, arch)});
    schemes.push_back({"graph, write word, poll        parameter 1376", by_graph<INLINE>(source, arch)});
    schemes.push_back({"graph, write word, poll        parameter 256*", by_graph<SMALL>(source, arch)});
    const KernelGraph<INLINE> as_it_was(source, arch);
    schemes.push_back({"  a graph whose parameter stays", [=](u64 selected, u64 at) {
        static u64 set_to = 0;
        if (std::exchange(set_to, selected) != selected) as_it_was.set(selected, at);
        as_it_was.launch();
        write_and_poll();
    }});
    schemes.push_back({"launch, write word, poll       pinned indices", written(ours(gather, 128, 4096, From::Pinned, false))});
    schemes.push_back({"  row states in pinned memory", written(ours(gather, 128, 4096, From::Inline, true))});
    schemes.push_back({"  indices copied to the device first", [=](u64 selected, u64 at) {
        CHECK(cuMemcpyHtoDAsync(device_indices + at * 4, pinned_indices + at, selected * 4, stream));
        ours(gather, 128, 4096, From::Device, false)(selected, at);
        write_and_poll();
    }});
    schemes.push_back({"last block writes, poll        parameter 1376", [=](u64 selected, u64 at) {
        Arguments a = arguments(selected, at, From::Inline, false);
        u64 value = ++ticket;
        void* parameters[] = {&a, &finished, &word_at, &value};
        CHECK(cuLaunchKernel(last_block, u32(PAYLOAD / 4096), u32(selected), 1, 128, 1, 1, 0, stream, parameters, nullptr));
        poll(value);
    }});
    schemes.push_back({"nothing but write word, poll", [=](u64, u64) { write_and_poll(); }});

    const u64 selections[] = {1, 8, 64};
    std::vector<std::vector<double>> medians(schemes.size());
    for (const u64 selected : selections) {
        std::vector<std::vector<double>> samples(schemes.size());
        std::vector<size_t> order(schemes.size());
        for (size_t at = 0; at < order.size(); at++) order[at] = at;
        std::mt19937_64 random(selected);
        const u64 sets = ROWS / selected;
        for (u64 round = 0; round < 1100; round++) {
            std::shuffle(order.begin(), order.end(), random);
            for (const size_t at : order) {
                const u64 set = (round * 13 + at) % sets * selected;
                const double from = now_us();
                schemes[at].run(selected, set);
                if (round >= 100) samples[at].push_back(now_us() - from);
            }
        }
        for (size_t at = 0; at < schemes.size(); at++) medians[at].push_back(median(samples[at]));
    }
    std::printf("\nhost-completed gather, us wall, p50  (* inline up to 42 rows, else device memory)\n%-46s %8s %8s %8s\n",
                "", "S=1", "S=8", "S=64");
    for (size_t at = 0; at < schemes.size(); at++) {
        std::printf("%-46s %8.2f %8.2f %8.2f\n", schemes[at].label, medians[at][0], medians[at][1], medians[at][2]);
    }
    const KernelGraph<INLINE> graph(source, arch);
    const auto alone = [](const char* label, const std::function<void()>& before, const std::function<void()>& call) {
        std::vector<double> samples;
        for (int round = 0; round < 2000; round++) {
            before();
            const double from = now_us();
            call();
            samples.push_back(now_us() - from);
            CHECK(cuStreamSynchronize(stream));
        }
        std::printf("%-46s %8.2f\n", label, median(samples));
    };
    std::printf("\ncalls alone, S=1, parameter 1376, us\n");
    alone("launch", [] {}, [&] { travelling(1, 0); });
    alone("set the parameter of a graph's kernel", [] {}, [&] { graph.set(1, 0); });
    alone("launch the graph", [&] { graph.set(1, 0); }, [&] { graph.launch(); });
}

// --- a batch in parts -------------------------------------------------------------------------------------------------

void print_batch(const std::string& source, const std::string& arch, double one_layer_us) {
    const CUfunction gather = entry(compile(source, arch, options(128, 4096, 0, 0)), "gather_int32");
    const u64 all = LAYERS * BATCH_SELECTED;
    // `depth` parts are under way at once.
    const auto run = [&](u64 part_rows, u64 depth, u64 at) {
        Arguments a = arguments(BATCH_SELECTED, 0, From::Inline, false);
        int selected[BATCH_SELECTED];
        for (u64 s = 0; s < BATCH_SELECTED; s++) selected[s] = int((at * BATCH_SELECTED + s) % 170);
        std::memcpy(a.inline_bytes, selected, sizeof selected);
        a.bases = bases;
        a.shape |= 1;
        a.rows = 170;
        std::vector<u64> tickets;
        size_t answered = 0;
        for (u64 first = 0; first < all; first += part_rows) {
            if (tickets.size() - answered == depth) poll(tickets[answered++]);
            a.first_row = u32(first);
            launch_ours(gather, 128, 4096, a, std::min(part_rows, all - first));
            tickets.push_back(++ticket);
            CHECK(cuStreamWriteValue64(stream, word_at, ticket, CU_STREAM_WRITE_VALUE_DEFAULT));
        }
        poll(tickets.back());
    };
    const auto timed = [&](u64 part_rows, u64 depth) {
        std::vector<double> samples;
        for (u64 round = 0; round < 120; round++) {
            const double from = now_us();
            run(part_rows, depth, round % 21);
            if (round >= 20) samples.push_back(now_us() - from);
        }
        return median(samples);
    };
    const u64 part = (64ull << 20) / PAYLOAD;
    const double expected = LAYERS * one_layer_us;
    std::printf("\n69 layers, S=8 (414 MiB), us wall, p50; 69 x one layer's kernel time is %.1f\n", expected);
    for (const auto& [label, rows_of_part, depth] : std::vector<std::tuple<const char*, u64, u64>>{
             {"one launch", all, 1}, {"parts of 64 MiB, all at once", part, 99}, {"parts of 64 MiB, two under way", part, 2},
             {"parts of 64 MiB, one under way", part, 1}, {"parts of 32 MiB, two under way", part / 2, 2}}) {
        const double us = timed(rows_of_part, depth);
        std::printf("%-46s %8.1f  (%.3f)\n", label, us, us / expected);
    }
}

int main(int count, char** values) {
    if (count < 3) {
        std::fprintf(stderr, "usage: kernel_probe STATE_COPY_CU ARCH [TRITON_LIST]\n");
        return 2;
    }
    const std::string source = read(values[1]), arch = values[2];
    CHECK(cuInit(0));
    CUdevice device;
    CHECK(cuDeviceGet(&device, 0));
    CUcontext context;
    CHECK(cuDevicePrimaryCtxSetFlags(device, CU_CTX_SCHED_SPIN));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    char name[128] = "";
    int driver = 0, major = 0, minor = 0;
    CHECK(cuDeviceGetName(name, sizeof name, device));
    CHECK(cuDriverGetVersion(&driver));
    nvrtcVersion(&major, &minor);
    std::printf("%s, driver API %d, NVRTC %d.%d, states of 0.75 MiB in pages of 27\n", name, driver, major, minor);
    set_up();
    print_memcpy();
    fill_cache();
    std::vector<Kernel> kernels = our_kernels(source, arch);
    if (count > 3) add_triton(kernels, values[3]);
    for (const Kernel& kernel : kernels) check(kernel);
    const u64 selected[] = {1, 8, 64, 256};
    const int rounds[] = {41, 41, 21, 9};
    for (size_t at = 0; at < 4; at++) time_graphs(kernels, at, selected[at], rounds[at]);
    print_kernels(kernels);
    print_host_completed(source, arch);
    print_batch(source, arch, kernels[0].us[1]);
    std::printf("\nall bytes were right\n");
    return 0;
}
