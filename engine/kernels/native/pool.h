// Threads that share a call's tasks: they spin briefly for the next call, which mostly comes within microseconds, then
// sleep. A thread that the system has put aside before it began holds up nobody: tasks are claimed one by one.
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

// Memory that only grows, aligned to cache lines.
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
    // `threads` includes the caller's own.
    Pool(int threads, int spin_us) : own(threads), spin_(std::chrono::microseconds(spin_us)) {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { serve(i); });
    }
    ~Pool() {
        stop_.store(true);
        ticket_.store(Ticket(generation_ + 1, 0));
        {
            std::lock_guard<std::mutex> lock(mutex_);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    int threads() const { return (int)own.size(); }

    // f(task, thread) for every task, on all threads; returns when all are done.
    template <class Call> void run(int tasks, Call&& f) {
        if (workers_.empty() || tasks <= 1) {
            for (int i = 0; i < tasks; i++) f(i, 0);
            return;
        }
        call_ = [](void* context, int task, int thread) {
            (*static_cast<std::remove_reference_t<Call>*>(context))(task, thread);
        };
        context_ = &f;
        for (offset_ = 0; offset_ < tasks; offset_ += kMost) share(std::min(tasks - offset_, kMost));
    }

    std::vector<Scratch> own;  // of each thread
    Scratch shared;  // of a call
    Scratch step;  // of a step of several calls

  private:
    // A call's number, its tasks and the next one to be claimed in one word: who claims a task sees which call it is of,
    // and a straggler from the last call does no harm.
    static constexpr int kBits = 20;
    static constexpr int kMost = 1 << (kBits - 1);  // leaves room for the threads that find nothing left
    static uint64_t Ticket(uint64_t generation, uint64_t tasks) {
        return generation << (2 * kBits) | tasks << kBits;
    }
    static uint64_t generation_of(uint64_t ticket) { return ticket >> (2 * kBits); }

    void share(int tasks) {
        done_.store(0, std::memory_order_relaxed);
        generation_++;
        ticket_.store(Ticket(generation_, tasks));
        if (sleeping_.load()) {
            {
                std::lock_guard<std::mutex> lock(mutex_);
            }
            wake_.notify_all();
        }
        work(0);
        for (int i = 1; done_.load(std::memory_order_acquire) != tasks; i++) {
            // Whoever has the last task may be waiting for this very core.
            if (i % 4096 == 0) std::this_thread::yield();
            else pause_briefly();
        }
    }

    void work(int thread) {
        for (;;) {
            uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
            int next = ticket & ((1 << kBits) - 1), tasks = ticket >> kBits & ((1 << kBits) - 1);
            if (next >= tasks) return;
            call_(context_, offset_ + next, thread);
            done_.fetch_add(1, std::memory_order_release);
        }
    }

    void serve(int thread) {
        uint64_t seen = 0;
        for (;;) {
            wait_beyond(seen);
            if (stop_.load()) return;
            seen = generation_of(ticket_.load());
            work(thread);
        }
    }

    void wait_beyond(uint64_t seen) {
        auto changed = [&] { return generation_of(ticket_.load()) != seen; };
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
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};
