# SPDX-License-Identifier: Apache-2.0
"""Decays between the tokens of a chunk, as factors that are never above 1.

A state that decays by e^{l_t} at token t brings what token j has written to token i > j times e^{l_{j+1} + ... + l_i}.
Neither e^{b_i} e^{-b_j} nor e^{b_i - b_j}, with b the running sums of l, will do: the first overflows float32 after a
few strong decays, the second loses the digits of all that follows one. Here sums run over the tokens between j and i
alone, and a chunk is halved again and again for them. Where i is in the second half of a block and j in the first, the
factor is

    e^{sum from j + 1 to the end of the first half} e^{sum from the start of the second half to i},

so that the decayed products of two halves are one matrix product, whether the decay is one number of a token or one of
each channel. l = -inf, which forgets everything, is as good as any other number. Off the processor, where kernels are
dear and numbers cheap, the sums of all pairs of tokens are made at once instead, if the decay is a number of a token;
if it is one of each channel, all halvings are multiplied out in full, and two tokens take the product of the one that
separates them.

Names: `n` chunks of `C` tokens (a power of two), keys of width `K`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.exponential import exp_, vectorised
from ..common.kept import kept
from ..common.products import product


class ChunkDecay:
    """log_decay `[n, C]`, one number of each token, or `[n, C, K]`, one of each channel; not above 0.

    from_start `[n, C, 1 or K]`: what is left, at each token, of the state before the chunk. to_end: what is left,
    after the chunk, of what each token writes. whole `[n, 1 or K, 1]`: what is left of the state before after the
    chunk. levels, each two `[n, blocks, half, 1 or K]`: what is left from behind tokens of first halves to their end,
    and from the start of second halves to their tokens, with the decay of these. every `[log2 C + 1, n, C, K]`: ones,
    as if of blocks of one token, and all levels.

    low: type of the operands of products. Where decays are of tokens, `shared` rows of `count` chunks of them, one row
    after the other, may have the same queries and keys, of which there are then only `n / shared` chunks. at_once:
    whether few kernels matter more than few numbers.
    """

    def __init__(self, log_decay: Tensor, low: torch.dtype, count: int = 1, shared: int = 1, at_once: bool = False):
        self.per_channel, self.low, self.count, self.shared = log_decay.dim() == 3, low, count, shared
        self.levels: list[tuple[Tensor, Tensor]] = []
        self.every: Tensor | None = None
        if at_once and not self.per_channel:
            between = log_decay[..., None].expand(-1, -1, log_decay.shape[1]).tril(-1).cumsum(1)  # j < t <= i
            self.pairs: Tensor | None = between.exp_().tril_()
            self.from_start = log_decay.cumsum(1).exp_()[..., None]
            self.to_end, self.whole = self.pairs[:, -1, :, None], self.from_start[:, -1:]
            return
        total = log_decay if self.per_channel else log_decay[..., None]
        chunks, size, width = total.shape
        prefix, suffix = total.clone(memory_format=torch.contiguous_format), total.new_zeros(total.shape)
        half, every = 1, [torch.zeros_like(prefix)] if at_once else []
        while half < size:
            # prefix: sums from the start of a half to each token; suffix: from behind it to the end of the half.
            pre, suf = (x.view(chunks, -1, 2, half, width) for x in (prefix, suffix))
            sums, logs = total.reshape(chunks, -1, 2, width), (suf[:, :, 0], pre[:, :, 1])
            if at_once:
                every.append(torch.stack(logs, dim=2).view_as(prefix))
            else:
                self.levels.append((_exp(logs[0]), _exp(logs[1])))
            pre[:, :, 1].add_(sums[:, :, 0, None])
            suf[:, :, 0].add_(sums[:, :, 1, None])
            total, half = sums.sum(2), 2 * half
        if at_once:
            *_, self.from_start, self.to_end = factors = torch.stack([*every, prefix, suffix]).exp_()
            self.every = factors[:-2]
            self.depths = _depths(size, prefix.device).expand(1, chunks, -1, -1)
        else:
            self.from_start, self.to_end = _exp(prefix), _exp(suffix)
        self.whole = self.from_start[:, -1, :, None]
        self.pairs = None if self.per_channel else self._pairs()

    def _pairs(self) -> Tensor:
        """[n, C, C]: the factor between tokens i >= j, zeros where j > i."""
        pairs = torch.diag_embed(torch.ones_like(self.from_start[..., 0]))
        for early, late in self.levels:
            _off_diagonal(pairs, late.shape[2]).copy_(late * early.mT)
        return pairs

    def weighed(self, x: Tensor, by: Tensor) -> Tensor:
        """x times `from_start` or `to_end`: [n, C, K]; or times `every`."""
        if self.shared == 1:
            return (x * by).to(self.low)
        by = by.unflatten(0, (-1, self.shared, self.count))
        return (x.unflatten(0, (-1, 1, self.count)) * by).flatten(0, 2).to(self.low)

    def gathered(self, x: Tensor) -> Tensor:
        """[n, ...] -> the sum over what shares queries and keys."""
        return x if self.shared == 1 else x.unflatten(0, (-1, self.shared, self.count)).sum(1).flatten(0, 1)

    def products(self, y: Tensor, *some: Tensor) -> list[Tensor]:
        """sum_c x_ic y_jc e^{sum of l_c over j < t <= i} for j <= i, zeros elsewhere, for each x: [n, C, C]."""
        if self.pairs is not None:
            return [self._of_pairs(product(x, y.mT), self.pairs) for x in some]
        if self.every is not None:
            keys = self.weighed(y, self.every).flatten(0, 1)
            queries = (keys if x is y else self.weighed(x, self.every).flatten(0, 1) for x in some)
            every = (product(x, keys.mT).unflatten(0, (-1, y.shape[0])) for x in queries)
            return [x.gather(0, self.depths)[0].tril_() for x in every]
        found = [torch.diag_embed((x.to(self.from_start.dtype) * y).sum(-1)) for x in some]
        for early, late in self.levels:
            keys = self._half(y, 0, early).mT
            for x, into in zip(some, found, strict=True):
                block = _off_diagonal(into, late.shape[2])
                block.copy_(_small_product(self._half(x, 1, late), keys).view_as(block))
        return found

    def _of_pairs(self, found: Tensor, pairs: Tensor) -> Tensor:
        if self.shared == 1:
            return found.mul_(pairs)
        pairs = pairs.unflatten(0, (-1, self.shared, self.count))
        return (pairs * found.unflatten(0, (-1, 1, self.count))).flatten(0, 2)

    def pull(self, grad: Tensor, found: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, of y, and of the logarithms, from that of `found`, their products, which is zero above the
        diagonal. That of the logarithms [n, C, 1 or K] holds numbers of tokens that count for every l up to theirs."""
        if self.pairs is not None:
            both, decayed = grad * found, self.gathered(grad * self.pairs).to(self.low)
            return product(decayed, y), product(decayed.mT, x), (both.sum(2) - both.sum(1))[..., None]
        if self.every is not None:
            keys, queries = (self.weighed(z, self.every).flatten(0, 1) for z in (y, x))
            parted = grad.new_zeros(len(self.every), *grad.shape, dtype=self.low)
            parted = parted.scatter_(0, self.depths, grad[None].to(self.low)).flatten(0, 1)
            pulled = product(parted, keys), product(parted.mT, queries)
            to_x, to_y = (z.view_as(self.every).mul_(self.every).sum(0) for z in pulled)
        else:
            own = grad.diagonal(dim1=1, dim2=2)[..., None]
            to_x, to_y = own * y, own * x
            for early, late in self.levels:
                queries, keys = self._half(x, 1, late), self._half(y, 0, early)
                block = _off_diagonal(grad, late.shape[2]).flatten(0, 1).to(self.low)
                _halves(to_x, late)[:, :, 1].addcmul_(late, _small_product(block, keys).view_as(late))
                _halves(to_y, early)[:, :, 0].addcmul_(early, _small_product(block.mT, queries).view_as(early))
        return to_x, to_y, x * to_x - y * to_y

    def _half(self, x: Tensor, which: int, part: Tensor) -> Tensor:
        """x of the first (0) or second (1) halves with its part of the decay, [n blocks, half, K]."""
        return (_halves(x, part)[:, :, which] * part).to(self.low).flatten(0, 1)


