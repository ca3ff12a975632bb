"""The maths of Kimi Delta Attention (KDA), in plain torch: over chunks of 64 tokens, and token by token.

A head keeps a state S of [V, K]. A token decays each of its K columns, corrects what the state says for the token's
key, and reads the state with its query:

    S <- S * exp(g)                          g [K], at most 0
    S <- S + beta * (v - S k) k^T            the delta rule
    o  = S q / sqrt(K)

`recurrent` does exactly that. `chunked` does 64 tokens at once. With G the running sum of g inside a chunk and S0 the
state before it, the corrections u of a chunk depend on one another only through a lower triangle:

    u_i + sum over j < i of A_ij u_j = beta_i (v_i - S0 (exp(G_i) * k_i))      A_ij = beta_i k_i . (exp(G_i - G_j) *
    k_j)

One triangular solve gives them all. Outputs and the final state then are products of matrices. Exponents are taken of
differences G_i - G_j with j <= i alone: these are never above zero, so nothing overflows.

It is written to be read and to be right, not to be fast.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

CHUNK = 64
"""Tokens of one chunk."""


class Tokens(NamedTuple):
    """What a layer makes of tokens before the delta rule: T tokens, H heads, all float32 on one device."""

    query: torch.Tensor  # [H, T, K], of length 1
    key: torch.Tensor  # [H, T, K], of length 1
    value: torch.Tensor  # [H, T, V]
    gate: torch.Tensor  # [H, T, K], logarithms of decays, at most 0
    beta: torch.Tensor  # [H, T], between 0 and 1

    def part(self, start: int, stop: int) -> Tokens:
        """The tokens from `start` up to `stop`."""
        return Tokens(*(tensor[:, start:stop] for tensor in self))

    @property
    def length(self) -> int:
        """How many tokens there are."""
        return self.query.shape[1]


def chunked(tokens: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [H, T, V], and the state [H, V, K] behind the last token, from `state`, that before the first."""
    outputs = []
    for start in range(0, tokens.length, CHUNK):
        output, state = _chunk(tokens.part(start, start + CHUNK), state)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


def recurrent(tokens: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `chunked`, by definition: one token after the other."""
    outputs = []
    for at in range(tokens.length):
        query, key, value, gate, beta = (tensor[:, at] for tensor in tokens)
        state = state * gate.exp()[:, None, :]
        correction = beta[:, None] * (value - (state @ key[..., None])[..., 0])
        state = state + correction[..., None] * key[:, None, :]
        outputs.append((state @ query[..., None])[..., 0] * key.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1), state


def _chunk(tokens: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, gate, beta = tokens
    decay = gate.cumsum(dim=1)
    since_start = decay.exp()

    # exp(G_i - G_j) * k_j for j <= i, and zero above the diagonal.
    above = torch.ones(tokens.length, tokens.length, dtype=torch.bool, device=key.device).triu(1)
    between = decay[:, :, None] - decay[:, None]
    keys = between.masked_fill(above[..., None], -torch.inf).exp() * key[:, None]

    # The corrections of all tokens, by forward substitution.
    triangle = torch.einsum("hik,hijk->hij", key, keys) * beta[..., None]
    wanted = beta[..., None] * (value - (key * since_start) @ state.mT)
    corrections = torch.linalg.solve_triangular(triangle, wanted, upper=False, unitriangular=True)

    read = torch.einsum("hik,hijk->hij", query, keys)
    output = (query * since_start) @ state.mT + read @ corrections

    # What is left of each token's key at the end of the chunk stands in the last row.
    after = state * since_start[:, -1:] + corrections.mT @ keys[:, -1]
    return output * key.shape[-1] ** -0.5, after
