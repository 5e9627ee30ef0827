// Small dense products on tiles that lie in cache: C += A * B, A row-major, B packed in panels of 2 W columns.
#pragma once

#include "vec.h"

namespace kvdrive {

constexpr int PANEL = 2 * W;  // columns of a packed panel
constexpr int TILE_ROWS = KVDRIVE_VECTOR_BYTES == 64 ? 12 : 6;  // with two vectors per row, what the registers hold

template <int ROWS, bool ADD>
inline void tile(const float* a, int lda, const float* panel, int depth, float* c, int ldc) {
  vfloat sums[ROWS][2];
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < 2; j++) sums[r][j] = ADD ? load(c + r * ldc + j * W) : vfloat{};
  for (int k = 0; k < depth; k++) {
    const vfloat left = load(panel + k * PANEL), right = load(panel + k * PANEL + W);
    for (int r = 0; r < ROWS; r++) {
      const vfloat x = splat(a[r * lda + k]);
      sums[r][0] += x * left;
      sums[r][1] += x * right;
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < 2; j++) store(c + r * ldc + j * W, sums[r][j]);
}

template <int ROWS, bool ADD>
inline void tile_rest(int rows, const float* a, int lda, const float* panel, int depth, float* c, int ldc) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS)
      tile<ROWS, ADD>(a, lda, panel, depth, c, ldc);
    else
      tile_rest<ROWS - 1, ADD>(rows, a, lda, panel, depth, c, ldc);
  }
}

// C [rows, panels * PANEL] (+)= A [rows, depth] * B, B packed as [panels][depth][PANEL].
template <bool ADD>
inline void multiply(int rows, int panels, int depth, const float* a, int lda, const float* b, float* c, int ldc) {
  for (int p = 0; p < panels; p++) {
    const float* panel = b + p * depth * PANEL;
    int r = 0;
    for (; r + TILE_ROWS <= rows; r += TILE_ROWS) tile<TILE_ROWS, ADD>(a + r * lda, lda, panel, depth, c + r * ldc + p * PANEL, ldc);
    tile_rest<TILE_ROWS - 1, ADD>(rows - r, a + r * lda, lda, panel, depth, c + r * ldc + p * PANEL, ldc);
  }
}

}  // namespace kvdrive
