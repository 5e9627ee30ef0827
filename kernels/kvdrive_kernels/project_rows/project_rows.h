// A few rows times a large matrix: bound by reading the matrix, which is read once. Contract: reference.py.
#pragma once

#include <algorithm>

#include "../cpp/rows.h"
#include "../cpp/tensors.h"

namespace kvdrive {

constexpr int WEIGHT_ROWS = 4;            // rows of the matrix that share the loads of x
constexpr ptrdiff_t FETCH_BYTES = 8192;   // between what is multiplied and what is fetched

// to[r * stride + j] = x[r] . w[j], r < ROWS, j < count.
template <typename T, int ROWS, bool FETCH>
inline void project_tile(const typename Query<T>::Element* x, const T* const* w, int depth, int count, T* to, int64_t stride) {
  constexpr int STEP = keys_at_once(ROWS);
  for (int u = 0; u < count; u += STEP) {
    vfloat sums[ROWS][4] = {};
    partial_dots<T, ROWS, STEP, FETCH>(x, w + u, depth, sums, FETCH_BYTES / ptrdiff_t(sizeof(T)));
    for (int r = 0; r < ROWS; r++) {
      float found[4];
      sum4(sums[r], 1, found);
      for (int j = 0; j < std::min(STEP, count - u); j++) write(to + r * stride + u + j, found[j]);
    }
  }
}

inline void project_rows(TensorView x, TensorView weight, TensorView out) {
  const int n_rows = int(x.size(0)), depth = int(x.size(1));
  const int64_t n_out = weight.size(0);
  TVM_FFI_ICHECK(weight.size(1) == depth && depth % W == 0);
  TVM_FFI_ICHECK(out.size(0) == n_rows && out.size(1) == n_out);
  by_type(x, "x", [&](auto element) {
    using T = decltype(element);
    const T* matrix = data<T>(weight, 2, "weight");
    T* to = data<T>(out, 2, "out");
    auto* rows = scratch<typename Query<T>::Element, 60>(size_t(n_rows) * depth);
    read_query(data<T>(x, 2, "x"), n_rows, depth, rows);
#pragma omp parallel for schedule(static) if (n_out * depth > 1 << 14)
    for (int64_t j = 0; j < n_out; j += WEIGHT_ROWS) {
      const T* w[WEIGHT_ROWS];
      for (int i = 0; i < WEIGHT_ROWS; i++) w[i] = matrix + std::min(j + i, n_out - 1) * depth;
      const int count = int(std::min<int64_t>(WEIGHT_ROWS, n_out - j));
      for (int r = 0; r < n_rows; r += MAX_TILE) {
        by_tile(n_rows - r, [&](auto tile) {
          constexpr int ROWS = decltype(tile)::value;
          if (r == 0)
            project_tile<T, ROWS, true>(rows, w, depth, count, to + j, n_out);
          else
            project_tile<T, ROWS, false>(rows + size_t(r) * depth, w, depth, count, to + r * n_out + j, n_out);
        });
      }
    }
  });
}

}  // namespace kvdrive
