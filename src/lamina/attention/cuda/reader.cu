// One warp reads the packed pages of a sequence and KV head; second part of the source of decode.cu.

struct Params {
    const u8* q;             // int8 [B, HKV, 2 NCOL, D]: high and low bytes of q' * scaling * log2(e) in units, times
                             // 1/4 for channels of odd planes
    const float* q_meta;     // [B, HKV, NCOL, 4]: unit of the integers, sum of q', energy, squared norm in natural units
    const float* q_exact;    // [B, HKV, NCOL, D]: q * scaling * log2(e)
    const u8* records;       // [N, RECORD_BYTES]
    const u8* slabs;         // [M, HKV, 64, D/4]
    const void* exact;       // [E, 2, HKV, 64, D]
    const int* table;        // [N, COLUMNS]
    const int* page_ids;     // [B, width]
    const int* lengths;      // [B]
    const float* kappa;      // [HKV, 3, 3]
    float* partial;          // [splits + exact_splits, B, HKV, NCOL, PART], packed, then exact rows: values, maximum,
                             // mass, spread
    int width, splits, exact_splits, exact_at, exact_cost, tokens, sink, recent;  // exact_at: first block that reads exact rows
    float softcap;           // in units of log2(e), 0 for none
    float variance[6];       // of rows, in units of their squared step: K at 2, 4, 8 bits, V
    float along;             // 1/D if errors avoid the row itself
};

// What the table says of one page.
struct Page {
    int id = -1, start = 0, rows = 0, tier_k = 0, tier_v = 0, slot = -1;
    int finer[6] = {-1, -1, -1, -1, -1, -1};  // slabs beyond the base in the order in which they are read: K's, V's
    bool exact = false, exact_for_all = false;  // read exactly by the oldest query token, by the newest

    DEVICE void look_up(const Params& P, int b, int j, int oldest, int newest) {
        id = P.page_ids[(i64)b * P.width + j];
        if (id < 0) return;
        const int* t = P.table + (i64)id * COLUMNS;
        start = t[0]; rows = t[1]; tier_k = t[2]; tier_v = t[3]; slot = t[10];
        finer[0] = t[4]; finer[1] = t[7]; finer[2] = t[6]; finer[3] = t[5]; finer[4] = t[9]; finer[5] = t[8];
        exact = tier_k == 0 || (slot >= 0 && in_window(start, oldest, P.sink, P.recent));
        exact_for_all = tier_k == 0 || (slot >= 0 && in_window(start, newest, P.sink, P.recent));
        if (start > newest) id = -1;
    }
};
// A page that a warp will read, in shared memory: {id, start, kind, -}, finer slabs, centers times queries by column.
// kind: rows | planes of K << 8 | of V << 12 | bits of K << 16 | of V << 20 | has exact rows << 24.
struct Entry {
    int4 page;
    int finer[8];
    float center[NCOL];
};
#define KIND_OF(NK, NV, K, V) (64 | (NK) << 8 | (NV) << 12 | (K) << 16 | (V) << 20)
// Pages of a sequence of ``length`` tokens: as many as that tells, or more where pages were cut.
DEVICE int pages_of(const int* ids, int width, int length) {
    int n = min(width, (length + 63) / 64);
    while (n < width && ids[n] >= 0) n++;
    return n;
}
// Shares of a sequence's pages that are worth a block of their own, at most ``splits``: a warp has a page at least.
DEVICE int shares_of(int n_pages, int splits) { return max(1, min(splits, (n_pages + WARPS - 1) / WARPS)); }
DEVICE int pages_of(const Params& P, int b) { return pages_of(P.page_ids + (i64)b * P.width, P.width, P.lengths[b]); }

struct Smem {
    float m[WARPS][NCOL], l[WARPS][NCOL], spread[WARPS][NCOL][3];
    float o[WARPS][NCOL][D];
};

// A warp at work on the pages of one sequence and KV head; a thread has column 4n + c of every tile n.
struct Reader {
    const Params& P;
    u8* ring;
    Entry* entries;
    const int h, lane, r, c, oldest;
    u32 ring_at;
    int place_k, place_v, place_header;
    i64 head;
    u32 bq[NT][KW][4];
    float unit[NT], total[NT], energy[NT], m[NT], l[NT], off[NT];
    int position[NT];
    Out o;
#if MEASURED
    float norm[NT], spread[NT][3];
#endif

