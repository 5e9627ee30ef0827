// Hits, misses and victims of windows, and the new books. Contract: reference.py.
#pragma once

#include <algorithm>

#include "../cpp/tensors.h"

namespace kvdrive {

struct Victim {
  bool held;  // free entries go first
  float priority;
  int64_t stamp;
  int32_t entry;
  bool operator<(const Victim& other) const {
    if (held != other.held) return held < other.held;
    if (priority != other.priority) return priority < other.priority;
    if (stamp != other.stamp) return stamp < other.stamp;
    return entry < other.entry;
  }
};

// The book of one window: `n` entries.
struct Window {
  int32_t *chunks, *groups;
  int64_t* stamps;
  const int32_t* slots;
  int n;
};

struct Counts {
  int64_t hits = 0, misses = 0, evictions = 0;
};

inline Counts probe(Window w, const int32_t* chunk_ids, const int32_t* group_ids, const float* scores, int k, int64_t now,
                    bool by_score, bool stamps_hits, int32_t* out_slots, bool* out_misses) {
  Counts counts;
  int n_selected = 0, last = -1;
  while (n_selected < k && chunk_ids[n_selected] >= 0) last = std::max(last, chunk_ids[n_selected++]);
  for (int e = 0; e < w.n; e++) last = std::max(last, w.chunks[e]);
  int32_t* entry_of = scratch<int32_t, 20>(last + 1);  // entry + 1 of each resident chunk; all 0 between calls
  bool* is_selected = scratch<bool, 21>(w.n);
  int32_t* entries = scratch<int32_t, 22>(k);
  std::fill_n(is_selected, w.n, false);
  for (int e = 0; e < w.n; e++)
    if (w.chunks[e] >= 0) entry_of[w.chunks[e]] = e + 1;
  int n_misses = 0;
  for (int i = 0; i < n_selected; i++) {
    entries[i] = entry_of[chunk_ids[i]] - 1;
    if (entries[i] >= 0)
      is_selected[entries[i]] = true;
    else
      n_misses++;
  }
  for (int e = 0; e < w.n; e++)
    if (w.chunks[e] >= 0) entry_of[w.chunks[e]] = 0;
  Victim* victims = scratch<Victim, 23>(w.n);
  int n_victims = 0;
  if (n_misses > 0) {
    for (int e = 0; e < w.n; e++) {
      if (is_selected[e]) continue;
      const bool held = w.chunks[e] >= 0;
      victims[n_victims++] = {held, held && by_score ? scores[w.groups[e]] : 0.0f, w.stamps[e], e};
    }
    TVM_FFI_ICHECK_LE(n_misses, n_victims) << "a window is smaller than the selection";
    std::partial_sort(victims, victims + n_misses, victims + n_victims);
  }
  int nth = 0;
  for (int i = 0; i < k; i++) {
    const bool valid = i < n_selected, miss = valid && entries[i] < 0;
    out_misses[i] = miss;
    if (!valid) {
      out_slots[i] = 0;
      continue;
    }
    if (miss) {
      counts.evictions += victims[nth].held;
      entries[i] = victims[nth++].entry;
      w.chunks[entries[i]] = chunk_ids[i];
    }
    w.groups[entries[i]] = group_ids[i];
    if (miss || stamps_hits) w.stamps[entries[i]] = now + k - 1 - i;
    out_slots[i] = w.slots[entries[i]];
  }
  counts.misses = n_misses;
  counts.hits = n_selected - n_misses;
  return counts;
}

inline void probe_books(TensorView chunks, TensorView groups, TensorView stamps, TensorView slots, TensorView n_entries,
                         TensorView seq_ids, TensorView chunk_ids, TensorView group_ids, TensorView scores, int64_t now,
                         bool by_score, bool stamps_hits, TensorView slot_ids, TensorView misses, TensorView counts) {
  auto* book_chunks = data<int32_t>(chunks, 3, "chunks");
  auto* book_groups = data<int32_t>(groups, 3, "groups");
  auto* book_stamps = data<int64_t>(stamps, 3, "stamps");
  const auto* book_slots = data<int32_t>(slots, 3, "slots");
  const auto* entries = data<int64_t>(n_entries, 1, "n_entries");
  const auto* seq = data<int64_t>(seq_ids, 1, "seq_ids");
  const auto* ids = data<int32_t>(chunk_ids, 3, "chunk_ids");
  const auto* of_group = data<int32_t>(group_ids, 3, "group_ids");
  const auto* score = data<float>(scores, 3, "scores");
  auto* out_slots = data<int32_t>(slot_ids, 3, "slot_ids");
  auto* out_misses = data<bool>(misses, 3, "misses");
  auto* out_counts = data<int64_t>(counts, 2, "counts");
  const int n_batch = int(chunk_ids.size(0)), n_heads = int(chunk_ids.size(1)), k = int(chunk_ids.size(2));
  const int64_t width = chunks.size(2), n_groups = scores.size(2);
  std::vector<Counts> found(size_t(n_batch) * n_heads);
  std::vector<std::exception_ptr> failed(1);
#pragma omp parallel for schedule(dynamic, 1) if (n_batch * n_heads * k > 2048)
  for (int item = 0; item < n_batch * n_heads; item++) {
    const int b = item / n_heads;
    const int64_t at = (seq[b] * n_heads + item % n_heads) * width, row = int64_t(item) * k;
    try {
      found[item] = probe({book_chunks + at, book_groups + at, book_stamps + at, book_slots + at, int(entries[seq[b]])}, ids + row,
                          of_group + row, score + item * n_groups, k, now, by_score, stamps_hits, out_slots + row, out_misses + row);
    } catch (...) {
#pragma omp critical
      failed[0] = std::current_exception();
    }
  }
  if (failed[0]) std::rethrow_exception(failed[0]);
  for (int b = 0; b < n_batch; b++) {
    for (int i = 0; i < 3; i++) out_counts[b * 3 + i] = 0;
    for (int h = 0; h < n_heads; h++) {
      const Counts& c = found[size_t(b) * n_heads + h];
      out_counts[b * 3] += c.hits, out_counts[b * 3 + 1] += c.misses, out_counts[b * 3 + 2] += c.evictions;
    }
  }
}

}  // namespace kvdrive
