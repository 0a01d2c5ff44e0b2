// Whole pages of engine rows -> packed basis -> codes, scales, midpoints, gains and centers, as lamina/codec/page.py
// says (Lamina SPEC 4), written straight into records and slabs.
//
// Compiled for one geometry: D, HKV, CENTERED, KIND (see pages.cu) and RULE (0 minmax, 1 clip, 2 unbiased). One block a
// page, side and KV head at a time; a warp has 16 rows, a quad of lanes two of them, a lane D/4 channels of each. Which
// channels is chosen such that a lane has whole bytes of every slab: channel p D/4 + c D/16 + j, p < 4, j < D/16.
//
// Rows are multiplied as bfloat16 with the matrix split in two, which keeps 16 bits of it (rows of other dtypes are split
// as well), and stay in registers from then on. Bound by arithmetic: four passes over the codes at 2 and 4 bits.

#define WARPS 4
#define BYTES (D / 16)
#define VALUES (D / 4)
#define GAUSSIAN_STEP 0.9957f
#define BLOCKS (D > 160 ? 2 : D > 96 ? 3 : 4)

// A page to encode: int64 words.
struct Job {
    const u8* rows[2];   // of KV head 0: K, V
    i64 head[2], row[2]; // their strides in numbers: {K, V} between heads, {K, V} between rows
    i64 page, bits[2];
    i64 slots[6];        // slabs beyond the base, as in the page table
    i64 layer;
};
// Where a layer's pages are.
struct Layer {
    u8 *records, *slabs;
    const uint4* matrix[2];  // [HKV, D/16, D/8, 32]: a lane's operands, two high and two low halves
    const float* shift;      // [HKV, D]: what is taken off V's rows in the packed basis
};

DEVICE float sum_quad(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
DEVICE float max_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE float sum_rows(float x) {
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}
DEVICE float ratio(float a, float b) { return b > 0.f ? a / b : 0.f; }
// Bits 30 to 15 of a number that is not negative, rounded to even.
DEVICE u32 to_scale16(float x) {
    const u32 bits = __float_as_uint(x);
    return min(bits + 0x3fffu + (bits >> 15 & 1u), 0x7f7fffffu) >> 15;
}
DEVICE float round_scale16(float x) { return scale16(to_scale16(x)); }

// Four numbers of a row as operands: their high parts, and what is left of them where they are not bfloat16.
DEVICE void row_operands(const u8* row, int at, u32 (&high)[2], u32 (&low)[2]) {
#if KIND == 1
    const uint2 x = *(const uint2*)(row + 2 * at);
    high[0] = x.x; high[1] = x.y;
#else
    float x[4];
#if KIND == 0
    const float4 y = *(const float4*)(row + 4 * at);
    x[0] = y.x; x[1] = y.y; x[2] = y.z; x[3] = y.w;
#else
    const uint2 y = *(const uint2*)(row + 2 * at);
    x[0] = from_f16((u16)y.x); x[1] = from_f16((u16)(y.x >> 16)); x[2] = from_f16((u16)y.y); x[3] = from_f16((u16)(y.y >> 16));
#endif
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        high[i] = to_bf16_pair(x[2 * i], x[2 * i + 1]);
        low[i] = to_bf16_pair(x[2 * i] - bf16(high[i]), x[2 * i + 1] - as_float(high[i] & 0xffff0000u));
    }
#endif
}

// A lane's numbers of its two rows, and how their codes come from them: floor(x scale + shift), within [0, most].
struct Rows {
    float y[VALUES / 2][4];
    float scale[2], shift[2], most;

    DEVICE float& at(int i, int s) { return y[s / 2][2 * i + (s & 1)]; }
    DEVICE float code(int i, int s) {
        const float x = fminf(fmaxf(fmaf(at(i, s), scale[i], shift[i]), 0.f), most + 0.5f);
        return __fadd_rd(x, 8388608.f);  // the integer is in the low bits
    }
    DEVICE void take_grid(int i, float step, float offset) {
        scale[i] = step > 0.f ? 1.f / step : 0.f;
        shift[i] = offset + 0.5f;
    }
};

