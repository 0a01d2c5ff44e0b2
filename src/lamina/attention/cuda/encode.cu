// Whole pages of engine rows -> packed basis -> codes, scales, midpoints, gains and centers, as lamina/codec/page.py
// says (Lamina SPEC 4), written straight into records and slabs.
//
// Compiled for one geometry: D, HKV, CENTERED, KIND (see pages.cu), RULE (0 minmax, 1 clip, 2 unbiased), and STAGED, which
// says that the matrix is in shared memory. A block has
// one side and KV head and goes through pages, GROUPS of them at a time; four warps have a page, a warp 16 rows of it, a
// quad of lanes two of them, a lane D/4 channels of each. Which channels is chosen such that a lane has whole bytes of
// every slab: channel p D/4 + c D/16 + j, p < 4, j < D/16.
//
// Rows are multiplied as bfloat16 with a matrix of bfloat16 (rows of other dtypes are split in two, which keeps 16 bits of
// them), and stay in registers from then on. Bound by arithmetic: four passes over the codes at 2 and 4 bits.

#define GROUPS 2
#define WARPS 4
#define BYTES (D / 16)
#define VALUES (D / 4)
#define COPIED (STAGED && KIND != 0)  // rows are in shared memory, on their way while those before them are quantised
#define PITCH (2 * D + 16)  // bytes between rows: a warp's reads meet no bank twice
#define AHEAD 4  // otherwise, steps of 16 channels whose rows are fetched at once
#define APART 4000  // cycles
#define GAUSSIAN_STEP 0.9957f
#define BLOCKS (D > 128 ? 1 : 2)

// A page to encode: int64 words.
struct Job {
    const u8* rows[2];   // of KV head 0: K, V
    i64 head[2], row[2]; // their strides in numbers: {K, V} between heads, {K, V} between rows
    u8* record;          // of the page
    i64 bits[2];
    i64 slots[6];        // slabs beyond the base, as in the page table
    u8* slabs;           // of its layer, as are
    const uint4* matrix[2];  // [HKV, D/16, D/16, 32]: a lane's operands for 16 channels of the result
    const float* shift;      // [HKV, D]: what is taken off V's rows in the packed basis
};

DEVICE float ratio(float a, float b) { return b > 0.f ? __fdividef(a, b) : 0.f; }
// Bits 30 to 15 of a number that is not negative, rounded to even.
DEVICE u32 to_scale16(float x) {
    const u32 bits = __float_as_uint(x);
    return min(bits + 0x3fffu + (bits >> 15 & 1u), 0x7f7fffffu) >> 15;
}
DEVICE float round_scale16(float x) { return scale16(to_scale16(x)); }
DEVICE float round_bf16(float x) { return bf16(to_bf16(x)); }

// Two neighbouring numbers of a row, as they come.
#if KIND == 0
typedef float2 Pair;
#else
typedef u32 Pair;
#endif
// The high parts of two numbers, and what is left of them where they are not bfloat16.
DEVICE void split(const Pair& x, u32& high, u32& low) {
#if KIND == 1
    high = x;
#else
#if KIND == 0
    const float a = x.x, b = x.y;
#else
    const float a = from_f16((u16)x), b = from_f16((u16)(x >> 16));
#endif
    high = to_bf16_pair(a, b);
    low = to_bf16_pair(a - bf16(high), b - as_float(high & 0xffff0000u));
#endif
}

// Over a row, of codes t: sums of t, y t and t t.
struct Sums { float t, yt, tt; };
DEVICE u32 mask_of(int bits) { return 0xffffffffu << (23 - bits); }
// A lane's numbers of its two rows, and how codes come from them: by a line that is cut off at 0 and 1. A code c of n bits
// is held as 1 + c / 2^n, the bits of which hold those of the code, and whose upper bits alone are the code read with less.
template <int BITS>
struct Rows {
    static constexpr float HALF = 0.5f * ((1 << BITS) - 1), UNIT = 1.f / (1 << BITS);
    static constexpr bool UNBIASED = RULE == 2 && BITS < 8;
    float (&y)[VALUES / 2][4];
    float scale[2], shift[2];

