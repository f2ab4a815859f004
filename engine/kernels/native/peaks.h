// Finds the largest of each row of a product without storing the product, for greedy sampling.
#pragma once

#include <cfloat>
#include <limits>

#include "gemm.h"
#include "quantised.h"
#include "ranks.h"

// For each row and lane, the largest number so far, its place, and whether any number was not finite.
struct Peaks {
    alignas(64) float value[kTaskRows][LANES];
    alignas(64) int32_t place[kTaskRows][LANES];
    alignas(64) int32_t wrong[kTaskRows][LANES];

    void begin(int64_t rows) {
        std::fill_n(&value[0][0], rows * LANES, -std::numeric_limits<float>::infinity());
        std::fill_n(&place[0][0], rows * LANES, std::numeric_limits<int32_t>::max());
        std::fill_n(&wrong[0][0], rows * LANES, 0);
    }

    // `c` has whole panels. Columns from `columns` on are padding, -inf.
    void take(const float* c, int64_t rows, int64_t first, int64_t columns) {
        I<LANES> lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        for (int64_t r = 0; r < rows; r++) {
            F<LANES> best = load<LANES>(value[r]);
            I<LANES> at, bad;
            memcpy(&at, place[r], sizeof at);
            memcpy(&bad, wrong[r], sizeof bad);
            for (int j = 0; j < kVectors; j++) {
                F<LANES> x = load<LANES>(c + r * kColumns + j * LANES);
                I<LANES> here = lane + (int32_t)(first + j * LANES);
                I<LANES> finite = (x <= splat<LANES>(FLT_MAX)) & (x >= splat<LANES>(-FLT_MAX));
                bad |= ~finite & (here < (int32_t)(first + columns));
                I<LANES> more = x > best;
                best = more ? x : best;
                at = more ? here : at;
            }
            store<LANES>(value[r], best);
            memcpy(place[r], &at, sizeof at);
            memcpy(wrong[r], &bad, sizeof bad);
        }
    }
};

struct Peak {
    float value;
    int32_t place;  // the first of equal ones
    bool finite;
};

INLINE bool before(const Peak& a, float value, int32_t place) {
    return a.value > value || (a.value == value && a.place < place);
}

// Writes `places`, `finite` and, unless it is null, `values`, [rows]. A row that is not finite gets an arbitrary valid place. `panels_of(part)` gives
// a function of (p, c) that computes a whole panel of columns; it lives as long as the part's task.
template <class PanelsOf>
INLINE void peaks(Pool& pool, const Gemm& g, int64_t* places, uint8_t* finite, float* values,
                  PanelsOf&& panels_of) {
    Cut cut(pool, g);
    std::vector<Peak> found(cut.across * g.rows);
    pool.spread((int)(cut.across * cut.down), [&](int task, int) {
        Part part = cut.part(g, task);
        auto&& panel = panels_of(part);
        Peaks own;
        own.begin(part.rows);
        for (int64_t p = part.begin; p < part.end; p++) {
            alignas(64) float c[kTaskRows * kColumns];
            int64_t columns = std::min<int64_t>(kColumns, g.outputs - p * kColumns);
            panel(p, c);
            for (int64_t r = 0; r < part.rows; r++)
                std::fill(c + r * kColumns + columns, c + (r + 1) * kColumns, -std::numeric_limits<float>::infinity());
            own.take(c, part.rows, p * kColumns, columns);
        }
        for (int64_t r = 0; r < part.rows; r++) {
            Peak peak{own.value[r][0], own.place[r][0], !own.wrong[r][0]};
            for (int i = 1; i < LANES; i++) {
                peak.finite &= !own.wrong[r][i];
                if (!before(peak, own.value[r][i], own.place[r][i])) peak.value = own.value[r][i], peak.place = own.place[r][i];
            }
            found[task % cut.across * g.rows + part.first + r] = peak;
        }
    });
    for (int64_t r = 0; r < g.rows; r++) {
        Peak all = found[r];
        for (int64_t i = 1; i < cut.across; i++) {
            const Peak& other = found[i * g.rows + r];
            bool whole = all.finite && other.finite;
            if (!before(all, other.value, other.place)) all = other;
            all.finite = whole;
        }
        places[r] = std::min<int64_t>(all.place, g.outputs - 1);
        finite[r] = all.finite;
        if (values) values[r] = all.value;
    }
}

template <class W> static void peaks(Pool& pool, Gemm g, int64_t* places, uint8_t* finite, float* values) {
    prepare<W>(pool, g);
    peaks(pool, g, places, finite, values, [&](const Part& part) { return PanelProduct<W>{g, part}; });
}

static void quantised_peaks(Pool& pool, const Gemm& g, int64_t* places, uint8_t* finite, float* values) {
    const Quantised& q = *(const Quantised*)g.weight;
    Rounded r = rounded_rows(pool, q, g.x, g.rows, g.inputs);
    peaks(pool, g, places, finite, values, [&](const Part& part) { return QuantisedPanels{q, r, g, part}; });
}

INLINE void find_peaks(Pool& pool, const Gemm& g, int kind, int64_t* places, uint8_t* finite, float* values) {
    if (kind == 2) quantised_peaks(pool, g, places, finite, values);
    else if (kind) peaks<bf16>(pool, g, places, finite, values);
    else peaks<float>(pool, g, places, finite, values);
}

// A rank's peak of a row. `place` counts from the first rank's first column.
struct RankPeak {
    int64_t place;
    float value;
    uint32_t finite;
};

// On rank 0, the peaks of the columns of all ranks; on the others, arbitrary ones. This rank's columns begin at `first`.
INLINE void peaks_of_ranks(Pool& pool, const Gemm& g, int kind, int64_t first, Exchange& exchange, int64_t* places,
                           uint8_t* finite) {
    std::vector<float> values(g.rows);
    find_peaks(pool, g, kind, places, finite, values.data());
    std::vector<RankPeak> own(g.rows), every(exchange.rank() ? 0 : exchange.ranks() * g.rows);
    for (int64_t r = 0; r < g.rows; r++) own[r] = {first + places[r], values[r], finite[r]};
    exchange.gather(0, (const char*)own.data(), g.rows * sizeof(RankPeak), (char*)every.data());
    for (size_t i = 0; i < every.size(); i++) {
        RankPeak& best = own[i % g.rows];  // at first rank 0's
        bool whole = best.finite && every[i].finite;
        if (every[i].value > best.value) best = every[i];  // of equal ones the earlier rank's has the smaller place
        best.finite = whole;
    }
    for (int64_t r = 0; r < g.rows; r++) places[r] = own[r].place, finite[r] = own[r].finite;
}