// Sums over a row's codes c: of c, of x c, of c c.
DEVICE void fit(Rows& x, int i, float& offset, float& dot, float& norm) {
    float sum = 0.f, product = 0.f, square = 0.f;
    #pragma unroll
    for (int s = 0; s < VALUES; s++) {
        const float c = x.code(i, s) - 8388608.f;
        sum += c;
        product = fmaf(x.at(i, s), c, product);
        square = fmaf(c, c, square);
    }
    offset = sum_quad(sum) / D;
    dot = sum_quad(product);
    norm = fmaf(-D * offset, offset, sum_quad(square));
}

// The k-th smallest of a row's magnitudes: their bits are ordered as they are.
DEVICE float order_statistic(Rows& x, int i, int k) {
    u32 found = 0;
    for (int bit = 30; bit >= 0; bit--) {
        const u32 next = found | 1u << bit;
        float below = 0.f;
        #pragma unroll
        for (int s = 0; s < VALUES; s++) below += (__float_as_uint(x.at(i, s)) & 0x7fffffffu) < next ? 1.f : 0.f;
        if (sum_quad(below) <= (float)k) found = next;
    }
    return as_float(found);
}

// Chooses the grid of a row. Its numbers are less ``base`` afterwards, and decode as mid + step (code - half).
DEVICE void quantise(Rows& x, int i, int bits, int clip, float& base, float& mean, float& step, float& mid) {
    const float half = 0.5f * (float)((1 << bits) - 1);
    if (RULE == 1 && bits == 2) {
        const float limit = order_statistic(x, i, clip);
        #pragma unroll
        for (int s = 0; s < VALUES; s++) x.at(i, s) = fminf(fmaxf(x.at(i, s), -limit), limit);
    }
    float sum = 0.f, low = 3e38f, high = -3e38f;
    #pragma unroll
    for (int s = 0; s < VALUES; s++) {
        sum += x.at(i, s);
        low = fminf(low, x.at(i, s));
        high = fmaxf(high, x.at(i, s));
    }
    mean = sum_quad(sum) / D;
    low = -max_quad(-low);
    high = max_quad(high);
    step = round_scale16((high - low) / (2.f * half));
    mid = bf16(to_bf16(low + (high - low) / 2.f));
    const bool unbiased = RULE == 2 && bits < 8;
    base = unbiased ? mean : mid;
    float energy = 0.f;
    #pragma unroll
    for (int s = 0; s < VALUES; s++) {
        x.at(i, s) -= base;
        energy = fmaf(x.at(i, s), x.at(i, s), energy);
    }
    if (!unbiased) { x.take_grid(i, step, half); return; }
    energy = sum_quad(energy);
    if (bits == 2) x.take_grid(i, GAUSSIAN_STEP * sqrtf(energy / D), half);
    else {
        x.take_grid(i, step, half);
        x.shift[i] = fmaf(mean - mid, x.scale[i], x.shift[i]);
    }
    float offset, dot, norm;
    #pragma unroll 1
    for (int round = 0; round < 2; round++) {
        fit(x, i, offset, dot, norm);
        x.take_grid(i, ratio(dot, norm), offset);
    }
    fit(x, i, offset, dot, norm);
    const float fitted = ratio(dot, norm);
    step = round_scale16(fminf(fmaxf(ratio(energy, dot), fitted / 2.f), fitted * 2.f));
    mid = bf16(to_bf16(fmaf(step, half - offset, mean)));
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

// Writes a row's codes; ``from`` tells where its lane's bytes of the base and of the finer slabs go.
template <int BITS>
DEVICE void pack(Rows& x, int i, u8* const (&to)[4]) {
    Bytes slabs[4];
    #pragma unroll
    for (int j = 0; j < BYTES; j++) {
        u32 q[4];
        #pragma unroll
        for (int p = 0; p < 4; p++) q[p] = __float_as_uint(x.code(i, p * BYTES + j)) & 255u;
        #pragma unroll
        for (int z = 0; z < (BITS == 2 ? 1 : 2); z++) {
            const int down = BITS - 2 - 2 * z;
            slabs[z].put(j, (q[0] >> down & 3u) | (q[1] >> down & 3u) << 2 | (q[2] >> down & 3u) << 4 | (q[3] >> down & 3u) << 6);
        }
        if (BITS == 8) {
            slabs[2].put(j, (q[0] & 15u) | (q[2] & 15u) << 4);
            slabs[3].put(j, (q[1] & 15u) | (q[3] & 15u) << 4);
        }
    }
    #pragma unroll
    for (int z = 0; z < (BITS == 8 ? 4 : BITS / 2); z++) slabs[z].store(to[z]);
}

// Sums over a lane's rows from which gains and errors of reading fewer bits follow.
#define SUMS 9  // of y y, of errors; by bits read (2, 4): of y step top, of u step t, of step step t t; of u u
DEVICE void add_truncations(Rows& x, int i, int bits, float base, float mean, float step, float mid, float (&sums)[SUMS]) {
    const float half = 0.5f * (float)((1 << bits) - 1), to_y = base - mean, to_u = base - mid;
    float part[SUMS] = {};
    #pragma unroll
    for (int s = 0; s < VALUES; s++) {
        const float y = x.at(i, s) + to_y, u = x.at(i, s) + to_u, c = x.code(i, s) - 8388608.f;
        const float left = fmaf(-step, c - half, u);
        part[0] = fmaf(y, y, part[0]);
        part[1] = fmaf(left, left, part[1]);
        part[8] = fmaf(u, u, part[8]);
        #pragma unroll
        for (int z = 0; z < 2; z++) {
            const int read = 2 + 2 * z;
            if (read >= bits) continue;
            const u32 whole = __float_as_uint(x.code(i, s)) & 255u;
            const float top = __uint_as_float((whole >> (bits - read)) | 0x4b000000u) - 8388608.f, t = top - 0.5f * (float)((1 << read) - 1);
            part[2 + 3 * z] = fmaf(y, top, part[2 + 3 * z]);
            part[3 + 3 * z] = fmaf(u, t, part[3 + 3 * z]);
            part[4 + 3 * z] = fmaf(t, t, part[4 + 3 * z]);
        }
    }
    sums[0] += part[0];
    sums[1] += part[1];
    sums[8] += part[8];
    #pragma unroll
    for (int z = 0; z < 2; z++) {
        const float one = step * (float)(1 << max(bits - 2 - 2 * z, 0));
        sums[2 + 3 * z] = fmaf(one, part[2 + 3 * z], sums[2 + 3 * z]);
        sums[3 + 3 * z] = fmaf(one, part[3 + 3 * z], sums[3 + 3 * z]);
        sums[4 + 3 * z] = fmaf(one * one, part[4 + 3 * z], sums[4 + 3 * z]);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) lamina_encode(
    const Job* jobs, int n_jobs, const Layer* layers, int clip_k, int clip_v, float* truncation
) {
    const int h = blockIdx.y, side = blockIdx.z, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = lane >> 2, c = lane & 3;
    __shared__ float columns[WARPS][4][VALUES], totals[WARPS][SUMS];
    constexpr int SIZE = KIND == 0 ? 4 : 2;
    const int first = (int)((i64)n_jobs * blockIdx.x / gridDim.x), last = (int)((i64)n_jobs * (blockIdx.x + 1) / gridDim.x);
    for (int j = first; j < last; j++) {
        const Job& job = jobs[j];
        const Layer& layer = layers[job.layer];
        const int bits = (int)job.bits[side];
        Rows x;
        #pragma unroll
        for (int t = 0; t < VALUES / 2; t++)
            #pragma unroll
            for (int e = 0; e < 4; e++) x.y[t][e] = 0.f;
        {
            const u8* rows = job.rows[side] + (h * job.head[side] + (16 * warp + r) * job.row[side]) * SIZE;
            const i64 below = 8 * job.row[side] * SIZE;
            const uint4* matrix = layer.matrix[side] + (i64)h * (D / 16) * (D / 8) * 32 + lane;
            #pragma unroll 2
            for (int k = 0; k < D / 16; k++) {
                u32 high[2][2], low[2][2];
                row_operands(rows, 16 * k + 4 * c, high[0], low[0]);
                row_operands(rows + below, 16 * k + 4 * c, high[1], low[1]);
                #pragma unroll
                for (int t = 0; t < D / 8; t++) {
                    const uint4 m = __ldg(matrix + (k * (D / 8) + t) * 32);
                    mma_bf16(x.y[t], high[0][0], high[1][0], high[0][1], high[1][1], m.x, m.y);
                    mma_bf16(x.y[t], high[0][0], high[1][0], high[0][1], high[1][1], m.z, m.w);
                    if (KIND != 1) mma_bf16(x.y[t], low[0][0], low[1][0], low[0][1], low[1][1], m.x, m.y);
                }
            }
        }
        if (side == 1) {
            #pragma unroll
            for (int s = 0; s < VALUES; s++) {
                const float y = layer.shift[h * D + s / BYTES * (D / 4) + c * BYTES + s % BYTES];
                x.at(0, s) -= y;
                x.at(1, s) -= y;
            }
        }
        u8* record = layer.records + job.page * RECORD_BYTES;
        if (CENTERED && side == 0) {
            #pragma unroll
            for (int s = 0; s < VALUES; s++) {
                const float sum = sum_rows(x.at(0, s) + x.at(1, s));
                if (r == 0) columns[warp][c][s] = sum;
            }
            __syncthreads();
            float top = 0.f;
            #pragma unroll
            for (int s = 0; s < VALUES; s++) {
                float sum = 0.f;
                #pragma unroll
                for (int w = 0; w < WARPS; w++) sum += columns[w][c][s];
                top = fmaxf(top, fabsf(sum));
            }
            const float scale = round_scale16(max_quad(top) / 64.f / 127.f), inverse = scale > 0.f ? 1.f / scale : 0.f;
            Bytes codes[4];
            #pragma unroll
            for (int s = 0; s < VALUES; s++) {
                float sum = 0.f;
                #pragma unroll
                for (int w = 0; w < WARPS; w++) sum += columns[w][c][s];
                const float code = fminf(fmaxf(rintf(sum / 64.f * inverse), -127.f), 127.f);
                x.at(0, s) = fmaf(-scale, code, x.at(0, s));
                x.at(1, s) = fmaf(-scale, code, x.at(1, s));
                codes[s / BYTES].put(s % BYTES, (u32)__float2int_rn(code) & 255u);
            }
            if (warp == 0 && r == 0) {
                #pragma unroll
                for (int p = 0; p < 4; p++) codes[p].store(record + CENTER_AT + h * D + p * (D / 4) + c * BYTES);
                if (c == 0) *(u16*)(record + CENTER_SCALE_AT + 2 * h) = (u16)to_scale16(scale);
            }
        }
        x.most = (float)((1 << bits) - 1);
        float sums[SUMS] = {};
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = 16 * warp + r + 8 * i;
            float base, mean, step, mid;
            quantise(x, i, bits, side ? clip_v : clip_k, base, mean, step, mid);
            const int at = h * 16 * D + row * (D / 4) + c * BYTES;
            u8* to[4] = {record + side * SLAB_BYTES + at};
            const i64* slots = job.slots;
            if (bits > 2) to[1] = layer.slabs + slots[side] * SLAB_BYTES + at;
            if (bits > 4) {
                to[2] = layer.slabs + slots[2 + 2 * side] * SLAB_BYTES + at;
                to[3] = layer.slabs + slots[3 + 2 * side] * SLAB_BYTES + at;
            }
            if (bits == 2) pack<2>(x, i, to);
            else if (bits == 4) pack<4>(x, i, to);
            else pack<8>(x, i, to);
            const int number = 2 * ((side * HKV + h) * 64 + row);
            if (c == 0) *(u16*)(record + SCALE_AT + number) = (u16)to_scale16(step);
            if (c == 1) *(u16*)(record + MID_AT + number) = to_bf16(mid);
            if (bits > 2) add_truncations(x, i, bits, base, mean, step, mid, sums);
        }
        if (bits > 2) {
            #pragma unroll
            for (int z = 0; z < SUMS; z++) {
                sums[z] = sum_rows(sum_quad(sums[z]));
                if (lane == 0) totals[warp][z] = sums[z];
            }
        }
        __syncthreads();
        if (threadIdx.x < 2) {
            const int z = threadIdx.x, read = 2 + 2 * z;
            float gain = 1.f, error = 0.f;
            if (read < bits) {
                float of[SUMS];
                #pragma unroll
                for (int k = 0; k < SUMS; k++) of[k] = totals[0][k] + totals[1][k] + totals[2][k] + totals[3][k];
                const float dot = of[2 + 3 * z];
                gain = round_scale16(dot > 0.f ? fminf(fmaxf(of[0] / dot, 0.5f), 2.f) : 1.f);
                error = fmaxf((of[8] - 2.f * gain * of[3 + 3 * z] + gain * gain * of[4 + 3 * z] - of[1]) / (64.f * D), 0.f);
            }
            *(u16*)(record + GAIN_AT + 2 * ((side * HKV + h) * 2 + z)) = (u16)to_scale16(gain);
            truncation[(((i64)j * 2 + side) * HKV + h) * 2 + z] = error;
        }
        __syncthreads();
    }
}
