// Sums and messages between the ranks of a model: processes that compute it together, through memory that they share.
//
// An exchange is a sequence of rounds that all ranks go through alike. In a round a rank may write its slot, then
// arrives, and waits for the ranks whose slots it reads. Each rank has two slots, used in turn: who has arrived at a
// round has read all that it wanted of the round before. So a slot is written once all others have arrived at the
// round before this one, and a rank that reads nothing does not wait.
//
// Ranks of several machines: each machine has a copy of the memory. `carry` sends what a rank of this machine writes to
// another machine, where `deliver` writes it into the copy: there the rank is one like the others. A round that nobody
// there reads may be overwritten before it is sent, or while it is; one that somebody reads cannot, as its rank writes
// its slot again only once it knows from that machine that it was read.
#pragma once

#include <linux/futex.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>

#include "pool.h"

constexpr int64_t kMostProcesses = 16;

// The rounds of a rank of which another machine may not have the last ones yet, while it needs them. Before these are read
// the rank may have gone on by two rounds, the second of which writes nothing: it waits for a message then.
constexpr uint32_t kKept = 4;

// How far a rank has come. `waiting`: how many sleep until it has come further. `bytes`: written in each of its rounds.
struct alignas(64) Arrived {
    std::atomic<uint32_t> round, waiting, bytes[kKept];
};

// The head of the shared memory, zero at first. The slots follow at kHead: two of each rank.
struct RanksHead {
    std::atomic<uint32_t> failed;
    Arrived arrived[kMostProcesses];
};
constexpr int64_t kHead = 4096;
static_assert(sizeof(RanksHead) <= kHead && std::atomic<uint32_t>::is_always_lock_free);

class Exchange {
  public:
    // `slot`: the bytes of a slot, a multiple of 64. `spin_us`: how long a rank polls before it sleeps.
    Exchange(void* memory, int64_t rank, int64_t ranks, int64_t slot, int64_t spin_us)
        : memory_((char*)memory), rank_(rank), ranks_(ranks), slot_(slot), spin_(std::chrono::microseconds(spin_us)) {}

    int64_t rank() const { return rank_; }
    int64_t ranks() const { return ranks_; }
    bool failed() const { return head().failed.load(std::memory_order_acquire); }

    // Ends all waiting, of all ranks, for good.
    void fail() {
        head().failed.store(1);
        for (int64_t r = 0; r < ranks_; r++) wake(head().arrived[r]);
    }

    // Adds up `x`, [count], over all ranks, in their order. The sum is the same to the bit on every rank.
    void sum(Pool& pool, float* x, int64_t count) {
        constexpr int64_t kTask = 16384;
        for (int64_t from = 0, step = slot_ / (int64_t)sizeof(float); from < count; from += step) {
            int64_t floats = std::min(step, count - from);
            float* part = x + from;
            memcpy(begin(), part, floats * sizeof(float));
            arrive(floats * sizeof(float));
            for (int64_t r = 0; r < ranks_; r++)
                if (!wait(r)) return;
            pool.spread((int)((floats + kTask - 1) / kTask), [&](int task, int) {
                int64_t first = task * kTask, end = std::min(first + kTask, floats);
                const float* of = (const float*)slot(0);
                memcpy(part + first, of + first, (end - first) * sizeof(float));
                for (int64_t r = 1; r < ranks_; r++) {
                    of = (const float*)slot(r);
                    for (int64_t i = first; i < end; i++) part[i] += of[i];
                }
            });
        }
    }

    // Sends the message to all others, without waiting for them. Its length goes before it.
    void send(const char* message, int64_t length) {
        int64_t sent = std::min(length, slot_ - kLength);
        char* to = begin();
        memcpy(to, &length, sizeof length);
        memcpy(to + kLength, message, sent);
        arrive(kLength + sent);
        for (; sent < length && !failed(); sent += std::min(slot_, length - sent)) {
            int64_t bytes = std::min(slot_, length - sent);
            memcpy(begin(), message + sent, bytes);
            arrive(bytes);
        }
    }

    // Waits for a message of rank `of`. Returns its length, -1 if the exchange has failed. `take` it then.
    int64_t receive(int64_t of) {
        round_++;
        arrive(0);
        if (!wait(of)) return -1;
        int64_t length;
        memcpy(&length, slot(of), sizeof length);
        return length;
    }
    void take(int64_t of, char* message, int64_t length) {
        int64_t taken = std::min(length, slot_ - kLength);
        memcpy(message, slot(of) + kLength, taken);
        for (; taken < length; taken += std::min(slot_, length - taken)) {
            round_++;
            arrive(0);
            if (!wait(of)) return;
            memcpy(message + taken, slot(of), std::min(slot_, length - taken));
        }
    }

