"""`mean_keys`, `group_keys`, `score_groups` and `gather_chunks` against loops in float64."""

import numpy as np
import pytest
import torch
from kvdrive_kernels.gather_chunks import gather_chunks
from kvdrive_kernels.group_keys import group_keys
from kvdrive_kernels.mean_keys import mean_keys
from kvdrive_kernels.score_groups import score_groups
from kvsupport.driver import largest_error
from kvsupport.full_attention import as_float64
from kvsupport.poison import poison

# -- mean_keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_a_mean_key_is_the_mean_of_its_chunk(chunk_size, dim):
    keys = torch.randn(3, 63, chunk_size, dim).to(torch.bfloat16)
    out = mean_keys(keys)
    assert out.dtype == torch.float32
    assert largest_error(out, torch.from_numpy(as_float64(keys).mean(-2))) < 1e-6


# -- gather_chunks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 63, 100])
def test_gathered_chunks_arrive_and_nothing_else_changes(n):
    source, target = torch.randn(50, 24), torch.randn(120, 24)
    before, rows, slots = target.clone(), torch.randint(0, 50, (n,)), torch.randperm(120)[:n]
    gather_chunks(source, rows, target, slots)
    for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
        assert torch.equal(target[slot], source[row])
    untouched = torch.ones(120, dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(target[untouched], before[untouched])


# -- group_keys ----------------------------------------------------------------------------------------------------


def lloyd(vectors: np.ndarray, n_groups: int, iterations: int) -> list[int]:
    """The recipe for one problem `[M, D]`, vector by vector."""
    centred = vectors - vectors.mean(0)
    centroids = [centred[i * len(vectors) // n_groups] for i in range(n_groups)]
    labels: list[int] = []
    for step in range(iterations):
        used = centroids if step == iterations - 1 else [c / max(np.linalg.norm(c), 1e-12) for c in centroids]
        labels = [int(np.argmax([vector @ c for c in used])) for vector in centred]
        members = [[v for v, label in zip(centred, labels, strict=True) if label == g] for g in range(n_groups)]
        centroids = [np.mean(m, axis=0) if m else c for m, c in zip(members, used, strict=True)]
    return labels


def assert_groups_are_consistent(vectors, labels, centroids, sizes):
    """Sizes count the labels, centroids are the means of their members, empty groups are zero."""
    for n in range(vectors.shape[0]):
        for g in range(sizes.shape[1]):
            members = as_float64(vectors[n])[(labels[n] == g).numpy()]
            assert len(members) == sizes[n, g]
            mean = members.mean(0) if len(members) else np.zeros(vectors.shape[-1])
            assert np.abs(as_float64(centroids[n, g]) - mean).max() < 1e-5


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("n_vectors", "n_groups"), [(1, 1), (63, 16), (100, 7), (100, 100)])
def test_groups_follow_the_recipe(dim, n_vectors, n_groups):
    vectors = torch.randn(2, n_vectors, dim) + 0.5
    labels, centroids, sizes = group_keys(vectors, n_groups, 10)
    assert_groups_are_consistent(vectors, labels, centroids, sizes)
    for n in range(2):
        assert labels[n].tolist() == lloyd(as_float64(vectors[n]), n_groups, 10)


def test_clear_clusters_are_found():
    centres = torch.nn.functional.normalize(torch.randn(8, 64), dim=-1) * 10
    truth = torch.arange(8).repeat_interleave(12)
    labels, _, sizes = group_keys((centres[truth] + 0.1 * torch.randn(96, 64)).unsqueeze(0), 8, 10)
    assert sizes.tolist() == [[12] * 8]
    for cluster in range(8):
        assert labels[0, truth == cluster].unique().numel() == 1


def test_equal_vectors_form_one_huge_group_and_leave_the_others_empty():
    vectors = torch.ones(1, 64, 16)
    labels, centroids, sizes = group_keys(vectors, 16, 10)
    assert sizes[0].tolist() == [64] + [0] * 15
    assert_groups_are_consistent(vectors, labels, centroids, sizes)


def test_a_problem_does_not_depend_on_its_neighbours():
    vectors = torch.randn(5, 100, 32)
    together = group_keys(vectors, 25, 10)[0]
    assert torch.equal(together[3], group_keys(vectors[3:4], 25, 10)[0][0])


# -- score_groups --------------------------------------------------------------------------------------------------


def score(q, centroids, sizes, scale):
    """Scores `[N_g]` and log denominators `[G]` of one (sequence, KV head)."""
    exists = sizes.numpy() > 0
    logits = as_float64(q) @ as_float64(centroids[sizes > 0]).T * scale
    top = logits.max(1, keepdims=True)
    weights = np.exp(logits - top)
    scores = np.full(len(exists), -1.0)
    scores[exists] = (weights / weights.sum(1, keepdims=True)).sum(0)
    return torch.from_numpy(scores), torch.from_numpy(top[:, 0] + np.log(weights.sum(1)))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("q_per_kv", [1, 3, 4, 8])
@pytest.mark.parametrize("n_groups", [1, 63, 100])
def test_a_score_is_the_softmax_mass_summed_over_the_query_heads(dim, q_per_kv, n_groups):
    q, centroids = torch.randn(2, 2, q_per_kv, dim), torch.randn(2, 2, n_groups, dim)
    sizes = torch.randint(0, 3, (2, 2, n_groups))
    sizes[..., 0] = 1
    poison(centroids)[sizes > 0] = torch.randn(int((sizes > 0).sum()), dim)
    scores, lse = score_groups(q, centroids, sizes, dim**-0.5)
    for b in range(2):
        for h in range(2):
            expected, expected_lse = score(q[b, h], centroids[b, h], sizes[b, h], dim**-0.5)
            assert largest_error(scores[b, h], expected) < 1e-5
            assert largest_error(lse[b, h], expected_lse) < 1e-5
    assert torch.equal(scores == -1, sizes == 0)


def test_scores_sum_to_the_number_of_query_heads():
    sizes = torch.randint(1, 3, (2, 2, 63))
    scores, _ = score_groups(torch.randn(2, 2, 4, 64), torch.randn(2, 2, 63, 64), sizes, 0.125)
    assert torch.allclose(scores.sum(-1), torch.tensor(4.0))


def test_huge_logits_do_not_overflow():
    scores, lse = score_groups(torch.randn(1, 1, 2, 64) * 1e3, torch.randn(1, 1, 63, 64) * 1e3, torch.ones(1, 1, 63).int(), 1.0)
    assert scores.isfinite().all()
    assert lse.isfinite().all()


def test_bfloat16_centroids_are_scored_in_fp32():
    q, centroids, sizes = torch.randn(1, 1, 2, 64), torch.randn(1, 1, 63, 64).to(torch.bfloat16), torch.ones(1, 1, 63).int()
    scores, _ = score_groups(q, centroids, sizes, 0.125)
    assert largest_error(scores[0, 0], score(q[0, 0], centroids[0, 0], sizes[0, 0], 0.125)[0]) < 1e-6