def numbers_at_once(chunk: int, width: int) -> int:
    """Of a token, in what is made of decays of channels at once, for `segments`."""
    return max(width, chunk) * (chunk.bit_length() + 2)


def _halves(x: Tensor, part: Tensor) -> Tensor:
    """x [n, C, K] as [n, blocks, 2, half, K]."""
    return x.view(x.shape[0], -1, 2, *part.shape[2:])


def _exp(x: Tensor) -> Tensor:
    return exp_(x.clone()) if vectorised(x) else x.exp()


@kept(16)
def _depths(size: int, device: torch.device) -> Tensor:
    """[C, C]: the smallest d for which two tokens are in the same block of 2^d."""
    blocks = torch.arange(size, device=device) >> torch.arange(size.bit_length() - 1, device=device)[:, None]
    return (blocks[:, :, None] != blocks[:, None]).sum(0)


def _small_product(left: Tensor, right: Tensor) -> Tensor:
    """left [n, t, d] right [n, d, s]; without a product for every pair of tokens."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.shape[1] == 1 and right.shape[2] == 1:
        return (left * right.mT).sum(-1, keepdim=True, dtype=wide)
    return left.to(wide) * right if left.shape[2] == 1 else product(left, right)


def _off_diagonal(matrix: Tensor, half: int) -> Tensor:
    """[n, C, C] -> [n, blocks, half, half]: in each block of two halves on the diagonal, the second half's rows and
    the first half's columns; a view."""
    blocks = matrix.unflatten(2, (-1, 2, half)).unflatten(1, (-1, 2, half))
    return blocks[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)
