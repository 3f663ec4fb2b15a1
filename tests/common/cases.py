"""The table of what the contract suite runs over: components, in every registered variant and in free mixes.

A component is covered by being part of a variant, or of a mix; the family's heads say in which shapes it is tested.
What a component or a family cannot do stands in `exceptions.py`, with the reason, and the suite reports a skip.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_xformers import XFormerConfig
from hf_xformers.core.components import SLOTS
from hf_xformers.families import HEADS
from hf_xformers.variants import config_class, family, model_types
from tests.common.exceptions import exception, holders
from tests.helpers import make_strong, tiny_fields

SHAPES = {"encoder": "ForMaskedLM", "decoder": "ForCausalLM", "seq2seq": "ForSeq2SeqLM"}
FLAGS = {
    "encoder": {"is_decoder": False, "is_encoder_decoder": False},
    "decoder": {"is_decoder": True, "is_encoder_decoder": False},
    "seq2seq": {"is_decoder": False, "is_encoder_decoder": True},
}
BOTH = ("encoder", "decoder")
ALL = tuple(SHAPES)


@dataclass(frozen=True)
class Mix:
    """A free mix: fields of `XFormerConfig`, and the shapes in which it is tested."""

    fields: dict[str, Any]
    shapes: tuple[str, ...] = ALL


MIXES: dict[str, Mix] = {
    "modern": Mix(  # what most current language models are made of
        {
            "position": "rotary",
            "attention": {"type": "dense", "bias": False},
            "normalization": "rms_norm",
            "residual": "pre_ln",
            "feedforward": {"type": "swiglu", "bias": False},
            "num_key_value_heads": 2,
        }
    ),
    "multi_query": Mix({"num_key_value_heads": 1, "cross_attention": {"type": "dense", "scale": 0.5}}),
    "task_conditioned": Mix(  # CA-MTL as a whole
        {
            "attention": "ca_mtl",
            "stack": "ca_mtl",
            "residual": "conditional_post_ln",
            "decoder": {"attention": "dense"},
        }
    ),
    "shared_attention": Mix({"distinct_layers": 1, "share": "attention"}),
    "shared_feedforward": Mix({"distinct_layers": 1, "share": "feedforward"}, BOTH),
    "free_head_width": Mix({"head_dim": 12, "position": {"type": "rotary", "layout": "interleaved"}}, BOTH),
    "partial_rotary": Mix({"position": {"type": "rotary", "fraction": 0.5}, "feedforward": "geglu"}, ("decoder",)),
    "sinusoids": Mix({"position": {"type": "sinusoidal_absolute", "layout": "half"}, "feedforward": "relu"}),
    "no_position": Mix({"position": "none", "residual": "pre_ln"}, BOTH),
    "score_bias_post_ln": Mix(
        {"position": {"type": "t5_relative_bias", "num_buckets": 8, "max_distance": 12}, "head": "transform"}
    ),
    "side_by_side": Mix(  # as in GPT-J, with BLOOM's positions
        {
            "position": "alibi",
            "block": {"type": "parallel", "shared_norm": True},
            "residual": "pre_ln",
            "attention": {"type": "dense", "bias": False, "output_bias": True, "query_key_norm": "each_head"},
            "feedforward": "squared_relu",
        }
    ),
    "windows_and_norms": Mix(  # as in Gemma 3, with StreamingLLM's first tokens
        {
            "position": {"type": "rotary", "scaling": {"type": "linear", "factor": 8.0}, "local_theta": 100.0},
            "attention": {
                **{"type": "sliding_window", "window_size": 4, "sinks": 2, "bias": False},
                **{"angles": "local", "query_key_norm": "head", "score_cap": 20.0},
            },
            "per_layer_config": {1: {"attention": {"type": "dense", "bias": False, "query_key_norm": "head"}}},
            "normalization": {"type": "rms_norm", "from_zero": True},
            "residual": "peri_ln",
            "feedforward": {"type": "geglu", "approximate": "tanh"},
            "head": {"type": "linear", "cap": 30.0},
            "num_key_value_heads": 2,
        },
        ("decoder",),
    ),
    "shared_experts": Mix(  # as in DeepSeek-V3, with Granite's factors
        {
            "feedforward": {
                **{"type": "deepseek_moe", "num_experts": 4, "expert_size": 12, "shared_size": 8, "groups": 2},
                **{"group_score": "best", "scale": 2.5},
            },
            "position": "rotary",
            "embedding": {"type": "token", "scale": 3.0},
            "normalization": "rms_norm",
            "residual": {"type": "pre_ln", "branch_scale": 0.5},
            "head": {"type": "linear", "scale": 0.5},
        },
        BOTH,
    ),
    "differing_layers": Mix(
        {
            "num_hidden_layers": 3,
            "per_layer_config": {
                0: {"feedforward": {"type": "swiglu", "bias": False}},
                2: {"feedforward": "relu", "num_key_value_heads": 2},
            },
        }
    ),
    "differing_decoder": Mix(
        {"num_decoder_layers": 1, "decoder": {"position": "rotary", "feedforward": "reglu", "residual": "pre_ln"}},
        ("seq2seq",),
    ),
    "adaptive_vocabulary": Mix(
        {
            "embedding": {"type": "adaptive", "cutoffs": [8, 16], "factor": 2, "scale": True},
            "head": {"type": "adaptive", "cutoffs": [8, 16], "factor": 2, "tied_projections": "after_first"},
        }
    ),
    "image_plane": Mix(  # with a mixture of logistics as output
        {
            "attention": {"type": "image_transformer", "local": "2d", "num_channels": 1},
            "position": {"type": "axial"},
            "residual": "pre_ln",
            "head": {"type": "logistic_mixture", "num_mixtures": 3},
            "tie_word_embeddings": False,
        },
        BOTH,
    ),
    "hedgehog": Mix({"attention": "hedgehog", "position": "rotary", "num_key_value_heads": 2}, BOTH),
    "lolcats": Mix({"attention": {"type": "lolcats", "window": 3}, "position": "rotary"}, BOTH),
    "convolution_beside": Mix({"block": {"type": "convolution", "groups": 2, "activation": "gelu"}}),
    "supra": Mix(
        {
            "attention": {"type": "t2r", "normalization": "output_norm"},
            "position": "rotary",
            "feedforward": {"type": "squared_reglu", "bias": False},
        },
        BOTH,
    ),
    "gated_random_features": Mix(
        {"attention": {"type": "rfa", "num_features": 6, "gate": True, "redraw_interval": 0}, "position": "rotary"},
        ("decoder",),
    ),
    "dpfp_delta": Mix({"attention": {"type": "dpfp", "nu": 2, "update_rule": "delta"}}, ("decoder",)),
    "dpfp_sums": Mix({"attention": {"type": "dpfp", "attention_normalize": False}, "residual": "pre_ln"}, BOTH),
    "delta_favor_normalized": Mix(
        {"attention": {"type": "delta_net", "feature_map": "favor", "attention_normalize": True}}, ("decoder",)
    ),
    "gated_delta_hybrid": Mix(  # as in Qwen3-Next: softmax attention and positions in some layers alone
        {
            "position": "rotary",
            "attention": {"type": "gated_delta_net", "key_heads": 2, "value_heads": 4, "value_width": 6},
            "normalization": "rms_norm",
            "residual": "pre_ln",
            "feedforward": {"type": "swiglu", "bias": False},
            "num_key_value_heads": 2,
            "per_layer_config": {1: {"attention": {"type": "dense", "bias": False, "output_gate": "element"}}},
        },
        ("decoder",),
    ),
    "hybrid_heads": Mix(  # as in Falcon-H1
        {
            "block": {
                **{"type": "hybrid_heads", "attention_factors": [0.7, 1.2], "mixer_factors": [1.3, 0.6]},
                "mixer": {"type": "mamba2", "key_heads": 1, "key_width": 6, "part_scales": [0.8, 1.2, 0.7, 1.4, 0.6]},
                "feedforward_factor": 0.5,
            },
            "position": "rotary",
            "normalization": "rms_norm",
            "residual": "pre_ln",
            "feedforward": {"type": "swiglu", "bias": False, "gate_scale": 0.9},
            "num_key_value_heads": 2,
        },
        ("decoder",),
    ),
    "decays_both_ways": Mix(
        {
            "attention": {"type": "mamba2", "key_heads": 1, "key_width": 6},
            "position": "none",
            "decoder": {"attention": "dense"},
            "per_layer_config": {1: {"attention": {"type": "kimi_delta_attention", "gate_rank": 3}}},
            "residual": "pre_ln",
        },
        ("encoder", "seq2seq"),
    ),
    "channel_mixing": Mix(  # RWKV-7's layer around another recurrence
        {"block": "rwkv7", "attention": {"type": "gla", "gate_rank": 3}, "residual": "pre_ln"}, ("decoder",)
    ),
    "one_cache_above": Mix(  # as in YOCO
        {
            "num_hidden_layers": 4,
            "attention": {"type": "cross_layer_attention", "sharing_factor": None, "first_layer": 2},
            "per_layer_config": {
                layer: {"attention": {"type": "sliding_window", "window_size": 3, "sinks": 0}} for layer in range(2)
            },
            "position": "rotary",
            "num_key_value_heads": 2,
        },
        BOTH,
    ),
    "performer_relu": Mix({"attention": {"type": "performer", "feature_kind": "relu", "num_features": 8}}, BOTH),
    "fixed_windows_of_a_memory": Mix(
        {
            "attention": "hard_coded_gaussian",
            "cross_attention": {"type": "hard_coded_gaussian", "ratio": 1.5, "renormalize": True},
        },
        ("seq2seq",),
    ),
    "predicted_windows_of_a_memory": Mix(
        {"attention": "localness", "cross_attention": {"type": "localness", "window": "layer", "layers": 2}},
        ("seq2seq",),
    ),
    "predicted_scores_of_a_memory": Mix(
        {"attention": "predictive_attention", "cross_attention": {"type": "predictive_attention", "form": "pat"}},
        ("seq2seq",),
    ),
    "gated_heads": Mix(  # as in Qwen3-Next
        {
            "attention": {"type": "dense", "bias": False, "output_gate": "element", "query_key_norm": "head"},
            "position": {"type": "rotary", "fraction": 0.5},
            "normalization": {"type": "rms_norm", "from_zero": True},
            "num_key_value_heads": 2,
        },
        ("decoder",),
    ),
    "transient_global": Mix(
        {
            "attention": {"type": "transient_global", "window_size": 3, "block_size": 3},
            "position": "rotary",
            "num_key_value_heads": 2,
        },
        ("encoder",),
    ),
    "dynamic_masks": Mix({"attention": "dynamic_mask", "num_key_value_heads": 2}, BOTH),
    "edges_of_all_layers": Mix(
        {"attention": {"type": "sac", "share_structure": "layers", "edges_per_node": 3, "predictor_hidden": 4}}, BOTH
    ),
    "vector_of_a_memory": Mix({"cross_attention": "memory_vector"}, ("seq2seq",)),
    "conformer_layers": Mix(
        {"block": {"type": "conformer", "conv_kernel": 3, "conv_norm": "layer"}, "residual": "pre_ln"}
    ),
    "separable_convolutions": Mix(
        {"block": "separable_convolution", "position": "none", "stack": {"type": "universal", "act": "accumulated"}}
    ),
    "token_types_chunked": Mix({"type_vocab_size": 3, "chunk_size_feed_forward": 4, "add_pooler": True}, ("encoder",)),
}


@dataclass(frozen=True)
class Case:
    """A variant or a mix in one shape."""

    name: str
    shape: str
    config_class: type = field(repr=False)
    family: dict[str, type] = field(repr=False, compare=False)
    fields: str = field(default="{}", repr=False)  # JSON, so that a case can be a key

    def __str__(self) -> str:
        return f"{self.name}-{self.shape}"

    @property
    def head(self) -> str:
        """The head that this shape is tested with."""
        return SHAPES[self.shape]

    @property
    def causal(self) -> bool:
        return self.shape != "encoder"

    def config(self, **changes: Any) -> XFormerConfig:
        fields = json.loads(self.fields)
        if "per_layer_config" in fields:
            fields["per_layer_config"] = {int(key): value for key, value in fields["per_layer_config"].items()}
        return self.config_class(
            **tiny_fields(self.config_class, self.shape, **{**fields, **FLAGS[self.shape], **changes})
        )

    @property
    def preset(self) -> XFormerConfig:
        """The configuration without changes, made once: to be read alone."""
        return _preset(self)

    def build(
        self, head: str | None = None, dtype: torch.dtype = torch.float64, strong: bool = True, **changes: Any
    ) -> PreTrainedModel:
        """A new model, always with the same parameters, in evaluation mode."""
        implementation = changes.pop("attn_implementation", None)
        config = self.config(**changes)
        if implementation is not None:
            config._attn_implementation = implementation
        torch.manual_seed(0)
        model = self.family[head or self.head](config).to(dtype).eval()
        return make_strong(model) if strong else model

    def shared(self, dtype: torch.dtype = torch.float64, implementation: str | None = None) -> PreTrainedModel:
        """The same model for every test that only reads it."""
        return _shared(self, dtype, implementation)

    def run(self, model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        """Logits [B, T, V] for `ids` [B, T]; an encoder-decoder reads them on both sides, under the same mask."""
        if self.shape == "seq2seq":
            more = {"decoder_input_ids": ids, "decoder_attention_mask": mask, **more}
        return model(input_ids=ids, attention_mask=mask, **more).logits

    def exception(self, test: str) -> str | None:
        """Why this case is excused from `test`."""
        return exception(_holders(self), test, f"{test}:{self.shape}")


@functools.cache
def _preset(case: Case) -> XFormerConfig:
    return case.config()


@functools.cache
def _holders(case: Case):
    return holders(case.preset)


def _word(value: Any) -> Any:
    """A setting without its size: numbers are all alike, and different from None."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_word, value))
    if dataclasses.is_dataclass(value):
        return type(value).__name__
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


