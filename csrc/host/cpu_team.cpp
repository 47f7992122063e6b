// How a team of threads gives out rows.
#include "cpu_team.h"

#include <algorithm>
#include <cstdio>
#if defined(__linux__)
#include <sched.h>
#endif

namespace dix {
namespace {

constexpr int kLeastPart = 16, kMostPart = 64;  // rows: few enough to balance, enough to reuse weights

// Whether `threads` threads, one of them running now, find a core each. Unknown means yes.
bool cores_free(int threads) {
    int running = 0;
    std::FILE* file = std::fopen("/proc/loadavg", "r");
    if (file == nullptr) return true;
    const bool found = std::fscanf(file, "%*f %*f %*f %d", &running) == 1;
    std::fclose(file);
    int cores = int(std::thread::hardware_concurrency());
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) cores = CPU_COUNT(&allowed);
#endif
    return !found || running - 1 + threads <= cores;
}

}  // namespace

Team::~Team() {
    {
        const std::lock_guard lock(mutex_);
        ending_ = true;
    }
    start_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
}

void Team::set(int threads, int least_rows, bool polite) {
    threads_ = std::max(1, threads);
    least_rows_ = least_rows;
    polite_ = polite;
}

void Team::begin(int rows) {
    active_ = threads_ > 1 && rows >= least_rows_ && (!polite_ || cores_free(threads_)) ? threads_ : 1;
    while (int(helpers_.size()) + 1 < active_) {
        const int member = int(helpers_.size()) + 1;
        helpers_.emplace_back([this, member] { help(member); });
    }
}

void Team::split(int count, const Work& work) {
    if (active_ == 1 || count < 2) return work(0, count, 0);
    {
        const std::lock_guard lock(mutex_);
        count_ = count;
        part_ = std::clamp(count / (4 * active_), std::min(kLeastPart, (count + 1) / 2), kMostPart) & ~1;
        part_ = std::max(part_, 2);
        next_ = 0;
        work_ = &work;
        ++round_;
    }
    start_.notify_all();
    take_parts(work, 0);
    std::unique_lock lock(mutex_);
    work_ = nullptr;  // who wakes only now finds nothing to do
    done_.wait(lock, [this] { return busy_ == 0; });
}

void Team::take_parts(const Work& work, int member) {
    for (;;) {
        const int from = next_.fetch_add(part_);
        if (from >= count_) return;
        work(from, std::min(count_, from + part_), member);
    }
}

void Team::help(int member) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
        start_.wait(lock, [&] { return ending_ || (work_ != nullptr && round_ != seen && member < active_); });
        if (ending_) return;
        seen = round_;
        const Work& work = *work_;
        ++busy_;
        lock.unlock();
        take_parts(work, member);
        lock.lock();
        if (--busy_ == 0) done_.notify_one();
    }
}

}  // namespace dix