    DEVICE Rows(float (&y)[VALUES / 2][4]) : y(y) {}
    DEVICE float& at(int i, int s) { return y[s / 2][2 * i + (s & 1)]; }
    DEVICE float code(int i, int s, u32 mask) {
        const float line = __saturatef(fmaf(at(i, s), scale[i], shift[i]));
        return as_float(__float_as_uint(fmaf(line, 0.9999999f, 1.f)) & mask);
    }
    // Codes are those of y / range + middle - 1 and half a step more, to the last bit or so.
    DEVICE void take_grid(int i, float range, float middle) {
        scale[i] = ratio(1.f, range);
        shift[i] = middle - 1.f + (0.5f * UNIT + 2.5e-7f);
    }
    // Adds up a row's codes as read with FIRST bits, with twice as many, and so on, READS times.
    template <int FIRST, int READS>
    DEVICE void add_up(int i, Sums (&sums)[READS]) {
        forget(scale[i]);
        #pragma unroll
        for (int z = 0; z < READS; z++) sums[z] = {0.f, 0.f, 0.f};
        #pragma unroll
        for (int s = 0; s < VALUES; s++) {
            const float t = code(i, s, mask_of(FIRST << READS - 1));
            #pragma unroll
            for (int z = 0; z < READS; z++) {
                const float read = as_float(__float_as_uint(t) & mask_of(FIRST << z));
                sums[z].t += read;
                sums[z].yt = fmaf(at(i, s), read, sums[z].yt);
                sums[z].tt = fmaf(read, read, sums[z].tt);
            }
        }
        #pragma unroll
        for (int z = 0; z < READS; z++) sums[z] = {sum_quad(sums[z].t), sum_quad(sums[z].yt), sum_quad(sums[z].tt)};
    }
    // The k-th smallest of a row's magnitudes: their bits are ordered as they are.
    DEVICE float order_statistic(int i, int k) {
        u32 found = 0;
        for (int bit = 30; bit >= 0; bit--) {
            const u32 next = found | 1u << bit;
            float below = 0.f;
            #pragma unroll
            for (int s = 0; s < VALUES; s++) below += (__float_as_uint(at(i, s)) & 0x7fffffffu) < next ? 1.f : 0.f;
            if (sum_quad(below) <= (float)k) found = next;
        }
        return as_float(found);
    }
    DEVICE void minmax(float (&step)[2], float (&mid)[2]) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            float low = at(i, 0), high = low;
            #pragma unroll
            for (int s = 1; s < VALUES; s++) {
                low = fminf(low, at(i, s));
                high = fmaxf(high, at(i, s));
            }
            low = -max_quad(-low);
            high = max_quad(high);
            step[i] = round_scale16((high - low) / (2.f * HALF));
            mid[i] = round_bf16(low + (high - low) / 2.f);
        }
    }
    // Least-squares slope of numbers on codes that add up to this.
    DEVICE static float fitted(const Sums& fit) { return ratio(fit.yt, fmaf(-fit.t / D, fit.t, fit.tt)); }
    // Chooses the grids. Numbers are less ``base`` afterwards.
    DEVICE void choose(int clip, float (&base)[2], float (&mean)[2], float (&energy)[2], float (&step)[2], float (&mid)[2]) {
        if (RULE == 1 && BITS == 2) {
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const float limit = order_statistic(i, clip);
                #pragma unroll
                for (int s = 0; s < VALUES; s++) at(i, s) = fminf(fmaxf(at(i, s), -limit), limit);
            }
        }
        if (!UNBIASED || BITS != 2) minmax(step, mid);
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            float all = 0.f;
            #pragma unroll
            for (int s = 0; s < VALUES; s++) all += at(i, s);
            mean[i] = sum_quad(all) / D;
            base[i] = UNBIASED ? mean[i] : mid[i];
            energy[i] = 0.f;
            #pragma unroll
            for (int s = 0; s < VALUES; s++) {
                at(i, s) -= base[i];
                energy[i] = fmaf(at(i, s), at(i, s), energy[i]);
            }
            energy[i] = sum_quad(energy[i]);
            const float first = UNBIASED && BITS == 2 ? GAUSSIAN_STEP * sqrtf(energy[i] / D) : step[i];
            take_grid(i, first / UNIT, 1.f + HALF * UNIT);
            if (UNBIASED && BITS == 4) shift[i] = fmaf(mean[i] - mid[i], scale[i], shift[i]);
        }
        if (!UNBIASED) return;
        #pragma unroll 1
        for (int round = 0; round < 2; round++) {
            Sums fit[2][1];
            #pragma unroll
            for (int i = 0; i < 2; i++) add_up<BITS>(i, fit[i]);
            #pragma unroll
            for (int i = 0; i < 2; i++) take_grid(i, fitted(fit[i][0]), fit[i][0].t / D);
        }
    }
    // The unbiased step and the midpoint of codes that add up to this: numbers decode as mid + step (c - half).
    DEVICE static void settle(const Sums& fit, float mean, float energy, float& step, float& mid) {
        const float range = fitted(fit), unbiased = ratio(energy, fit.yt);
        step = round_scale16(fminf(fmaxf(unbiased, range / 2.f), range * 2.f) * UNIT);
        mid = round_bf16(fmaf(step, HALF - (fit.t / D - 1.f) / UNIT, mean));
    }
};