@functools.cache
def components(case: Case) -> frozenset[tuple[Any, ...]]:
    """What a case is made of: (slot, component, its settings without numbers, whether it is in a decoder)."""
    found = set()
    for tower in case.preset.tower_configs():
        for layer in list(tower.per_layer_config) if tower.is_heterogeneous else [tower]:
            for slot in SLOTS:
                spec = getattr(layer, slot)
                words = tuple((entry.name, _word(getattr(spec, entry.name))) for entry in dataclasses.fields(spec))
                found.add((slot, spec.type, words, tower.is_decoder))
    return frozenset(found)


def covering(cases: Sequence[Case], parts: Callable[[Case], Iterable[Any]]) -> list[Case]:
    """Few of the cases, which together have every part that any of them has: for tests that are slow, and of which
    one case for each part shows what all of them would."""
    of_case = {case: frozenset(parts(case)) for case in cases}
    left, chosen = set().union(*of_case.values()), []
    while left:
        best = max(cases, key=lambda case: len(left & of_case[case]))  # the first of the equal ones
        left -= of_case[best]
        chosen.append(best)
    return [case for case in cases if case in chosen]


@functools.cache
def _shared(case: Case, dtype: torch.dtype, implementation: str | None) -> PreTrainedModel:
    return case.build(dtype=dtype, attn_implementation=implementation)


