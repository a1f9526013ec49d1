# ruff: noqa: E501 - tables
"""Each rule against the loop in float64, for M = 1, a divisor, a ragged size and the whole mini-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loop_oracle import assert_exact
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

B = 12


def rnd(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def tokens(*shape: int, high: int = 9) -> Tensor:
    return torch.randint(0, high, shape)


class Call(nn.Module):
    """A module from a function of its parameters and inputs."""

    def __init__(self, function, *modules: nn.Module, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.m = nn.ModuleList(modules)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self.register_buffer("index", torch.randint(0, 6, (5, 5)))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def seq(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


class ScaleAndShift(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(rnd(width)), nn.Parameter(rnd(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, x, self.weight)


CASES = {
    "linear": lambda: (nn.Linear(5, 4), rnd(B, 5)),
    "linear_no_bias": lambda: (nn.Linear(5, 4, bias=False), rnd(B, 5)),
    "linear_sequence": lambda: (nn.Linear(5, 4), rnd(B, 7, 5)),
    "linear_4d": lambda: (nn.Linear(5, 4), rnd(B, 2, 3, 5)),
    "linear_flattened": lambda: (
        Call(lambda s, x: s.m[1](s.m[0](x.reshape(-1, 5)).tanh()).view(rows_of(x), -1), nn.Linear(5, 4), nn.Linear(4, 3)),
        rnd(B, 7, 5),
    ),
    "linear_frozen_weight": lambda: (frozen(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), "1.weight"), rnd(B, 5)),
    "bilinear": lambda: (nn.Bilinear(3, 4, 5), rnd(B, 3), rnd(B, 4)),
    "conv1d": lambda: (nn.Conv1d(4, 6, 3), rnd(B, 4, 8)),
    "conv2d": lambda: (seq(nn.Conv2d(4, 6, 3, 2, 1), nn.Tanh(), nn.Conv2d(6, 3, 2)), rnd(B, 4, 7, 7)),
    "conv2d_same": lambda: (nn.Conv2d(4, 6, (2, 3), padding="same", dilation=2), rnd(B, 4, 6, 6)),
    "conv2d_grouped": lambda: (nn.Conv2d(4, 6, 3, groups=2, dilation=2, padding=(1, 2)), rnd(B, 4, 7, 7)),
    "conv2d_depthwise": lambda: (seq(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, groups=4)), rnd(B, 3, 5, 5)),
    "conv2d_channels_last": lambda: (
        nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        rnd(B, 4, 7, 7).to(memory_format=torch.channels_last),
    ),
    "conv3d": lambda: (nn.Conv3d(2, 3, 2), rnd(B, 2, 4, 4, 4)),
    "conv_transpose1d": lambda: (nn.ConvTranspose1d(4, 6, 3, 2), rnd(B, 4, 5)),
    "conv_transpose2d": lambda: (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), rnd(B, 4, 5, 5)),
    "conv_transpose3d": lambda: (nn.ConvTranspose3d(2, 3, 2), rnd(B, 2, 3, 3, 3)),
    "embedding": lambda: (seq(nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 4)), tokens(B, 6)),
    "embedding_single": lambda: (nn.Embedding(4, 4), tokens(B, high=4)),
    "embedding_sparse": lambda: (nn.Embedding(9, 4, sparse=True), tokens(B, 6)),
    "embedding_bag_sparse": lambda: (nn.EmbeddingBag(9, 4, mode="sum", sparse=True), tokens(B, 6)),
    "embedding_bag_mean": lambda: (nn.EmbeddingBag(9, 4, mode="mean", padding_idx=2), tokens(B, 6)),
    "embedding_bag_sum": lambda: (nn.EmbeddingBag(9, 4, mode="sum"), tokens(B, 6)),
    "embedding_bag_max": lambda: (nn.EmbeddingBag(9, 4, mode="max"), tokens(B, 6)),
    "layer_norm": lambda: (seq(nn.Linear(5, 5), nn.LayerNorm(5)), rnd(B, 7, 5)),
    "layer_norm_2d": lambda: (seq(nn.Linear(5, 5), nn.LayerNorm((7, 5))), rnd(B, 7, 5)),
    "layer_norm_no_bias": lambda: (seq(nn.Linear(5, 5), nn.LayerNorm(5, bias=False)), rnd(B, 5)),
    "rms_norm": lambda: (seq(nn.Linear(5, 5), nn.RMSNorm(5)), rnd(B, 7, 5)),
    "group_norm": lambda: (seq(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6)), rnd(B, 4, 5, 5)),
    "scale_and_shift": lambda: (seq(nn.Linear(4, 6), ScaleAndShift(6)), rnd(B, 5, 4)),
    "scale_and_shift_flat": lambda: (seq(nn.Linear(4, 6), ScaleAndShift(6)), rnd(B, 4)),
    "scale_and_shift_time_first": lambda: (
        Call(lambda s, x: s.m[1](s.m[0](x).transpose(0, 1)).transpose(0, 1), nn.Linear(4, 6), ScaleAndShift(6)),
        rnd(B, 5, 4),
    ),
    "group_norm_flat": lambda: (seq(nn.Linear(4, 6), nn.GroupNorm(2, 6)), rnd(B, 4)),
    "instance_norm": lambda: (seq(nn.Conv2d(4, 6, 3), nn.InstanceNorm2d(6, affine=True)), rnd(B, 4, 5, 5)),
    "batch_norm_eval": lambda: (seq(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).eval(), rnd(B, 4, 5, 5)),
    "prelu": lambda: (seq(nn.Linear(4, 6), nn.PReLU(6), nn.PReLU()), rnd(B, 4)),
    "rnn": lambda: (Call(lambda s, x: s.m[0](x)[0], nn.RNN(5, 4, 2, batch_first=True)), rnd(B, 6, 5)),
    "rnn_relu": lambda: (
        Call(lambda s, x: s.m[0](x)[0], nn.RNN(5, 4, nonlinearity="relu", batch_first=True)), rnd(B, 6, 5)
    ),
    "lstm": lambda: (
        Call(lambda s, x: s.m[0](x)[0], nn.LSTM(5, 4, 2, batch_first=True, bidirectional=True)), rnd(B, 6, 5)
    ),
    "lstm_states": lambda: (
        Call(lambda s, x: torch.cat([t[0] for t in s.m[0](x)[1]], 1), nn.LSTM(5, 4, batch_first=True)), rnd(B, 6, 5)
    ),
    "gru_time_first": lambda: (
        Call(lambda s, x: s.m[0](x.transpose(0, 1))[0].transpose(0, 1), nn.GRU(5, 4, bidirectional=True)), rnd(B, 6, 5)
    ),
    "cells": lambda: (Call(cells, nn.LSTMCell(5, 4), nn.GRUCell(4, 4), nn.RNNCell(4, 4)), rnd(B, 3, 5)),
    "attention_self": lambda: (
        Call(lambda s, x: s.m[0](x, x, x)[0], nn.MultiheadAttention(8, 2, batch_first=True)), rnd(B, 5, 8)
    ),
    "attention_weights": lambda: (
        Call(lambda s, x: s.m[0](x, x, x, average_attn_weights=False)[1], nn.MultiheadAttention(8, 2, batch_first=True)),
        rnd(B, 5, 8),
    ),
    "attention_cross": lambda: (
        Call(lambda s, x, y: s.m[0](x, y, y, need_weights=False)[0], nn.MultiheadAttention(8, 2, batch_first=True)),
        rnd(B, 4, 8), rnd(B, 5, 8),
    ),
    "attention_three_inputs": lambda: (
        Call(lambda s, x, y, z: s.m[0](x, y, z)[0], nn.MultiheadAttention(8, 2, batch_first=True)),
        rnd(B, 4, 8), rnd(B, 5, 8), rnd(B, 5, 8),
    ),
    "attention_learned_query": lambda: (  # SigLIP's head
        Call(lambda s, x: s.m[0](s.t.repeat(rows_of(x), 1, 1), *[s.m[1](x)] * 2)[0],
             nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8), t=(1, 2, 8)),
        rnd(B, 5, 8),
    ),
    "attention_learned_memory": lambda: (
        Call(lambda s, x: s.m[0](s.m[1](x).transpose(0, 1), *[s.t[:, None].expand(-1, rows_of(x), -1)] * 2)[0]
             .transpose(0, 1), nn.MultiheadAttention(8, 2), nn.Linear(8, 8), t=(3, 8)),
        rnd(B, 5, 8),
    ),
    "attention_separate": lambda: (
        Call(lambda s, x, y, z: s.m[0](x, y, z)[0], nn.MultiheadAttention(8, 2, kdim=3, vdim=5, batch_first=True)),
        rnd(B, 4, 8), rnd(B, 5, 3), rnd(B, 5, 5),
    ),
    "attention_masks": lambda: (Call(masked, nn.MultiheadAttention(8, 2, batch_first=True)), rnd(B, 5, 8)),
    "attention_time_first": lambda: (
        Call(lambda s, x: s.m[0](*[s.m[1](x).transpose(0, 1)] * 3)[0].transpose(0, 1), nn.MultiheadAttention(8, 2),
             nn.Linear(8, 8)),
        rnd(B, 5, 8),
    ),
    "encoder_layer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), rnd(B, 4, 8)),
    "decoder_layer": lambda: (
        nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), rnd(B, 4, 8), rnd(B, 5, 8)
    ),
    "class_token": lambda: (
        Call(lambda s, x: s.m[0](torch.cat([s.cls.expand(x.shape[0], -1, -1), x], 1)), nn.Linear(5, 5), cls=(1, 1, 5)),
        rnd(B, 4, 5),
    ),
    "class_token_repeat": lambda: (
        Call(lambda s, x: torch.cat([s.cls.repeat(len(x), 1, 1), s.m[0](x)], 1).tanh(), nn.Linear(5, 5), cls=(1, 2, 5)),
        rnd(B, 4, 5),
    ),
    "positions": lambda: (Call(lambda s, x: x + s.pos[:, : x.shape[1]], pos=(1, 9, 5)), rnd(B, 4, 5)),
    "positions_of_batch_length": lambda: (Call(lambda s, x: x * s.pos, pos=(B, 5)), rnd(B, B, 5)),
    "position_embedding_of_batch_length": lambda: (
        Call(lambda s, x: s.m[1](x + s.m[0](torch.arange(B, device=x.device))), nn.Embedding(B, 5), nn.Linear(5, 5)), rnd(B, B, 5)
    ),
    "layer_scale": lambda: (Call(lambda s, x: s.m[0](x) * s.g, nn.Linear(5, 5), g=(5,)), rnd(B, 4, 5)),
    "in_place": lambda: (Call(in_place, nn.Linear(5, 5), g=(5,)), rnd(B, 4, 5)),
    "arithmetic": lambda: (
        Call(lambda s, x: (1 - s.a) * x / (s.b**2 + 1) - s.c + (s.a - x) + 2 / (s.b.exp() + x**2), a=(5,), b=(1,), c=()),
        rnd(B, 4, 5),
    ),
    "temperature": lambda: (Call(lambda s, x: s.m[0](x) * s.t.exp(), nn.Linear(5, 5), t=()), rnd(B, 5)),
    "matmul_right": lambda: (Call(lambda s, x: (x @ s.w).tanh() @ s.u.T, w=(5, 4), u=(3, 4)), rnd(B, 6, 5)),
    "matmul_left": lambda: (Call(lambda s, x: s.w @ x, w=(6, 7)), rnd(B, 7, 5)),
    "matmul_vector": lambda: (Call(lambda s, x: x @ s.w, w=(5,)), rnd(B, 7, 5)),
    "addmm": lambda: (
        Call(lambda s, x: torch.addmm(s.b, x.view(-1, 5), s.w).view(len(x), -1), b=(4,), w=(5, 4)), rnd(B, 3, 5)
    ),
    "written_over_a_token": lambda: (
        Call(written_over(lambda x, s: (slice(None), 0), lambda s: s.p), nn.Linear(5, 5), nn.Linear(5, 4), p=(5,)),
        rnd(B, 4, 5),
    ),
    "written_over_columns": lambda: (
        Call(written_over(lambda x, s: (..., slice(2, 4)), lambda s: s.p.exp()), nn.Linear(5, 5), nn.Linear(5, 4),
             p=(4, 1)),
        rnd(B, 4, 5),
    ),
    "written_over_where_a_mask_is": lambda: (
        Call(written_over(lambda x, s: x[..., 0] > 0, lambda s: s.p * 2), nn.Linear(5, 5), nn.Linear(5, 4), p=(5,)),
        rnd(B, 4, 5),
    ),
    "written_over_one_time_of_each": lambda: (
        Call(written_over(lambda x, s: (torch.arange(len(x)), x.sum(-1).argmax(1)), lambda s: s.p.exp()),
             nn.Linear(5, 5), nn.Linear(5, 4), p=(5,)),
        rnd(B, 4, 5),
    ),
    "written_over_in_a_checkpoint": lambda: (
        Call(again(written_over(lambda x, s: x[..., 0] > 0, lambda s: s.p * 2)), nn.Linear(5, 5), nn.Linear(5, 4), p=(5,)),
        rnd(B, 4, 5),
    ),
    "written_over_time_first": lambda: (
        Call(lambda s, x: written_over(lambda x, s: (0,), lambda s: s.p)(s, s.m[2](x).transpose(0, 1)).transpose(0, 1),
             nn.Linear(5, 5), nn.Linear(5, 4), nn.Linear(5, 5), p=(5,)),
        rnd(B, 4, 5),
    ),
    "written_into_constants_sample_by_sample": lambda: (
        Call(into_constants, nn.Linear(5, 5), p=(2, 5)), rnd(B, 4, 5)
    ),
    "lora": lambda: (
        Call(lambda s, x: F.linear(x, s.w) + x @ s.a @ s.b + x @ (s.a @ s.b), w=(5, 5), a=(5, 2), b=(2, 5)), rnd(B, 4, 5)
    ),
    "einsum": lambda: (Call(lambda s, x: torch.einsum("btd,hde->bhte", x, s.w), w=(2, 5, 3)), rnd(B, 4, 5)),
    "einsum_time_first": lambda: (  # attention whose keys come from constants that were repeated for each sample
        Call(lambda s, x: einsum_time_first(s, x.transpose(0, 1)).transpose(0, 1), u=(2, 4), k=(5, 2, 4), q=(5, 2, 4)),
        rnd(B, 7, 5),
    ),
    "einsum_time_first_of_several_batches": lambda: (
        Call(lambda s, x: einsum_time_first(s, x.transpose(0, 1)).transpose(0, 1), u=(2, 4), k=(5, 2, 4), q=(5, 2, 4)),
        rnd(B, 2 * B, 5),
    ),
    "tensordot": lambda: (Call(lambda s, x: torch.tensordot(x, s.w, ([2], [1])), w=(2, 5, 3)), rnd(B, 4, 5)),  # out=None
    "relative_bias": lambda: (
        Call(lambda s, x: (s.t[s.index].permute(2, 0, 1).softmax(-1) @ s.m[0](x)[:, None]).sum(1), nn.Linear(4, 4),
             t=(6, 3)),
        rnd(B, 5, 4),
    ),
    "bias_as_attention_mask": lambda: (
        Call(lambda s, x: F.scaled_dot_product_attention(x, x, x, s.t[s.index].permute(2, 0, 1)[None]), t=(6, 3)),
        rnd(B, 3, 5, 4),
    ),
    "where": lambda: (Call(lambda s, x: torch.where(x > 0, x, s.t * x), t=(5,)), rnd(B, 5)),
    "gather_rows": lambda: (Call(lambda s, x: s.t[x].tanh(), t=(9, 3)), tokens(B, 4)),
    "hypernetwork_of_parameters": lambda: (
        Call(lambda s, x: F.linear(x, s.m[0](s.z).view(4, 5)), nn.Linear(3, 20), z=(3,)), rnd(B, 5)
    ),
    "mlp_of_a_constant": lambda: (
        Call(lambda s, x: x + F.relu(s.m[0](torch.linspace(-1, 1, 4, dtype=x.dtype, device=x.device)[:, None]), inplace=True),
             nn.Linear(1, 5)),
        rnd(B, 4, 5),
    ),
    "weight_norm": lambda: (
        seq(nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(),
            nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 3, 2))),
        rnd(B, 6, 5),
    ),
    "orthogonal": lambda: (nn.utils.parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"), rnd(B, 4)),
    "time_first_inside": lambda: (
        Call(lambda s, x: s.m[1](s.m[0](x).transpose(0, 1)).transpose(0, 1), nn.Linear(5, 5), nn.Linear(5, 4)),
        rnd(B, 6, 5),
    ),
    "time_first_of_batch_length": lambda: (
        Call(lambda s, x: s.m[1](s.m[0](x).transpose(0, 1)).transpose(0, 1), nn.Linear(5, 5), nn.Linear(5, 4)),
        rnd(B, B, 5),
    ),
    "permuted_samples": lambda: (
        Call(lambda s, x: s.m[1](s.m[0](x)[torch.arange(len(x), device=x.device).flip(0)]).flip(0), nn.Linear(5, 5), nn.Linear(5, 4)),
        rnd(B, 5),
    ),
    "windows": lambda: (
        Call(lambda s, x: s.m[0](x.view(-1, 2, 3, 5).transpose(1, 2).reshape(-1, 3, 10)).view(len(x), -1), nn.Linear(10, 4)),
        rnd(B, 12, 5),
    ),
    "tied_head": lambda: (Call(tied, nn.Embedding(9, 5), nn.Linear(5, 5), e=(1,)), tokens(B, 6)),
    "shared_layer": lambda: (
        Call(lambda s, x: s.m[0](s.m[0](s.m[0](x).tanh()).tanh()), nn.Linear(5, 5)), rnd(B, 6, 5)
    ),
    "shared_convolution": lambda: (
        Call(lambda s, x: s.m[0](s.m[0](x).tanh()), nn.Conv2d(4, 4, 3, padding=1)), rnd(B, 4, 5, 5)
    ),
    "shared_norm": lambda: (
        Call(lambda s, x: s.m[1](s.m[0](s.m[1](x))), nn.Linear(5, 5), nn.LayerNorm(5)), rnd(B, 6, 5)
    ),
    "shared_attention": lambda: (
        Call(lambda s, x, y: s.m[0](s.m[0](x, y, y)[0], y, y)[0], nn.MultiheadAttention(8, 2, batch_first=True)),
        rnd(B, 4, 8), rnd(B, 5, 8),
    ),
    "shared_transposed": lambda: (
        Call(lambda s, x: (x @ s.w).tanh() @ s.w.t(), w=(5, 3)), rnd(B, 6, 5)
    ),
    "iteration": lambda: (Call(lambda s, x: sum(x * w for w in s.w), w=(3, 5)), rnd(B, 5)),
    "numpy_index": lambda: (Call(lambda s, x: x * s.w[np.array([0, 1, 1, 2, 0])], w=(3,)), rnd(B, 5)),
    "list_index": lambda: (Call(lambda s, x: x * s.w[[0, 1, 1, 2, 0]], w=(3,)), rnd(B, 5)),
    "conversion": lambda: (Call(lambda s, x: x * s.w.type(torch.float64).to(x.device), w=(5,)), rnd(B, 5)),
    "halves_of_one_parameter": lambda: (Call(halves, w=(6, 5)), rnd(B, 5)),
}  # fmt: skip


def rows_of(x: Tensor) -> int:
    return x.shape[0]


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def einsum_time_first(s: Call, x: Tensor) -> Tensor:
    places = torch.linspace(-1, 1, 2 * x.shape[0], dtype=x.dtype, device=x.device)
    places = (places[:, None] * torch.arange(1, 6, device=x.device)).sin()[:, None].expand(-1, x.shape[1], -1)
    keys = torch.einsum("jbe,ehd->jbhd", places, s.k)
    queries = torch.einsum("ibe,ehd->ibhd", x, s.q)
    return torch.einsum("ibhd,jbhd->bhij", queries + s.u, keys).softmax(-1).permute(2, 0, 1, 3).flatten(2)


def written_over(where, value):
    def forward(s: Call, x: Tensor) -> Tensor:
        x = s.m[0](x) * 2
        x[where(x, s)] = value(s).to(x.dtype)  # which x[mask] asks for
        return s.m[1](x)

    return forward


def again(function):
    return lambda s, x: checkpoint(function, s, x, use_reentrant=False)


def into_constants(s: Call, x: Tensor) -> Tensor:
    places = torch.empty_like(x)
    for i in range(len(x)):
        places[i, :2] = s.p.tanh()
        places[i, 2:] = s.p.tanh()[0]
        places[i, 9:] = s.p[0]  # nothing
    return s.m[0](x + places)


def cells(s: Call, x: Tensor) -> Tensor:
    h = c = z = r = x.new_zeros(x.shape[0], 4)
    for t in range(x.shape[1]):
        h, c = s.m[0](x[:, t], (h, c))
        z = s.m[1](h, z)
        r = s.m[2](z, r)
    return r


def masked(s: Call, x: Tensor) -> Tensor:
    T = x.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
    padding = torch.zeros(x.shape[0], T, dtype=torch.bool, device=x.device)
    padding[:, -1] = True
    return s.m[0](x, x, x, attn_mask=causal, key_padding_mask=padding)[0]


def in_place(s: Call, x: Tensor) -> Tensor:
    y = s.m[0](x)
    y += s.g
    y *= s.g.exp()
    y /= s.g.cosh()
    return y


def tied(s: Call, x: Tensor) -> Tensor:
    return F.linear(s.m[1](s.m[0](x)).tanh() * s.e, s.m[0].weight)


def halves(s: Call, x: Tensor) -> Tensor:
    a, b = s.w.chunk(2)
    return F.linear(x, a) * F.linear(x, b)


def loss(model: nn.Module, batch: tuple) -> Tensor:
    return model(*batch).flatten(1).sin().sum(1).mean()


@pytest.mark.parametrize("M", [1, 3, 5, B])
@pytest.mark.parametrize("name", CASES)
def test_rule_equals_loop(name: str, M: int) -> None:
    torch.manual_seed(0)
    model, *batch = CASES[name]()
    assert_exact(model.double(), tuple(batch), loss, M)


@pytest.mark.parametrize("M", [2, 3, 5, B])
@pytest.mark.parametrize("kind", ["2d", "1d", "no_affine", "frozen", "no_statistics", "3d"])
def test_batch_norm_has_the_statistics_of_each_micro_batch(kind: str, M: int) -> None:
    torch.manual_seed(0)
    x = rnd(B, 4)
    if kind == "2d":
        model, x = (
            seq(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1)),
            rnd(B, 4, 5, 5),
        )
    elif kind == "3d":
        model, x = seq(nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3)), rnd(B, 2, 3, 3, 3)
    elif kind == "no_affine":
        model = seq(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.Tanh(), nn.Linear(6, 2))
    elif kind == "frozen":
        model = frozen(
            seq(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)),
            "1.weight",
            "1.bias",
        )
    elif kind == "no_statistics":
        model = seq(
            nn.Linear(4, 6),
            nn.BatchNorm1d(6, track_running_stats=False),
            nn.Tanh(),
            nn.Linear(6, 2),
        )
    else:
        model = seq(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    assert_exact(model.double(), (x,), loss, M)


@pytest.mark.parametrize("M", [1, 3, 5])
@pytest.mark.parametrize("T", [6, B, 2 * B])
def test_batch_dim_1(T: int, M: int) -> None:
    torch.manual_seed(0)
    model = Call(
        lambda s, x: s.m[2](s.m[0](x, x, x)[0] + s.m[1](x)[0]).transpose(0, 1),
        nn.MultiheadAttention(8, 2), nn.LSTM(8, 8), nn.Linear(8, 3),
    )  # fmt: skip
    assert_exact(model.double(), (rnd(T, B, 8),), loss, M, B=B, dims=1, batch_dim=1)
