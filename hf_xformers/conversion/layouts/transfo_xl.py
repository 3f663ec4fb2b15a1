# SPDX-License-Identifier: Apache-2.0
"""The layout of Transformer-XL's published checkpoint (`transfo-xl-wt103`), as transformers 4 wrote it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ...core.vocabulary_clusters import ClusterFields
from .shared import Layout


class TransfoXLConfig(PreTrainedConfig):
    """Fields of its config.json.

    Args:
        cutoffs, div_val, d_embed: clusters of the vocabulary.
        mem_len: states of earlier segments that are read.
        tgt_len: tokens of a segment.
        same_length: every token reads as many keys.
        clamp_len: distance beyond which all count as it (0 or less: none).
        untie_r: each layer has its own pair of biases.
        tie_projs: of each cluster, whether the output has the input's projection; by default all but the first
            (`proj_share_all_but_first`).
    """

    model_type = "transfo-xl"
    attribute_map = {
        "n_token": "vocab_size",
        "hidden_size": "d_model",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    vocab_size: int = 267735
    cutoffs: list[int] | tuple[int, ...] = (20000, 40000, 200000)
    d_model: int = 1024
    d_embed: int = 1024
    n_head: int = 16
    d_head: int = 64
    d_inner: int = 4096
    div_val: int = 4
    pre_lnorm: bool = False
    n_layer: int = 18
    mem_len: int = 1600
    tgt_len: int = 128
    ext_len: int = 0
    clamp_len: int = 1000
    same_length: bool = True
    proj_share_all_but_first: bool = True
    tie_projs: list[bool] | None = None
    tie_weight: bool = True
    attn_type: int = 0
    sample_softmax: int = -1
    adaptive: bool = True
    dropout: float | int = 0.1
    dropatt: float | int = 0.0
    untie_r: bool = True
    init: str = "normal"
    init_range: float = 0.01
    proj_init_std: float = 0.01
    init_std: float = 0.02
    layer_norm_epsilon: float = 1e-5
    bos_token_id: int | None = None
    eos_token_id: int | None = 0
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.cutoffs = list(self.cutoffs)
        if self.tie_projs is None:
            self.tie_projs = [False] + [self.proj_share_all_but_first] * len(self.cutoffs)


class _Clusters(nn.Module):
    """One side's tables (`kind`) and projections [d_model, width], by cluster."""

    def __init__(self, config: TransfoXLConfig, output: bool):
        super().__init__()
        fields = ClusterFields(cutoffs=tuple(config.cutoffs), factor=config.div_val, width=config.d_embed)
        clusters = fields.clusters(config)
        projections = [torch.empty(config.d_model, cluster.width) for cluster in clusters]
        projections = projections if fields.projects(config) else []
        if output:
            self.out_layers = nn.ModuleList(nn.Linear(cluster.width, cluster.size) for cluster in clusters)
            self.out_projs = nn.ParameterList(projections)
            self.cluster_weight = nn.Parameter(torch.empty(len(clusters) - 1, config.d_embed))
            self.cluster_bias = nn.Parameter(torch.empty(len(clusters) - 1))
        else:
            self.emb_layers = nn.ModuleList(nn.Embedding(cluster.size, cluster.width) for cluster in clusters)
            self.emb_projs = nn.ParameterList(projections)


class _Layer(nn.Module):
    def __init__(self, config: TransfoXLConfig):
        super().__init__()
        inner = config.n_head * config.d_head
        self.dec_attn, self.pos_ff = nn.Module(), nn.Module()
        for name, sizes in {
            "qkv_net": (config.d_model, 3 * inner),
            "o_net": (inner, config.d_model),
            "r_net": (config.d_model, inner),
        }.items():
            self.dec_attn.add_module(name, nn.Linear(*sizes, bias=False))
        for name in ("r_r_bias", "r_w_bias"):
            self.dec_attn.register_parameter(name, nn.Parameter(torch.empty(config.n_head, config.d_head)))
        up, down = nn.Linear(config.d_model, config.d_inner), nn.Linear(config.d_inner, config.d_model)
        self.pos_ff.add_module("CoreNet", nn.ModuleDict({"0": up, "3": down}))
        for part in (self.dec_attn, self.pos_ff):
            part.add_module("layer_norm", nn.LayerNorm(config.d_model))


class TransfoXLPreTrainedModel(Layout):
    config_class = TransfoXLConfig
    base_model_prefix = "transformer"


class TransfoXLModel(TransfoXLPreTrainedModel):
    """The tensors of the bare model."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__(config)
        self.word_emb = _Clusters(config, output=False)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.n_layer))
        self._tied_weights_keys = {}
        if not config.untie_r:
            for name in ("r_w_bias", "r_r_bias"):
                self.register_parameter(name, nn.Parameter(torch.empty(config.n_head, config.d_head)))
                copies = {f"layers.{index}.dec_attn.{name}": name for index in range(config.n_layer)}
                self._tied_weights_keys.update(copies)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.word_emb


class TransfoXLLMHeadModel(TransfoXLPreTrainedModel):
    """The tensors of the language model."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__(config)
        self.transformer = TransfoXLModel(config)
        self.crit = _Clusters(config, output=True)
        tied = {
            f"crit.out_layers.{index}.weight": f"transformer.word_emb.emb_layers.{index}.weight"
            for index in range(len(self.crit.out_layers))
        }
        shared = zip(self.crit.out_projs, config.tie_projs or [], strict=False)
        for index in [place for place, (_, shares) in enumerate(shared) if shares]:
            tied[f"crit.out_projs.{index}"] = f"transformer.word_emb.emb_projs.{index}"
        self._tied_weights_keys = tied
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.word_emb

    def get_output_embeddings(self) -> None:
        return None
