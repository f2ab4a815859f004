// Mixtures of experts. Rows are sorted by expert, and the products of all experts with rows are tasks of one call. As in
// gemm.h, each output is one chain, whatever the other rows; a row's results are added up in the order of its experts.
#pragma once

#include <utility>
#include <vector>

#include "adapters.h"
#include "operations.h"

struct Expert {
    Product gate_up, down;
};

// layers.py repeats this structure. Each field has eight bytes.
struct Mixture {
    const Expert* experts;
    int64_t count, chosen;  // all experts, and those of a row
    int64_t normed, gelu;   // whether a row's shares are divided by their sum
};

// A number and its index. NaN counts as the largest number.
using Likely = std::pair<float, int64_t>;
INLINE bool likelier(const Likely& a, const Likely& b) {
    return (a.first != a.first && b.first == b.first) || a.first > b.first;
}

// Sorts the `chosen` largest to the front, by the steps of torch.topk on a CPU, so that it takes the same of equal ones.
static void take_largest(std::vector<Likely>& all, int64_t chosen) {
    auto begin = all.begin(), end = all.end();
    if (chosen * 64 <= (int64_t)all.size()) return std::partial_sort(begin, begin + chosen, end, likelier);
    std::nth_element(begin, begin + chosen - 1, end, likelier);
    std::sort(begin, begin + chosen - 1, likelier);
}

// The softmax of a row of `experts` logits. All are NaN if a logit is not finite.
static void probabilities(const float* logits, int64_t experts, std::vector<Likely>& to) {
    float most = *std::max_element(logits, logits + experts), sum = 0;
    for (int64_t i = 0; i < experts; i += LANES) {
        int64_t count = std::min<int64_t>(LANES, experts - i);
        alignas(64) float part[LANES] = {};
        memcpy(part, logits + i, count * sizeof(float));
        store<LANES>(part, exponential<LANES>(load<LANES>(part) - splat<LANES>(most)));
        for (int64_t j = 0; j < count; j++) {
            float odd = logits[i + j] * 0.0f;
            to[i + j] = {part[j] + odd, i + j};
            sum += part[j] + odd;
        }
    }
    for (Likely& one : to) one.first /= sum;
}

// Writes each row's experts, the likeliest first, and their shares: both [rows, m.chosen].
static void route(Pool& pool, const Mixture& m, const float* logits, int64_t rows, int64_t* experts, float* shares) {
    int64_t tasks = std::min<int64_t>({rows, rows * m.count / 1024 + 1, 4 * (int64_t)pool.threads()});
    pool.spread((int)tasks, [&](int task, int) {
        std::vector<Likely> all(m.count);
        for (int64_t row = rows * task / tasks; row < rows * (task + 1) / tasks; row++) {
            probabilities(logits + row * m.count, m.count, all);
            take_largest(all, m.chosen);
            float sum = 0;
            for (int64_t i = 0; i < m.chosen; i++) sum += all[i].first;
            for (int64_t i = 0; i < m.chosen; i++) {
                experts[row * m.chosen + i] = all[i].second;
                shares[row * m.chosen + i] = m.normed ? all[i].first / sum : all[i].first;
            }
        }
    });
}

// One of several products that run at once.
struct Job {
    Gemm g;
    int64_t kind;
    int first;  // its first task
    Cut cut;
    Rounded rounded{};

    size_t floats() const {
        size_t room = kind == 2   ? rounded_floats(*(const Quantised*)g.weight, g.rows)
                      : kind == 1 ? rounded_floats<bf16>(g)
                                  : rounded_floats<float>(g);
        return (room + 15) / 16 * 16;
    }
    void round(Pool& pool, float* memory) {
        if (kind == 2) rounded = round_into(pool, *(const Quantised*)g.weight, g.x, g.rows, g.inputs, memory);
        else if (kind) round_into<bf16>(pool, g, memory);
        else round_into<float>(pool, g, memory);
    }
    void run(int task) const {
        Part part = cut.part(g, task - first);
        if (kind == 2) quantised_part(*(const Quantised*)g.weight, rounded, g, part);
        else if (kind) gemm_part<bf16>(g, part);
        else gemm_part<float>(g, part);
    }
};

// The products of x, [places, inputs], whose rows are sorted by expert, with each expert's `which`. `starts`: the first
// place of each expert, and the end.
static void multiply_each(Pool& pool, const Mixture& m, Product Expert::*which, const float* x, float* out,
                          const std::vector<int64_t>& starts) {
    int64_t panels = 0;
    for (int64_t e = 0; e < m.count; e++)
        if (starts[e] < starts[e + 1]) panels += panels_of((m.experts[e].*which).outputs);
    std::vector<Job> jobs;
    int tasks = 0;
    size_t room = 0;
    for (int64_t e = 0; e < m.count; e++) {
        int64_t first = starts[e], rows = starts[e + 1] - first;
        if (!rows) continue;
        const Product& p = m.experts[e].*which;
        Gemm g{x + first * p.inputs, p.weight, p.bias, out + first * p.outputs, rows, p.inputs, p.outputs};
        jobs.push_back({g, p.kind, tasks, Cut(pool, g, p.kind == 1 ? most_rows<bf16>(g) : kTaskRows, panels)});
        tasks += jobs.back().cut.tasks();
        room += jobs.back().floats();
    }
    float* memory = pool.shared.take(room);
    for (Job& job : jobs) {
        job.round(pool, memory);
        memory += job.floats();
    }
    pool.spread(tasks, [&](int task, int) {
        auto after = std::upper_bound(jobs.begin(), jobs.end(), task, [](int t, const Job& j) { return t < j.first; });
        (after - 1)->run(task);
    });
}

