# SPDX-License-Identifier: Apache-2.0
"""ELECTRA's pretraining: a small generator puts tokens into a text, and an encoder finds them."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers.utils import can_return_tuple

from ..auto_classes import registered
from ..configuration_xformer import XFormerConfig
from ..core import outputs
from ..core.choices import token_rows
from ..core.inputs import check_token_labels
from ..core.losses import counted_of, step_share, token_cross_entropy, with_aux_losses
from .language import XFormerForMaskedLM
from .replaced_tokens import ReplacedTokensSpec, XFormerForReplacedTokenDetection

GENERATOR_LOSS = "generator"


def generator_config(config: Any) -> Any:
    """The config of the generator: `config` with `generator_size` of its width and `generator_depth` of its layers.

    Heads keep their width, and the feed-forward layer its ratio (Clark et al. 2020, section 3.2 and appendix A). Where
    the embedding is shared, the generator's has the same width and is projected onto the generator's own.

    Raises ValueError for a config whose parts do not fit a narrower or shallower model.
    """
    settings = ReplacedTokensSpec.of(config)
    width_per_head = config.hidden_size // config.num_attention_heads
    heads = max(1, round(settings.generator_size * config.hidden_size / width_per_head))
    if settings.generator_size == 1:
        heads = config.num_attention_heads
    width = heads * width_per_head
    layers = max(1, round(settings.generator_depth * config.num_hidden_layers))
    fields = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": max(1, round(config.intermediate_size * width / config.hidden_size)),
        "num_hidden_layers": layers,
        "decoder": None,
        "dtype": None,
    }
    if config.num_key_value_heads is not None:
        shared = config.num_attention_heads // config.num_key_value_heads
        fields["num_key_value_heads"] = heads // shared if heads % shared == 0 else 1
    if overrides := config.to_dict().get("per_layer_config"):
        fields["per_layer_config"] = {key: value for key, value in overrides.items() if int(key) < layers}
    if settings.generator_sharing != "untied":
        fields.update(_same_table(config, width))
    try:
        return config.changed(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"A generator of width {width} with {layers} layers cannot be made of this config ({error}); take"
            " `generator_size=1` and `generator_depth=1`, or another `generator_sharing`."
        ) from error


def _same_table(config: Any, width: int) -> dict[str, Any]:
    """Fields of a generator whose token table is as wide as `config`'s."""
    embedding, head = config.embedding, config.head
    table = embedding.table_width(config)
    if embedding.type == "factorized" and table == width:
        fields: dict[str, Any] = {"embedding": {"type": "token", "normalize": embedding.normalize}}
    elif embedding.type == "token" and table != width:
        if embedding.scale or embedding.id_tables:
            raise ValueError(
                "A generator cannot project an embedding 'token' with `scale` or `id_tables` onto its own width; take"
                " `generator_size=1` or `generator_sharing='untied'`."
            )
        narrow = "input" in config.position.acts and config.position.any_width
        fields = {
            "embedding": {
                "type": "factorized",
                "width": table,
                "normalize": embedding.normalize,
                "narrow_positions": narrow,
            }
        }
    else:
        fields = {}
    if table != width and not head.leads_back:
        fields["head"] = "transform"
    return fields


def sample_tokens(logits: Tensor, draws: Tensor, temperature: float, original: Tensor | None = None) -> Tensor:
    """Ids drawn from softmax(logits / temperature): the first whose cumulative probability exceeds the draw.

    logits [..., V], draws [...] in [0, 1). original [...]: ids that are not to be drawn. One number for each token in
    place of one for each word: a batch carries its own draws, so that what is drawn depends on the row alone.
    """
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    if original is not None:
        logits = logits.scatter(-1, original.unsqueeze(-1), float("-inf"))
    cumulative = logits.softmax(-1).cumsum(-1)
    wanted = draws.to(cumulative.dtype).unsqueeze(-1) * cumulative[..., -1:]
    return (cumulative <= wanted).sum(-1).clamp(max=logits.shape[-1] - 1)