// y += 16 channels of rows times the matrix.
DEVICE void multiply(float (&y)[VALUES / 2][4], const Pair (&x)[4], const uint4* matrix) {
    u32 a[4], low[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) split(x[i], a[i], low[i]);
    #pragma unroll
    for (int t = 0; t < D / 8; t += 2) {
        const uint4 m = matrix[t * 16];
        mma_bf16(y[t], a[0], a[1], a[2], a[3], m.x, m.y);
        mma_bf16(y[t + 1], a[0], a[1], a[2], a[3], m.z, m.w);
        if (KIND == 1) continue;
        mma_bf16(y[t], low[0], low[1], low[2], low[3], m.x, m.y);
        mma_bf16(y[t + 1], low[0], low[1], low[2], low[3], m.z, m.w);
    }
}

// A lane's bytes of a row of a slab.
struct Bytes {
    u32 w[(BYTES + 3) / 4];
    DEVICE void put(int j, u32 byte) { w[j / 4] = j % 4 ? w[j / 4] | byte << 8 * (j % 4) : byte; }
    DEVICE void store(u8* to) const {
        if (BYTES % 4 == 0) {
            #pragma unroll
            for (int k = 0; k < BYTES / 4; k++) ((u32*)to)[k] = w[k];
        } else if (BYTES % 2 == 0) {
            #pragma unroll
            for (int k = 0; k < BYTES / 2; k++) ((u16*)to)[k] = (u16)(w[k / 2] >> 16 * (k % 2));
        } else {
            #pragma unroll
            for (int k = 0; k < BYTES; k++) to[k] = (u8)(w[k / 4] >> 8 * (k % 4));
        }
    }
};

DEVICE u32 moved(u32 x, int down) { return down >= 0 ? x >> down : x << -down; }

// Writes a row's codes; ``to``: where the lane's bytes of the base and of the finer slabs go.
template <int BITS>
DEVICE void pack(Rows<BITS>& x, int i, u8* const (&to)[4]) {
    // The third byte of a number holds its code, from bit 6 down; of 8 bits, from bit 7 down once moved up.
    constexpr int TOP = BITS == 8 ? 6 : 5;
    Bytes slabs[4];
    #pragma unroll
    for (int k = 0; k < (BYTES + 3) / 4; k++) {
        u32 w[4];
        #pragma unroll
        for (int p = 0; p < 4; p++) {
            u32 t[4];
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                t[j] = 4 * k + j < BYTES ? __float_as_uint(x.code(i, p * BYTES + 4 * k + j, mask_of(BITS))) : 0;
                if (BITS == 8) t[j] <<= 1;
            }
            w[p] = __byte_perm(__byte_perm(t[0], t[1], 0x0062), __byte_perm(t[2], t[3], 0x0062), 0x5410);
        }
        #pragma unroll
        for (int z = 0; z < (BITS == 2 ? 1 : 2); z++) {
            slabs[z].w[k] = 0;
            #pragma unroll
            for (int p = 0; p < 4; p++) slabs[z].w[k] |= moved(w[p], TOP - 2 * z - 2 * p) & 0x03030303u << (2 * p);
        }
        if (BITS == 8) {
            slabs[2].w[k] = (w[0] & 0x0f0f0f0fu) | (w[2] & 0x0f0f0f0fu) << 4;
            slabs[3].w[k] = (w[1] & 0x0f0f0f0fu) | (w[3] & 0x0f0f0f0fu) << 4;
        }
    }
    #pragma unroll
    for (int z = 0; z < (BITS == 8 ? 4 : BITS / 2); z++) slabs[z].store(to[z]);
}

