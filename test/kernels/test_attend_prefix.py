"""`attend_prefix` and `merge_state` against float64 attention."""

import pytest
import torch
from kvdrive_kernels.attend_prefix import attend_prefix
from kvdrive_kernels.merge_state import merge_state
from kvsupport.driver import EXACT, largest_error
from kvsupport.full_attention import full_attention


def draw(n_tokens, n_keys, *, heads=2, q_per_kv=3, dim=64):
    return torch.randn(heads, q_per_kv, n_tokens, dim), torch.randn(heads, n_keys, dim), torch.randn(heads, n_keys, dim)


def oracle(q, keys, values, scale, *, causal):
    """`[H_kv, G, T, D]`: full attention, or causal over as many keys as tokens."""
    heads, q_per_kv, n_tokens, dim = q.shape
    flat = q.permute(2, 0, 1, 3).reshape(n_tokens, heads * q_per_kv, dim)
    first = 0 if causal else keys.shape[1]
    out = full_attention(flat, keys.transpose(0, 1), values.transpose(0, 1), scale, first)
    return out.view(n_tokens, heads, q_per_kv, dim).permute(1, 2, 0, 3)


def log_sums(q, keys, scale, *, causal):
    logits = q.double() @ keys.double().unsqueeze(1).transpose(-1, -2) * scale
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.logsumexp(logits, dim=-1)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("q_per_kv", [1, 3, 4, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_every_head_shape(dim, q_per_kv, causal):
    case = draw(100, 100 if causal else 63, q_per_kv=q_per_kv, dim=dim)
    out, lse = attend_prefix(*case, dim**-0.5, causal=causal)
    assert largest_error(out, oracle(*case, dim**-0.5, causal=causal)) < EXACT
    assert largest_error(lse, log_sums(*case[:2], dim**-0.5, causal=causal)) < 1e-5


@pytest.mark.parametrize("n_tokens", [1, 63, 100])
@pytest.mark.parametrize("n_keys", [1, 63, 100])
def test_every_number_of_tokens_over_every_number_of_keys(n_tokens, n_keys):
    case = draw(n_tokens, n_keys, dim=16)
    out, lse = attend_prefix(*case, 0.25, causal=False)
    assert largest_error(out, oracle(*case, 0.25, causal=False)) < EXACT
    assert largest_error(lse, log_sums(*case[:2], 0.25, causal=False)) < 1e-5


@pytest.mark.parametrize("n_tokens", [1, 63, 100])
def test_a_token_never_sees_a_later_one(n_tokens):
    q, keys, values = draw(n_tokens, n_tokens)
    whole, _ = attend_prefix(q, keys, values, 0.125, causal=True)
    first, _ = attend_prefix(q[:, :, :1], keys[:, :1], values[:, :1], 0.125, causal=True)
    assert torch.allclose(first, values[:, None, :1].expand_as(first))
    assert torch.allclose(whole[:, :, :1], first)


@pytest.mark.parametrize("cut", [1, 63, 99])
def test_merging_two_halves_is_attention_over_both(cut):
    q, keys, values = draw(10, 100)
    a = attend_prefix(q, keys[:, :cut], values[:, :cut], 0.125, causal=False)
    b = attend_prefix(q, keys[:, cut:], values[:, cut:], 0.125, causal=False)
    out, lse = merge_state(*a, *b)
    assert largest_error(out, oracle(q, keys, values, 0.125, causal=False)) < EXACT
    assert largest_error(lse, log_sums(q, keys, 0.125, causal=False)) < 1e-5


def test_merging_is_the_same_in_both_orders():
    a, b = (torch.randn(5, 8), torch.randn(5)), (torch.randn(5, 8), torch.randn(5))
    for one, other in zip(merge_state(*a, *b), merge_state(*b, *a), strict=True):
        assert torch.allclose(one, other)


@pytest.mark.parametrize("gap", [100.0, 1e4, float("inf")])
def test_a_side_without_mass_leaves_the_other_as_it_is(gap):
    out, lse = torch.randn(5, 8), torch.randn(5)
    merged, total = merge_state(out, lse, torch.randn(5, 8), lse - gap)
    assert torch.equal(merged, out)
    assert torch.equal(total, lse)
