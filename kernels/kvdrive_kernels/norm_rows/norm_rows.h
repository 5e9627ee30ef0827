// RMS norm of rows, with the residual added first. Contract: reference.py.
#pragma once

#include <algorithm>
#include <cmath>

#include "../cpp/tensors.h"

namespace kvdrive {

inline void norm_rows(TensorView x, TensorView residual, TensorView weight, double epsilon, TensorView out, TensorView sum_out) {
  const int64_t n_rows = x.size(0), dim = x.size(1);
  const bool adds = residual.numel() > 0;
  TVM_FFI_ICHECK(dim % W == 0 && weight.numel() == dim && (!adds || (residual.size(0) == n_rows && residual.size(1) == dim)));
  by_type(x, "x", [&](auto element) {
    using T = decltype(element);
    const T* from = data<T>(x, 2, "x");
    const T* other = data<T>(residual, 2, "residual");
    const T* factor = data<T>(weight, 1, "weight");
    T* to = data<T>(out, 2, "out");
    T* sums = data<T>(sum_out, 2, "sum_out");
#pragma omp parallel for schedule(static) if (n_rows * dim > 1 << 14)
    for (int64_t r = 0; r < n_rows; r++) {
      float* row = scratch<float, 50>(size_t(dim));
      vfloat squares{};
      for (int64_t d = 0; d < dim; d += W) {
        vfloat value = load(from + r * dim + d);
        if (adds) {
          value += load(other + r * dim + d);
          store(sums + r * dim + d, value);
        }
        store(row + d, value);
        squares += value * value;
      }
      const float scale = 1 / std::sqrt(sum(squares) / float(dim) + float(epsilon));
      for (int64_t d = 0; d < dim; d += W) store(to + r * dim + d, load(row + d) * scale * load(factor + d));
    }
  });
}

}  // namespace kvdrive
