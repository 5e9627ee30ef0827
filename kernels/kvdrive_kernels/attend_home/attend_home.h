// Decode attention over chunks where they lie at home. Contract: reference.py.
#pragma once

#include "../cpp/home.h"
#include "../cpp/split.h"

namespace kvdrive {

// Ascending chunk ids of every (b, h), from the ranked ones: one pass over a bit map instead of a sort.
inline void ascending(const int32_t* ranked, int n, int32_t* out) {
  int32_t last = -1;
  for (int i = 0; i < n && ranked[i] >= 0; i++) last = std::max(last, ranked[i]);
  if (last < 0) return;
  const int words = last / 64 + 1;
  uint64_t* bits = scratch<uint64_t, 3>(words);
  std::fill_n(bits, words, 0);
  for (int i = 0; i < n && ranked[i] >= 0; i++) bits[ranked[i] / 64] |= uint64_t(1) << (ranked[i] % 64);
  for (int w = 0; w < words; w++)
    for (uint64_t rest = bits[w]; rest; rest &= rest - 1) *out++ = w * 64 + __builtin_ctzll(rest);
}

inline void attend_home(TensorView q, TensorView home, int64_t layer, TensorView blocks, TensorView seq_ids, TensorView n_tokens,
                        TensorView n_sink, TensorView zone_begin, TensorView chunk_ids, TensorView n_wanted, double scale,
                        double logit_cap, int64_t window, TensorView out) {
  const Shape s{int(q.size(0)), int(q.size(1)), int(q.size(2)), int(q.size(3)), int(home.size(5))};
  TVM_FFI_ICHECK(home.ndim() == 7 && home.size(6) == s.dim && s.dim % W == 0 && home.size(2) == s.n_heads);
  const auto* seq = data<int64_t>(seq_ids, 1, "seq_ids");
  const auto* tokens = data<int64_t>(n_tokens, 1, "n_tokens");
  const auto* sink = data<int64_t>(n_sink, 1, "n_sink");
  const auto* zone = data<int64_t>(zone_begin, 1, "zone_begin");
  const auto* ranked = data<int32_t>(chunk_ids, 3, "chunk_ids");
  const auto* wanted = data<int64_t>(n_wanted, 1, "n_wanted");
  const int width = int(chunk_ids.size(2)), items = s.n_batch * s.n_heads;
  int32_t* sorted = scratch<int32_t, 4>(size_t(items) * width + 1);
#pragma omp parallel for if (items * width > 4096)
  for (int item = 0; item < items; item++) ascending(ranked + size_t(item) * width, width, sorted + size_t(item) * width);
  by_type(home, "home", [&](auto element) {
    using T = decltype(element);
    const Home<T> stored(home, blocks, layer);
    const auto chunks_of = [&](int b) { return (tokens[b] + s.chunk - 1) / s.chunk; };
    attend_lists<T>(
        s, data<T>(q, 4, "q"), data<T>(out, 4, "out"), Scoring{float(scale), float(logit_cap)},
        [&](int b) { return int(sink[b] + wanted[b] + std::max<int64_t>(0, chunks_of(b) - zone[b])); },
        [&](int b, int h, int i, const T** row) {
          int64_t id = i;
          if (i >= sink[b] + wanted[b])
            id = zone[b] + i - sink[b] - wanted[b];
          else if (i >= sink[b])
            id = sorted[(size_t(b) * s.n_heads + h) * width + i - sink[b]];
          const int64_t before = window ? std::clamp<int64_t>(tokens[b] - window - id * s.chunk, 0, s.chunk) : 0;
          *row = stored.chunk(seq[b], h, id) + before * s.dim;
          return int(std::min<int64_t>(s.chunk, tokens[b] - id * s.chunk) - before);
        });
  });
}

}  // namespace kvdrive
