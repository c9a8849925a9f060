"""The GPU's attention, with the kernel it calls replaced on the CPU by what that kernel is documented to do."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from asyncrl.learner.attention import GroupLayout, attend_padded
from asyncrl.learner.varlen_attention import attend_varlen, has_varlen_kernel

GROUPS = [(3, [2, 5, 1]), (4, []), (1, [7]), (6, [3, 3])]
NUM_TOKENS = sum(prompt + sum(lengths) for prompt, lengths in GROUPS)
SCALING = 0.3


def sequences(starts_q: Tensor, starts_k: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries, keys and mask [Q, K] of each: FlashAttention 2.1 and later align a causal mask to the last query and the
    last key."""
    q, k = starts_q.tolist(), starts_k.tolist()
    for i in range(len(q) - 1):
        num_queries, num_keys = q[i + 1] - q[i], k[i + 1] - k[i]
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        yield slice(q[i], q[i + 1]), slice(k[i], k[i + 1]), seen


def plain_forward(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, scale: float
) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    out = torch.empty_like(query)
    for q, k, seen in sequences(starts_q, starts_k):
        scores = torch.einsum("qhd,khd->hqk", query[q], key[k]) * scale
        out[q] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value[k])
    return out


def plain_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """By hand: inside an operator's kernel autograd is off."""
    num_kv_heads, repeats = key.shape[1], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    grad_q, grad_k, grad_v = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for q, k, seen in sequences(starts_q, starts_k):
        scores = torch.einsum("qhd,khd->hqk", query[q], key[k]) * scale
        softmax = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        grad_v[k] = torch.einsum("hqk,qhd->khd", softmax, grad[q])
        grad_softmax = torch.einsum("qhd,khd->hqk", grad[q], value[k])
        grad_scores = softmax * (grad_softmax - (grad_softmax * softmax).sum(-1, keepdim=True)) * scale
        grad_q[q] = torch.einsum("hqk,khd->qhd", grad_scores, key[k])
        grad_k[k] = torch.einsum("hqk,qhd->khd", grad_scores, query[q])
    of_kv_heads = (x.view(len(x), num_kv_heads, repeats, -1).sum(2) for x in (grad_k, grad_v))
    return grad_q, *of_kv_heads


@pytest.fixture
def cpu_kernels() -> Iterator[None]:
    """The kernels behind torch.nn.attention.varlen for CPU tensors: its public function, the order of its arguments
    and its autograd are torch's own."""

    def forward(
        q, k, v, starts_q, starts_k, max_q, max_k, is_causal=False, scale=None, window_size=None, *rest
    ):
        assert is_causal
        assert window_size == [-1, 0]
        assert (max_q, max_k) == (int(starts_q.diff().max()), int(starts_k.diff().max()))
        assert starts_q.dtype == starts_k.dtype == torch.int32
        out = plain_forward(q, k, v, starts_q, starts_k, scale)
        return out, q.new_empty(0), torch.zeros(2, dtype=torch.uint64)

    def backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        starts_q,
        starts_k,
        max_q,
        max_k,
        is_causal,
        rng,
        scale=None,
        window_size=None,
    ):
        assert is_causal
        return plain_backward(grad, q, k, v, starts_q, starts_k, scale)

    with torch.library._scoped_library("torch_attn", "FRAGMENT") as library:
        library.impl("_varlen_attn", forward, "CPU", allow_override=True)
        library.impl("_varlen_attn_backward", backward, "CPU", allow_override=True)
        yield


@pytest.mark.usefixtures("cpu_kernels")
def test_attention_without_padding_is_that_of_padded_groups_in_value_and_gradient():
    # Mutations caught: a completion without its prompt's keys; keys of the prompt before; window_size (-1, -1);
    # `scale` left out; a gradient of the prompt's keys from one completion only.
    generator = torch.Generator().manual_seed(0)
    query, key, value, upstream = (
        torch.randn(NUM_TOKENS, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4)
    )
    layout = GroupLayout(GROUPS, torch.device("cpu"))

    def run(attend) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        out = attend(*inputs)
        return [out, *torch.autograd.grad(out, inputs, upstream)]

    padded = run(lambda *qkv: attend_padded(*qkv, layout.padded, SCALING))
    varlen = run(lambda *qkv: attend_varlen(*qkv, layout.varlen, SCALING))
    for ours, expected in zip(varlen, padded, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "uses"),
    [
        (torch.bfloat16, 64, (8, 0), True),
        (torch.float16, 256, (9, 0), True),
        (torch.float32, 64, (9, 0), False),
        (torch.bfloat16, 60, (9, 0), False),
        (torch.bfloat16, 264, (9, 0), False),
        (torch.bfloat16, 64, (7, 5), False),
    ],
)
def test_the_kernel_is_used_where_it_exists(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    uses: bool,
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query = SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 4, 9, head_dim), device="cuda:0")
    assert has_varlen_kernel(query) is uses  # type: ignore[arg-type]
    query.is_cuda = False
    assert has_varlen_kernel(query) is False  # type: ignore[arg-type]