// The memory of `run_experts` for `rows` rows, in floats.
INLINE int64_t experts_floats(const Mixture& m, int64_t rows) {
    const Expert& one = m.experts[0];
    return rows * m.chosen * (one.gate_up.inputs + one.gate_up.outputs + one.down.inputs);
}

// Copies rows to their places, sorted by expert. `places`: [rows, m.chosen]. Returns the first place of each expert, and
// the end.
static std::vector<int64_t> sort_rows(Pool& pool, const Mixture& m, const std::vector<int64_t>& experts, const float* x,
                                      int64_t rows, int64_t width, float* to, std::vector<int64_t>& places) {
    std::vector<int64_t> starts(m.count + 1);
    for (int64_t e : experts) starts[e + 1]++;
    for (int64_t e = 0; e < m.count; e++) starts[e + 1] += starts[e];
    std::vector<int64_t> next(starts);
    for (size_t i = 0; i < experts.size(); i++) places[i] = next[experts[i]]++;
    each_row(pool, rows, m.chosen * width, [&](int64_t row) {
        for (int64_t i = 0; i < m.chosen; i++)
            memcpy(to + places[row * m.chosen + i] * width, x + row * width, width * sizeof(float));
    });
    return starts;
}

// Writes to `out`, [rows, width], the sums of share times result over each row's experts.
static void add_shares(Pool& pool, const Mixture& m, const float* results, const int64_t* places, const float* shares,
                       int64_t rows, int64_t width, float* out) {
    each_row(pool, rows, m.chosen * width, [&](int64_t row) {
        float* to = out + row * width;
        std::fill(to, to + width, 0.0f);
        for (int64_t i = 0; i < m.chosen; i++) {
            const float* from = results + places[row * m.chosen + i] * width;
            F<LANES> share = splat<LANES>(shares[row * m.chosen + i]);
            int64_t k = 0;
            for (; k + LANES <= width; k += LANES)
                store<LANES>(to + k, fused(share, load<LANES>(from + k), load<LANES>(to + k)));
            for (; k < width; k++) to[k] = std::fma(share[0], from[k], to[k]);
        }
    });
}

// The places of one adapter's rows with one expert.
struct AdaptedPlaces {
    const LowRank* changes;  // of the expert's gate and up product, and of its down product
    std::vector<int64_t> places;
};

// Sorts the adapters' rows by expert. `places`, `starts`: see sort_rows.
static std::vector<AdaptedPlaces> adapted_places(const Mixture& m, const ExpertAdapters& by,
                                                 const std::vector<int64_t>& places,
                                                 const std::vector<int64_t>& starts) {
    std::vector<AdaptedPlaces> all;
    for (int64_t a = 0; by.adapters && a < by.adapters->count; a++) {
        const LowRank* changes = by.adapters->experts ? by.adapters->experts[a] : nullptr;
        if (!changes) continue;
        const AdapterRows& group = by.adapters->each[a];
        std::vector<int64_t> own;
        for (int64_t i = 0; i < group.count; i++) {
            const int64_t* of_row = places.data() + group.rows[i] * m.chosen;
            own.insert(own.end(), of_row, of_row + m.chosen);
        }
        std::sort(own.begin(), own.end());
        auto from = own.begin();
        for (int64_t e = 0; e < m.count; e++) {
            auto to = std::lower_bound(from, own.end(), starts[e + 1]);
            if (from != to) all.push_back({changes + 2 * (by.first + e), {from, to}});
            from = to;
        }
    }
    return all;
}

// Adds the adapters' changes to the results of the experts' `which`: 0 is gate and up, 1 is down.
static void change_experts(Pool& pool, const Step& s, const std::vector<AdaptedPlaces>& adapted, int which,
                           const Adaptable& of) {
    if (adapted.empty()) return;
    timed(s, kAdapters, [&] {
        std::vector<Change> changes;
        for (const AdaptedPlaces& one : adapted)
            if (one.changes[which].count)
                changes.push_back({one.changes + which, one.places.data(), (int64_t)one.places.size()});
        add_changes(pool, changes, of);
    });
}

// Runs the experts of x, [rows, width], by the router's logits, [rows, m.count]. `out` may be neither of them.
static void run_experts(Pool& pool, const Step& s, const Mixture& m, const float* x, const float* logits, int64_t rows,
                        float* out, float* memory, const ExpertAdapters& adapters) {
    if (!rows) return;
    int64_t width = m.experts[0].gate_up.inputs, inner = m.experts[0].down.inputs, all = rows * m.chosen;
    float *sorted = memory, *both = sorted + all * width, *gated = both + all * 2 * inner;
    std::vector<int64_t> experts(all), places(all), starts;
    std::vector<float> shares(all);
    std::vector<AdaptedPlaces> adapted;
    timed(s, kRoute, [&] {
        route(pool, m, logits, rows, experts.data(), shares.data());
        starts = sort_rows(pool, m, experts, x, rows, width, sorted, places);
        adapted = adapted_places(m, adapters, places, starts);
    });
    timed(s, kLinear, [&] { multiply_each(pool, m, &Expert::gate_up, sorted, both, starts); });
    change_experts(pool, s, adapted, 0, {sorted, width, both, 2 * inner});
    timed(s, kGate, [&] { gate(pool, both, gated, m.gelu, all, inner); });
    timed(s, kLinear, [&] { multiply_each(pool, m, &Expert::down, gated, sorted, starts); });
    change_experts(pool, s, adapted, 1, {gated, inner, sorted, width});
    timed(s, kRoute, [&] { add_shares(pool, m, sorted, places.data(), shares.data(), rows, width, out); });
}
