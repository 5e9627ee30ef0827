// Prefill: causal attention of prompt pieces over their sequences' keys and values at home. Contract: reference.py.
//
// Flash attention on tiles: a work item is a run of query tokens of one (sequence, KV head), all its query heads together. It
// walks the home blocks, turns each into packed tiles in its own small buffer, and keeps a running softmax.
#pragma once

#include <algorithm>

#include "../cpp/gemm.h"
#include "../cpp/rows.h"
#include "../cpp/tensors.h"

namespace kvdrive {

constexpr int KEYS = 64;         // tokens of a home block
constexpr int QUERY_ROWS = 192;  // query tokens times query heads of a work item, at most

struct Tile {
  int sequence, head, first, count;  // query tokens [first, first + count) of the piece
};

template <typename T>
struct Pieces {
  const T* home;
  const int64_t* blocks;
  int64_t max_blocks, n_layers, layer, n_heads, chunk;
  const int64_t *seq_ids, *starts, *prefix;
};

template <typename T>
inline void pack_block(const T* block, int n, int chunk, int dim, int padded_dim, float* keys, float* values) {
  // keys: [KEYS / PANEL][dim][PANEL], values: [padded_dim / PANEL][KEYS][PANEL]; zero where there is no token or dimension.
  float row[1024];
  if (n < KEYS) {
    std::fill_n(keys, KEYS * dim, 0.0f);
    std::fill_n(values, KEYS * padded_dim, 0.0f);
  } else if (padded_dim > dim) {
    std::fill_n(values, KEYS * padded_dim, 0.0f);
  }
  for (int t = 0; t < n; t++) {
    const T* key = block + (t / chunk * 2 * chunk + t % chunk) * dim;
    for (int d = 0; d < dim; d += W) store(row + d, load(key + d));
    float* column = keys + t / PANEL * dim * PANEL + t % PANEL;
    for (int d = 0; d < dim; d++) column[d * PANEL] = row[d];
    const T* value = key + chunk * dim;
    for (int d = 0; d < dim; d += W) store(values + (d / PANEL * KEYS + t) * PANEL + d % PANEL, load(value + d));
  }
}

template <typename T>
inline void attend_tile(const Pieces<T>& p, Tile tile, int n_group, int dim, Scoring scoring, int64_t window, const T* q,
                        int64_t q_stride, T* out) {
  const int rows = tile.count * n_group, padded_dim = (dim + PANEL - 1) / PANEL * PANEL;
  float* query = scratch<float, 30>(size_t(QUERY_ROWS + n_group) * dim);
  float* acc = scratch<float, 31>(size_t(QUERY_ROWS + n_group) * padded_dim);
  float* scores = scratch<float, 32>(size_t(QUERY_ROWS + n_group) * KEYS);
  float* keys = scratch<float, 33>(size_t(KEYS) * dim);
  float* values = scratch<float, 34>(size_t(KEYS) * padded_dim);
  float* top = scratch<float, 35>(QUERY_ROWS + n_group);
  float* total = scratch<float, 36>(QUERY_ROWS + n_group);
  const int64_t start = p.starts[tile.sequence], position = p.prefix[tile.sequence] + tile.first;
  const int64_t row_elements = int64_t(n_group) * dim, out_stride = p.n_heads * row_elements;
  for (int t = 0; t < tile.count; t++)
    read_row(q + (start + tile.first + t) * q_stride + tile.head * row_elements, int(row_elements), scoring.scale, query + t * row_elements);
  std::fill_n(acc, size_t(rows) * padded_dim, 0.0f);
  std::fill_n(top, rows, NEVER);
  std::fill_n(total, rows, 0.0f);
  const int64_t n_keys = position + tile.count;
  // With a window the first query token sees keys from here on, the others from later ones.
  const int64_t first_seen = window ? std::max<int64_t>(0, position + 1 - window) : 0;
  for (int64_t first_key = first_seen / KEYS * KEYS; first_key < n_keys; first_key += KEYS) {
    const int n = int(std::min<int64_t>(KEYS, n_keys - first_key));
    const int64_t block = p.blocks[p.seq_ids[tile.sequence] * p.max_blocks + first_key / KEYS];
    pack_block(p.home + ((block * p.n_layers + p.layer) * p.n_heads + tile.head) * KEYS * 2 * dim, n, int(p.chunk), dim, padded_dim,
               keys, values);
    multiply<false>(rows, KEYS / PANEL, dim, query, dim, keys, scores, KEYS);
    for (int r = 0; r < rows; r++) {
      float* mine = scores + r * KEYS;
      const int64_t seen = position + r / n_group + 1 - first_key;  // keys of this block up to the query token
      const int visible = int(std::min<int64_t>(KEYS, seen)), hidden = window ? int(std::max<int64_t>(0, seen - window)) : 0;
      if (visible <= hidden) {
        std::fill_n(mine, KEYS, 0.0f);
        continue;
      }
      if (scoring.cap > 0) cap_scores(mine, visible, scoring.cap);
      std::fill_n(mine, hidden, NEVER);
      take_scores(mine, visible, padded_dim, top[r], total[r], acc + size_t(r) * padded_dim);
      std::fill(mine + visible, mine + KEYS, 0.0f);
    }
    multiply<true>(rows, padded_dim / PANEL, KEYS, scores, KEYS, values, acc, padded_dim);
  }
  for (int t = 0; t < tile.count; t++) {
    for (int g = 0; g < n_group; g++) {
      const int r = t * n_group + g;
      write_row(acc + size_t(r) * padded_dim, dim, 1 / total[r],
                out + (start + tile.first + t) * out_stride + tile.head * row_elements + g * dim);
    }
  }
}

inline void attend_pieces(TensorView q, TensorView home, int64_t layer, TensorView blocks, TensorView seq_ids, TensorView starts,
                          TensorView prefix, TensorView lengths, double scale, double logit_cap, int64_t window, TensorView out) {
  const int dim = int(q.size(2)), n_heads = int(home.size(2)), n_group = int(q.size(1)) / n_heads;
  TVM_FFI_ICHECK(home.ndim() == 7 && home.size(3) * home.size(5) == KEYS && home.size(6) == dim && dim % W == 0 && dim <= 1024);
  const auto* length = data<int64_t>(lengths, 1, "lengths");
  std::vector<Tile> tiles;
  const int most = std::max(1, QUERY_ROWS / n_group);
  for (int i = 0; i < int(seq_ids.size(0)); i++)
    for (int h = 0; h < n_heads; h++)
      for (int first = 0; first < length[i]; first += most) tiles.push_back({i, h, first, std::min<int>(most, int(length[i]) - first)});
  by_type(home, "home", [&](auto element) {
    using T = decltype(element);
    const Pieces<T> pieces{data<T>(home, 7, "home"), data<int64_t>(blocks, 2, "blocks"), blocks.size(1), home.size(1), layer, n_heads,
                           home.size(5), data<int64_t>(seq_ids, 1, "seq_ids"), data<int64_t>(starts, 1, "starts"),
                           data<int64_t>(prefix, 1, "prefix")};
    const T* from = data<T>(q, 3, "q", 1);
    T* to = data<T>(out, 3, "out");
    const int64_t stride = q.stride(0);
    const Scoring scoring{float(scale), float(logit_cap)};
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = int(tiles.size()) - 1; i >= 0; i--) attend_tile(pieces, tiles[i], n_group, dim, scoring, window, from, stride, to);
  });
}

}  // namespace kvdrive