    // Gives rank `to` what each rank has, `length` bytes each: `gathered`, [ranks, length], null elsewhere.
    void gather(int64_t to, const char* own, int64_t length, char* gathered) {
        for (int64_t from = 0; from < length; from += slot_) {
            int64_t bytes = std::min(slot_, length - from);
            memcpy(begin(), own + from, bytes);
            arrive(rank_ == to ? 0 : bytes);
            for (int64_t r = 0; rank_ == to && r < ranks_; r++) {
                if (!wait(r)) return;
                memcpy(gathered + r * length + from, slot(r), bytes);
            }
        }
    }

    // Sends to another machine what `rank`, of this one, writes: until the exchange has failed, or the socket.
    void carry(int64_t rank, int end) {
        Arrived& of = head().arrived[rank];
        for (uint32_t sent = 0; wait(rank, sent + 1);) {
            uint32_t now = of.round.load(std::memory_order_acquire);
            if (now - sent > kKept) sent = now - kKept;
            while (sent != now) {
                sent++;
                Carried carried{sent, of.bytes[sent % kKept].load()};
                if (!send_all(end, (const char*)&carried, sizeof carried) ||
                    !send_all(end, slot(rank, sent), carried.bytes))
                    return lose(end);
            }
        }
        lose(end);
    }

    // Writes here what `rank`, of another machine, has written there: until the exchange has failed, or the socket.
    void deliver(int64_t rank, int end) {
        Arrived& of = head().arrived[rank];
        for (Carried carried; receive_all(end, (char*)&carried, sizeof carried) && carried.bytes <= slot_;) {
            if (!receive_all(end, slot(rank, carried.round), carried.bytes)) break;
            of.round.store(carried.round);
            if (of.waiting.load()) wake(of);
        }
        lose(end);
    }

  private:
    static constexpr int64_t kLength = 64;

    // What goes before a slot's content.
    struct Carried {
        uint32_t round, bytes;
    };

    static bool send_all(int end, const char* from, int64_t bytes) {
        for (int64_t done; bytes > 0; from += done, bytes -= done) {
            done = ::send(end, from, bytes, MSG_NOSIGNAL);
            if (done < 0 && errno == EINTR) done = 0;
            if (done < 0) return false;
        }
        return true;
    }

    static bool receive_all(int end, char* to, int64_t bytes) {
        for (int64_t done; bytes > 0; to += done, bytes -= done) {
            done = recv(end, to, bytes, 0);
            if (done < 0 && errno == EINTR)
                done = 0;
            else if (done <= 0)
                return false;
        }
        return true;
    }

    void lose(int end) {
        fail();
        shutdown(end, SHUT_RDWR);
    }

    RanksHead& head() const { return *(RanksHead*)memory_; }
    // The slot of a rank in this round.
    char* slot(int64_t rank) const { return slot(rank, round_); }
    char* slot(int64_t rank, uint32_t round) const { return memory_ + kHead + (2 * rank + round % 2) * slot_; }

    // Begins a round. Returns this rank's slot, which no other still reads.
    char* begin() {
        for (int64_t r = 0; r < ranks_; r++) wait(r);
        round_++;
        return slot(rank_);
    }

    // `bytes`: written to the slot.
    void arrive(int64_t bytes) {
        Arrived& own = head().arrived[rank_];
        own.bytes[round_ % kKept].store(bytes, std::memory_order_relaxed);
        own.round.store(round_);
        if (own.waiting.load()) wake(own);
    }

    static void wake(Arrived& of) { syscall(SYS_futex, &of.round, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

    // Waits until a rank has arrived at this round. Returns false if the exchange has failed.
    bool wait(int64_t rank) { return wait(rank, round_); }
    bool wait(int64_t rank, uint32_t round) {
        Arrived& of = head().arrived[rank];
        auto reached = [&] { return (int32_t)(of.round.load(std::memory_order_acquire) - round) >= 0; };
        if (reached()) return !failed();
        for (auto end = std::chrono::steady_clock::now() + spin_; std::chrono::steady_clock::now() < end;)
            for (int i = 0; i < 64; i++) {
                if (reached()) return !failed();
                pause_briefly();
            }
        of.waiting.fetch_add(1);
        for (uint32_t seen; !failed();) {
            seen = of.round.load();
            if ((int32_t)(seen - round) >= 0) break;
            timespec most{0, 200'000'000};  // a failure between the look and the sleep is seen then
            syscall(SYS_futex, &of.round, FUTEX_WAIT, seen, &most, nullptr, 0);
        }
        of.waiting.fetch_sub(1);
        return !failed();
    }

    char* memory_;
    int64_t rank_, ranks_, slot_;
    uint32_t round_ = 0;
    std::chrono::microseconds spin_;
};