def _cases() -> list[Case]:
    found = []
    for name in model_types():
        if name == "xformer":
            continue  # its defaults stand in the mixes' rows
        members = family(name)
        found += [Case(name, shape, config_class(name), members) for shape in ALL if SHAPES[shape] in members]
    free = family("xformer")
    for name, mix in {"defaults": Mix({}), **MIXES}.items():
        fields = json.dumps(mix.fields)
        found += [Case(name, shape, XFormerConfig, free, fields) for shape in mix.shapes]
    return found


CASES = _cases()
TEXT_TYPES = [name for name in model_types() if config_class(name).modality == "text"]  # tests/vision has the others
FAMILY_HEADS = [  # tests/finetuning/test_forecasting.py has the models that read numbers
    (name, head) for name in TEXT_TYPES for head in family(name) if head != "ForTimeSeriesPrediction"
]
AUTO = HEADS


@functools.cache
def defaults(name: str) -> XFormerConfig:
    """A family's config as it is by itself, made once: to be read alone."""
    return config_class(name)()


@functools.cache
def _below_heads(name: str) -> tuple[Any, ...]:
    return tuple(
        (tower.stack.type, tower.is_decoder, tower.layer(0).attention.max_global_tokens)
        for tower in defaults(name).tower_configs()
    )


