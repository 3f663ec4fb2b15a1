# SPDX-License-Identifier: Apache-2.0
"""Sparse adaptive connection: an LSTM chooses which tokens a token reads, and learns it from the task's loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from ..compat import parameters_of
from ..core.cache import KeepsMore
from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.choices import LOG_PROBS, ChoiceLogProbs, ChoiceSettings
from ..core.components import bounded, register
from ..core.initialization import start_linear
from ..core.prepared import Carry, Prepared
from ..core.reading_weights import weight_of
from ..core.visibility import visible_block
from ..ops.chosen_keys import chosen_keys_attention, edges_mask
from ..ops.common.derivatives import LITERAL, first_derivative_only
from ..ops.common.products import autocast_state, wide_products, widened
from .shared.base import Attention, literal_softmax_attention
from .shared.bucketed import BucketLayer
from .shared.query_blocks import rows_at_once
from .shared.spec import AttentionSpec


class CandidateLayer(KeepsMore, BucketLayer):
    """Keys, values and, as labels, the vectors of the tokens among which edges are chosen, [B, P, S]."""


class EdgePredictor(nn.Module):
    """p(a_1 .. a_n | i) = prod_t softmax_j((W h_t) e_j / (sqrt(P) tau) + u_(j - i)) over the tokens that i may see
    and that are neither i nor chosen before; h_1 = LSTM(e_i, s_g), h_(t+1) = LSTM(e_(a_t), h_t), e = W_e x.

    s_g [P] is the start of graph g, of which there is one, or one for each head; u one number for each distance, those
    beyond `edge_distances` having that of the farthest. The sources i are a batch of the LSTM. e and x have no
    gradient to the states: the model learns from its loss, the predictor from choices alone.
    """

    def __init__(self, config, spec: SacSpec, graphs: int):
        super().__init__()
        self.spec, self.graphs = spec, graphs
        width = spec.predictor_hidden
        self.embed = nn.Linear(config.hidden_size, width)
        self.cell = nn.LSTMCell(width, width)
        self.score = nn.Linear(width, width, bias=False)
        self.start = nn.Parameter(torch.empty(graphs, width))
        self.distance = nn.Parameter(torch.empty(2 * spec.edge_distances + 1))

    def initialize(self, config, init) -> None:
        for linear in (self.embed, self.score):
            start_linear(config, init, linear)
        bound = self.spec.predictor_hidden**-0.5
        for parameter in self.cell.parameters():
            init.uniform_(parameter, -bound, bound)
        init.normal_(self.start, mean=0.0, std=1.0)  # graphs differ by nothing else
        init.zeros_(self.distance)

    def begin(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """e of sources [B, t, P] -> the LSTM's state after it has read them, of [B * G * t, P]."""
        batch, count, width = source.shape
        start = weight_of(self, "start")[None, :, None].expand(batch, -1, count, -1).reshape(-1, width)
        return self.cell(self._each(source), (start, torch.zeros_like(start)))

    def _each(self, source: Tensor) -> Tensor:
        return source[:, None].expand(-1, self.graphs, -1, -1).reshape(-1, source.shape[-1])

    def read(self, state: tuple[Tensor, Tensor], candidates: Tensor, picks: Tensor) -> tuple[Tensor, Tensor]:
        """The state after the picks [B, G, t] among candidates [B, S, P]; -1: the last one, of no consequence."""
        index = picks.clamp(min=0).flatten(1)[..., None].expand(-1, -1, candidates.shape[-1])
        return self.cell(candidates.gather(1, index).flatten(0, 1), state)

    def beside(self, offset: Tensor) -> Tensor:
        """u / tau of the distances j - i [t, S]."""
        most = self.spec.edge_distances
        return weight_of(self, "distance")[offset.clamp(-most, most) + most] / self.spec.edge_temperature

    def scores(self, state: tuple[Tensor, Tensor], candidates: Tensor, beside: Tensor, shape: torch.Size) -> Tensor:
        """[B, G, t, S] in float32 at least; next to [t, S]: what belongs to distances."""
        (query,) = widened(self.score(state[0]).view(shape[0], -1, self.spec.predictor_hidden))
        query = query * (self.spec.predictor_hidden**-0.5 / self.spec.edge_temperature)
        found = wide_products(query, candidates)
        return found.view(*shape, -1) + beside.to(found.dtype)

    def walk(
        self,
        source: Tensor,
        candidates: Tensor,
        offset: Tensor,
        seen: Tensor,
        steps: int,
        picks: Tensor | None = None,
        weigh: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """The steps of a block of sources: picks [B, G, t, n], -1 where none is left, and, with `weigh`, log p summed
        over steps and graphs [B, t]. Picks that are not given are sampled in training, the likeliest ones otherwise.

        source [B, t, P], candidates [B, S, P], offset [t, S], seen [B or 1, 1, t, S] boolean: who may be chosen.
        """
        state, beside = self.begin(source), self.beside(offset)
        shape = torch.Size((source.shape[0], self.graphs, source.shape[1]))
        gone = (~seen).expand(*shape, -1)
        found, total = [], None
        for step in range(steps):
            scores = self.scores(state, candidates, beside, shape)
            scores = scores.masked_fill_(gone, torch.finfo(scores.dtype).min)
            pick = self._pick(scores.detach(), gone) if picks is None else picks[..., step]
            found.append(pick)
            if weigh:
                chosen = scores.gather(-1, pick.clamp(min=0)[..., None])[..., 0] - torch.logsumexp(scores, -1)
                chosen = torch.where(pick >= 0, chosen, 0.0).sum(1)
                total = chosen if total is None else total + chosen
            if step < steps - 1:
                state = self.read(state, candidates, pick)
                gone = gone.scatter(-1, pick.clamp(min=0)[..., None], True)
        return torch.stack(found, -1), total

    def _pick(self, scores: Tensor, gone: Tensor) -> Tensor:
        """scores [B, G, t, S], the lowest number where `gone` -> [B, G, t]. Of equal scores, such as those of one word
        at several places, the first is the best, however they were rounded: a step of generation rounds otherwise
        than a pass over the whole text."""
        most = scores.amax(-1, keepdim=True)
        rounding = 64 * torch.finfo(scores.dtype).eps * most.abs().clamp(min=1.0)
        best = (scores >= most - rounding).int().argmax(-1)
        if self.training and self.spec.sample_edges:
            summed = torch.softmax(scores, -1).cumsum(-1)
            total = summed[..., -1:]
            drawn = torch.searchsorted(summed, torch.rand_like(total) * total, right=True)[..., 0]
            best = torch.where(drawn < scores.shape[-1], drawn, best)  # rounded up to the end
        return torch.where(gone.gather(-1, best[..., None])[..., 0], -1, best)  # only where all are gone


class Walks:
    """The walks of all sources of a call, a block of them at a time."""

    def __init__(self, predictor: EdgePredictor, context: Call, source: Tensor, candidates: Tensor):
        self.predictor, self.context = predictor, context
        self.length, self.total = source.shape[1], candidates.shape[1]
        self.steps = min(predictor.spec.edges_per_node, self.total - 1)
        self.window = predictor.spec.candidate_window
        across = self.total if self.window is None else min(self.total, 4 * self.window)
        # The scores of all steps are there at once for the gradient.
        rows = rows_at_once(source.shape[0] * predictor.graphs * across * max(self.steps, 1))
        self.rows = rows if self.window is None else max(min(rows, 2 * self.window), 1)
        self.autocast = autocast_state(source.device.type)

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Which sources, their candidates, how far these are away [t, S], and who may be chosen [B or 1, 1, t, S]."""
        context, first = self.context, self.total - self.length  # slots of sources are the last ones
        for begin in range(0, self.length, self.rows):
            end = min(begin + self.rows, self.length)
            low, high = 0, first + end if context.causal else self.total
            if self.window is not None:
                low, high = max(first + begin - self.window, 0), min(high, first + end + self.window)
            rows, keys = slice(begin, end), slice(low, high)
            offset = context.key_index[None, keys] - context.query_index[rows, None]
            seen = (offset != 0)[None, None]
            if self.window is not None:
                seen = seen & (offset.abs() <= self.window)
            allowed = visible_block(context, False, rows, keys)
            yield rows, keys, offset, seen if allowed is None else seen & allowed

    def take(self, source: Tensor, candidates: Tensor, weigh: bool) -> tuple[Tensor, Tensor | None]:
        """Picks among all tokens [B, G, T, n] and, with `weigh`, log p [B, T]."""
        picks, totals = [], []
        for rows, keys, offset, seen in self.blocks():
            steps = min(self.steps, offset.shape[1])
            found, total = self.predictor.walk(source[:, rows], candidates[:, keys], offset, seen, steps, weigh=weigh)
            found = torch.where(found >= 0, found + keys.start, -1)
            picks.append(nn.functional.pad(found, (0, self.steps - steps), value=-1))
            if total is not None:
                totals.append(total)
        return torch.cat(picks, 2), torch.cat(totals, 1) if totals else None

    def gradients(self, grad: Tensor, picks: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """grad [B, T] of log p of the picks -> those of `inputs`: source, candidates, parameters."""
        source, candidates, *parameters = inputs
        sums = [torch.zeros_like(x) for x in inputs]
        for rows, keys, offset, seen in self.blocks():
            near = picks[:, :, rows, : min(self.steps, offset.shape[1])]
            near = torch.where(near >= 0, near - keys.start, -1)
            own, others = (x.detach().requires_grad_() for x in (source[:, rows], candidates[:, keys]))
            with torch.enable_grad(), torch.autocast(**self.autocast):
                _, total = self.predictor.walk(own, others, offset, seen, near.shape[-1], near)
            assert total is not None
            targets = (sums[0][:, rows], sums[1][:, keys], *sums[2:])
            wanted = [(x, to) for x, to in zip((own, others, *parameters), targets) if x.requires_grad]
            pieces = torch.autograd.grad(total, [x for x, _ in wanted], grad[:, rows], allow_unused=True)
            for (_, target), piece in zip(wanted, pieces):
                if piece is not None:
                    target += piece
        return sums


class _LogProbs(torch.autograd.Function):
    """log p of walks that were taken without gradients: the backward pass takes them again, a block at a time. Nothing
    is kept of them, where a checkpoint of each block would keep what is noted of all its operations."""

    @staticmethod
    def forward(ctx: Any, walks: Walks, picks: Tensor, log_probs: Tensor, *inputs: Tensor) -> Tensor:
        ctx.walks = walks
        ctx.save_for_backward(picks, *inputs)
        return log_probs.view_as(log_probs)

    @staticmethod
    @first_derivative_only("The policy gradient of sac", LITERAL)
    def backward(ctx: Any, grad: Tensor):
        picks, *inputs = ctx.saved_tensors
        return None, None, None, *ctx.walks.gradients(grad, picks, tuple(inputs))


class SacAttention(Attention):
    """o_i = sum_j softmax_j(q_i k_j / sqrt(d)) v_j over i itself and the tokens that an [`EdgePredictor`] connects it
    to, `edges_per_node` of them (Li et al. 2020, arXiv 2003.09833, section 3, with every token a source once, which
    the paper calls the variant in which all nodes are connected).

    The predictor samples in training, and learns by the policy gradient (section 3.3): the logarithm of the
    probability of its choices goes to the head that knows the task's loss (`core/choices.py`). In evaluation and
    generation it takes the likeliest edges. A source reads nothing but itself and what it may see, so that a decoder
    is strictly causal and generates with a cache: keys, values and e, P numbers per token.

    Attention: time O(T n d) for n edges, memory O(T d). The predictor: time O(T^2 n P), or O(T w n P) with a
    `candidate_window` w, memory O(T P): its scores are those of a block of sources at a time.
    """

    spec: SacSpec

    joins_projections = True

    def __init__(self, config, spec: SacSpec, **where):
        super().__init__(config, spec, **where)
        graphs = self.num_heads if spec.share_structure == "none" else 1
        owns = spec.share_structure != "layers" or self.layer_idx == 0
        self.predictor = EdgePredictor(config, spec, graphs) if owns else None

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if self.predictor is not None:
            self.predictor.initialize(config, init)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        step = self.layer_idx if step is None else step
        query, key, value = self.project_self(hidden_states, context, past_key_values, step)
        losses = None
        if self.predictor is None:
            picks = context.prepared(Edges).picks
        else:
            picks, log_probs = self.edges(self.predictor, hidden_states, context, past_key_values, step)
            context.keep(Edges(picks))
            losses = None if log_probs is None else {LOG_PROBS: self.spec.reinforce_weight * log_probs}
        index = torch.cat([context.query_index.expand(*picks.shape[:3])[..., None], picks], -1)
        there = index >= 0
        mask = context.query_padding_mask
        if mask is not None:
            there = there & mask[:, None, :, None]
        index = index.clamp(min=0)
        key, value = self.repeated(key), self.repeated(value)
        dropout, weights = self.dropout_now, None
        if self.wants_weights(context):
            pairs = edges_mask(index, there, key.shape[2])
            output, weights = literal_softmax_attention(query, key, value, pairs, None, self.scaling, dropout)
        else:
            lists, real = (x.expand(-1, self.num_heads, -1, -1) for x in (index, there))
            output = chosen_keys_attention(query, key, value, lists, real, self.scaling, dropout).transpose(1, 2)
        written = self.o_proj(output.flatten(2))
        if self.predictor is not None and torch.is_grad_enabled():
            # Distributed training waits for the gradient of every parameter, and a bare model has no loss to learn by.
            written = written + 0.0 * sum(parameter.sum() for parameter in self.predictor.parameters())
        return SublayerOutput(written, weights, aux_losses=losses)

    def edges(
        self,
        predictor: EdgePredictor,
        hidden_states: Tensor,
        context: Call,
        cache: Cache | None,
        step: int,
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens that each current one is connected to, [B, G, T, n] with -1 for none, and, where they are
        sampled, log p of them all, [B]."""
        source = predictor.embed(hidden_states.detach())
        candidates = self._candidates(source, cache, step)
        walks = Walks(predictor, context, source, candidates)
        if walks.steps < 1:
            return source.new_zeros(*source.shape[:1], predictor.graphs, walks.length, 0, dtype=torch.long), None
        # Noted for the gradient as they are taken, or taken again for it: no compiled graph holds a derivative.
        noted = torch.compiler.is_compiling() or self.wants_weights(context)
        with torch.set_grad_enabled(noted and torch.is_grad_enabled()):
            picks, log_probs = walks.take(source, candidates, weigh=self.training and self.spec.sample_edges)
        if log_probs is None:
            return picks, None
        if not noted:
            log_probs = _LogProbs.apply(walks, picks, log_probs, source, candidates, *parameters_of(predictor))
        mask = context.query_padding_mask
        return picks, (log_probs if mask is None else log_probs.masked_fill(~mask, 0.0)).sum(1)

    def _candidates(self, source: Tensor, cache: Cache | None, step: int) -> Tensor:
        """e of all tokens, [B, S, P]."""
        own = self_attention_cache(cache)
        if own is None:
            return source
        layer = own.layers[step]
        if not isinstance(layer, CandidateLayer):
            raise ValueError(
                f"sac keeps what edges are chosen by besides keys and values, which the given {type(own).__name__} has"
                " no place for; leave `past_key_values` out, or make it with"
                " `hf_xformers.core.cache.make_cache(config)`."
            )
        return layer.add_labels(source.mT).mT


class Edges(Prepared):
    """The tokens that each one reads, which layer 0 chooses for all."""

    picks: Tensor


@register("attention", "sac")
class SacSpec(AttentionSpec):
    """
    Args:
        edges_per_node: tokens that each token is connected to besides itself (fewer where it sees fewer).
        share_structure: `heads` (one graph for all heads of a layer), `layers` (one for all heads of all layers, which
            the first chooses), or `none` (each head has its own).
        predictor_hidden: P, width of the LSTM.
        edge_distances: farthest distance with a score of its own.
        edge_temperature: tau, divides scores.
        candidate_window: tokens on each side among which edges are chosen (`None`: all).
        sample_edges: training samples edges and learns from the loss; without it edges are the likeliest ones of a
            predictor that stays as it is.
        reinforce_weight: factor on the policy gradient.
        reward_baseline_decay: of the running mean of the loss that choices are compared with.
    """

    summary = "an LSTM chooses the tokens that a token reads, and learns from the task's loss"
    head_options = frozenset({"norm"})
    supports = frozenset({"packed_rows"})

    edges_per_node: int = bounded(10, least=1)
    share_structure: Literal["none", "heads", "layers"] = "heads"
    predictor_hidden: int = bounded(64, least=1)
    edge_distances: int = bounded(64, least=1)
    edge_temperature: float | int = bounded(1.0, above=0)
    candidate_window: int | None = bounded(None, least=1)
    sample_edges: bool = True
    reinforce_weight: float | int = bounded(1.0, least=0)
    reward_baseline_decay: float | int = bounded(0.9, least=0, below=1)

    def check(self, config) -> None:
        if "choices" not in config.stack.supports:
            raise ValueError(
                f"attention 'sac' learns from the task's loss by the probabilities of its choices in each row, which"
                f" stack {config.stack.type!r} does not pass on as they are; use stack 'plain'."
            )

    def choice_settings(self) -> ChoiceSettings | None:
        return ChoiceSettings(float(self.reward_baseline_decay)) if self.sample_edges else None

    def call_feature(self, config) -> ChoiceLogProbs:
        return ChoiceLogProbs()

    def carries(self, config) -> Carry | None:
        if self.share_structure != "layers":
            return None
        return Carry(Edges, ("sac", self.edges_per_node), of_first=True, handed_on=True)

    def cache_layer(self, config, layer_idx: int = 0) -> CacheLayerMixin:
        return DynamicLayer() if self.share_structure == "layers" and layer_idx else CandidateLayer()

    def build(self, config, **where) -> SacAttention:
        return SacAttention(config, self, **where)
