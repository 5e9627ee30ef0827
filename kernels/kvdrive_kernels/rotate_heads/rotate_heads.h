// Rotary position embedding of query and key heads. Contract: reference.py.
#pragma once

#include <algorithm>

#include "../cpp/tensors.h"

namespace kvdrive {

// A product as T would hold it.
template <typename T>
inline float product(float x, float y) {
  T held;
  write(&held, x * y);
  return to_float(held);
}

// `turn` holds the cosines of half the rotated dimensions, then their sines.
template <typename T>
inline void rotate_head(const T* from, const T* turn, int rotary, int dim, bool halves, T* to) {
  const int half = rotary / 2;
  int i = 0;
  for (; halves && i + W <= half; i += W) {
    const vfloat a = load(from + i), b = load(from + half + i), cosine = load(turn + i), sine = load(turn + half + i);
    store(to + i, rounded<T>(a * cosine) - rounded<T>(b * sine));
    store(to + half + i, rounded<T>(b * cosine) + rounded<T>(a * sine));
  }
  for (; i < half; i++) {
    const int first = halves ? i : 2 * i, second = halves ? i + half : 2 * i + 1;
    const float a = to_float(from[first]), b = to_float(from[second]), cosine = to_float(turn[i]), sine = to_float(turn[half + i]);
    write(to + first, product<T>(a, cosine) - product<T>(b, sine));
    write(to + second, product<T>(b, cosine) + product<T>(a, sine));
  }
  std::copy(from + rotary, from + dim, to + rotary);
}

inline void rotate_heads(TensorView q, TensorView k, TensorView positions, TensorView cos_sin, int64_t dim, bool halves,
                         TensorView q_out, TensorView k_out) {
  const int64_t n_tokens = q.size(0), n_positions = cos_sin.size(0), rotary = cos_sin.size(1);
  const int64_t n_q = q.size(1) / dim, n_k = k.size(1) / dim;
  TVM_FFI_ICHECK(n_q * dim == q.size(1) && n_k * dim == k.size(1) && rotary <= dim && rotary % 2 == 0);
  TVM_FFI_ICHECK(k.size(0) == n_tokens && positions.numel() == n_tokens);
  const auto* at = data<int64_t>(positions, 1, "positions");
  by_type(q, "q", [&](auto element) {
    using T = decltype(element);
    const T* queries = data<T>(q, 2, "q", 1);
    const T* keys = data<T>(k, 2, "k", 1);
    const T* turns = data<T>(cos_sin, 2, "cos_sin");
    T* to_q = data<T>(q_out, 2, "q_out");
    T* to_k = data<T>(k_out, 2, "k_out");
    const int64_t q_stride = q.stride(0), k_stride = k.stride(0);
    int64_t wrong = -1;
#pragma omp parallel for schedule(static) if (n_tokens > 16)
    for (int64_t t = 0; t < n_tokens; t++) {
      if (at[t] < 0 || at[t] >= n_positions) {
#pragma omp atomic write
        wrong = t;
        continue;
      }
      const T* turn = turns + at[t] * rotary;
      for (int64_t h = 0; h < n_q; h++)
        rotate_head(queries + t * q_stride + h * dim, turn, int(rotary), int(dim), halves, to_q + (t * n_q + h) * dim);
      for (int64_t h = 0; h < n_k; h++)
        rotate_head(keys + t * k_stride + h * dim, turn, int(rotary), int(dim), halves, to_k + (t * n_k + h) * dim);
    }
    if (wrong >= 0) TVM_FFI_THROW(IndexError) << "rotate_heads: position " << at[wrong] << " of " << n_positions << " does not exist";
  });
}

}  // namespace kvdrive
