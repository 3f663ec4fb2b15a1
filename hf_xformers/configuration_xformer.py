# SPDX-License-Identifier: Apache-2.0
"""The configuration of every X-former: standard geometry fields and one component spec per slot."""

from __future__ import annotations

import copy
from dataclasses import field
from typing import Any, ClassVar, Literal, Self, cast

from transformers import PreTrainedConfig

from .compat import LAYER_SETTINGS, has_own_code, shared_setting
from .core.components import SLOTS, Spec, SpecLike, build_spec, check_components, check_shared
from .core.config_checks import (
    check_base_fields,
    check_geometry,
    check_layer_fields,
    layers_with_specs,
    refuse_typos,
    refuse_unknown,
    strict_config,
    with_specs,
)
from .core.parallel_plans import expert_parallel_plan, fully_sharded_plan, tensor_parallel_plan
from .core.pretraining_specs import (
    PretrainingSpec,
    changed_pretraining,
    settled_pretraining,
)
from .core.serving import pipeline_plan
from .core.sharing import Order, Part, check_layer_drop, check_sharing
from .core.specs import default_of

Initializer = Literal["normal", "scaled_residual", "xavier", "small", "t5", "fan_in"]

# What an encoder-decoder's towers cannot differ in: they share the token table, one reads the other's states, and
# there is one task.
_SHARED = (
    "vocab_size",
    "hidden_size",
    "is_decoder",
    "is_encoder_decoder",
    "decoder",
    "id2label",
    "label2id",
    "problem_type",
    "architectures",
    "dtype",
    "transformers_version",
    "pretraining",
)


def _plain(value: Any) -> Any:
    """`value` with every spec replaced by its dict, at any depth."""
    if isinstance(value, Spec):
        return value.to_dict()
    if isinstance(value, PretrainingSpec):
        return value.plain()
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


