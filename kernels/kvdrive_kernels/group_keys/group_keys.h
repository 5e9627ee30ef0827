// k-means by inner product, segment by segment. Contract and recipe: reference.py.
#pragma once

#include <algorithm>

#include "../cpp/gemm.h"
#include "../cpp/tensors.h"

namespace kvdrive {

constexpr int VECTOR_ROWS = 48;   // vectors assigned at a time
constexpr int COLUMNS = 4 * PANEL;  // centroids compared at a time

// labels of `rows` vectors: the centroid with the largest inner product, the first of equals.
inline void assign(const float* vectors, int rows, int dim, const float* packed, int n_groups, int n_panels, int64_t* labels) {
  alignas(64) float products[VECTOR_ROWS * COLUMNS];
  alignas(64) float best[VECTOR_ROWS * W];
  alignas(64) int32_t where[VECTOR_ROWS * W];
  std::fill_n(best, rows * W, -3.4e38f);
  std::fill_n(where, rows * W, 0);
  vint lanes;
  for (int i = 0; i < W; i++) lanes[i] = i;
  for (int p = 0; p < n_panels; p += COLUMNS / PANEL) {
    const int panels = std::min(COLUMNS / PANEL, n_panels - p);
    multiply<false>(rows, panels, dim, vectors, dim, packed + size_t(p) * dim * PANEL, products, COLUMNS);
    const int first = p * PANEL, count = std::min(panels * PANEL, n_groups - first);
    for (int r = 0; r < rows; r++) {
      vfloat top = load(best + r * W);
      vint at;
      std::memcpy(&at, where + r * W, sizeof at);
      float* mine = products + r * COLUMNS;
      std::fill(mine + count, mine + panels * PANEL, -3.4e38f);
      for (int c = 0; c < panels * PANEL; c += W) {
        const vfloat value = load(mine + c);
        at = value > top ? lanes + (first + c) : at;
        top = vmax(value, top);
      }
      store(best + r * W, top);
      std::memcpy(where + r * W, &at, sizeof at);
    }
  }
  for (int r = 0; r < rows; r++) {
    int lane = 0;
    for (int i = 1; i < W; i++) {
      const float a = best[r * W + i], b = best[r * W + lane];
      if (a > b || (a == b && where[r * W + i] < where[r * W + lane])) lane = i;
    }
    labels[r] = where[r * W + lane];
  }
}

inline void group_keys(TensorView vectors, int64_t iterations, TensorView labels, TensorView centroids, TensorView sizes) {
  const int n_problems = int(vectors.size(0)), n = int(vectors.size(1)), dim = int(vectors.size(2)), n_groups = int(centroids.size(1));
  TVM_FFI_ICHECK(dim % W == 0);
  const float* from = data<float>(vectors, 3, "vectors");
  auto* label = data<int64_t>(labels, 2, "labels");
  auto* centre = data<float>(centroids, 3, "centroids");
  auto* size = data<int64_t>(sizes, 2, "sizes");
  const int n_panels = (n_groups + PANEL - 1) / PANEL, n_tiles = (n + VECTOR_ROWS - 1) / VECTOR_ROWS;
  const size_t packed_size = size_t(n_panels) * dim * PANEL;
  float* centred = scratch<float, 40>(size_t(n_problems) * n * dim);
  float* packed = scratch<float, 41>(n_problems * packed_size);
  float* means = scratch<float, 42>(size_t(n_problems) * dim);
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int i = 0; i < n_problems; i++) {
      float* mean = means + size_t(i) * dim;
      std::fill_n(mean, dim, 0.0f);
      const float* mine = from + size_t(i) * n * dim;
      for (int v = 0; v < n; v++)
        for (int d = 0; d < dim; d += W) store(mean + d, load(mean + d) + load(mine + size_t(v) * dim + d));
      for (int d = 0; d < dim; d++) mean[d] /= float(n);
      for (int v = 0; v < n; v++)
        for (int d = 0; d < dim; d += W)
          store(centred + (size_t(i) * n + v) * dim + d, load(mine + size_t(v) * dim + d) - load(mean + d));
      for (int g = 0; g < n_groups; g++)
        std::memcpy(centre + (size_t(i) * n_groups + g) * dim, centred + (size_t(i) * n + size_t(g) * n / n_groups) * dim, dim * sizeof(float));
    }
    for (int64_t step = 0; step < iterations; step++) {
#pragma omp for schedule(static)
      for (int i = 0; i < n_problems; i++) {
        float* to = packed + i * packed_size;
        std::fill_n(to, packed_size, 0.0f);
        for (int g = 0; g < n_groups; g++) {
          const float* mine = centre + (size_t(i) * n_groups + g) * dim;
          vfloat squares{};
          for (int d = 0; d < dim; d += W) squares += load(mine + d) * load(mine + d);
          const float factor = step < iterations - 1 ? 1 / std::max(std::sqrt(sum(squares)), 1e-12f) : 1.0f;
          float* column = to + size_t(g / PANEL) * dim * PANEL + g % PANEL;
          for (int d = 0; d < dim; d++) column[d * PANEL] = mine[d] * factor;
        }
      }
#pragma omp for schedule(dynamic, 1) collapse(2)
      for (int i = 0; i < n_problems; i++)
        for (int tile = 0; tile < n_tiles; tile++) {
          const int first = tile * VECTOR_ROWS;
          assign(centred + (size_t(i) * n + first) * dim, std::min(VECTOR_ROWS, n - first), dim, packed + i * packed_size, n_groups,
                 n_panels, label + size_t(i) * n + first);
        }
#pragma omp for schedule(static)
      for (int i = 0; i < n_problems; i++) {
        int64_t* count = size + size_t(i) * n_groups;
        float* sums = scratch<float, 43>(size_t(n_groups) * dim);
        std::fill_n(count, n_groups, 0);
        std::fill_n(sums, size_t(n_groups) * dim, 0.0f);
        for (int v = 0; v < n; v++) {
          const int64_t g = label[size_t(i) * n + v];
          count[g]++;
          const float* mine = centred + (size_t(i) * n + v) * dim;
          for (int d = 0; d < dim; d += W) store(sums + g * dim + d, load(sums + g * dim + d) + load(mine + d));
        }
        // An empty group keeps its old centroid, so that it can still attract members in the next step.
        for (int g = 0; g < n_groups; g++) {
          if (!count[g]) continue;
          float* mine = centre + (size_t(i) * n_groups + g) * dim;
          for (int d = 0; d < dim; d++) mine[d] = sums[size_t(g) * dim + d] / float(count[g]);
        }
      }
    }
#pragma omp for schedule(static)
    for (int i = 0; i < n_problems; i++) {
      for (int g = 0; g < n_groups; g++) {
        float* mine = centre + (size_t(i) * n_groups + g) * dim;
        for (int d = 0; d < dim; d++) mine[d] = size[size_t(i) * n_groups + g] ? mine[d] + means[size_t(i) * dim + d] : 0.0f;
      }
    }
  }
}

}  // namespace kvdrive
