// The backbone over one step. Its parts: cpu_backbone.cpp, cpu_select.cpp, and cpu_share.cpp for steps of several ranks.
#pragma once

#include <vector>

#include "cpu_step.h"

namespace dix {

constexpr int32_t kEntries = 1 << 30;  // names of compressed entries follow those of the window, which are positions

class Backbone : Rows {
   public:
    // share: when several ranks compute the step's rows; w.slices are then this rank's pieces.
    Backbone(const Model& model, Workspace& work, Share* share) : Rows(model, work), share_(share) {}
    // keep: leave the taps to the next draft, which needs them only if there is one.
    void run(bool compact, bool keep, float* logits);
    // Bring the draft stages' windows up to the positions of a draft. ints: see `draft_block`.
    void settle_taps(const int32_t* ints, int count);

   private:
    void look_up(const Engram& engram);
    void compress(const Layer& layer);
    const float* pool(const Compressor& c, const Slice& s, const float* both, int row, float* out) const;
    void select(const Layer& layer);
    bool must_choose(const Indexer& indexer, int row, int ratio) const;
    void score_slice(const Indexer& indexer, const Slice& s, int ratio);
    void score_pair(const Indexer& indexer, const float* const* keys, int first, int rows, int count, int ratio, MemberScratch& own);
    void take_all(const Indexer& indexer, int row, int ratio, MemberScratch& own);
    void choose(const Indexer& indexer, int row, float* scores, int ratio, MemberScratch& own);
    void locate(const Indexer& indexer, int row, int ratio, const int32_t* entries, int count);
    bool drop_rows();
    bool drop_shared_rows();
    std::vector<Slice> own_slices() const;
    const float* gather(Gathered what, const float* mine, int width, Buffer<float>& into, int rows) const;
    void attend_window(const Layer& layer, const float* keys);
    void window(const Layer& layer, const float* keys, int row, KeyList& list) const;
    void store_keys(float* ring, const float* key);
    void tap(int place);
    void store_taps(const float* taps);
    void store_own_taps();
    bool can_keep_taps() const;
    void keep_taps();
    TapWindow& tap_window(int slot) const;
    // Where the taps of a position wait for the draft stages.
    float* tap_row(int slot, int position) const {
        const Draft& draft = *m_.draft;
        return draft.taps + (int64_t(slot) * draft.tap_places + position % draft.tap_places) * draft.main_proj.cols;
    }
    void read_logits(float* logits);
    void read_output(int row, float* x) const;
    // The sequences whose keys this step stores, and the one that a slice belongs to.
    const std::vector<Slice>& stored() const { return share_ ? share_->sequences : w_.slices; }
    int stored_rows() const { return stored().back().row + stored().back().rows; }
    const Slice& whole(const Slice& s) const { return share_ ? share_->sequences[s.sequence] : s; }
    int rect(const Slice& s) const { return decoder_ ? s.rect : 0; }
    int visible(int row, int ratio) const { return (w_.positions.get(0)[row] + 1) / ratio; }
    float* ring_row(float* ring, const Slice& s, int position) const {
        return ring + (int64_t(s.slot) * m_.ring_rows + position % m_.ring_rows) * m_.head_dim;
    }

    Share* share_;
    bool decoder_ = false;
};

// Flags of a step, beside its slices.
enum StepFlags { kCompact = 1, kKeepTaps = 2 };

int read_slices(const Model& model, const int32_t* ints, std::vector<Slice>& slices);

}  // namespace dix