    DEVICE Reader(const Params& P, u8* ring, int h, int b, int lane)
        : P(P), ring(ring), entries((Entry*)(ring + SLOTS * SLOT)), h(h), lane(lane), r(lane >> 2), c(lane & 3),
          oldest(P.lengths[b] - P.tokens), ring_at(shared_address(ring)), place_k(slab_place<false>(lane)),
          place_v(slab_place<true>(lane)), head(h * 16 * D + lane * 16) {
        place_header = (lane < 16 ? SCALE_AT : MID_AT) + ((lane >> 3 & 1) * HKV + h) * 128 + (lane & 7) * 16 - lane * 16 - h * 16 * D;
    }
    DEVICE void take_queries(int b) {
        finished_before();
        const i64 row0 = ((i64)b * HKV + h) * NCOL;
        #pragma unroll
        for (int n = 0; n < NT; n++) {
            const u8* q = P.q + (2 * row0 + 8 * n + r) * D;
            #pragma unroll
            for (int k = 0; k < KW; k++)
                #pragma unroll
                for (int p = 0; p < 4; p++) bq[n][k][p] = c * KW + k < NW ? *(const u32*)(q + p * (D / 4) + 4 * (c * KW + k)) : 0;
            const float4 meta = *(const float4*)(P.q_meta + (row0 + 4 * n + c) * 4);
            unit[n] = meta.x; total[n] = meta.y; energy[n] = meta.z;
            m[n] = NEVER; l[n] = off[n] = 0.f;
#if MEASURED
            norm[n] = meta.w; spread[n][0] = spread[n][1] = spread[n][2] = 0.f;
#endif
            const int token = (4 * n + c) / G;
            position[n] = oldest + (token < P.tokens ? token : P.tokens - 1);
            #pragma unroll
            for (int k = 0; k < VW; k++)
                #pragma unroll
                for (int j = 0; j < 4; j++)
                    #pragma unroll
                    for (int p = 0; p < 4; p++) o[n][k][j][p] = 0.f;
        }
    }

    // Sends for slab z of a page's K or V into a slot.
    template <bool V>
    DEVICE void fetch(const Entry& e, int z, int slot) const {
        const u32 to = ring_at + slot * SLOT;
        const u8* from = head + (z == 0 ? P.records + (i64)e.page.x * RECORD_BYTES + (V ? SLAB_BYTES : 0)
                                        : P.slabs + (i64)e.finer[V ? 2 + z : z - 1] * SLAB_BYTES);
        if (V) copy_slab<true>(to + place_v, from, lane);
        else {
            copy_slab<false>(to + place_k, from, lane);
            if (z == 0) copy_16<16 * D>(to + lane * 16, from + place_header);
        }
    }
    static DEVICE void wait() {
        wait_for_groups<SLOTS - 2>();
        __syncwarp();
    }

    // Centers of 16 pages at a time times queries, odd planes first as queries carry 1/4: page r (+ 8) in the rows.
    DEVICE void centers(int count) {
        const u32 zero = (u32)P.width >> 31;
        for (int g = 0; g < count; g += 16) {
            int sum[NT][2] = {};
            const u8* from[2];
            #pragma unroll
            for (int s = 0; s < 2; s++) from[s] = P.records + (i64)entries[min(g + 8 * s + r, count - 1)].page.x * RECORD_BYTES;
            #pragma unroll
            for (int z = 1; z >= 0; z--) {
                int acc[NT][4] = {};
                #pragma unroll
                for (int p = z; p < 4; p += 2)
                    #pragma unroll
                    for (int k = 0; k < KW; k += 2) {
                        u32 a[2][2] = {};
                        #pragma unroll
                        for (int s = 0; s < 2; s++)
                            #pragma unroll
                            for (int x = 0; x < 2; x++)
                                if (k + x < KW && c * KW + k + x < NW)
                                    a[s][x] = *(const u32*)(from[s] + CENTER_AT + h * D + p * (D / 4) + 4 * (c * KW + k + x));
                        #pragma unroll
                        for (int n = 0; n < NT; n++)
                            mma_s8s8(acc[n], a[0][0], a[1][0], a[0][1], a[1][1], bq[n][k][p] ^ zero, k + 1 < KW ? bq[n][k + 1 < KW ? k + 1 : k][p] ^ zero : 0);
                    }
                #pragma unroll
                for (int n = 0; n < NT; n++)
                    #pragma unroll
                    for (int s = 0; s < 2; s++) sum[n][s] = 4 * sum[n][s] + whole(acc[n], s);
            }
            #pragma unroll
            for (int s = 0; s < 2; s++) {
                const float scale = scale16(*(const u16*)(from[s] + CENTER_SCALE_AT + 2 * h));
                #pragma unroll
                for (int n = 0; n < NT; n++)
                    if (g + 8 * s + r < count) entries[g + 8 * s + r].center[4 * n + c] = scale * unit[n] * (float)sum[n][s];
            }
        }
    }

