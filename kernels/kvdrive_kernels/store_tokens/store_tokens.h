// New keys and values go to their chunks. Contract: reference.py.
#pragma once

#include "../cpp/tensors.h"

namespace kvdrive {

inline void store_tokens(TensorView pool, TensorView rows, int64_t offset, TensorView inside, TensorView k, TensorView v) {
  by_type(pool, "pool", [&](auto element) {
    using T = decltype(element);
    T* to = data<T>(pool, 4, "pool");
    const auto* row = data<int64_t>(rows, 2, "rows");
    const auto* at = data<int64_t>(inside, 1, "inside");
    const T* keys = data<T>(k, 3, "k", 1);
    const T* values = data<T>(v, 3, "v", 1);
    const int64_t n_tokens = k.size(0), n_heads = k.size(1), dim = k.size(2), chunk = pool.size(2), n_rows = pool.size(0);
    const int64_t k_stride = k.stride(0), v_stride = v.stride(0);
    TVM_FFI_ICHECK(rows.size(0) == n_tokens && rows.size(1) == n_heads && pool.size(1) == 2 && pool.size(3) == dim);
    int64_t wrong = -1;
#pragma omp parallel for if (n_tokens > 64)
    for (int64_t t = 0; t < n_tokens; t++) {
      for (int64_t h = 0; h < n_heads; h++) {
        const int64_t to_row = row[t * n_heads + h] + offset;
        if (to_row < 0 || to_row >= n_rows || at[t] < 0 || at[t] >= chunk) {
#pragma omp atomic write
          wrong = to_row;
          continue;
        }
        T* base = to + to_row * 2 * chunk * dim + at[t] * dim;
        std::memcpy(base, keys + t * k_stride + h * dim, dim * sizeof(T));
        std::memcpy(base + chunk * dim, values + t * v_stride + h * dim, dim * sizeof(T));
      }
    }
    if (wrong != -1) TVM_FFI_THROW(IndexError) << "store_tokens: row " << wrong << " of " << n_rows << " does not exist";
  });
}

}  // namespace kvdrive
