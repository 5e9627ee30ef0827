// Attention of a few query heads over tokens that lie anywhere in memory: the inner loop of every decode kernel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "vec.h"

namespace kvdrive {

constexpr int BLOCK = 64;   // tokens whose scores are held at a time
constexpr int MAX_TILE = 4; // query heads that share one pass over the keys
constexpr float NEVER = -std::numeric_limits<float>::infinity();

template <typename T>
inline void prefetch(const T* row, int dim) {
  for (int byte = 0; byte < int(dim * sizeof(T)); byte += 64) __builtin_prefetch(reinterpret_cast<const char*>(row) + byte);
}

// out[g * stride + t] = q[g] . rows[t], t < n rounded up to 4: rows beyond n must be readable, their results mean nothing.
template <typename T, int G>
inline void dots(const float* q, const T* const* rows, int n, int dim, float* out, int stride) {
  constexpr int STEP = G == 4 && KVDRIVE_VECTOR_BYTES < 64 ? 2 : 4;
  for (int t = 0; t < n; t += 4) {
    vfloat sums[G][4] = {};
    for (int u = 0; u < 4; u += STEP) {
      for (int d = 0; d < dim; d += W) {
        for (int i = u; i < u + STEP; i++) {
          const vfloat key = load(rows[t + i] + d);
          for (int g = 0; g < G; g++) sums[g][i] += load(q + g * dim + d) * key;
        }
      }
    }
    for (int g = 0; g < G; g++) sum4(sums[g], out + g * stride + t);
  }
}

// acc[g] += sum over t of weights[g * stride + t] * (rows[t] + offset), N vectors of the head from d on.
template <typename T, int G, int N>
inline void add_values(const float* weights, int stride, const T* const* rows, ptrdiff_t offset, int n, int dim, int d, float* acc) {
  vfloat sums[G][N];
  for (int g = 0; g < G; g++)
    for (int j = 0; j < N; j++) sums[g][j] = load(acc + g * dim + d + j * W);
  for (int t = 0; t < n; t++) {
    const T* row = rows[t] + offset + d;
    vfloat value[N];
    for (int j = 0; j < N; j++) value[j] = load(row + j * W);
    for (int g = 0; g < G; g++) {
      const vfloat weight = splat(weights[g * stride + t]);
      for (int j = 0; j < N; j++) sums[g][j] += weight * value[j];
    }
  }
  for (int g = 0; g < G; g++)
    for (int j = 0; j < N; j++) store(acc + g * dim + d + j * W, sums[g][j]);
}

// Running softmax of G query heads: maxima, denominators, weighted values [G, dim].
struct Running {
  float* top;
  float* total;
  float* acc;
};

inline void start(Running state, int n_group, int dim) {
  std::fill_n(state.top, n_group, NEVER);
  std::fill_n(state.total, n_group, 0.0f);
  std::fill_n(state.acc, n_group * dim, 0.0f);
}

// One block of at most BLOCK tokens for G query heads.
template <typename T, int G>
inline void attend_block(const float* q, const T* const* rows, ptrdiff_t to_values, int n, int dim, Running state) {
  alignas(64) float scores[G * BLOCK];
  dots<T, G>(q, rows, n, dim, scores, BLOCK);
  for (int g = 0; g < G; g++) {
    float* mine = scores + g * BLOCK;
    const int padded = (n + W - 1) / W * W;
    std::fill(mine + n, mine + padded, NEVER);
    vfloat best = load(mine);
    for (int t = W; t < padded; t += W) best = vmax(best, load(mine + t));
    const float top = std::max(state.top[g], largest(best));
    if (top > state.top[g]) {
      const float shrink = std::exp(state.top[g] - top);
      state.total[g] *= shrink;
      for (int d = 0; d < dim; d += W) store(state.acc + g * dim + d, load(state.acc + g * dim + d) * shrink);
      state.top[g] = top;
    }
    vfloat total{};
    for (int t = 0; t < padded; t += W) {
      const vfloat weight = exp_negative(load(mine + t) - top);
      store(mine + t, weight);
      total += weight;
    }
    state.total[g] += sum(total);
  }
  constexpr int N = G <= 3 || KVDRIVE_VECTOR_BYTES == 64 ? 4 : 2;
  int d = 0;
  for (; d + N * W <= dim; d += N * W) add_values<T, G, N>(scores, BLOCK, rows, to_values, n, dim, d, state.acc);
  for (; d < dim; d += W) add_values<T, G, 1>(scores, BLOCK, rows, to_values, n, dim, d, state.acc);
}

// Attend n tokens. rows[t] points to the key of token t, its value lies `to_values` elements further; three more entries of
// `rows` are written. q [n_group, dim] carries the scale already.
template <typename T>
inline void attend_rows(const float* q, int n_group, int dim, const T** rows, int n, ptrdiff_t to_values, Running state) {
  if (n == 0) return;
  for (int i = 0; i < 3; i++) rows[n + i] = rows[n - 1];
  for (int t = 0; t < n; t += BLOCK) {
    const int count = std::min(BLOCK, n - t);
    for (int u = t + BLOCK; u < std::min(n, t + 2 * BLOCK); u++) {
      prefetch(rows[u], dim);
      prefetch(rows[u] + to_values, dim);
    }
    for (int g = 0; g < n_group; g += MAX_TILE) {
      const Running part{state.top + g, state.total + g, state.acc + g * dim};
      switch (std::min(MAX_TILE, n_group - g)) {
        case 1: attend_block<T, 1>(q + g * dim, rows + t, to_values, count, dim, part); break;
        case 2: attend_block<T, 2>(q + g * dim, rows + t, to_values, count, dim, part); break;
        case 3: attend_block<T, 3>(q + g * dim, rows + t, to_values, count, dim, part); break;
        default: attend_block<T, 4>(q + g * dim, rows + t, to_values, count, dim, part);
      }
    }
  }
}

// q . rows for any number of query heads, see `dots`. `rows` has room for three entries more than n.
template <typename T>
inline void score_rows(const float* q, int n_group, int dim, const T** rows, int n, float* out, int stride) {
  if (n == 0) return;
  for (int i = 0; i < 3; i++) rows[n + i] = rows[n - 1];
  for (int g = 0; g < n_group; g += MAX_TILE) {
    switch (std::min(MAX_TILE, n_group - g)) {
      case 1: dots<T, 1>(q + g * dim, rows, n, dim, out + g * stride, stride); break;
      case 2: dots<T, 2>(q + g * dim, rows, n, dim, out + g * stride, stride); break;
      case 3: dots<T, 3>(q + g * dim, rows, n, dim, out + g * stride, stride); break;
      default: dots<T, 4>(q + g * dim, rows, n, dim, out + g * stride, stride);
    }
  }
}

}  // namespace kvdrive
