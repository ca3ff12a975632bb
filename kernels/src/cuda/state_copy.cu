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
#define INLINE_BYTES 1288
#endif

// What every launch reads stands first, and the first indices with it, in the line of constants that a block has to fetch
// anyhow. Where the indices lie in memory, their address stands in the first 8 bytes of `inline_bytes`.
struct alignas(16) Arguments {
    u32 shape;
    u32 first_row;
    u64 base;
    u64 packed;
    u64 page_stride;
    u64 rows;
    u8 inline_bytes[INLINE_BYTES];
    u64 payload;
    u64 bases;
    u64 flags;
    u64 row_states;
    u32 selected;
    u32 inline_flags_at;
    u32 direction;
    u32 index_width;
};

enum : u32 { DIRECTION_GATHER = 0, DIRECTION_SCATTER = 1 };
enum : u32 {
    SHAPE_BATCH = 1,
    SHAPE_INDICES_INLINE = 2,
    SHAPE_FLAGS_INLINE = 4,
    SHAPE_FLAGS_ADDRESS = 8,
    SHAPE_ROW_STATES = 16
};
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
        asm volatile("ld.global" SUFFIX " %0, [%1];" : "=" REGISTER(value) : "l"(address));            \
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
    asm volatile("ld.global.u8 %0, [%1];" : "=h"(byte.value) : "l"(address));
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

// The row of the cache that a selected row names. What comes with the launch cannot change. What lies in memory that others
// write is loaded once by each thread, which checks and uses that one value: to have one thread load it and share it cost
// 0.1 us a launch (H200), and the address of each thread is checked either way.
__device__ __forceinline__ long long index_of(const Arguments& a, u32 s, u32 index_width) {
    if (a.shape & SHAPE_INDICES_INLINE) {
        return index_width == 4 ? reinterpret_cast<const int*>(a.inline_bytes)[s]
                                : reinterpret_cast<const long long*>(a.inline_bytes)[s];
    }
    const u64 indices = *reinterpret_cast<const u64*>(a.inline_bytes);
    if (index_width == 4) {
        u32 narrow;
        load_once(narrow, indices + static_cast<u64>(s) * 4);
        return static_cast<int>(narrow);
    }
    u64 wide;
    load_once(wide, indices + static_cast<u64>(s) * 8);
    return static_cast<long long>(wide);
}

__device__ __forceinline__ bool flag_of(const Arguments& a, u32 s) {
    if (a.shape & SHAPE_FLAGS_INLINE) {
        return a.inline_bytes[a.inline_flags_at + s] != 0;
    }
    Byte flag;
    load_once(flag, a.flags + s);
    return flag.value != 0;
}

// One chunk in words of BYTES, to which both sides are aligned: a few loads of each thread, then their stores.
template <u32 BYTES>
__device__ __forceinline__ void move(u64 destination, u64 source, u64 payload, bool clear, u32 chunk, u32 thread) {
    constexpr u32 STEP = THREADS * BYTES;
    constexpr u32 WORDS = CHUNK_BYTES / STEP;
    constexpr u32 BATCH = WORDS < 8 ? WORDS : 8;
    static_assert(WORDS * STEP == CHUNK_BYTES && WORDS % BATCH == 0, "a chunk is a whole number of batches");
    u64 begin = static_cast<u64>(chunk) * CHUNK_BYTES + thread * BYTES;
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

// The widest words narrower than BYTES to which both sides are aligned: a page stride may put a row on any multiple of the
// item. Apart from the usual path, which begins sooner the fewer lines of instructions it has to fetch.
template <u32 BYTES> __device__ __noinline__ void move_narrow(u64 destination, u64 source, u64 payload, bool clear) {
    if constexpr (BYTES / 2 > ITEM_BYTES) {
        if ((destination | source) % (BYTES / 2) != 0) {
            return move_narrow<BYTES / 2>(destination, source, payload, clear);
        }
    }
    move<BYTES / 2>(destination, source, payload, clear, blockIdx.x, threadIdx.x);
}

// Where row 0 of a layer is, and which of the selected rows a row of the request is.
struct Place {
    u64 base;
    u32 s;
};

__device__ __noinline__ Place place_in_batch(u64 bases, u32 selected, u32 row) {
    const u32 layer = row / selected;
    Place place;
    load(place.base, bases + static_cast<u64>(layer) * 8);
    place.s = row - layer * selected;
    return place;
}

__device__ __forceinline__ void state_copy(const Arguments& a, u32 direction, u32 index_width) {
    // Asked for early: the answer takes a while.
    u32 chunk, thread;
    asm volatile("mov.u32 %0, %%ctaid.x;\n\tmov.u32 %1, %%tid.x;" : "=r"(chunk), "=r"(thread));
    const bool gather = direction == DIRECTION_GATHER;
    const u32 row = a.first_row + blockIdx.y;
    Place place = {a.base, row};
    if (a.shape & SHAPE_BATCH) {
        place = place_in_batch(a.bases, a.selected, row);
    }
    const long long index = index_of(a, place.s, index_width);
    // A negative index is a huge one here.
    bool chosen = static_cast<u64>(index) < a.rows;
    if (gather && (a.shape & (SHAPE_FLAGS_INLINE | SHAPE_FLAGS_ADDRESS))) {
        chosen = flag_of(a, place.s) && chosen;
    }
    // The size of the grid is in a line that has been fetched, too.
    const u64 payload = EVEN ? static_cast<u64>(gridDim.x) * CHUNK_BYTES : a.payload;
    if (gather || chosen) {
        const u64 cache = place.base + static_cast<u64>(index) * a.page_stride;
        const u64 packed = a.packed + static_cast<u64>(row) * payload;
        // A row that is cleared has no source.
        const u64 source = gather && chosen ? cache : packed;
        const u64 destination = gather ? packed : cache;
        if constexpr (VECTOR_BYTES == ITEM_BYTES) {
            move<VECTOR_BYTES>(destination, source, payload, !chosen, chunk, thread);
        } else if ((destination | source) % VECTOR_BYTES != 0) {
            move_narrow<VECTOR_BYTES>(destination, source, payload, !chosen);
        } else {
            move<VECTOR_BYTES>(destination, source, payload, !chosen, chunk, thread);
        }
    }
    if ((a.shape & SHAPE_ROW_STATES) && chunk == 0 && thread == 0) {
        store(a.row_states + blockIdx.y, Byte{chosen});
    }
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
