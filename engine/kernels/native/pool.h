// A pool of threads that share a call's tasks. They poll briefly for the next call, which mostly comes within
// microseconds, and then sleep. A thread that the system suspends before its first task delays no other: tasks are
// claimed one by one, and threads without tasks take those of others.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "vectors.h"

INLINE void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

// Scratch memory that only grows, aligned to cache lines.
class Scratch {
  public:
    float* take(size_t floats) {
        if (floats > size_) {
            memory_.reset(static_cast<float*>(std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64)));
            if (!memory_) std::abort();
            size_ = floats;
        }
        return memory_.get();
    }

  private:
    struct Free {
        void operator()(float* memory) const { std::free(memory); }
    };
    std::unique_ptr<float, Free> memory_;
    size_t size_ = 0;
};

class Pool {
  public:
    // `threads` includes the caller's own. Throws std::system_error if the system starts no more threads.
    Pool(int threads, int spin_us) : own(threads), spin_(std::chrono::microseconds(spin_us)), queues_(threads) {
        try {
            for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { serve(i); });
        } catch (...) {
            end();
            throw;
        }
    }
    ~Pool() { end(); }

    int threads() const { return (int)own.size(); }

    // Calls f(task, thread) for every task, on all threads, started in order. Returns when all are done.
    template <class Call> void run(int tasks, Call&& f) { start(tasks, f, false); }

    // The same, but each thread runs neighbouring tasks, from its own starting point. So the data that neighbours read
    // is in its cache, and no two threads write neighbouring memory at once. It then helps other threads from their
    // last task on.
    template <class Call> void spread(int tasks, Call&& f) { start(tasks, f, true); }

    std::vector<Scratch> own;  // one for each thread
    Scratch shared;  // for one call
    Scratch step;  // for a step of several calls

  private:
    // One word holds a call's number, the end of its tasks in this queue and the next task to claim. So a thread that
    // claims a task knows its call, and a straggler from the last call does no harm.
    struct alignas(64) Queue {
        static constexpr int kBits = 20;
        static constexpr uint64_t kMask = (1 << kBits) - 1;
        std::atomic<uint64_t> left{0};

        static uint64_t of(uint64_t generation, uint64_t next, uint64_t end) {
            return generation << (2 * kBits) | end << kBits | next;
        }
        static int next(uint64_t word) { return word & kMask; }
        static int end(uint64_t word) { return word >> kBits & kMask; }
        static uint64_t generation(uint64_t word) { return word >> (2 * kBits); }

        // Claims a task. Returns -1 if there is none.
        int first() {
            uint64_t word = left.load(std::memory_order_acquire);
            if (next(word) >= end(word)) return -1;
            word = left.fetch_add(1, std::memory_order_acq_rel);
            return next(word) < end(word) ? next(word) : -1;
        }
        int last() {
            uint64_t word = left.load(std::memory_order_acquire);
            while (next(word) < end(word))
                if (left.compare_exchange_weak(word, word - (1 << kBits), std::memory_order_acq_rel)) return end(word) - 1;
            return -1;
        }
    };
    static constexpr int kMost = 1 << (Queue::kBits - 1);  // leaves room for claims by threads that find no task left

    template <class Call> void start(int tasks, Call& f, bool apart) {
        if (workers_.empty() || tasks <= 1) {
            for (int i = 0; i < tasks; i++) f(i, 0);
            return;
        }
        call_ = [](void* context, int task, int thread) { (*static_cast<Call*>(context))(task, thread); };
        context_ = &f;
        apart_.store(apart, std::memory_order_relaxed);
        for (offset_ = 0; offset_ < tasks; offset_ += kMost) share(std::min(tasks - offset_, kMost));
    }

    void share(int tasks) {
        done_.store(0, std::memory_order_relaxed);
        generation_++;
        // Fill the first queue last, because the others wait for it.
        bool apart = apart_.load(std::memory_order_relaxed);
        for (int i = threads() - 1; i >= 0; i--) {
            int64_t first = apart ? i : std::min(i, 1), parts = apart ? threads() : 1;
            int64_t next = tasks * first / parts, end = std::min<int64_t>(tasks * (first + 1) / parts, tasks);
            queues_[i].left.store(Queue::of(generation_, next, end));
        }
        if (sleeping_.load()) {
            {
                std::lock_guard<std::mutex> lock(mutex_);
            }
            wake_.notify_all();
        }
        work(0);
        for (int i = 1; done_.load(std::memory_order_acquire) != tasks; i++) {
            // The thread with the last task may be waiting for this core.
            if (i % 4096 == 0) std::this_thread::yield();
            else pause_briefly();
        }
    }

    void end() {
        stop_.store(true);
        queues_[0].left.store(Queue::of(generation_ + 1, 0, 0));
        {
            std::lock_guard<std::mutex> lock(mutex_);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    void work(int thread) {
        for (int i = 0; i < threads(); i++) {
            Queue& queue = queues_[(thread + i) % threads()];
            for (;;) {
                int task = i && apart_.load(std::memory_order_relaxed) ? queue.last() : queue.first();
                if (task < 0) break;
                call_(context_, offset_ + task, thread);
                done_.fetch_add(1, std::memory_order_release);
            }
        }
    }

    void serve(int thread) {
        uint64_t seen = 0;
        for (;;) {
            wait_beyond(seen);
            if (stop_.load()) return;
            seen = Queue::generation(queues_[0].left.load());
            work(thread);
        }
    }

    void wait_beyond(uint64_t seen) {
        auto changed = [&] { return Queue::generation(queues_[0].left.load()) != seen; };
        auto end = std::chrono::steady_clock::now() + spin_;
        do {
            for (int i = 0; i < 64; i++) {
                if (changed()) return;
                pause_briefly();
            }
        } while (std::chrono::steady_clock::now() < end);
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1);
        wake_.wait(lock, changed);
        sleeping_.fetch_sub(1);
    }

    std::chrono::microseconds spin_;
    uint64_t generation_ = 0;
    void (*call_)(void*, int, int) = nullptr;
    void* context_ = nullptr;
    int offset_ = 0;
    std::atomic<bool> apart_{false};
    std::vector<Queue> queues_;
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};