class XFormerConfig(PreTrainedConfig):
    r"""
    Configuration of an X-former: the vanilla Transformer's geometry and one component for each slot.

    A slot takes a component name, a dict (`{"type": name, field: value}`) or a spec object, and always stores the
    spec:

    ```python
    >>> from hf_xformers import XFormerConfig

    >>> config = XFormerConfig(hidden_size=64, num_attention_heads=4, position="rotary", residual="pre_ln")
    >>> config.position.theta
    10000.0
    ```

    Args:
        vocab_size: tokens of the vocabulary.
        hidden_size: width D of the states of a token.
        num_hidden_layers: layers, of an encoder-decoder's encoder.
        num_decoder_layers: layers of its decoder; `None`: as many as `num_hidden_layers`.
        distinct_layers: how many layers have parameters, which then run at several depths; `None`: all. 1 is ALBERT.
        sharing: at which depths they run: `sequence`, each several times in a row; `cycle`, all in order again and
            again; `cycle_rev`, the last time in reverse (Takase and Kiyono 2021).
        layer_map: the same said for each depth, the number of the layer that runs there: `[0, 1, 1, 0]`.
        share: what depths share: `all`, whole layers; `attention` or `feedforward`, these alone, while every depth has
            norms and the rest of its own.
        decoder_vocab_size: rows of a token table of the decoder's own, which its output is tied to; `None`: both
            towers read one table.
        num_attention_heads: heads of attention.
        num_key_value_heads: heads of keys and values; `None`: one for each of the queries'; 1: multi-query attention;
            between: grouped.
        head_dim: width of a head; `None`: `hidden_size / num_attention_heads`. Any width is allowed.
        intermediate_size: inner width of the feed-forward layers.
        max_position_embeddings: tokens of the longest text that learned positions are made for.
        first_position: the number that `position_ids` give a text's first token: 0, in RoBERTa of transformers 2.
        type_vocab_size: token types; 0: none.
        hidden_dropout_prob: dropout of embeddings and of what layers add to the states.
        attention_probs_dropout_prob: dropout of attention weights.
        activation_dropout_prob: dropout behind the activation of feed-forward layers.
        classifier_dropout: dropout before a classifier; `None`: `hidden_dropout_prob`, of images none.
        layer_drop: probability that a training step leaves a layer out, so that layers can go later (LayerDrop, Fan et
            al. 2020).
        layer_norm_eps: added to variances before their root is taken.
        initializer: `normal`, N(0, initializer_range); `scaled_residual`, the same with output projections divided by
            sqrt(2 * layers) (GPT-2); `xavier`, Glorot uniform (Vaswani et al. 2017); `small` (Nguyen and Salazar
            2019); `t5` (Raffel et al. 2020); `fan_in`, N(0, initializer_factor / sqrt(fan in)) with output projections
            divided by sqrt(2 * layers) (Child et al. 2019).
        initializer_range: standard deviation of `normal` and `scaled_residual`.
        initializer_factor: multiplies the standard deviation of the others.
        add_pooler: whether classifiers read a dense layer on the first token, in a decoder on the last.
        pooler_activation: its activation, by the name in transformers' table; BERT: tanh.
        classifier_pooling: what a classifier without a pooler reads: `first`, `last` or `mean` token states; `auto`,
            the first, in decoders the last; `late_mean`, the mean of what the transform makes of every token;
            `attention`, what a learned vector reads of all tokens (Lee et al. 2019).
        classifier_transform: what stands between the states and the labels of texts, tokens, spans, choices and
            images: `none`; `dense`, a map and an activation; `dense_norm`, these and the config's normalization.
        classifier_activation: activation of the transform, by the name in transformers' table.
        classifier_bias: whether the map of the transform has a bias.
        tag_decoder: how tokens are labeled: `softmax`, each by itself; `crf`, a linear chain that scores sequences of
            tags, whose best ones are well-formed where tags are of the form B-PER, I-PER, O.
        pretraining: settings of the heads that only pretraining has, by the name of their spec, such as
            `{"replaced_tokens": {"generator_size": 0.5}}`. Missing settings fall back to the variant's, then to the
            spec's defaults.
        pad_token_id: id of the padding token; `None`: there is none.
        bos_token_id: id of the token that begins a text.
        eos_token_id: id of the token that ends a text, or several.
        decoder_start_token_id: id of what an encoder-decoder's decoder reads first; `None`: the padding token.
        is_decoder: whether self-attention is causal. The head classes set it, so a saved config says what was built.
        is_encoder_decoder: whether there are two towers and cross-attention. The head classes set it, too.
        use_cache: whether a decoder keeps the state of what it has read.
        unpad_inputs: whether layers are given the real tokens of a batch alone, as one row, wherever they do not look
            at other tokens (faster the more padding there is; the same results). Not while decoding, recording or
            tracing.
        tie_word_embeddings: whether the output reads the token table.
        labels_in_place: whether a causal model compares a prediction with the label in its own place, as transformers'
            BartForCausalLM does, not with the next one.
        embedding, position, attention, cross_attention, normalization, residual, feedforward, block, stack, head: the
            component of the slot: a name, a dict or a spec.
        decoder: fields of an encoder-decoder's decoder that differ from its encoder's: `{"attention": "dense"}`.
        per_layer_config: fields of single layers that differ (transformers' own field): `{0: {"attention":
            "dense"}}`. Slots but embedding, position, block, stack and head, and the sizes and dropout inside them.

    Raises:
        TypeError: a field or a component field has a wrong type.
        ValueError: unknown component, unknown component field, or a combination that cannot work.
    """

    model_type: ClassVar[str] = "xformer"
    modality: ClassVar[str] = "text"
    reads_colors: ClassVar[Literal["no", "also", "only"]] = "no"  # whether tokens may be colors of images' pixels
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "cache",
        "aux_losses",
        "exit_layers",
        "segment_memory",
        "encoder_last_hidden_state",
    ]
    attribute_map: ClassVar[dict[str, str]] = {}
    add_cross_attention: ClassVar[bool] = False  # of a decoder: `EncoderDecoderModel` asks for it and sets it
    info: ClassVar[Any] = None
    heads: ClassVar[tuple[str, ...]] = ()
    presets: ClassVar[dict[str, dict[str, Any]]] = {}  # by name of a published model: fields other than the defaults
    sizes: ClassVar[dict[str, dict[str, Any]]] = {}  # by size: fields that differ from the preset of that size

    vocab_size: int = 32000
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_decoder_layers: int | None = None
    distinct_layers: int | None = None
    sharing: Order = "sequence"
    layer_map: list[int] | None = None
    share: Part = "all"
    decoder_vocab_size: int | None = None
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    first_position: int = 0
    type_vocab_size: int = 0
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    activation_dropout_prob: float | int = 0.0
    classifier_dropout: float | int | None = None
    layer_drop: float | int = 0.0
    layer_norm_eps: float = 1e-5
    initializer: Initializer = "normal"
    initializer_range: float = 0.02
    initializer_factor: float | int = 1.0
    add_pooler: bool = False
    pooler_activation: str = "tanh"
    classifier_pooling: Literal["auto", "first", "mean", "last", "late_mean", "attention"] = "auto"
    classifier_transform: Literal["none", "dense", "dense_norm"] = "none"
    classifier_activation: str = "gelu"
    classifier_bias: bool = True
    tag_decoder: Literal["softmax", "crf"] = "softmax"
    pretraining: dict[str, Any] = field(default_factory=dict)
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None
    is_decoder: bool = False
    use_cache: bool = True
    unpad_inputs: bool = False
    tie_word_embeddings: bool = True
    labels_in_place: bool = False

    embedding: SpecLike = "token"
    position: SpecLike = "learned_absolute"
    attention: SpecLike = "dense"
    cross_attention: SpecLike = "dense"
    normalization: SpecLike = "layer_norm"
    residual: SpecLike = "post_ln"
    feedforward: SpecLike = "gelu"
    block: SpecLike = "vanilla"
    stack: SpecLike = "plain"
    head: SpecLike = "linear"

    decoder: dict[str, Any] | None = None

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """The configuration of a published model of the family, such as `XFBertConfig.preset("large")`, with `changes`
        on top. Raises ValueError for a name that it has not; `presets` lists them."""
        if name not in cls.presets:
            known = ", ".join(cls.presets) or "none"
            raise ValueError(f"{cls.__name__} has no preset {name!r}; there are: {known}.")
        chosen = copy.deepcopy(cls.presets[name])
        if "pretraining" in chosen and "pretraining" in changes:
            changes = {**changes, "pretraining": changed_pretraining(chosen["pretraining"], changes["pretraining"])}
        return cls(**{**chosen, **changes})

    def changed(self, **fields: Any) -> Self:
        """A config of the same class with other values of these fields, for the same attention back-end."""
        of_this = ("model_type", "transformers_version", "architectures")
        kept = {name: value for name, value in self.to_dict().items() if name not in of_this}
        made = type(self)(**{**kept, **fields})
        made._attn_implementation = self._attn_implementation
        made.name_or_path = self.name_or_path
        return made

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        strict_config(cls)

    def __setattr__(self, key: str, value: Any) -> None:
        if key in SLOTS:
            value = build_spec(key, value)
        elif key == "pretraining":
            value = settled_pretraining(default_of(type(self), key), value)
        elif key == "per_layer_config" and value is not None:
            value = layers_with_specs(self, value)
            count = shared_setting(self, "num_hidden_layers")
            beyond = [layer for layer in value if layer >= count]
            if beyond:
                raise ValueError(
                    f"`per_layer_config` overrides layer {beyond[0]}, but there are {count}, from 0 on; leave it out,"
                    " or raise `num_hidden_layers`."
                )
        elif key == "decoder" and value is not None:
            refuse_unknown(self, "`decoder`", value, allowed=("per_layer_config",), shared=_SHARED)
            value = with_specs(value)
            if value.get("per_layer_config") is not None:
                value["per_layer_config"] = layers_with_specs(self, value["per_layer_config"])
        super().__setattr__(key, value)

    def __post_init__(self, **kwargs):
        refuse_typos(self, kwargs)
        check_base_fields(self)
        super().__post_init__(**kwargs)
        check_layer_fields(self, "`per_layer_config`")
        if self.decoder_start_token_id is None and self.is_encoder_decoder:
            self.decoder_start_token_id = self.pad_token_id
        towers = self.tower_configs()
        for view in towers:
            view.check_layers()
        if not self.shares_token_table:
            return
        if len({view.embedding.clusters(view) for view in towers}) > 1:
            raise ValueError(
                "Both towers read one token table, but the embeddings of encoder and decoder divide the vocabulary in"
                " clusters differently; give both the same `cutoffs`, `factor` and `width`."
            )
        widths = [view.embedding.table_width(view) for view in towers]
        if len(set(widths)) > 1:
            raise ValueError(
                f"Both towers read one token table, but embedding {towers[0].embedding.type!r} of the encoder has one"
                f" of width {widths[0]} and {towers[1].embedding.type!r} of the decoder one of width {widths[1]}; give"
                " both the same."
            )

    # ------------------------------------------------------------------------------------------------ layers

    def check_layers(self) -> None:
        """Checks every distinct layer of this one-tower view; see [`check_components`]."""
        layers = list(self.per_layer_config) if self.is_heterogeneous else [self]
        for layer in layers:
            check_geometry(layer)
            heads, kv_heads = layer.num_attention_heads, layer.num_key_value_heads
            if layer.head_dim is None and layer.hidden_size % heads:
                raise ValueError(
                    f"`hidden_size` {layer.hidden_size} is not a multiple of `num_attention_heads` {heads}; "
                    "change one of them or set `head_dim`."
                )
            if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
                raise ValueError(
                    f"`num_key_value_heads` {kv_heads} must divide `num_attention_heads` {heads} (1: multi-query)."
                )
            check_components(layer)
        check_shared(layers)
        check_sharing(self)
        check_layer_drop(self)

    # ------------------------------------------------------------------------------------------------ towers

    def tower(self, name: Literal["trunk", "decoder"]) -> XFormerConfig:
        """This config as one tower sees it: `trunk` (the only tower, or the encoder) or the `decoder` of an
        encoder-decoder, whose overrides are applied and whose layer count is its own."""
        view = copy.copy(self)
        if name == "trunk":
            if self.is_encoder_decoder:
                view.is_decoder = False
            return view
        if not self.is_encoder_decoder:
            raise ValueError("Only an encoder-decoder has a `decoder` tower; set `is_encoder_decoder=True`.")
        view.is_decoder = True
        layers = self.num_decoder_layers if self.num_decoder_layers is not None else self.num_hidden_layers
        rows = self.vocab_size if self.decoder_vocab_size is None else self.decoder_vocab_size
        overrides = {"num_hidden_layers": layers, "vocab_size": rows, **(self.decoder or {})}
        # Overrides of single layers belong to the encoder unless the decoder brings its own.
        view.__dict__.pop(LAYER_SETTINGS, None)
        for key, value in overrides.items():
            setattr(view, key, value)
        check_layer_fields(view, "`decoder['per_layer_config']`")
        return view

    @property
    def shares_token_table(self) -> bool:
        """Whether there is one token table for all towers."""
        return not self.is_encoder_decoder or self.decoder_vocab_size is None

    def tower_configs(self) -> list[XFormerConfig]:
        """The one-tower views of this config, the trunk first."""
        return [self.tower("trunk"), self.tower("decoder")] if self.is_encoder_decoder else [self.tower("trunk")]

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> XFormerConfig:
        """The config of one side, e.g. to size a cache. transformers' own method would take the field `decoder`, which
        holds overrides, for a whole config."""
        return self.tower("decoder") if decoder and not encoder and self.is_encoder_decoder else self

    def layer(self, layer_idx: int) -> XFormerConfig:
        """The config of one layer of this one-tower view, `per_layer_config` applied."""
        return cast(XFormerConfig, self.per_layer_config[layer_idx]) if self.is_heterogeneous else self

    def layer_configs(self) -> list[XFormerConfig]:
        """The configs of the distinct layers of this one-tower view: one where all are alike."""
        return [self.layer(index) for index in range(self.num_hidden_layers)] if self.is_heterogeneous else [self]

    @property
    def head_width(self) -> int:
        """Width of one head (numbers): `head_dim`, or `hidden_size / num_attention_heads`."""
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """Number of key/value heads: `num_key_value_heads`, or one per head."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def logit_scale(self) -> float:
        """The head's scale, for clients that project the last hidden states themselves (trl)."""
        return self.head.logits(self).scale

    @property
    def final_logit_softcapping(self) -> float | None:
        """The head's cap on logits, for clients that project the last hidden states themselves (trl)."""
        return self.head.logits(self).cap

    @property
    def base_model_tp_plan(self) -> dict[str, str] | None:  # type: ignore[override]
        """How transformers' tensor parallelism splits a base model of this config; see [`tensor_parallel_plan`]."""
        return tensor_parallel_plan(self)

    @property
    def base_model_ep_plan(self) -> dict[str, str] | None:  # type: ignore[override]
        """How transformers' expert parallelism splits a base model of this config; see [`expert_parallel_plan`]."""
        return expert_parallel_plan(self)

    @property
    def base_model_fsdp_plan(self) -> dict[Any, str]:  # type: ignore[override]
        """How transformers' FSDP2 groups a base model of this config; see [`fully_sharded_plan`]."""
        return fully_sharded_plan(self)

    @property
    def base_model_pp_plan(self) -> dict[str, tuple[list[str], list[str]]] | None:  # type: ignore[override]
        """How serving engines divide a base model of this config among processes by layers; see [`pipeline_plan`]."""
        return pipeline_plan(self)

    def update_from_string(self, update_str: str) -> None:
        # `--config_overrides` of transformers' scripts, which names components, too.
        for entry in update_str.split(","):
            name, _, value = entry.partition("=")
            if name in SLOTS:
                setattr(self, name, value)
            else:
                super().update_from_string(entry)
        for view in self.tower_configs():
            view.check_layers()

    # ------------------------------------------------------------------------------------------------ serialization

    @property
    def auto_map(self) -> dict[str, str]:
        """Where the code of a self-contained checkpoint stands, by Auto class; empty where there is none (trl reads it
        of every config whose class is not transformers' own)."""
        return self.__dict__.setdefault("auto_map", {})

    @auto_map.setter
    def auto_map(self, value: dict[str, str] | None) -> None:
        self.__dict__["auto_map"] = dict(value or {})

    def to_dict(self) -> dict[str, Any]:
        fields = self._plain_fields(super().to_dict())
        # Absent rather than None where that says the same: peft's prefix tuning multiplies by what it finds.
        for name in ("num_key_value_heads", "head_dim"):
            if fields.get(name, 0) is None and type(self).__dataclass_fields__[name].default is None:
                del fields[name]
        return fields

    def to_diff_dict(self) -> dict[str, Any]:
        return self._plain_fields(super().to_diff_dict())

    def _plain_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        fields = {key: _plain(value) for key, value in fields.items()}
        if not fields.get("pretraining", True):  # nothing is decided, nor changed
            del fields["pretraining"]
        auto_map = fields.pop("auto_map", None)
        if auto_map and has_own_code(self):  # this is a checkpoint's own code, and is saved with the config
            fields["auto_map"] = {key: reference.rpartition("--")[2] for key, reference in auto_map.items()}
        return fields


strict_config(XFormerConfig)
