// SwiGLU's gate. Contract: reference.py.
#pragma once

#include "../cpp/tensors.h"

namespace kvdrive {

inline void gate_rows(TensorView x, TensorView out) {
  const int64_t n_rows = out.size(0), dim = out.size(1);
  TVM_FFI_ICHECK(x.size(0) == n_rows && x.size(1) == 2 * dim && dim % W == 0);
  by_type(x, "x", [&](auto element) {
    using T = decltype(element);
    const T* from = data<T>(x, 2, "x");
    T* to = data<T>(out, 2, "out");
#pragma omp parallel for schedule(static) collapse(2) if (n_rows * dim > 1 << 13)
    for (int64_t r = 0; r < n_rows; r++) {
      for (int64_t d = 0; d < dim; d += W) {
        const vfloat gate = load(from + r * 2 * dim + d);
        const vfloat decay = exp_negative(gate > 0 ? -gate : gate);
        const vfloat share = (gate > 0 ? splat(1.0f) : decay) / (decay + 1.0f);
        const vfloat silu = rounded<T>(gate * share);  // rounded before it is multiplied, as the twin does
        store(to + r * dim + d, silu * load(from + r * 2 * dim + dim + d));
      }
    }
  });
}

}  // namespace kvdrive
