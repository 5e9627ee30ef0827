// A few rows times a large matrix: bound by reading the matrix, which is read once. Contract: reference.py.
#pragma once

#include <algorithm>

#include "../cpp/tensors.h"

namespace kvdrive {

constexpr int WEIGHT_ROWS = 2;  // rows of the matrix that share the loads of x
constexpr int INPUT_ROWS = 4;   // rows of x that share the loads of the matrix

// to[r][j] = x[r] . w[j], r < ROWS, j < WEIGHT_ROWS.
template <typename T, int ROWS>
inline void dot_tile(const float* x, const T* w, int64_t depth, float (*to)[WEIGHT_ROWS]) {
  vfloat sums[ROWS][WEIGHT_ROWS] = {};
  for (int64_t d = 0; d < depth; d += W) {
    vfloat weight[WEIGHT_ROWS];
    for (int j = 0; j < WEIGHT_ROWS; j++) weight[j] = load(w + j * depth + d);
    for (int r = 0; r < ROWS; r++) {
      const vfloat value = load(x + r * depth + d);
      for (int j = 0; j < WEIGHT_ROWS; j++) sums[r][j] += value * weight[j];
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < WEIGHT_ROWS; j++) to[r][j] = sum(sums[r][j]);
}

inline void project_rows(TensorView x, TensorView weight, TensorView out) {
  const int64_t n_rows = x.size(0), depth = x.size(1), n_out = weight.size(0);
  TVM_FFI_ICHECK(weight.size(1) == depth && depth % W == 0 && n_out % WEIGHT_ROWS == 0);
  TVM_FFI_ICHECK(out.size(0) == n_rows && out.size(1) == n_out);
  by_type(x, "x", [&](auto element) {
    using T = decltype(element);
    const T* from = data<T>(x, 2, "x");
    const T* matrix = data<T>(weight, 2, "weight");
    T* to = data<T>(out, 2, "out");
    float* rows = scratch<float, 60>(size_t(n_rows * depth));
    for (int64_t i = 0; i < n_rows * depth; i += W) store(rows + i, load(from + i));
#pragma omp parallel for schedule(static) if (n_out * depth > 1 << 14)
    for (int64_t j = 0; j < n_out; j += WEIGHT_ROWS) {
      const T* w = matrix + j * depth;
      for (int64_t r = 0; r < n_rows; r += INPUT_ROWS) {
        float found[INPUT_ROWS][WEIGHT_ROWS];
        const int count = int(std::min<int64_t>(INPUT_ROWS, n_rows - r));
        switch (count) {
          case 1: dot_tile<T, 1>(rows + r * depth, w, depth, found); break;
          case 2: dot_tile<T, 2>(rows + r * depth, w, depth, found); break;
          case 3: dot_tile<T, 3>(rows + r * depth, w, depth, found); break;
          default: dot_tile<T, 4>(rows + r * depth, w, depth, found);
        }
        for (int i = 0; i < count; i++)
          for (int k = 0; k < WEIGHT_ROWS; k++) write(to + (r + i) * n_out + j + k, found[i][k]);
      }
    }
  });
}

}  // namespace kvdrive