    // The page's numbers, from the slot of its first slab; and the largest step of V: steps are ordered as their bits are.
    struct Header { uint4 k_scales, v_scales, k_mids, v_mids; };
    DEVICE Header header_of(const u8* here) const {
        const uint4* x = (const uint4*)(here + 16 * D + 16 * r);
        return Header{x[0], x[8], x[16], x[24]};
    }
    static DEVICE float most_of(const uint4& v_scales) {
        const u32 pairs = __vmaxu2(__vmaxu2(v_scales.x, v_scales.y), __vmaxu2(v_scales.z, v_scales.w));
        return fmaxf(max_rows(scale16(max(pairs & 0xffffu, pairs >> 16))), 1e-30f);
    }

    // What is known of a page's codes beyond their bits.
    struct Reading { float gain_k, gain_v, half_k, half_v, noise, variance_k, variance_v; };

    // Products of a page -> weights for its V, their factors, and the running softmax.
    template <bool ALL>
    DEVICE void softmax(
        const int (&acc)[NT][4][4], const Header& x, const Reading& y, const Entry& e, float most, u32 (&w)[NT][4], float (&factor)[NT]
    ) {
        const float up = __fdividef(65280.f, most);
        float keep[NT];
        bool higher = false;
        #pragma unroll
        for (int n = 0; n < NT; n++) {
            // Everything that a step multiplies carries the gain.
            const float one = unit[n] * y.gain_k, middle = y.half_k * total[n] * y.gain_k, loss = y.noise * energy[n] * y.gain_k * y.gain_k;
            const float of_center = CENTERED ? e.center[4 * n + c] : 0.f;
            float s[8];
#if MEASURED
            float errs[8];
#endif
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                const float step = scale_of(x.k_scales, i), dot = fmaf(one, (float)whole(acc[n][i >> 1], i & 1), -middle);
#if MEASURED
                const float along = LN2 * fmaf(step, dot, mid_of(x.k_mids, i) * total[n]);
                errs[i] = fmaxf(y.variance_k * step * step * norm[n] - along * along * P.along, 0.f);
#endif
                s[i] = fmaf(step, fmaf(-loss, step, dot), fmaf(mid_of(x.k_mids, i), total[n], of_center));
#if CAPPED
                s[i] = capped(s[i], P.softcap);
#if MEASURED
                const float slope = 1.f - s[i] * s[i] / (P.softcap * P.softcap);
                errs[i] *= slope * slope;
#endif
#endif
            }
            if (!ALL) {
                const int from = e.page.y, kind = e.page.z, t = position[n];
                const bool exact = kind >> 24 && in_window(from, t, P.sink, P.recent);
                #pragma unroll
                for (int i = 0; i < 8; i++)
                    if (8 * r + i >= (kind & 255) || from + 8 * r + i > t || exact) s[i] = NEVER;
            }
            float top = NEVER;
            #pragma unroll
            for (int i = 0; i < 8; i++) top = fmaxf(top, s[i]);
            top = max_rows(top);
            const float now = fmaxf(m[n], top);
            higher = higher || now > m[n];
            keep[n] = exp2_(m[n] - now);
            m[n] = now;
            // Weights are relative to the page's maximum; a page of which nothing is seen counts for nothing.
            const float share = !ALL && top == NEVER ? 0.f : exp2_(top - now);
            if (!ALL) top = fmaxf(top, 0.1f * NEVER);
            float mass = 0.f, offset = 0.f, stepped = 0.f;
#if MEASURED
            float sums[3] = {0.f, 0.f, 0.f};
#endif
            u32 q[8];
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                const float p = exp2_(s[i] - top), z = p * scale_of(x.v_scales, i);
                mass += p;
                offset = fmaf(p, mid_of(x.v_mids, i), offset);
                stepped += z;
                // The integer is in the low bits of the sum.
                q[i] = __float_as_uint(fmaf(z, up, 8388608.f));
#if MEASURED
                sums[0] = fmaf(p, errs[i], sums[0]);
                sums[1] = fmaf(p * p, errs[i], sums[1]);
                sums[2] = fmaf(z * z, y.variance_v, sums[2]);
#endif
            }
            #pragma unroll
            for (int i = 0; i < 4; i++) w[n][i] = transposed(__byte_perm(q[2 * i], q[2 * i + 1], 0x4051));
            l[n] = fmaf(l[n], keep[n], share * mass);
            off[n] = fmaf(off[n], keep[n], share * fmaf(-y.half_v * y.gain_v, stepped, offset));
            factor[n] = share * most * y.gain_v * (1.f / 65280.f);
#if MEASURED
            #pragma unroll
            for (int z = 0; z < 3; z++)
                spread[n][z] = fmaf(spread[n][z], z ? keep[n] * keep[n] : keep[n], sums[z] * (z ? share * share : share));
#endif
        }
        if (__any_sync(~0u, higher)) {
            #pragma unroll
            for (int n = 0; n < NT; n++)
                #pragma unroll
                for (int k = 0; k < VW; k++)
                    #pragma unroll
                    for (int j = 0; j < 4; j++)
                        #pragma unroll
                        for (int p = 0; p < 4; p++) o[n][k][j][p] *= keep[n];
        }
    }
    DEVICE void scaled(float (&to)[NT], const float (&factor)[NT], float by) const {
        #pragma unroll
        for (int n = 0; n < NT; n++) to[n] = factor[n] * by;
    }

    // Sends for the J-th slab from page ``at`` on, of pages that have NK and NV; ``base`` slabs were sent for before.
    template <int NK, int NV, int J>
    DEVICE void send(int at, int high, int base) const {
        constexpr int ALL = NK + NV, Z = J % ALL;
        const int page = at + J / ALL;
        if (page < high) fetch<(Z >= NK)>(entries[page], Z < NK ? Z : Z - NK, ALL % 4 ? (base + J) % SLOTS : J % SLOTS);
        end_group();
    }
    template <int NK, int NV>
    DEVICE void begin(int low, int high) const {
        send<NK, NV, 0>(low, high, 0);
        send<NK, NV, 1>(low, high, 0);
        send<NK, NV, 2>(low, high, 0);
    }

    // Pages [low, high) that have NK and NV planes, are read as they were encoded, whole and by all query tokens.
    template <int NK, int NV>
    DEVICE void run(int low, int high, bool begun) {
        constexpr int ALL = NK + NV, K = NK == 1 ? 2 : 2 * NK, V = NV == 1 ? 2 : 2 * NV, IK = K == 2 ? 0 : K == 4 ? 1 : 2, IV = V == 2 ? 0 : V == 4 ? 1 : 2;
        const Reading reading{1.f, 1.f, 0.5f * ((1 << K) - 1), 0.5f * ((1 << V) - 1), P.kappa[h * 9 + 4 * IK], P.variance[IK], P.variance[3 + IV]};
        int base = 0, at = low;
        auto arrived = [&](auto J) -> const u8* {
            constexpr int j = decltype(J)::value;
            wait();
            send<NK, NV, j + SLOTS - 1>(at, high, base);
            return ring + (ALL % 4 ? (base + j) % SLOTS : j % SLOTS) * SLOT;
        };
        if (!begun) begin<NK, NV>(low, high);
        #pragma unroll 1
        for (; at < high; at++) {
            const u8* here = arrived(Int<0>());
            const Header x = header_of(here);
            const float most = most_of(x.v_scales);
            int acc[NT][4][4] = {};
            {
                KRows k;
                read_k(k, here, r, c);
                dot_k<PAIRS>(acc, k, bq, 0);
                if constexpr (NK >= 2) {
                    read_k(k, arrived(Int<1>()), r, c);
                    quadruple(acc);
                    dot_k<PAIRS>(acc, k, bq, 0);
                }
                if constexpr (NK == 4) {
                    const u32 zero = (u32)P.width >> 31;
                    read_k(k, arrived(Int<2>()), r, c);
                    quadruple(acc);
                    dot_k<NIBBLES_1>(acc, k, bq, zero);
                    read_k(k, arrived(Int<3>()), r, c);
                    quadruple(acc);
                    dot_k<NIBBLES_0>(acc, k, bq, zero);
                }
            }
            u32 w[NT][4];
            float factor[NT], by[NT];
            softmax<true>(acc, x, reading, entries[at], most, w, factor);
            VRows v;
            read_v(v, arrived(Int<NK>()), r, c);
            scaled(by, factor, NV == 4 ? 64.f : NV == 2 ? 4.f : 1.f);
            dot_v<PAIRS>(o, v, w, by);
            if constexpr (NV >= 2) {
                read_v(v, arrived(Int<NK + 1>()), r, c);
                scaled(by, factor, NV == 4 ? 16.f : 1.f);
                dot_v<PAIRS>(o, v, w, by);
            }
            if constexpr (NV == 4) {
                // Nibbles of planes 1 and 3 come out four times too small beside pairs, whose bits are at 2p.
                read_v(v, arrived(Int<NK + 2>()), r, c);
                scaled(by, factor, 4.f);
                dot_v<NIBBLES_1>(o, v, w, by);
                read_v(v, arrived(Int<NK + 3>()), r, c);
                dot_v<NIBBLES_0>(o, v, w, factor);
            }
            base += ALL;
        }
        wait_for_copies();
        __syncwarp();
    }

    // Any other pages: one after the other, nothing sent for ahead of a page.
    DEVICE void run_any(int low, int high) {
        #pragma unroll 1
        for (int at = low; at < high; at++) {
            const Entry& e = entries[at];
            const int kind = e.page.z, nk = kind >> 8 & 15, nv = kind >> 12 & 15, bits_k = kind >> 16 & 15, bits_v = kind >> 20 & 15;
            const int read_k_ = nk == 1 ? 2 : 2 * nk, read_v_ = nv == 1 ? 2 : 2 * nv;
            const u8* gains = P.records + (i64)e.page.x * RECORD_BYTES + GAIN_AT + 4 * h;
            Reading reading{1.f, 1.f, 0.5f * ((1 << read_k_) - 1), 0.5f * ((1 << read_v_) - 1), P.kappa[h * 9 + 3 * index_of(bits_k) + index_of(read_k_)],
                            P.variance[index_of(bits_k)], P.variance[3 + index_of(bits_v)]};
            if (read_k_ != bits_k) reading.gain_k = scale16(*(const u16*)(gains + 2 * index_of(read_k_))) * (float)(1 << (bits_k - read_k_));
            if (read_v_ != bits_v) reading.gain_v = scale16(*(const u16*)(gains + 4 * HKV + 2 * index_of(read_v_))) * (float)(1 << (bits_v - read_v_));
            Header x;
            int acc[NT][4][4] = {};
            #pragma unroll 1
            for (int z = 0; z < nk; z++) fetch<false>(e, z, z);
            wait_for_copies();
            __syncwarp();
            x = header_of(ring);
            const float most = most_of(x.v_scales);
            #pragma unroll 1
            for (int z = 0; z < nk; z++) {
                KRows k;
                read_k(k, ring + z * SLOT, r, c);
                quadruple(acc);
                if (z < 2) dot_k<PAIRS>(acc, k, bq, 0);
                else if (z == 2) dot_k<NIBBLES_1>(acc, k, bq, 0);
                else dot_k<NIBBLES_0>(acc, k, bq, 0);
            }
            __syncwarp();
            #pragma unroll 1
            for (int z = 0; z < nv; z++) fetch<true>(e, z, z);
            u32 w[NT][4];
            float factor[NT], by[NT];
            softmax<false>(acc, x, reading, e, most, w, factor);
            wait_for_copies();
            __syncwarp();
            #pragma unroll 1
            for (int z = 0; z < nv; z++) {
                VRows v;
                read_v(v, ring + z * SLOT, r, c);
                scaled(by, factor, z == 0 ? (nv == 4 ? 64.f : nv == 2 ? 4.f : 1.f) : z == 1 ? (nv == 4 ? 16.f : 1.f) : z == 2 ? 4.f : 1.f);
                if (z < 2) dot_v<PAIRS>(o, v, w, by);
                else if (z == 2) dot_v<NIBBLES_1>(o, v, w, by);
                else dot_v<NIBBLES_0>(o, v, w, by);
            }
            __syncwarp();
        }
    }
};
