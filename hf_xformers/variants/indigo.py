"""InDIGO (Gu et al. 2019): decoding by insertion, with positions known only relative to each other."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple

from ..auto_classes import register_model
from ..configuration_xformer import Initializer, XFormerConfig
from ..core.cache import make_cache
from ..core.components import SpecLike
from ..core.losses import token_cross_entropy, with_aux_losses
from ..core.outputs import XFormerCausalLMOutput
from ..families import DECODER_HEADS, VariantInfo, make_family
from ..heads.insertion import InsertionHead, place_log_likelihood, slot_scores


class XFIndigoConfig(XFormerConfig):
    """InDIGO (Gu et al. 2019): decoding by insertion, with positions known only relative to each other."""

    model_type = "xf_indigo"

    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    layer_norm_eps: float = 1e-6
    initializer: Initializer = "xavier"
    embedding: SpecLike = field(default_factory=lambda: {"type": "token", "scale": True})
    is_decoder: bool = True
    position: SpecLike = "indigo"
    attention: SpecLike = field(default_factory=lambda: {"type": "dense", "bias": False})
    feedforward: SpecLike = "relu"
    head: SpecLike = "insertion"


INFO = VariantInfo(
    section="5.1",
    summary="tokens in the order of their generation; a key stands left or right of the query, no more is known",
    paper="Gu et al. 2019",
    url="https://arxiv.org/abs/1902.01370",
    equation=r"\frac{q_i (k_j + a_{r_{ij}})^\top}{\sqrt d}, \qquad r_{ij} = \mathrm{sign}(z_i - z_j)",
    cost="time O(T^2 D), memory O(T): scores are made in blocks of queries",
    bibtex="""@article{gu2019insertion,
  title={Insertion-based Decoding with Automatically Inferred Generation Order},
  author={Gu, Jiatao and Liu, Qi and Cho, Kyunghyun},
  journal={Transactions of the Association for Computational Linguistics},
  year={2019}
}""",
    notes=(
        "`insertion_positions` [B, T] gives each token's place in the finished text; without it, the order is left to"
        " right. `generate`, and all that is built on it, only appends words; `insert_tokens`, greedy and between two"
        " boundary tokens, inserts them where the model says."
    ),
)

_family = make_family(XFIndigoConfig, "XFIndigo", DECODER_HEADS, INFO)
XFIndigoModel = _family["Model"]
XFIndigoForSequenceClassification = _family["ForSequenceClassification"]
XFIndigoForTokenClassification = _family["ForTokenClassification"]
XFIndigoForQuestionAnswering = _family["ForQuestionAnswering"]


_CausalLM: Any = _family["ForCausalLM"]


class XFIndigoForCausalLM(_CausalLM):
    """A decoder that inserts: it predicts the next word and where it stands. Loss: negative log likelihood of both."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        insertion_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> XFormerCausalLMOutput:
        """insertion_positions: [B, T], the place in the finished text of each token (tokens come in the order of their
        generation); default: left to right. labels: [B, T] like `input_ids` (the shift is inside), -100 where there is
        no target."""
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
            "insertion_positions": insertion_positions,
        }
        targets = kwargs.get("shift_labels")
        if targets is None and labels is not None:
            targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        if targets is None or not isinstance(self.lm_head, InsertionHead):
            return super().forward(**given, labels=labels, logits_to_keep=logits_to_keep, **kwargs)
        count, _ = kwargs.pop("num_items_in_batch", None), kwargs.pop("shift_labels", None)
        base = self.model(**given, **kwargs)
        states = base.last_hidden_state
        logits = self.lm_head(states)
        places = self._place_loss(states, targets, attention_mask, insertion_positions, count)
        losses = {**(base.aux_losses or {}), "place": places}
        return XFormerCausalLMOutput(
            loss=with_aux_losses(token_cross_entropy(logits, targets, count), losses),
            logits=slice_logits_to_keep(logits, logits_to_keep),
            past_key_values=base.past_key_values,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=losses,
        )

    def _place_loss(
        self, states: Tensor, targets: Tensor, mask: Tensor | None, places: Tensor | None, count: Tensor | int | None
    ) -> Tensor:
        """Mean over tokens with a target of -log p(place). targets [B, T]: the next word of each; what follows the
        last token has no place yet."""
        batch, length = targets.shape
        if places is None:
            places = torch.arange(length, device=targets.device).expand(batch, -1)
        real = targets.new_ones(batch, length).bool() if mask is None else mask.bool()
        targets = targets[:, :-1].to(states.device)
        words = self.get_input_embeddings()(targets.clamp(min=0)).to(states.dtype)
        pointer, left, right = self.lm_head.pointers(states)
        likelihood, has_slot = place_log_likelihood(pointer, words, left, right, places, real)
        counted = (targets != -100) & has_slot
        total = -(likelihood * counted).sum()
        return total / (counted.sum().clamp(min=1) if count is None else count)

    @torch.no_grad()
    def insert_tokens(
        self, input_ids: Tensor, max_new_tokens: int, eos_token_id: int | None = None
    ) -> list[list[int]]:
        """Greedy decoding by insertion: the likeliest word, then the likeliest slot for it.

        input_ids: [B, 2], the tokens that bound the text on the left and on the right. Ends a row when `eos_token_id`
        (default: the config's) is predicted, which is not inserted. Returns the tokens of each row in text order,
        without the boundaries.
        """
        if input_ids.ndim != 2 or input_ids.shape[1] != 2:
            raise ValueError(
                f"`input_ids` holds the two boundary tokens of each row, [B, 2], got {list(input_ids.shape)}."
            )
        eos = self.config.eos_token_id if eos_token_id is None else eos_token_id
        batch, device = input_ids.shape[0], input_ids.device
        tokens, places = input_ids, torch.arange(2, device=device).expand(batch, -1)
        done = torch.zeros(batch, dtype=torch.bool, device=device)
        inserted = torch.ones_like(tokens, dtype=torch.bool)
        cache, lefts, rights, fresh = make_cache(self.config), [], [], tokens
        for _ in range(max_new_tokens):
            base = self.model(
                input_ids=fresh, insertion_positions=places, past_key_values=cache, use_cache=True
            ).last_hidden_state
            pointer, left, right = self.lm_head.pointers(base)
            lefts.append(left)
            rights.append(right)
            word = self.lm_head(base[:, -1]).argmax(-1)
            if eos is not None:
                done = done | (word == eos)
            vectors = self.get_input_embeddings()(word)[:, None].to(base.dtype)
            scores = slot_scores(pointer[:, -1:], vectors, torch.cat(lefts, 1), torch.cat(rights, 1))[:, 0]
            outside = torch.zeros_like(scores, dtype=torch.bool)
            outside[:, 0] = outside[:, tokens.shape[1] + 1] = True  # left of the left boundary, right of the right one
            slot = scores.masked_fill(outside, -torch.inf).argmax(-1)
            neighbour = places.gather(1, (slot % tokens.shape[1])[:, None])
            place = neighbour + (slot >= tokens.shape[1])[:, None]  # a left slot: its token and all after it move on
            places = torch.cat((places + (places >= place), place), dim=1)
            tokens, fresh = torch.cat((tokens, word[:, None]), dim=1), word[:, None]
            inserted = torch.cat((inserted, ~done[:, None]), dim=1)
            if bool(done.all()):
                break
        texts = []
        for row in range(batch):
            order = places[row].argsort()
            texts.append([int(tokens[row, t]) for t in order.tolist() if t >= 2 and inserted[row, t]])
        return texts


register_model("AutoModelForCausalLM", XFIndigoConfig, XFIndigoForCausalLM)