def _tested_heads() -> list[tuple[str, str]]:
    """Each head on whatever hands it vectors: heads depend on the stack, the direction and the tokens that may be
    global, and on nothing else of the layers (`test_vocabulary.py` has those that share tables with the embedding). Of
    families that are alike in those, the first is tested with all heads."""
    found, seen = [], set()
    for name, head in FAMILY_HEADS:
        if (_below_heads(name), head) not in seen:
            found.append((name, head))
        seen.add((_below_heads(name), head))
    return found


TESTED_HEADS = _tested_heads()


def _parts(case: Case) -> frozenset[Any]:
    parts = {part if part[0] not in ATTENTION else (*part[:2], part[3]) for part in components(case)}
    stacks = {("stack", tower.stack.type, case.shape) for tower in case.preset.tower_configs()}
    return parts | stacks | {("field", name) for name in json.loads(case.fields) if name not in SLOTS}


# Few of the cases: each component with each of its settings (of attention, `tests/attention/references` has them) in
# an encoder and in a decoder, each stack in each shape, and each further field of the mixes. Families are made of
# these, and differ in their defaults alone: `test_families.py` has those.
ATTENTION = ("attention", "cross_attention")
PARTS = covering(CASES, _parts)


def _components(cases: list[Case], slots: Iterable[str] = SLOTS) -> list[Case]:
    """Each component once, in one tower if there is such a case: for what direction and settings do not change."""
    names = {case: {part[:2] for part in components(case) if part[0] in slots} for case in cases}
    alone = covering([case for case in cases if case.shape != "seq2seq"], names.__getitem__)
    shown = set[Any]().union(*map(names.__getitem__, alone))
    return alone + covering([case for case in cases if case.shape == "seq2seq"], lambda case: names[case] - shown)


COMPONENTS = _components(CASES)
# Those that keep something of earlier tokens, or may read it.
CAUSAL = _components(
    [case for case in CASES if case.causal], (*ATTENTION, "position", "feedforward", "block", "stack")
)

each_part = pytest.mark.parametrize("case", PARTS, ids=str)
each_causal_part = pytest.mark.parametrize("case", [case for case in PARTS if case.causal], ids=str)
each_causal_component = pytest.mark.parametrize("case", CAUSAL, ids=str)
each_component = pytest.mark.parametrize("case", COMPONENTS, ids=str)
