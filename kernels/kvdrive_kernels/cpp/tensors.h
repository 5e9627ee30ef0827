// Tensors as they come from Python: checked once, then plain pointers and strides.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <vector>

#include "vec.h"

namespace kvdrive {

using tvm::ffi::TensorView;

template <typename T> struct TypeOf;
template <> struct TypeOf<float> { static constexpr int code = kDLFloat, bits = 32; };
template <> struct TypeOf<half> { static constexpr int code = kDLFloat, bits = 16; };
template <> struct TypeOf<bfloat> { static constexpr int code = kDLBfloat, bits = 16; };
template <> struct TypeOf<int32_t> { static constexpr int code = kDLInt, bits = 32; };
template <> struct TypeOf<int64_t> { static constexpr int code = kDLInt, bits = 64; };
template <> struct TypeOf<bool> { static constexpr int code = kDLBool, bits = 8; };

template <typename T>
inline bool holds(TensorView t) {
  return t.dtype().code == TypeOf<T>::code && t.dtype().bits == TypeOf<T>::bits;
}

// The data of a tensor of the given type whose last dimensions are contiguous (all, unless told otherwise).
template <typename T>
inline T* data(TensorView t, int n_dim, const char* name, int strided = 0) {
  TVM_FFI_ICHECK(holds<T>(t)) << name << " has another dtype than the kernel expects";
  TVM_FFI_ICHECK_EQ(t.ndim(), n_dim) << name << " has " << t.ndim() << " dimensions";
  int64_t expected = 1;
  for (int i = n_dim - 1; i >= strided; i--) {
    TVM_FFI_ICHECK(t.size(i) == 1 || t.stride(i) == expected || t.numel() == 0) << name << " is not contiguous";
    expected *= t.size(i);
  }
  return static_cast<T*>(t.data_ptr());
}

// Call f with a value of the tensor's element type.
template <typename F>
inline void by_type(TensorView t, const char* name, F f) {
  if (holds<float>(t)) return f(float{});
  if (holds<bfloat>(t)) return f(bfloat{});
  if (holds<half>(t)) return f(half{});
  TVM_FFI_THROW(TypeError) << name << " is not float32, bfloat16 or float16";
}

template <typename T>
inline void read_row(const T* from, int n, float scale, float* to) {
  int i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i) * scale);
  for (; i < n; i++) to[i] = to_float(from[i]) * scale;
}

template <typename T>
inline void write_row(const float* from, int n, float scale, T* to) {
  int i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i) * scale);
  for (; i < n; i++) write(to + i, from[i] * scale);
}

// x as T would hold it.
template <typename T>
inline vfloat rounded(vfloat x) {
  T held[W];
  store(held, x);
  return load(held);
}

// Memory of one thread that is kept from call to call.
template <typename T, int NAME>
inline T* scratch(size_t n) {
  static thread_local std::vector<std::conditional_t<std::is_same_v<T, bool>, uint8_t, T>> memory;
  if (memory.size() < n) memory.resize(n);
  return reinterpret_cast<T*>(memory.data());
}

}  // namespace kvdrive
