// Attention over the paged KV cache in place, for decodes and prefill chunks.
//
// A piece is some queries of one sequence and all query heads of one KV head: rows that read the same keys. It walks
// the keys in tiles (scores, running softmax, sum of values), in chunks of kChunk places. The results of chunks are
// joined in order. Tiles and chunks count from a sequence's first token, even if its table begins later (because of a
// window). So a row's sums have the same order, whatever blocks were dropped. If there are too few pieces for the
// threads, each chunk becomes a task of its own, and the results are joined afterwards. The arithmetic is the same, so
// a row's result depends neither on the threads nor on the batch.
#pragma once

#include <vector>

#include "walk.h"

// The number of rows whose computing takes as long as reading the keys and values: an estimate, for cutting tasks.
constexpr int kReading = 8;

// Groups consecutive pieces into about `most` tasks of similar work. Returns where each begins, and the end.
INLINE std::vector<int> tasks_of(const Attention& a, const std::vector<Piece>& pieces, int most) {
    // Reading keys and values takes as long as computing some rows with them.
    auto work = [&](const Piece& p) {
        int64_t to = p.place(a) + p.queries, rows = p.queries * a.heads / a.kv_heads;
        int64_t seen = to - std::max<int64_t>(p.chunk * kChunk, a.window ? to - p.queries - a.window : 0);
        return (seen + kTile) * (rows + kReading);
    };
    int64_t all = 0, some = 0;
    for (const Piece& p : pieces) all += work(p);
    std::vector<int> ends{0};
    for (int i = 0; i < (int)pieces.size(); i++) {
        some += work(pieces[i]);
        if (some * most < all && i + 1 < (int)pieces.size()) continue;
        ends.push_back(i + 1);
        some = 0;
    }
    return ends;
}

// `Walk`: see walk.h.
template <class Walk> static void attend(Pool& pool, const Attention& a) {
    int share = (int)(a.heads / a.kv_heads), most = std::max(1, Walk::kPieceRows / share), rows = 0;
    std::vector<Piece> pieces;
    int partials = 0;
    // Backwards, because long prefill chunks come last in a step and should be started first.
    for (int i = (int)a.sequences - 1; i >= 0; i--) {
        int queries = a.starts[i + 1] - a.starts[i], length = a.lengths[i];
        if (length == 0) continue;
        for (int query = 0; query < queries; query += most) {
            int count = std::min(most, queries - query), place = a.leads[i] + length - queries + query;
            int begin = a.window ? std::max(0, place - (int)a.window + 1) / kChunk : 0;
            int chunks = (place + count - 1) / kChunk + 1 - begin;
            for (int h = 0; h < (int)a.kv_heads; h++, partials += chunks)
                pieces.push_back({i, h, query, count, begin, chunks, partials});
            rows = std::max(rows, count * share);
        }
    }
    int64_t walk = Walk::floats(rows, a.head_dim), state = State::floats(Walk::state_rows(rows), a.head_dim);
    if (partials == (int)pieces.size() || (int)pieces.size() >= 4 * pool.threads() || pool.threads() == 1) {
        std::vector<int> ends = tasks_of(a, pieces, 16 * pool.threads());
        pool.run((int)ends.size() - 1, [&](int task, int thread) {
            float* memory = pool.own[thread].take(walk + state);
            for (int i = ends[task]; i < ends[task + 1]; i++) {
                const Piece &p = pieces[i], *after = i + 1 < ends[task + 1] ? &pieces[i + 1] : nullptr;
                Walk one(a, p, memory);
                State all(memory + walk, one.rows()), part(memory + walk - state, one.rows());
                for (int c = p.chunk; c < p.chunk + p.chunks; c++) {
                    bool last = c + 1 == p.chunk + p.chunks;
                    one.chunk(c, c == p.chunk ? all : part, last ? after : &p, last && after ? after->chunk : c + 1);
                    if (c > p.chunk) one.merge(all, part);
                }
                one.finish(all);
            }
        });
        return;
    }
    float* memory = pool.shared.take(partials * state);
    std::vector<std::pair<int, int>> tasks;
    for (int i = 0; i < (int)pieces.size(); i++)
        for (int c = 0; c < pieces[i].chunks; c++) tasks.emplace_back(i, c);
    pool.run((int)tasks.size(), [&](int task, int thread) {
        const Piece& p = pieces[tasks[task].first];
        Walk one(a, p, pool.own[thread].take(walk));
        int chunk = tasks[task].second;
        one.chunk(p.chunk + chunk, State(memory + (p.partial + chunk) * state, one.rows()), nullptr, 0);
    });
    pool.run((int)pieces.size(), [&](int task, int thread) {
        const Piece& p = pieces[task];
        Walk one(a, p, pool.own[thread].take(walk));
        State all(memory + p.partial * state, one.rows());
        for (int c = 1; c < p.chunks; c++)
            one.merge(all, State(memory + (p.partial + c) * state, one.rows()));
        one.finish(all);
    });
}
