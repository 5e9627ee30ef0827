// Attention of a few query heads over tokens that lie anywhere in memory: the inner loop of every decode kernel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <type_traits>

#include "vec.h"

namespace kvdrive {

constexpr int BLOCK = 32;   // tokens whose scores are held at a time
constexpr int AHEAD = 32;   // tokens between what is computed and what is fetched
constexpr int MAX_TILE = 4; // query heads that share one pass over the keys
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// How a query lies before the dot products: in fp32 and in the order that `load_pair` reads keys in. Where the CPU multiplies
// pairs of bf16 it stays as it came.
template <typename T>
struct Query {
  using Element = float;
};
#if defined(__AVX512BF16__)
template <>
struct Query<bfloat> {
  using Element = bfloat;
};
#endif

template <typename T>
inline void read_query(const T* from, int n_rows, int dim, typename Query<T>::Element* to) {
  if constexpr (std::is_same_v<typename Query<T>::Element, T>) {
    std::memcpy(to, from, size_t(n_rows) * dim * sizeof(T));
  } else {
    for (int r = 0; r < n_rows; r++, from += dim, to += dim) {
      int d = 0;
      for (; d + 2 * W <= dim; d += 2 * W) {
        vfloat first, second;
        load_pair(from + d, first, second);
        store(to + d, first);
        store(to + d + W, second);
      }
      for (; d < dim; d += W) store(to + d, load(from + d));
    }
  }
}

// Sums over values that were read by `load_pair` -> the order of memory.
template <typename T>
inline void unpair(const float* from, int dim, float* to) {
  int d = 0;
  if constexpr (std::is_same_v<T, bfloat>) {
    for (; d + 2 * W <= dim; d += 2 * W) {
      for (int i = 0; i < W; i++) {
        to[d + 2 * i] = from[d + i];
        to[d + 2 * i + 1] = from[d + W + i];
      }
    }
  }
  std::copy(from + d, from + dim, to + d);
}

// Fetch a row that is read soon. Into L2: the few lines that L1 can wait for at a time are left to the loads, which is worth half
// as much again of the memory's bandwidth.
template <typename T>
inline void prefetch(const T* row, int dim) {
  for (int byte = 0; byte < int(dim * sizeof(T)); byte += 64) __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, 0, 2);
}

// sums[g][i] += q[g] . rows[i], still spread over the lanes. FETCH: `next` elements further, memory is fetched.
template <typename T, int G, int STEP, bool FETCH = false>
inline void partial_dots(const typename Query<T>::Element* q, const T* const* rows, int dim, vfloat (*sums)[4], ptrdiff_t next = 0) {
  const auto fetch = [&](int d) {
    if constexpr (FETCH)
      for (int i = 0; i < STEP; i++) prefetch(rows[i] + d + next, 2 * W);
  };
  int d = 0;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bfloat>) {
    for (; d + 2 * W <= dim; d += 2 * W) {
      fetch(d);
      __m512bh query[G];
      for (int g = 0; g < G; g++) query[g] = (__m512bh)_mm512_loadu_si512(q + g * dim + d);
      for (int i = 0; i < STEP; i++) {
        const __m512bh key = (__m512bh)_mm512_loadu_si512(rows[i] + d);
        for (int g = 0; g < G; g++) sums[g][i] = (vfloat)_mm512_dpbf16_ps((__m512)sums[g][i], query[g], key);
      }
    }
    if (d < dim) {
      const auto half_of = [d](const bfloat* p) {
        return (__m512bh)_mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + d)));
      };
      for (int i = 0; i < STEP; i++)
        for (int g = 0; g < G; g++)
          sums[g][i] = (vfloat)_mm512_dpbf16_ps((__m512)sums[g][i], half_of(q + g * dim), half_of(rows[i]));
    }
    return;
  }
#endif
  for (; d + 2 * W <= dim; d += 2 * W) {
    fetch(d);
    for (int i = 0; i < STEP; i++) {
      vfloat first, second;
      load_pair(rows[i] + d, first, second);
      for (int g = 0; g < G; g++)
        sums[g][i] += load(q + g * dim + d) * first + load(q + g * dim + d + W) * second;
    }
  }
  for (; d < dim; d += W)
    for (int i = 0; i < STEP; i++)
      for (int g = 0; g < G; g++) sums[g][i] += load(q + g * dim + d) * load(rows[i] + d);
}

// Rows whose dot products with G others fit the registers.
constexpr int keys_at_once(int G) { return G == 4 && KVDRIVE_VECTOR_BYTES < 64 ? 2 : 4; }

// out[g * stride + t] = scale * (q[g] . rows[t]), t < n rounded up to 4: rows beyond n must be readable, their results mean
// nothing. On the way the keys of the tokens [AHEAD, n_ahead) are fetched.
template <typename T, int G>
inline void dots(const typename Query<T>::Element* q, const T* const* rows, int n, int dim, float scale, float* out, int stride,
                 int n_ahead = 0) {
  constexpr int STEP = keys_at_once(G);
  for (int t = 0; t < n; t += 4) {
    for (int u = t + AHEAD; u < std::min(n_ahead, t + AHEAD + 4); u++) prefetch(rows[u], dim);
    vfloat sums[G][4] = {};
    for (int u = 0; u < 4; u += STEP) {
      vfloat part[G][4] = {};
      partial_dots<T, G, STEP>(q, rows + t + u, dim, part);
      for (int g = 0; g < G; g++)
        for (int i = 0; i < STEP; i++) sums[g][u + i] = part[g][i];
    }
    for (int g = 0; g < G; g++) sum4(sums[g], scale, out + g * stride + t);
  }
}

