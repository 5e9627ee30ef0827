// Score all groups of an index, take the best ones, cut the last. Contract: reference.py.
#pragma once

#include "../cpp/home.h"
#include "../cpp/rows.h"
#include "../cpp/tensors.h"

namespace kvdrive {

constexpr int SCORED_AT_ONCE = 256;  // groups of one work item

// The books of one layer's index and of the home, see reference.py.
template <typename T>
struct Index {
  const int32_t *slots, *begins, *sizes, *members;
  const int64_t *pages, *n_pages;
  int64_t max_pages, per_page, slots_per_page, members_per_page, n_heads;
  const T* vectors;  // [S, vectors_per_slot, D]
  int64_t vectors_per_slot;
  Home<T> home;
  int64_t chunk;

  int32_t member(int64_t seq, int64_t h, int64_t position) const {
    const int64_t page = pages[seq * max_pages + position / members_per_page];
    return members[(page * n_heads + h) * members_per_page + position % members_per_page];
  }
};

// log sum over the query heads of exp(q . mean key - lse), the dot product capped as in attention: a chunk's own score.
template <typename T>
inline float chunk_score(const Index<T>& index, const float* q, float cap, const float* lse, int n_group, int dim, const T* key) {
  float logits[64], top = NEVER, total = 0;
  float* mean = scratch<float, 5>(dim);
  for (int d = 0; d < dim; d += W) {
    vfloat sum = load(key + d);
    for (int c = 1; c < index.chunk; c++) sum += load(key + c * dim + d);
    store(mean + d, sum / float(index.chunk));
  }
  for (int g = 0; g < n_group; g++) {
    vfloat dot{};
    for (int d = 0; d < dim; d += W) dot += load(q + g * dim + d) * load(mean + d);
    const float score = sum(dot);
    logits[g] = (cap > 0 ? cap * std::tanh(score / cap) : score) - lse[g];
    top = std::max(top, logits[g]);
  }
  for (int g = 0; g < n_group; g++) total += std::exp(logits[g] - top);
  return top + std::log(total);
}

// Turn logits [n_group, stride] of n groups into scores [n]; -1 where a group is empty. lse [n_group].
inline void softmax_sum(float* logits, int n_group, int stride, int n, const int32_t* sizes, float* scores, float* lse) {
  std::fill_n(scores, n, 0.0f);
  for (int g = 0; g < n_group; g++) {
    float* mine = logits + size_t(g) * stride;
    float top = NEVER;
    for (int i = 0; i < n; i++) {
      mine[i] = sizes[i] ? mine[i] : NEVER;
      top = std::max(top, mine[i]);
    }
    std::fill(mine + n, mine + (n + W - 1) / W * W, NEVER);
    vfloat total{};
    for (int i = 0; i < n; i += W) {
      const vfloat weight = exp_negative(load(mine + i) - top);
      store(mine + i, weight);
      total += weight;
    }
    const float denominator = sum(total);
    lse[g] = top + std::log(denominator);
    for (int i = 0; i < n; i++) scores[i] += mine[i] / denominator;
  }
  for (int i = 0; i < n; i++) scores[i] = sizes[i] ? scores[i] : -1.0f;
}

// Walk the groups best first (ties: lower id) until `wanted` chunks are taken.
template <typename T>
inline void fill(const Index<T>& index, int64_t seq, int64_t h, const float* q, float cap, const float* lse, int n_group, int dim,
                 int n, const float* scores, const int32_t* sizes, const int32_t* begins, int wanted, int32_t* chunk_ids,
                 int32_t* group_ids) {
  uint64_t* heap = scratch<uint64_t, 6>(n);
  int n_heap = 0;
  for (int i = 0; i < n; i++) {
    if (!sizes[i]) continue;
    uint32_t bits;
    const float score = std::max(scores[i], 0.0f);
    std::memcpy(&bits, &score, sizeof bits);
    heap[n_heap++] = uint64_t(bits) << 32 | (0xffffffffu - uint32_t(i));
  }
  std::make_heap(heap, heap + n_heap);
  int taken = 0;
  while (taken < wanted && n_heap > 0) {
    const int group = int(0xffffffffu - uint32_t(heap[0]));
    std::pop_heap(heap, heap + n_heap--);
    const int size = sizes[group], rest = wanted - taken;
    int32_t* target = chunk_ids + taken;
    if (size <= rest) {
      for (int i = 0; i < size; i++) target[i] = index.member(seq, h, begins[group] + i);
    } else {
      auto* ranked = scratch<std::pair<float, int32_t>, 7>(size);
      for (int i = 0; i < size; i++) {
        const int32_t id = index.member(seq, h, begins[group] + i);
        ranked[i] = {chunk_score(index, q, cap, lse, n_group, dim, index.home.chunk(seq, h, id)), id};
      }
      std::stable_sort(ranked, ranked + size, [](const auto& a, const auto& b) { return a.first > b.first; });
      for (int i = 0; i < rest; i++) target[i] = ranked[i].second;
    }
    const int count = std::min(size, rest);
    std::fill_n(group_ids + taken, count, group);
    taken += count;
  }
}

inline void select_chunks(TensorView q, TensorView arena, TensorView slots, TensorView begins, TensorView sizes,
                          TensorView members, TensorView pages, TensorView n_pages, TensorView home, int64_t layer, TensorView blocks,
                          TensorView seq_ids, TensorView n_wanted, double scale, double logit_cap, TensorView chunk_ids,
                          TensorView group_ids, TensorView scores) {
  const int n_batch = int(q.size(0)), n_heads = int(q.size(1)), n_group = int(q.size(2)), dim = int(q.size(3));
  TVM_FFI_ICHECK(dim % W == 0 && n_group <= 64);
  TVM_FFI_ICHECK(chunk_ids.dtype().bits == 32 && home.ndim() == 7);
  const auto* seq = data<int64_t>(seq_ids, 1, "seq_ids");
  const auto* wanted = data<int64_t>(n_wanted, 1, "n_wanted");
  auto* out_chunks = data<int32_t>(chunk_ids, 3, "chunk_ids");
  auto* out_groups = data<int32_t>(group_ids, 3, "group_ids");
  auto* out_scores = data<float>(scores, 3, "scores");
  const int width = int(chunk_ids.size(2)), max_groups = int(scores.size(2));
  const int stride = (max_groups + SCORED_AT_ONCE - 1) / SCORED_AT_ONCE * SCORED_AT_ONCE;
  by_type(arena, "arena", [&](auto element) {
    using T = decltype(element);
    const Index<T> index{data<int32_t>(slots, 3, "slots"), data<int32_t>(begins, 3, "begins"), data<int32_t>(sizes, 3, "sizes"),
                         data<int32_t>(members, 3, "members"), data<int64_t>(pages, 2, "pages"),
                         data<int64_t>(n_pages, 1, "n_pages"), pages.size(1), sizes.size(2),
                         slots.size(2), members.size(2), n_heads, data<T>(arena, 4, "arena"), arena.size(1) * arena.size(2),
                         Home<T>(home, blocks, layer), home.size(5)};
    const T* queries = data<T>(q, 4, "q");
    const int items = n_batch * n_heads, ranges = stride / SCORED_AT_ONCE;
    float* logits = scratch<float, 8>(size_t(items) * n_group * stride);
    const auto query_of = [&](int item) {
      float* out = scratch<float, 9>(n_group * dim);
      read_row(queries + size_t(item) * n_group * dim, n_group * dim, float(scale), out);
      return out;
    };
#pragma omp parallel
    {
#pragma omp for schedule(dynamic, 1) collapse(2)
      for (int item = 0; item < items; item++) {
        for (int range = 0; range < ranges; range++) {
          const int64_t sequence = seq[item / n_heads], h = item % n_heads;
          const int n = int(index.n_pages[sequence] * index.per_page), first = range * SCORED_AT_ONCE;
          const T** rows = scratch<const T*, 10>(SCORED_AT_ONCE + 4);
          int count = 0;
          for (int i = first; i < std::min(n, first + SCORED_AT_ONCE); i++) {
            const int64_t page = index.pages[sequence * index.max_pages + i / index.per_page], at = i % index.per_page;
            const int64_t slot = index.slots[(page * n_heads + h) * index.slots_per_page + at / index.vectors_per_slot];
            rows[count++] = index.vectors + (slot * index.vectors_per_slot + at % index.vectors_per_slot) * dim;
          }
          auto* query = scratch<typename Query<T>::Element, 14>(n_group * dim);
          read_query(queries + size_t(item) * n_group * dim, n_group, dim, query);
          float* out = logits + size_t(item) * n_group * stride + first;
          score_rows<T>(query, n_group, dim, rows, count, float(scale), out, stride);
          for (int g = 0; logit_cap > 0 && g < n_group; g++) cap_scores(out + size_t(g) * stride, count, float(logit_cap));
        }
      }
#pragma omp for schedule(dynamic, 1)
      for (int item = 0; item < items; item++) {
        const int64_t sequence = seq[item / n_heads], h = item % n_heads;
        const int n = int(index.n_pages[sequence] * index.per_page), k = int(wanted[item / n_heads]);
        int32_t* size = scratch<int32_t, 11>(n + 1);
        int32_t* begin = scratch<int32_t, 12>(n + 1);
        for (int i = 0; i < n; i++) {
          const int64_t page = index.pages[sequence * index.max_pages + i / index.per_page];
          const int64_t at = (page * n_heads + h) * index.per_page + i % index.per_page;
          size[i] = index.sizes[at];
          begin[i] = index.begins[at];
        }
        float* score = out_scores + size_t(item) * max_groups;
        float lse[64];
        softmax_sum(logits + size_t(item) * n_group * stride, n_group, stride, n, size, score, lse);
        std::fill(score + n, score + max_groups, -1.0f);
        std::fill_n(out_chunks + size_t(item) * width, width, -1);
        std::fill_n(out_groups + size_t(item) * width, width, -1);
        fill(index, sequence, h, query_of(item), float(logit_cap), lse, n_group, dim, n, score, size, begin, k,
             out_chunks + size_t(item) * width, out_groups + size_t(item) * width);
      }
    }
  });
}

}  // namespace kvdrive
