// Which frame holds the page of a key: a hash table over keys that lie elsewhere, the compiled twin of `page_map.DictPageMap`.
//
// Open addressing with linear probing. A slot holds a frame and the first four bytes of its key, which SHA-256 has made as good as any
// hash; the key itself stays in the caller's buffer, 32 bytes per frame. A page is removed by moving later ones of its run back, so
// there are no tombstones and the table never has to be rebuilt. The caller owns all memory and makes more slots than there are frames.
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr size_t kKeyBytes = 32;

struct Slot {
    uint32_t tag;
    int32_t frame;  // below 0: empty
};

struct Table {
    Slot* slots;
    uint32_t capacity;
    uint8_t* keys;  // [num_frames, 32]
    int32_t num_frames;

    static uint32_t tag_of(const uint8_t* key) {
        uint32_t tag;
        std::memcpy(&tag, key, sizeof(tag));
        return tag;
    }

    // The slots are divided evenly among all tags, so that any capacity will do.
    uint32_t home(uint32_t tag) const { return static_cast<uint32_t>((static_cast<uint64_t>(tag) * capacity) >> 32); }
    uint32_t after(uint32_t slot) const { return slot + 1 == capacity ? 0 : slot + 1; }
    uint32_t distance(uint32_t from, uint32_t to) const { return to >= from ? to - from : to + capacity - from; }
    uint8_t* key(int32_t frame) const { return keys + kKeyBytes * static_cast<size_t>(frame); }

    bool exists(int32_t frame) const { return frame >= 0 && frame < num_frames; }

    // The frame of `wanted`, or -1.
    int32_t find(const uint8_t* wanted) const {
        const uint32_t tag = tag_of(wanted);
        for (uint32_t slot = home(tag); slots[slot].frame >= 0; slot = after(slot)) {
            if (slots[slot].tag == tag && std::memcmp(key(slots[slot].frame), wanted, kKeyBytes) == 0) return slots[slot].frame;
        }
        return -1;
    }

    void insert(const uint8_t* added, int32_t frame) {
        std::memcpy(key(frame), added, kKeyBytes);
        const uint32_t tag = tag_of(added);
        uint32_t slot = home(tag);
        while (slots[slot].frame >= 0) slot = after(slot);
        slots[slot] = {tag, frame};
    }

    bool remove(int32_t frame) {
        if (!exists(frame)) return false;
        uint32_t hole = home(tag_of(key(frame)));
        while (slots[hole].frame != frame) {
            if (slots[hole].frame < 0) return false;
            hole = after(hole);
        }
        for (uint32_t slot = after(hole); slots[slot].frame >= 0; slot = after(slot)) {
            // Whoever would still be found from its home may close the gap.
            if (distance(home(slots[slot].tag), slot) >= distance(hole, slot)) {
                slots[hole] = slots[slot];
                hole = slot;
            }
        }
        slots[hole].frame = -1;
        return true;
    }

    void fetch(const uint8_t* wanted) const { __builtin_prefetch(&slots[home(tag_of(wanted))]); }
};

}  // namespace

// Frames of the leading keys that are present, into `frames`. Returns how many there are.
extern "C" int dix_page_table_match(void* slots, uint32_t capacity, uint8_t* keys, int32_t num_frames, const uint8_t* wanted, int count, int32_t* frames) {
    const Table table{static_cast<Slot*>(slots), capacity, keys, num_frames};
    for (int i = 0; i < count; ++i) {
        if (i + 1 < count) table.fetch(wanted + kKeyBytes * (i + 1));
        const int32_t frame = table.find(wanted + kKeyBytes * i);
        if (frame < 0) return i;
        frames[i] = frame;
    }
    return count;
}

// Adds keys for frames that hold none. Returns -1, or the number of the first key that is present already or whose frame does not exist;
// then nothing was added.
extern "C" int dix_page_table_insert(void* slots, uint32_t capacity, uint8_t* keys, int32_t num_frames, const uint8_t* added, int count, const int32_t* frames) {
    Table table{static_cast<Slot*>(slots), capacity, keys, num_frames};
    for (int i = 0; i < count; ++i) {
        if (!table.exists(frames[i]) || table.find(added + kKeyBytes * i) >= 0) return i;
    }
    for (int i = 0; i < count; ++i) table.insert(added + kKeyBytes * i, frames[i]);
    return -1;
}

// Removes the keys of frames. Returns -1, or the number of the first frame that is not in the table.
extern "C" int dix_page_table_remove(void* slots, uint32_t capacity, uint8_t* keys, int32_t num_frames, int count, const int32_t* frames) {
    Table table{static_cast<Slot*>(slots), capacity, keys, num_frames};
    for (int i = 0; i < count; ++i) {
        if (!table.remove(frames[i])) return i;
    }
    return -1;
}