// Call f with how many of n query heads the next pass takes, as a constant.
template <typename F>
inline void by_tile(int n, F f) {
  switch (std::min(MAX_TILE, n)) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    default: return f(std::integral_constant<int, 4>{});
  }
}

// acc[g] += sum over t of weights[g * stride + t] * (rows[t] + offset), N vectors of the head from d on; in pairs acc lies in the
// order of `load_pair`. Like `dots` for what lies ahead.
template <typename T, int G, int N, bool PAIRS>
inline void add_values(const float* weights, int stride, const T* const* rows, ptrdiff_t offset, int n, int dim, int d, float* acc,
                       int n_ahead) {
  vfloat sums[G][N];
  for (int g = 0; g < G; g++)
    for (int j = 0; j < N; j++) sums[g][j] = load(acc + g * dim + d + j * W);
  for (int t = 0; t < n; t++) {
    const T* row = rows[t] + offset + d;
    if (t + AHEAD < n_ahead) prefetch(rows[t + AHEAD] + offset + d, N * W);
    vfloat value[N];
    if constexpr (PAIRS)
      for (int j = 0; j < N; j += 2) load_pair(row + j * W, value[j], value[j + 1]);
    else
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

// Take n scores into the running softmax and turn them into weights; `scores` has room for n rounded up to W. acc [dim].
inline void take_scores(float* scores, int n, int dim, float& top, float& total, float* acc) {
  const int padded = (n + W - 1) / W * W;
  std::fill(scores + n, scores + padded, NEVER);
  vfloat best = load(scores);
  for (int t = W; t < padded; t += W) best = vmax(best, load(scores + t));
  const float now = std::max(top, largest(best));
  if (now > top) {
    const float shrink = std::exp(top - now);
    total *= shrink;
    for (int d = 0; d < dim; d += W) store(acc + d, load(acc + d) * shrink);
    top = now;
  }
  vfloat sums{};
  for (int t = 0; t < padded; t += W) {
    const vfloat weight = exp_negative(load(scores + t) - now);
    store(scores + t, weight);
    sums += weight;
  }
  total += sum(sums);
}

// cap * tanh(score / cap) of n scores, rounded up to W.
inline void cap_scores(float* scores, int n, float cap) {
  for (int t = 0; t < n; t += W) store(scores + t, hyperbolic_tangent(load(scores + t) / cap) * cap);
}

// How scores follow from dot products.
struct Scoring {
  float scale, cap;  // cap 0: none
};

// One block of at most BLOCK tokens for G query heads.
template <typename T, int G>
inline void attend_block(const typename Query<T>::Element* q, const T* const* rows, ptrdiff_t to_values, int n, int dim,
                         Scoring scoring, Running state, int n_ahead) {
  alignas(64) float scores[G * BLOCK];
  dots<T, G>(q, rows, n, dim, scoring.scale, scores, BLOCK, n_ahead);
  for (int g = 0; g < G; g++) {
    if (scoring.cap > 0) cap_scores(scores + g * BLOCK, n, scoring.cap);
    take_scores(scores + g * BLOCK, n, dim, state.top[g], state.total[g], state.acc + g * dim);
  }
  constexpr int N = G <= 3 || KVDRIVE_VECTOR_BYTES == 64 ? 4 : 2;
  int d = 0;
  for (; d + N * W <= dim; d += N * W)
    add_values<T, G, N, true>(scores, BLOCK, rows, to_values, n, dim, d, state.acc, n_ahead);
  for (; d + 2 * W <= dim; d += 2 * W)
    add_values<T, G, 2, true>(scores, BLOCK, rows, to_values, n, dim, d, state.acc, n_ahead);
  for (; d < dim; d += W) add_values<T, G, 1, false>(scores, BLOCK, rows, to_values, n, dim, d, state.acc, n_ahead);
}

// Attend n tokens. rows[t] points to the key of token t, its value lies `to_values` elements further; three more entries of
// `rows` are written. q [n_group, dim] from `read_query`.
template <typename T>
inline void attend_rows(const typename Query<T>::Element* q, int n_group, int dim, const T** rows, int n, ptrdiff_t to_values,
                        Scoring scoring, Running state) {
  if (n == 0) return;
  for (int i = 0; i < 3; i++) rows[n + i] = rows[n - 1];
  for (int t = 0; t < n; t += BLOCK) {
    const int count = std::min(BLOCK, n - t);
    for (int g = 0; g < n_group; g += MAX_TILE) {
      const Running part{state.top + g, state.total + g, state.acc + g * dim};
      const int n_ahead = g == 0 ? n - t : 0;
      const auto attend = [&](auto tile) {
        attend_block<T, decltype(tile)::value>(q + g * dim, rows + t, to_values, count, dim, scoring, part, n_ahead);
      };
      by_tile(n_group - g, attend);
    }
  }
}

// scale * q . rows for any number of query heads, see `dots`. `rows` has room for three entries more than n.
template <typename T>
inline void score_rows(const typename Query<T>::Element* q, int n_group, int dim, const T** rows, int n, float scale, float* out,
                       int stride) {
  if (n == 0) return;
  for (int i = 0; i < 3; i++) rows[n + i] = rows[n - 1];
  for (int g = 0; g < n_group; g += MAX_TILE)
    by_tile(n_group - g, [&](auto tile) {
      dots<T, decltype(tile)::value>(q + g * dim, rows, n, dim, scale, out + g * stride, stride);
    });
}

}  // namespace kvdrive
