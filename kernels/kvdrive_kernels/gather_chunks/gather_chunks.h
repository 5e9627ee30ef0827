// Copy chunks from one pool to another. Contract: reference.py.
#pragma once

#include "../cpp/tensors.h"

namespace kvdrive {

inline void gather_chunks(TensorView source, TensorView source_rows, TensorView target, TensorView target_slots) {
  TVM_FFI_ICHECK(source.dtype().bits == target.dtype().bits && source.size(1) == target.size(1)) << "chunks of two kinds";
  TVM_FFI_ICHECK(source.IsContiguous() && target.IsContiguous());
  const int64_t bytes = source.size(1) * source.dtype().bits / 8, n = source_rows.numel();
  const auto* rows = data<int64_t>(source_rows, 1, "source_rows");
  const auto* slots = data<int64_t>(target_slots, 1, "target_slots");
  const char* from = static_cast<const char*>(source.data_ptr());
  char* to = static_cast<char*>(target.data_ptr());
  int64_t wrong = 0;
#pragma omp parallel for schedule(static) reduction(+ : wrong) if (n * bytes > 1 << 15)
  for (int64_t i = 0; i < n; i++) {
    constexpr int AHEAD = 8;
    if (i + AHEAD < n && uint64_t(rows[i + AHEAD]) < uint64_t(source.size(0)))
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(from + rows[i + AHEAD] * bytes + b, 0, 2);
    if (uint64_t(rows[i]) >= uint64_t(source.size(0)) || uint64_t(slots[i]) >= uint64_t(target.size(0)))
      wrong++;
    else
      std::memcpy(to + slots[i] * bytes, from + rows[i] * bytes, bytes);
  }
  if (wrong) TVM_FFI_THROW(IndexError) << "gather_chunks: " << wrong << " rows or slots do not exist";
}

}  // namespace kvdrive