// What gains and errors follow from, summed up over rows: y y and u u, errors; by bits read (2, 4): y v, u v, v v. Here y
// is a number less its row's mean, u less its midpoint, and v what is read but for the midpoint and the gain.
enum Sum { YY, UU, ERROR, YV, UV, VV, ALL_SUMS = YV + 6 };

// The y v, u v and v v of a row read with so many bits, the codes of which add up to this: v is range (t - center).
DEVICE void read_as(const Sums& of, int read, float range, float base, float mean, float mid, float& yv, float& uv, float& vv) {
    const float center = 1.5f - 0.5f / (float)(1 << read);
    yv = range * fmaf(base - mean, of.t, of.yt);
    uv = range * (fmaf(base - mid, of.t, of.yt) - center * D * (mean - mid));
    vv = range * range * (of.tt - 2.f * center * of.t + center * center * D);
}

struct Smem {
    // What warps tell each other has two places, so that the next page's numbers do not replace this one's.
    float columns[GROUPS][2][WARPS][D], totals[GROUPS][2][WARPS][ALL_SUMS];
    float center[GROUPS][WARPS][D];  // what is taken off rows: a warp's own
};

// Channel of a warp's i-th number, D/4 for each lane of a quad.
DEVICE int channel_of(int i) { const int s = i % VALUES; return s / BYTES * (D / 4) + i / VALUES * BYTES + s % BYTES; }

// Sums of a lane's numbers over the rows of its warp: a lane halves what it is in charge of twice.
DEVICE void add_columns(float (&y)[VALUES / 2][4], float* to, int r, int c) {
    float v[VALUES];
    #pragma unroll
    for (int s = 0; s < VALUES; s++) v[s] = y[s / 2][s & 1] + y[s / 2][2 + (s & 1)];
    #pragma unroll
    for (int s = 0; s < VALUES / 2; s++) {
        const float mine = r & 1 ? v[s + VALUES / 2] : v[s], other = r & 1 ? v[s] : v[s + VALUES / 2];
        v[s] = mine + __shfl_xor_sync(~0u, other, 4);
    }
    #pragma unroll
    for (int s = 0; s < VALUES / 4; s++) {
        const float mine = r & 2 ? v[s + VALUES / 4] : v[s], other = r & 2 ? v[s] : v[s + VALUES / 4];
        v[s] = mine + __shfl_xor_sync(~0u, other, 8);
        v[s] += __shfl_xor_sync(~0u, v[s], 16);
        if (r < 4) to[c * VALUES + (r & 1) * (VALUES / 2) + (r >> 1 & 1) * (VALUES / 4) + s] = v[s];
    }
}

