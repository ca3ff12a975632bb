// Gather and scatter of recurrent states: rows of a cache to and from a packed buffer (contract: Gather, Scatter, Both).
//
// One block moves one chunk of one row; the grid has the chunks of a row in x and the rows of the launch in y. Bits are
// copied, never computed. Addresses are 64 bits wide. The class is fixed by macros:
//
//   ITEM_BYTES    1, 2, 4 or 8: every address and size is a multiple of it
//   VECTOR_BYTES  the widest power of two up to 16 that divides the payload and the base of every cache
//   EVEN          1 when the payload is a whole number of chunks
//   FUSED         1: the four entry points of a fused plan; 0: the one of a byte copy
//   THREADS, CHUNK_BYTES, LOAD_HINT, STORE_HINT: how, not what

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef LOAD_HINT
#define LOAD_HINT 0
#endif
#ifndef STORE_HINT
#define STORE_HINT 0
#endif
#ifndef INLINE_BYTES
#define INLINE_BYTES 3888
#endif

struct alignas(16) Arguments {
    u64 bases;
    u64 base;
    u64 packed;
    u64 indices;
    u64 flags;
    u64 row_states;
    u64 rows;
    u64 page_stride;
    u64 payload;
    u64 selected;
    u64 first_row;
    u32 direction;
    u32 index_width;
    u32 flags_kind;
    u32 inline_flags_at;
    u64 reserved;
    u8 inline_bytes[INLINE_BYTES];
};

enum : u32 { DIRECTION_GATHER = 0, DIRECTION_SCATTER = 1 };
enum : u32 { FLAGS_NONE = 0, FLAGS_INLINE = 1, FLAGS_ADDRESS = 2 };
static_assert(ITEM_BYTES <= VECTOR_BYTES && VECTOR_BYTES <= 16, "a vector holds an item");

// Loads and stores name the global space (device memory, or host memory that the driver pinned): from integers the compiler
// would make generic ones, which ask for the space at run time.
#if LOAD_HINT == 1
#define LOAD "ld.global.cs"
#elif LOAD_HINT == 2
#define LOAD "ld.global.nc"
#elif LOAD_HINT == 3
#define LOAD "ld.global.L1::no_allocate"
#elif LOAD_HINT == 4
#define LOAD "ld.global.nc.L1::no_allocate"
#elif LOAD_HINT == 5
#define LOAD "ld.global.nc.L1::no_allocate.L2::256B"
#else
#define LOAD "ld.global"
#endif
#if STORE_HINT == 1
#define STORE "st.global.cs"
#elif STORE_HINT == 2
#define STORE "st.global.L1::no_allocate"
#elif STORE_HINT == 3
#define STORE "st.global.cg"
#else
#define STORE "st.global"
#endif

