// Threads that share the rows of a long step. Nobody spins: who has nothing to do sleeps, and the caller never waits for a thread that the
// machine does not run, only for parts that one has begun.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace dix {

class Team {
   public:
    using Work = std::function<void(int from, int to, int member)>;

    ~Team();
    // Threads of the steps to come, the caller included. Steps of fewer rows stay on the caller, and with `polite` those that find the
    // machine's cores in use.
    void set(int threads, int least_rows, bool polite);
    int members() const { return threads_; }
    // Decide for one step.
    void begin(int rows);
    // Call `work` for parts of [0, count), which begin at even numbers, and return when all are done. Member 0 is the caller.
    void split(int count, const Work& work);

   private:
    void help(int member);
    void take_parts(const Work& work, int member);

    int threads_ = 1, least_rows_ = 0, active_ = 1;
    bool polite_ = true;
    std::vector<std::thread> helpers_;
    std::mutex mutex_;
    std::condition_variable start_, done_;
    const Work* work_ = nullptr;  // while parts are given out
    uint64_t round_ = 0;
    int busy_ = 0, count_ = 0, part_ = 0;
    bool ending_ = false;
    std::atomic<int> next_{0};
};

}  // namespace dix
