# SPDX-License-Identifier: Apache-2.0
"""Two language models over one text, from its beginning and from its end (ELMo)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers.utils import can_return_tuple

from ..configuration_xformer import XFormerConfig
from ..core import outputs
from ..core.call import check_axes
from ..core.call_readers import sharding_in_force
from ..core.choices import joint, token_rows
from ..core.losses import direction_targets, step_share, token_cross_entropy
from ..core.pretraining_specs import PretrainingSpec, register_pretraining
from ..core.weight_decay import Undecayed
from ..modeling_xformer import XFormerModel
from ..ops.common.real_tokens import first_real, last_real
from .language_model import LanguageModel


@register_pretraining("bidirectional_lm")
class BidirectionalLMSpec(PretrainingSpec):
    """share_embedding: whether both directions have one embedding. share_softmax: whether both have one output. mix:
    what a token is in its context: `concat`, the last states of both side by side; `scalar`, a learned mix of the
    states of all layers."""

    summary = "each token from those before it, and apart from those behind it (ELMo)"

    share_embedding: bool = True
    share_softmax: bool = True
    mix: Literal["concat", "scalar"] = "concat"


def mirror_places(real: Tensor) -> Tensor:
    """real [B, T] boolean -> [B, T]: where the token stands that comes to a place when a row's real tokens are
    reversed, from the first to the last of them; padding before and behind them stays. It is its own inverse."""
    place = torch.arange(real.shape[1], device=real.device)
    first, last = first_real(real)[:, None], last_real(real)[:, None]
    return torch.where((place >= first) & (place <= last), first + last - place, place)


def _moved(tensor: Tensor, places: Tensor) -> Tensor:
    """[B or 1, T, ...] with the tokens at `places` [B, T]."""
    further = tensor.shape[2:]
    index = places.reshape(*places.shape, *[1] * len(further)).expand(-1, -1, *further)
    return tensor.expand(len(places), *[-1] * (tensor.ndim - 1)).gather(1, index)


def _is_of_tokens(value: Any, places: Tensor) -> bool:
    """Whether an input has an entry for each token."""
    return isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == places.shape[1]


class ScalarMix(Undecayed, nn.Module):
    """gamma sum_j softmax(s)_j h^j over the states of the embedding and of all layers (Peters et al. 2018, eq. 1)."""

    undecayed = ("weights", "scale")

    def __init__(self, states: int):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(states))
        self.scale = nn.Parameter(torch.ones(()))

    def initialize(self, config: Any, init: Any) -> None:
        init.zeros_(self.weights)
        init.ones_(self.scale)

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """states: [B, T, D] each -> [B, T, D]."""
        if len(states) != len(self.weights):
            raise ValueError(
                f"The mix of layers has weights for {len(self.weights)} states, and {len(states)} came: layers ran"
                " another number of times; set `mix='concat'`."
            )
        wide = torch.promote_types(self.weights.dtype, torch.float32)
        shares = (self.scale.to(wide) * self.weights.to(wide).softmax(0)).to(states[0].dtype)
        return torch.stack([share * state for share, state in zip(shares, states)]).sum(0)


class XFormerForBidirectionalLM(LanguageModel):
    """Two causal models of one text, which predict the next token and the one before it.

    loss = -sum_t [log p_F(x_t | x_<t) + log p_G(x_t | x_>t)] / number of targets, with F and G over one embedding and
    one softmax (Peters et al. 2018, ELMo, section 3.1). G is a causal model that reads the row's real tokens in
    reversed order; its states are given in the text's order. `features` [B, T, 2 D] are what a token is in its
    context: [f_t ; g_t] of the last layers, or under `mix="scalar"` of [`BidirectionalLMSpec`] a learned mix of all
    layers. The pair writes nothing.

    Raises:
        ValueError: an embedding or a head with several tables, or a stack that moves tokens or reads more than them.
    """

    _of_one_embedding: dict[str, str] = {}  # the second model's tensors -> the first one's

    def __init__(self, config: XFormerConfig):
        super().__init__(self.shaped(config, is_decoder=True, is_encoder_decoder=False))
        self._check_components()
        config = cast(XFormerConfig, self.config)
        self.settings = settings = BidirectionalLMSpec.of(config)
        self.backward_model = XFormerModel(config, add_pooling_layer=False)
        self.backward_model.under_a_head = True
        if settings.share_embedding:
            self._of_one_embedding = {
                f"backward_model.trunk.embedding.{name}": f"model.trunk.embedding.{name}"
                for name, _ in self.model.trunk.embedding.named_parameters()
            }
        tied = {**(self._tied_weights_keys or {}), **self._of_one_embedding}
        self.backward_head: nn.Module | None = None
        if not settings.share_softmax:
            self.backward_head = config.head.build(config.layer(max(config.num_hidden_layers - 1, 0)))
            if not settings.share_embedding:
                for name, there in config.head.tied(config).items():
                    tied[f"backward_head.{name}"] = f"backward_model.trunk.embedding.{there}"
        self._tied_weights_keys = tied
        states = config.stack.num_steps(config) + 1
        self.mix = ScalarMix(states) if settings.mix == "scalar" else None
        self.post_init()

    def _check_components(self) -> None:
        config = self.config
        if config.embedding.clusters(config) is not None or config.head.clusters(config) is not None:
            raise ValueError(
                f"{type(self).__name__} shares one token table between two directions, and embedding"
                f" {config.embedding.type!r} or head {config.head.type!r} has several; set `embedding='token'` and"
                " `head='linear'`."
            )
        if not config.stack.keeps_tokens:
            raise ValueError(
                f"{type(self).__name__} joins the states of both directions by their places, which stack"
                f" {config.stack.type!r} does not keep; set `stack='plain'`."
            )
        if config.stack.inputs:
            raise ValueError(
                f"{type(self).__name__} reads a text from both ends, and stack {config.stack.type!r} reads"
                f" `{config.stack.inputs[0]}`, which belongs to one order of reading; set `stack='plain'`."
            )

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict:
        # One embedding is one whether the output is tied to it or not.
        found = super().get_expanded_tied_weights_keys(all_submodels=all_submodels)
        return found if all_submodels else {**found, **self._of_one_embedding}

    def set_input_embeddings(self, value: nn.Module) -> None:
        super().set_input_embeddings(value)
        if self._of_one_embedding:
            self.backward_model.set_input_embeddings(value)

    def why_not_resized(self) -> str:
        own = "each direction has a softmax of its own (`share_softmax=False`)"
        return super().why_not_resized() if self.backward_head is None else own

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        table = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        self.backward_model.resize_token_embeddings(new_num_tokens, *args, **kwargs)
        return table

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises TypeError: one of the two directions reads what is not written yet."""
        raise TypeError(
            f"{type(self).__name__} writes nothing, as one of its directions reads what is still to come; train a"
            " ForCausalLM class for generation."
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerBidirectionalLMOutput:
        """labels: [B, T] like `input_ids`, -100 where there is no target, or [B, T, 2] as [`direction_targets`] makes
        them of those. logits: [B, T, 2, V], of the next token and of the one before; targets: [B, T, 2]."""
        count = kwargs.pop("num_items_in_batch", None)
        real = self._real_tokens(input_ids, inputs_embeds, attention_mask)
        self._refuse_further(kwargs)
        places = mirror_places(real)
        text: dict[str, Any] = {
            "input_ids": input_ids,
            "token_type_ids": token_type_ids,
            "inputs_embeds": inputs_embeds,
        }
        text |= {name: kwargs.pop(name) for name in self.model.trunk.extra_inputs if name in kwargs}
        mirrored = {
            name: _moved(value, places) if _is_of_tokens(value, places) else value for name, value in text.items()
        }
        mask = None if attention_mask is None else _moved(attention_mask, places)
        wanted = kwargs.get("output_hidden_states")
        wanted = self.config.output_hidden_states if wanted is None else wanted
        shown = self.mix is None or (wanted is not None and wanted is not False)  # it may be the index of a state
        if self.mix is not None:
            kwargs["output_hidden_states"] = True
        forth = self.model(**text, attention_mask=attention_mask, use_cache=False, **kwargs)
        back = self.backward_model(**mirrored, attention_mask=mask, use_cache=False, **kwargs)
        backward = _moved(back.last_hidden_state, places)
        features = torch.cat([forth.last_hidden_state, backward], dim=-1)
        if self.mix is not None:
            pairs = zip(forth.hidden_states, back.hidden_states, strict=True)
            features = self.mix([torch.cat([ahead, _moved(behind, places)], dim=-1) for ahead, behind in pairs])
        head = self.lm_head if self.backward_head is None else self.backward_head
        logits = torch.stack([self.lm_head(forth.last_hidden_state), head(backward)], dim=2)
        targets, loss, rows = None, None, None
        if labels is not None:
            targets = self._targets(labels, logits, real)
            number = count
            if count is not None and labels.ndim == 2:  # by who counts labels, of which each is up to two targets
                found, counted = ((each != -100).sum().clamp(min=1) for each in (targets, labels))
                number = count * (found / counted)
            loss = token_cross_entropy(logits, targets, number)
            rows = partial(token_rows, logits.flatten(1, 2), targets.flatten(1), number)
            if self.mix is not None:  # no prediction reads the mix, and distributed training waits for every gradient
                loss = loss + 0.0 * (self.mix.weights.sum() + self.mix.scale)
        losses = dict(forth.aux_losses or {})
        losses.update({f"backward_{name}": value for name, value in (back.aux_losses or {}).items()})
        both = [chosen for chosen in (forth.log_probs, back.log_probs) if chosen is not None]
        forth.log_probs = joint(both) if both else None
        return outputs.XFormerBidirectionalLMOutput(
            loss=self.with_aux_losses(loss, forth, rows, losses, step_share(labels, count)),
            logits=logits,
            features=features,
            targets=targets,
            hidden_states=forth.hidden_states if shown else None,
            attentions=forth.attentions,
            aux_losses=self.reported(losses or None, loss),
        )

    @staticmethod
    def _real_tokens(ids: Tensor | None, vectors: Tensor | None, mask: Tensor | None) -> Tensor:
        """[B, T] boolean of a call."""
        check_axes("input_ids", ids)
        check_axes("inputs_embeds", vectors, ("batch", "length", "width"))
        given = vectors if ids is None else ids
        if given is None:
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        shape = given.shape[:2]
        if mask is not None and mask.shape != shape:
            raise ValueError(
                f"`attention_mask` must be [batch, length] = {list(shape)} for a model that reverses texts, got"
                f" {list(mask.shape)}."
            )
        return torch.ones(shape, dtype=torch.bool, device=given.device) if mask is None else mask != 0

    @staticmethod
    def _refuse_further(given: dict[str, Any]) -> None:
        if sharding_in_force():
            raise ValueError("A text is reversed as a whole, which context parallelism divides; train without it.")
        given.pop("use_cache", None)
        for name in ("position_ids", "past_key_values", "cache"):
            if given.pop(name, None) is not None:
                raise ValueError(
                    f"`{name}` was given to a model that reads each text as a whole, from both ends; leave it out."
                )

    @staticmethod
    def _targets(labels: Tensor, logits: Tensor, real: Tensor) -> Tensor:
        """[B, T, 2] of either form of labels."""
        if labels.shape == logits.shape[:2]:
            return direction_targets(labels, real)
        if labels.shape != logits.shape[:3]:
            raise ValueError(
                f"`labels` must be [batch, length] = {list(logits.shape[:2])}, or [batch, length, 2] with a target for"
                f" each direction, got {list(labels.shape)}."
            )
        return labels