class XFormerForReplacedTokenPreTraining(XFormerForReplacedTokenDetection):
    """An encoder that learns to find the tokens that a small generator, trained next to it, put into a text.

    loss = L_generator + detection_weight L_detection (Clark et al. 2020, ELECTRA, arXiv 2003.10555, section 2): the
    generator predicts masked tokens, what is drawn from it stands in the text in their place, and the encoder says of
    every token whether it is another one than before. No gradient goes through the draw.

    The two share token and position tables (`generator_sharing="tied"`); or the encoder's token vectors are
    stopgrad(E_generator) + E_delta with E_delta zero at the start (`"gradient_disentangled"`, He et al. 2021,
    DeBERTaV3, arXiv 2111.09543, section 3.2); or they share nothing (`"untied"`). Without labels it is the encoder
    alone. [`extract`] gives either as a model of its own.
    """

    made_of: ClassVar[tuple[str, ...]] = ("ForMaskedLM", "ForReplacedTokenDetection")

    def __init__(self, config: XFormerConfig):
        super().__init__(config)
        config = self.config
        if config.embedding.clusters(config) is not None and self.settings.generator_sharing != "untied":
            raise ValueError(
                f"`generator_sharing={self.settings.generator_sharing!r}` shares one token table, and embedding"
                f" {config.embedding.type!r} has several; set `generator_sharing='untied'`."
            )
        if self.settings.generator_sharing == "tied" and not config.tie_word_embeddings:
            raise ValueError(
                "`generator_sharing='tied'` shares the token table with the generator's output as well; set"
                " `tie_word_embeddings=True`, or `generator_sharing='untied'`."
            )
        self.loss_weight = float(self.settings.detection_weight)
        self.generator = _own_class(config, "AutoModelForMaskedLM", XFormerForMaskedLM)(generator_config(config))
        if self.settings.generator_sharing == "tied":
            self._tied_weights_keys = self._shared_tables()
        self.post_init()
        if self.settings.generator_sharing == "gradient_disentangled":
            nn.init.zeros_(self.model.trunk.embedding.tokens.weight)  # loading comes later

    @classmethod
    def part_configs(cls, config: Any) -> tuple[Any, ...]:
        return (generator_config(config),)

    def _shared_tables(self) -> dict[str, str]:
        """Tables of the generator -> the encoder's: tokens, types and positions."""
        pairs = {}
        for part in ("embedding", "position"):
            mine = dict(getattr(self.model.trunk, part).named_parameters())
            for name, parameter in getattr(self.generator.model.trunk, part).named_parameters():
                table = name.endswith(".weight") and not name.startswith(("norm.", "proj."))
                if table and name in mine and mine[name].shape == parameter.shape:
                    pairs[f"generator.model.trunk.{part}.{name}"] = f"model.trunk.{part}.{name}"
        return pairs

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        table = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        self.generator.resize_token_embeddings(new_num_tokens, *args, **kwargs)
        self.tie_weights()
        return table

    def extract(self, part: Literal["generator", "discriminator"] = "discriminator") -> Any:
        """A model of its own, with a copy of the weights: the generator, `ForMaskedLM`, or the encoder,
        `ForReplacedTokenDetection`, with its token vectors as they are used. `extract(...).save_pretrained(folder)`
        makes an ordinary checkpoint."""
        if part == "generator":
            return copy.deepcopy(self.generator)
        if part != "discriminator":
            raise ValueError(f"There is a 'generator' and a 'discriminator' to extract, not {part!r}.")
        config = copy.deepcopy(self.config)
        config.architectures = None
        made = _own_class(config, "AutoModelForPreTraining", XFormerForReplacedTokenDetection)(config)
        weights = {name: value for name, value in self.state_dict().items() if not name.startswith("generator.")}
        if self.settings.generator_sharing == "gradient_disentangled":
            name = "model.trunk.embedding.tokens.weight"
            weights[name] = weights[name] + self.generator.model.trunk.embedding.tokens.weight.detach()
        made.to(self.dtype).load_state_dict(weights)
        return made.to(self.device).train(self.training)

    def _as_read(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> dict[str, Tensor | None]:
        """What the encoder is given for ids."""
        if input_ids is None or self.settings.generator_sharing != "gradient_disentangled":
            return {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        learned = self.generator.model.trunk.embedding.lookup(input_ids).detach()
        return {"inputs_embeds": learned + self.model.trunk.embedding.lookup(input_ids)}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        target_positions: Tensor | None = None,
        sampling_draws: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerReplacedTokenOutput:
        """Without labels, `input_ids` are judged as they are.

        Args:
            labels: [B, T], what stands in the text, -100 at padding.
            input_ids: the same with masked tokens.
            target_positions: [B, N], where the generator predicts, -1 for none (default: wherever the two differ).
            sampling_draws: [B, N] numbers in [0, 1), one for each of these (default: random in training, the middle of
                the distribution in evaluation).

        Returns:
            logits: [B, T], positive where a token seems to be replaced; targets: [B, T], 1 where it was.
        """
        beside = {"attention_mask": attention_mask, "token_type_ids": token_type_ids, "position_ids": position_ids}
        if labels is None:
            kwargs.pop("num_items_in_batch", None)
            judged = super().forward(**self._as_read(input_ids, inputs_embeds), **beside, return_dict=True, **kwargs)
            return outputs.XFormerReplacedTokenOutput(**judged)
        if input_ids is None:
            raise ValueError(f"{type(self).__name__} is trained on `input_ids`, from which tokens are replaced.")
        check_token_labels(labels, input_ids.unsqueeze(-1))
        if attention_mask is not None and attention_mask.shape == labels.shape:
            given, labels = labels, labels.masked_fill(attention_mask == 0, -100)
            if (count := kwargs.get("num_items_in_batch")) is not None:
                kwargs["num_items_in_batch"] = counted_of(labels, given, count, self.dtype)
        original = torch.where(labels == -100, input_ids, labels)
        if target_positions is None:
            everywhere = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
            target_positions = torch.where(original != input_ids, everywhere, -1)
        places = target_positions.clamp(min=0)
        wanted = labels.gather(1, places).masked_fill(target_positions < 0, -100)
        own = {**self._for_generator(kwargs), **self.generator.own_inputs()}
        states = self.generator.model(input_ids=input_ids, **beside, **own)
        losses = {f"{GENERATOR_LOSS}_{name}": value for name, value in (states.aux_losses or {}).items()}
        chosen = states.last_hidden_state
        chosen = chosen.gather(1, places.unsqueeze(-1).expand(-1, -1, chosen.shape[-1]))
        scores = self.generator.lm_head(chosen)
        losses[GENERATOR_LOSS] = token_cross_entropy(scores, wanted)
        if states.log_probs is not None:
            rows = token_rows(scores, wanted)
            learned = self.generator.model.choice_loss(states.log_probs, losses[GENERATOR_LOSS], rows)
            losses[GENERATOR_LOSS] = losses[GENERATOR_LOSS] + learned
        replaced = self._replaced(original, scores.detach(), places, wanted, sampling_draws)
        targets = torch.where(labels == -100, -100, (replaced != original).long())
        judged = super().forward(**self._as_read(replaced, None), **beside, labels=targets, return_dict=True, **kwargs)
        loss = with_aux_losses(judged.loss, losses, step_share(targets, kwargs.get("num_items_in_batch")))
        judged.aux_losses = {**(judged.aux_losses or {}), **losses}
        return outputs.XFormerReplacedTokenOutput(**{**judged, "loss": loss}, targets=targets)

    def _for_generator(self, given: dict[str, Any]) -> dict[str, Any]:
        left_out = ("num_items_in_batch", "output_attentions", "output_hidden_states", "return_dict")
        return {name: value for name, value in given.items() if name not in left_out}

    @torch.no_grad()
    def _replaced(
        self, original: Tensor, scores: Tensor, places: Tensor, wanted: Tensor, draws: Tensor | None
    ) -> Tensor:
        """The text [B, T] with what is drawn from the generator's scores [B, N, V] at places [B, N]."""
        if draws is None:
            draws = (
                torch.rand(places.shape, device=places.device)
                if self.training
                else torch.full_like(places, 0.5, dtype=torch.float32)
            )
        before = original.gather(1, places)
        drawn = sample_tokens(
            scores,
            draws,
            self.settings.generator_temperature,
            before if self.settings.generator_avoids_original else None,
        )
        # A place that is no target is written nowhere: its column, one behind the text, is cut off.
        length = original.shape[1]
        into = torch.where(wanted == -100, length, places)
        return torch.cat([original, original[:, :1]], dim=1).scatter(1, into, drawn)[:, :length]


def _own_class(config: Any, auto: str, base: Any) -> Any:
    """The family's own class with that head, or the free mix's."""
    found = (cls for cls in registered(auto, type(config)) if issubclass(cls, base))
    return next((cls for cls in found if not issubclass(cls, XFormerForReplacedTokenPreTraining)), base)