__device__ __forceinline__ void load(uint4& value, u64 address) {
    asm volatile(LOAD ".v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(address));
}
__device__ __forceinline__ void store(u64 address, uint4 value) {
    asm volatile(STORE ".v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}

#define WORD(T, SUFFIX, REGISTER)                                                                      \
    __device__ __forceinline__ void load(T& value, u64 address) {                                      \
        asm volatile(LOAD SUFFIX " %0, [%1];" : "=" REGISTER(value) : "l"(address));                   \
    }                                                                                                  \
    __device__ __forceinline__ void load_once(T& value, u64 address) {                                 \
        asm volatile("ld.volatile.global" SUFFIX " %0, [%1];" : "=" REGISTER(value) : "l"(address));   \
    }                                                                                                  \
    __device__ __forceinline__ void store(u64 address, T value) {                                      \
        asm volatile(STORE SUFFIX " [%0], %1;" :: "l"(address), REGISTER(value) : "memory");           \
    }
WORD(u64, ".u64", "l")
WORD(u32, ".u32", "r")
WORD(u16, ".u16", "h")
#undef WORD

// A byte travels in a 16-bit register, the narrowest there is.
struct Byte {
    u16 value;
};
__device__ __forceinline__ void load(Byte& byte, u64 address) {
    asm volatile(LOAD ".u8 %0, [%1];" : "=h"(byte.value) : "l"(address));
}
__device__ __forceinline__ void load_once(Byte& byte, u64 address) {
    asm volatile("ld.volatile.global.u8 %0, [%1];" : "=h"(byte.value) : "l"(address));
}
__device__ __forceinline__ void store(u64 address, Byte byte) {
    asm volatile(STORE ".u8 [%0], %1;" :: "l"(address), "h"(byte.value) : "memory");
}

template <u32 BYTES> struct Word;
template <> struct Word<1> { typedef Byte type; };
template <> struct Word<2> { typedef u16 type; };
template <> struct Word<4> { typedef u32 type; };
template <> struct Word<8> { typedef u64 type; };
template <> struct Word<16> { typedef uint4 type; };

// The selected row of cache that a row of the request names.
struct Choice {
    long long index;
    bool flagged;
};

__device__ __forceinline__ long long loaded_index(u64 indices, u64 s, u32 index_width) {
    if (index_width == 4) {
        u32 narrow;
        load_once(narrow, indices + s * 4);
        return static_cast<int>(narrow);
    }
    u64 wide;
    load_once(wide, indices + s * 8);
    return static_cast<long long>(wide);
}

__device__ __forceinline__ Choice choose(const Arguments& a, u64 s, u32 index_width, bool flags) {
    Choice choice;
    if (a.indices == 0) {
        choice.index = index_width == 4 ? reinterpret_cast<const int*>(a.inline_bytes)[s]
                                        : reinterpret_cast<const long long*>(a.inline_bytes)[s];
    } else {
        choice.index = loaded_index(a.indices, s, index_width);
    }
    choice.flagged = true;
    if (flags && a.flags_kind == FLAGS_INLINE) {
        choice.flagged = a.inline_bytes[a.inline_flags_at + s] != 0;
    } else if (flags && a.flags_kind == FLAGS_ADDRESS) {
        Byte flag;
        load_once(flag, a.flags + s);
        choice.flagged = flag.value != 0;
    }
    return choice;
}

// The same choice in every thread of the block. What comes with the launch cannot change: every thread reads it. What lies
// in memory that others write is loaded by one thread, once, and its value is shared.
__device__ __forceinline__ Choice choose_once(const Arguments& a, u64 s, u32 index_width, bool flags) {
    if (a.indices == 0 && !(flags && a.flags_kind == FLAGS_ADDRESS)) {
        return choose(a, s, index_width, flags);
    }
    __shared__ Choice shared;
    if (threadIdx.x == 0) {
        shared = choose(a, s, index_width, flags);
    }
    __syncthreads();
    return shared;
}

// One chunk in words of BYTES, to which both sides are aligned: a few loads of each thread, then their stores.
template <u32 BYTES> __device__ __forceinline__ void move(u64 destination, u64 source, u64 payload, bool clear) {
    constexpr u32 STEP = THREADS * BYTES;
    constexpr u32 WORDS = CHUNK_BYTES / STEP;
    constexpr u32 BATCH = WORDS < 8 ? WORDS : 8;
    static_assert(WORDS * STEP == CHUNK_BYTES && WORDS % BATCH == 0, "a chunk is a whole number of batches");
    u64 begin = static_cast<u64>(blockIdx.x) * CHUNK_BYTES + threadIdx.x * BYTES;
#pragma unroll 1
    for (u32 batch = 0; batch < WORDS / BATCH; batch++, begin += BATCH * STEP) {
        typename Word<BYTES>::type words[BATCH] = {};
        if (!clear) {
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                if (EVEN || begin + i * STEP < payload) {
                    load(words[i], source + begin + i * STEP);
                }
            }
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            if (EVEN || begin + i * STEP < payload) {
                store(destination + begin + i * STEP, words[i]);
            }
        }
    }
}

// The widest words to which both sides are aligned: a page stride may put a row on any multiple of the item.
template <u32 BYTES>
__device__ __forceinline__ void move_aligned(u64 destination, u64 source, u64 payload, bool clear) {
    if constexpr (BYTES > ITEM_BYTES) {
        if ((destination | source) % BYTES != 0) {
            return move_aligned<BYTES / 2>(destination, source, payload, clear);
        }
    }
    move<BYTES>(destination, source, payload, clear);
}

__device__ __forceinline__ void state_copy(const Arguments& a, u32 direction, u32 index_width) {
    const bool gather = direction == DIRECTION_GATHER;
    const u64 row = a.first_row + blockIdx.y;
    u64 base = a.base;
    u64 s = row;
    if (a.bases != 0) {
        u64 layer;
        if (((row | a.selected) >> 32) == 0) {
            layer = static_cast<u32>(row) / static_cast<u32>(a.selected);
        } else {
            layer = row / a.selected;
        }
        s = row - layer * a.selected;
        load(base, a.bases + layer * 8);
    }
    const Choice choice = choose_once(a, s, index_width, gather);
    // A negative index is a huge one here.
    const bool chosen = choice.flagged && static_cast<u64>(choice.index) < a.rows;
    if (a.row_states != 0 && blockIdx.x == 0 && threadIdx.x == 0) {
        store(a.row_states + blockIdx.y, Byte{chosen});
    }
    if (!gather && !chosen) {
        return;
    }
    const u64 cache = base + static_cast<u64>(choice.index) * a.page_stride;
    const u64 packed = a.packed + row * a.payload;
    // A row that is cleared has no source.
    const u64 source = gather && chosen ? cache : packed;
    const u64 destination = gather ? packed : cache;
    move_aligned<VECTOR_BYTES>(destination, source, a.payload, !chosen);
}

// As many blocks as hold 2,048 threads, what a multiprocessor runs at once.
#define ENTRY extern "C" __global__ void __launch_bounds__(THREADS, 2048 / THREADS)

#if FUSED
ENTRY gather_int32(const __grid_constant__ Arguments a) { state_copy(a, DIRECTION_GATHER, 4); }
ENTRY gather_int64(const __grid_constant__ Arguments a) { state_copy(a, DIRECTION_GATHER, 8); }
ENTRY scatter_int32(const __grid_constant__ Arguments a) { state_copy(a, DIRECTION_SCATTER, 4); }
ENTRY scatter_int64(const __grid_constant__ Arguments a) { state_copy(a, DIRECTION_SCATTER, 8); }
#else
ENTRY byte_copy(const __grid_constant__ Arguments a) { state_copy(a, a.direction, a.index_width); }
#endif
