// Where chunks lie at home: pool [blocks, L, H_kv, chunks of a block, 2, C, D] and a block table per sequence.
#pragma once

#include "tensors.h"

namespace kvdrive {

template <typename T>
struct Home {
  const T* pool;
  const int64_t* blocks;
  int64_t max_blocks, n_layers, layer, n_heads, chunk_elements;
  int shift;  // chunks of a block are a power of two: no divisions on the way to a chunk

  Home(TensorView home, TensorView table, int64_t layer)
      : pool(data<T>(home, 7, "home")), blocks(data<int64_t>(table, 2, "blocks")), max_blocks(table.size(1)),
        n_layers(home.size(1)), layer(layer), n_heads(home.size(2)), chunk_elements(2 * home.size(5) * home.size(6)),
        shift(__builtin_ctzll(uint64_t(home.size(3)))) {
    TVM_FFI_ICHECK(home.size(4) == 2 && home.size(3) == int64_t(1) << shift) << "home is not made of blocks of 2^n chunks";
    TVM_FFI_ICHECK(layer >= 0 && layer < n_layers) << "there is no layer " << layer;
  }

  const T* chunk(int64_t seq, int64_t h, int64_t id) const {
    const int64_t block = blocks[seq * max_blocks + (id >> shift)];
    const int64_t row = (((block * n_layers + layer) * n_heads + h) << shift) + (id & ((int64_t(1) << shift) - 1));
    return pool + row * chunk_elements;
  }
};

}  // namespace kvdrive
