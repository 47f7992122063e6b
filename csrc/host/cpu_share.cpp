// A step whose rows are on several ranks: each computes its pieces of all sequences, and stores the keys and entries of all rows.
#include <algorithm>
#include <utility>

#include "cpu_backbone.h"

namespace dix {

std::vector<Slice> Backbone::own_slices() const {
    const auto first = share_->sequences.begin();
    return {first + share_->own_from, first + share_->own_to};
}

// Every rank gets the kept rows of its own sequences, and computes them alone from here on.
bool Backbone::drop_shared_rows() {
    std::vector<Slice> own = own_slices();
    int kept = 0;
    for (Slice& s : own) kept += s.rows = std::clamp(s.end - s.rect, 0, s.rows);
    const int width = kStreams * m_.hidden;
    gather(Gathered::kKept, w_.h.get(0), width, w_.shared, kept);
    gather(Gathered::kKept, w_.pre.get(0), kStreams, w_.shared_pre, kept);
    std::swap(w_.h, w_.shared);
    std::swap(w_.pre, w_.shared_pre);
    w_.slices = std::move(own);
    share_ = nullptr;
    place();
    return kept > 0;
}

// `rows` rows of all ranks' in the order in which they are asked for; without other ranks those that are here.
const float* Backbone::gather(Gathered what, const float* mine, int width, Buffer<float>& into, int rows) const {
    if (share_ == nullptr) return mine;
    float* out = into.get(size_t(rows) * width);
    share_->exchange(int32_t(what), mine, count_, width, out, rows);
    return out;
}

// Only the rank that a sequence belongs to drafts for it: it gets the taps of all its rows.
void Backbone::store_own_taps() {
    std::vector<Slice> own = own_slices();
    int rows = 0;
    for (const Slice& s : own) rows += s.rows;
    const float* taps = gather(Gathered::kOwn, w_.taps.get(0), m_.draft->main_proj.cols, w_.shared, rows);
    Share* share = std::exchange(share_, nullptr);
    std::swap(w_.slices, own);
    place();
    store_taps(taps);
    std::swap(w_.slices, own);
    place();
    share_ = share;
}

namespace {

// This rank's pieces of the sequences of a shared step. pieces: per piece its sequence, the first of its rows there, and their number.
std::vector<Slice> cut(const std::vector<Slice>& sequences, const int32_t* pieces, int count) {
    std::vector<Slice> result;
    for (int i = 0; i < count; ++i, pieces += 3) {
        Slice s = sequences[pieces[0]];
        s.sequence = pieces[0];
        s.start += pieces[1];
        s.ids += pieces[1];
        s.rows = pieces[2];
        s.end = s.start + s.rows;
        result.push_back(s);
    }
    return result;
}

}  // namespace
}  // namespace dix

// The same where several ranks compute the rows. ints: the sequences of all of them, of which own_from .. own_to are this rank's.
extern "C" void dix_step_shared(const dix::Model* model, void* work, const int32_t* ints, const int32_t* pieces, int32_t num_pieces, int32_t own_from,
                                int32_t own_to, dix::Gather exchange, float* logits) {
    auto& w = *static_cast<dix::Workspace*>(work);
    dix::Share share = {{}, own_from, own_to, exchange};
    const int flags = dix::read_slices(*model, ints, share.sequences);
    int row = 0;
    for (dix::Slice& s : share.sequences) {
        s.row = row;
        row += s.rows;
    }
    w.slices = dix::cut(share.sequences, pieces, num_pieces);
    dix::Backbone(*model, w, &share).run(flags & dix::kCompact, false, logits);
}
