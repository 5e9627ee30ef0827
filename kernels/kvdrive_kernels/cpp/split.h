// Decode attention as a list of chunks per (sequence, KV head), cut into parts of equal length that threads share.
// The cuts depend on the list alone, so the result does not depend on the number of threads or on the batch.
#pragma once

#include "rows.h"
#include "tensors.h"

namespace kvdrive {

constexpr int PART_TOKENS = 512;

struct Part {
  int b, h, first, stop;  // chunks [first, stop) of the list
};

struct Shape {
  int n_batch, n_heads, n_group, dim, chunk;
};

// For every (b, h): attend the chunks that `find(b, h, i, &row) -> tokens that count` names, i < length(b).
template <typename T, typename Length, typename Find>
inline void attend_lists(Shape s, const T* q, T* out, Scoring scoring, Length length, Find find) {
  const int part_chunks = PART_TOKENS / s.chunk, width = s.n_group * (s.dim + 2);
  std::vector<Part> parts;
  std::vector<int> begin{0};
  for (int b = 0; b < s.n_batch; b++) {
    for (int h = 0; h < s.n_heads; h++) {
      for (int i = 0; i < length(b); i += part_chunks) parts.push_back({b, h, i, std::min<int>(length(b), i + part_chunks)});
      begin.push_back(int(parts.size()));
    }
  }
  const int n_parts = int(parts.size());
  float* partial = scratch<float, 0>(size_t(n_parts) * width);
  const auto state_of = [&](int p) {
    float* base = partial + size_t(p) * width;
    return Running{base, base + s.n_group, base + 2 * s.n_group};
  };
#pragma omp parallel if (n_parts > 1)
  {
    auto* query = scratch<typename Query<T>::Element, 1>(s.n_group * s.dim);
    const T** rows = scratch<const T*, 2>(PART_TOKENS + 4);
#pragma omp for schedule(dynamic, 1)
    for (int p = 0; p < n_parts; p++) {
      const Part part = parts[p];
      read_query(q + (size_t(part.b) * s.n_heads + part.h) * s.n_group * s.dim, s.n_group, s.dim, query);
      const Running state = state_of(p);
      start(state, s.n_group, s.dim);
      int n = 0;
      for (int i = part.first; i < part.stop; i++) {
        const T* row = nullptr;
        const int count = find(part.b, part.h, i, &row);
        for (int t = 0; t < count; t++) {
          rows[n] = row + t * s.dim;
          if (n < AHEAD) {
            prefetch(rows[n], s.dim);
            prefetch(rows[n] + s.chunk * s.dim, s.dim);
          }
          n++;
        }
      }
      attend_rows<T>(query, s.n_group, s.dim, rows, n, ptrdiff_t(s.chunk) * s.dim, scoring, state);
    }
#pragma omp for schedule(static)
    for (int item = 0; item < s.n_batch * s.n_heads; item++) {
      const int first = begin[item], stop = begin[item + 1];
      for (int g = 0; g < s.n_group; g++) {
        T* target = out + (size_t(item) * s.n_group + g) * s.dim;
        float top = NEVER, total = 0;
        for (int p = first; p < stop; p++) top = std::max(top, state_of(p).top[g]);
        float* sum = scratch<float, 13>(2 * s.dim);
        std::fill_n(sum, s.dim, 0.0f);
        for (int p = first; p < stop; p++) {
          const Running state = state_of(p);
          if (state.total[g] == 0) continue;
          const float share = std::exp(state.top[g] - top);
          total += share * state.total[g];
          for (int d = 0; d < s.dim; d += W) store(sum + d, load(sum + d) + load(state.acc + g * s.dim + d) * share);
        }
        unpair<T>(sum, s.dim, sum + s.dim);
        write_row(sum + s.dim, s.dim, total > 0 ? 1 / total : 0.0f, target);
      }
    }
  }
}

}  // namespace kvdrive