// Quantises a warp's rows and writes them.
template <int BITS>
DEVICE void finish(float (&y)[VALUES / 2][4], const Job& job, int side, int h, int warp, int r, int c, int clip, float* totals) {
    Rows<BITS> x(y);
    float base[2], mean[2], energy[2], step[2], mid[2];
    x.choose(clip, base, mean, energy, step, mid);
    // Codes as they are read with 2, 4 and 8 bits, as many as there are.
    constexpr int READS = BITS == 2 ? 1 : BITS == 4 ? 2 : 3;
    Sums read[2][READS];
    if (x.UNBIASED || BITS > 2) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            x.template add_up<2>(i, read[i]);
            if (x.UNBIASED) x.settle(read[i][READS - 1], mean[i], energy[i], step[i], mid[i]);
        }
    }
    if (BITS > 2) {
        float sums[ALL_SUMS] = {};
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const float off = base[i] - mean[i], to_u = base[i] - mid[i];  // numbers sum up to -D off
            const float range = step[i] * (1 << BITS), uu = energy[i] + D * to_u * (to_u - 2.f * off);
            sums[YY] += energy[i] - D * off * off;
            sums[UU] += uu;
            #pragma unroll
            for (int z = 0; z < READS; z++) {
                float yv, uv, vv;
                read_as(read[i][z], 2 << z, range, base[i], mean[i], mid[i], yv, uv, vv);
                if (z == READS - 1) {
                    sums[ERROR] += uu - 2.f * uv + vv;
                    continue;
                }
                sums[YV + 3 * z] += yv;
                sums[UV + 3 * z] += uv;
                sums[VV + 3 * z] += vv;
            }
        }
        #pragma unroll
        for (int z = 0; z < ALL_SUMS; z++) {
            sums[z] = sum_rows(sums[z]);
            if (r == 0 && c == 0) totals[z] = sums[z];
        }
    }
    #pragma unroll
    for (int i = 0; i < 2; i++) forget(x.scale[i]);
    u8* record = job.record;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = 16 * warp + r + 8 * i, at = h * 16 * D + row * (D / 4) + c * BYTES;
        u8* to[4] = {record + side * SLAB_BYTES + at};
        if (BITS > 2) to[1] = job.slabs + job.slots[side] * SLAB_BYTES + at;
        if (BITS > 4) {
            to[2] = job.slabs + job.slots[2 + 2 * side] * SLAB_BYTES + at;
            to[3] = job.slabs + job.slots[3 + 2 * side] * SLAB_BYTES + at;
        }
        pack<BITS>(x, i, to);
        const int number = 2 * ((side * HKV + h) * 64 + row);
        if (c == 0) *(u16*)(record + SCALE_AT + number) = (u16)to_scale16(step[i]);
        if (c == 1) *(u16*)(record + MID_AT + number) = to_bf16(mid[i]);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS * GROUPS, BLOCKS) lamina_encode(
    const Job* jobs, int n_jobs, int clip_k, int clip_v, float* truncation
) {
    const int h = blockIdx.y, side = blockIdx.z, group = threadIdx.x / (32 * WARPS), thread = threadIdx.x % (32 * WARPS);
    const int warp = thread >> 5, lane = thread & 31, r = lane >> 2, c = lane & 3;
    DYNAMIC_SHARED(uint4, shared);
    Smem& S = *(Smem*)shared;
    uint4* staged = shared + (sizeof(Smem) + 15) / 16;
    constexpr int SIZE = KIND == 0 ? 4 : 2, OPERANDS = (D / 16) * (D / 16) * 32;
    const int first = (int)((i64)n_jobs * blockIdx.x / gridDim.x), last = (int)((i64)n_jobs * (blockIdx.x + 1) / gridDim.x);
    // Pages of one layer are taken together, two at a time; a group without one of its own waits for the next.
    const auto alike = [&](int j0) { return j0 + 1 < last && jobs[j0 + 1].matrix[side] == jobs[j0].matrix[side]; };
    const auto mine = [&](int j0) { return alike(j0) ? j0 + group : j0; };
    float* center = S.center[group][warp];
    const uint4* there = nullptr;
#if COPIED
    // A warp's own rows, of the page after the one at hand.
    u8* copied = (u8*)(staged + OPERANDS) + (group * 64 + 16 * warp) * PITCH;
    const auto send = [&](int j) {
        const u8* rows = jobs[j].rows[side] + (h * jobs[j].head[side] + 16 * warp * jobs[j].row[side]) * SIZE;
        #pragma unroll
        for (int n = 0; n < D / 16; n++) {
            const int i = lane + 32 * n, row = i / (D / 8), piece = i % (D / 8);
            copy_16(shared_address(copied + row * PITCH + piece * 16), rows + row * jobs[j].row[side] * SIZE + piece * 16);
        }
        end_group();
    };
    if (first < last) send(mine(first));
#endif
    for (int j0 = first, next, turn = 0; j0 < last; j0 = next, turn ^= 1) {
        next = j0 + (alike(j0) ? 2 : 1);
        const int j = mine(j0);
        const Job& job = jobs[j];
        const uint4* from = job.matrix[side] + (i64)h * OPERANDS;
        if (from != there) {
            there = from;
            __syncthreads();
            if (STAGED) {
                #pragma unroll 4
                for (int i = threadIdx.x; i < OPERANDS; i += 32 * WARPS * GROUPS) copy_16(shared_address(staged + i), from + i);
                end_group();
            }
            if (side == 1)
                for (int i = lane; i < D; i += 32) center[i] = job.shift[h * D + channel_of(i)];
            wait_for_copies();
            __syncthreads();
        }
        // Groups apart from each other multiply, which shared memory bounds, while others quantise.
        if (j0 == first && group && last - first > 2 * GROUPS) rest(APART);
        if (j != j0 + group) {
#if COPIED
            wait_for_copies();
            if (next < last) send(mine(next));
#endif
            continue;
        }
        float y[VALUES / 2][4];
        #pragma unroll
        for (int t = 0; t < VALUES / 2; t++)
            #pragma unroll
            for (int e = 0; e < 4; e++) y[t][e] = 0.f;
#if COPIED
        wait_for_copies();
        __syncwarp();
        #pragma unroll
        for (int k = 0; k < D / 16; k++) {
            Pair x[4];
            load_matrices(x, shared_address(copied + (lane & 15) * PITCH + 32 * k + (lane >> 4) * 16));
            multiply(y, x, staged + k * (D / 16) * 32 + lane);
        }
        __syncwarp();
        if (next < last) send(mine(next));
#else
        const u8* rows = job.rows[side] + (h * job.head[side] + (16 * warp + r) * job.row[side]) * SIZE;
        #pragma unroll 1
        for (int k0 = 0; k0 < D / 16; k0 += AHEAD) {
            Pair x[AHEAD][4];
            #pragma unroll
            for (int k = 0; k < AHEAD; k++)
                #pragma unroll
                for (int i = 0; i < 4; i++)
                    if (k0 + k < D / 16) x[k][i] = *(const Pair*)(rows + (8 * (i & 1) * job.row[side] + 16 * (k0 + k) + 2 * c + 8 * (i >> 1)) * SIZE);
            #pragma unroll
            for (int k = 0; k < AHEAD; k++)
                if (k0 + k < D / 16) multiply(y, x[k], (STAGED ? staged : from) + (k0 + k) * (D / 16) * 32 + lane);
        }
#endif
        u8* record = job.record;
        if (CENTERED && side == 0) {
            add_columns(y, S.columns[group][turn][warp], r, c);
            sync_some(1 + group, 32 * WARPS);
            const float (*columns)[D] = S.columns[group][turn];
            constexpr int EACH = (D + 31) / 32;
            float mean[EACH], top = 0.f;
            #pragma unroll
            for (int n = 0; n < EACH; n++) {
                const int i = lane + 32 * n;
                mean[n] = i < D ? (columns[0][i] + columns[1][i] + columns[2][i] + columns[3][i]) / 64.f : 0.f;
                top = fmaxf(top, fabsf(mean[n]));
            }
            top = max_quad(top);
            for (int z = 4; z < 32; z *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, z));
            const float scale = round_scale16(top / 127.f);
            #pragma unroll
            for (int n = 0; n < EACH; n++) {
                const int i = lane + 32 * n;
                if (i >= D) continue;
                const float code = fminf(fmaxf(rintf(ratio(mean[n], scale)), -127.f), 127.f);
                center[i] = scale * code;
                if (warp == 0) record[CENTER_AT + h * D + channel_of(i)] = (u8)__float2int_rn(code);
            }
            if (thread == 0) *(u16*)(record + CENTER_SCALE_AT + 2 * h) = (u16)to_scale16(scale);
            __syncwarp();
        }
        if (side == 1 || CENTERED) {
            #pragma unroll
            for (int s = 0; s < VALUES; s++) {
                const float less = center[c * VALUES + s];
                y[s / 2][s & 1] -= less;
                y[s / 2][2 + (s & 1)] -= less;
            }
            __syncwarp();
        }
        const int bits = (int)job.bits[side], clip = side ? clip_v : clip_k;
        float* totals = S.totals[group][turn][warp];
        if (bits == 2) finish<2>(y, job, side, h, warp, r, c, clip, totals);
        else if (bits == 4) finish<4>(y, job, side, h, warp, r, c, clip, totals);
        else finish<8>(y, job, side, h, warp, r, c, clip, totals);
        if (bits > 2) sync_some(1 + group, 32 * WARPS);
        if (thread < 2) {
            const int z = thread, read = 2 + 2 * z;
            float gain = 1.f, error = 0.f;
            if (read < bits) {
                const auto of = [&](int k) {
                    float sum = 0.f;
                    for (int w = 0; w < WARPS; w++) sum += S.totals[group][turn][w][k];
                    return sum;
                };
                const float yv = of(YV + 3 * z);
                gain = round_scale16(yv > 0.f ? fminf(fmaxf(of(YY) / yv, 0.5f), 2.f) : 1.f);
                error = fmaxf((of(UU) - 2.f * gain * of(UV + 3 * z) + gain * gain * of(VV + 3 * z) - of(ERROR)) / (64.f * D), 0.f);
            }
            *(u16*)(record + GAIN_AT + 2 * ((side * HKV + h) * 2 + z)) = (u16)to_scale16(gain);
            truncation[(((i64)j * 2 + side) * HKV + h) * 2 + z] = error;
        }
    }
}
