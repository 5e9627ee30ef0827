// Decode attention over slots of an arena. Contract: reference.py.
#pragma once

#include "../cpp/split.h"

namespace kvdrive {

inline void attend_slots(TensorView q, TensorView arena, TensorView slot_ids, TensorView n_valid, TensorView n_skipped,
                         double scale, double logit_cap, TensorView out) {
  const Shape s{int(q.size(0)), int(q.size(1)), int(q.size(2)), int(q.size(3)), int(arena.size(2))};
  TVM_FFI_ICHECK(arena.size(1) == 2 && arena.size(3) == s.dim && s.dim % W == 0);
  const auto* slots = data<int32_t>(slot_ids, 3, "slot_ids");
  const auto* valid = data<int32_t>(n_valid, 3, "n_valid");
  const auto* skipped = data<int32_t>(n_skipped, 3, "n_skipped");
  const bool skips = n_skipped.size(2) > 0;
  const int n_slots = int(slot_ids.size(2));
  by_type(arena, "arena", [&](auto element) {
    using T = decltype(element);
    const T* pool = data<T>(arena, 4, "arena");
    const size_t slot_elements = size_t(2) * s.chunk * s.dim;
    attend_lists<T>(
        s, data<T>(q, 4, "q"), data<T>(out, 4, "out"), Scoring{float(scale), float(logit_cap)}, [&](int) { return n_slots; },
        [&](int b, int h, int i, const T** row) {
          const size_t at = (size_t(b) * s.n_heads + h) * n_slots + i;
          const int before = skips ? skipped[at] : 0;
          *row = pool + slots[at] * slot_elements + before * s.dim;
          return int(valid[at]) - before;
        });
  });
}

}  // namespace kvdrive
