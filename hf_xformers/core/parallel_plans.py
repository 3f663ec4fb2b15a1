# SPDX-License-Identifier: Apache-2.0
"""What may be split over processes in an X-former: transformers' `tp_plan`, `ep_plan` and `fsdp_plan`."""

from __future__ import annotations

from typing import Any

from .components import SLOTS
from .sharing import shares_parts

_HEADS = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
_INNER = {"up_proj": "colwise", "gate_proj": "colwise", "down_proj": "rowwise"}
# What a position adds to scores or projections is made for all heads at once.
_ALL_HEADS = {"score_bias", "score_terms", "head_terms"}


def _splits_heads(layer: Any, kind: str) -> bool:
    own = kind == "attention"
    spec = layer.attention if own else layer.cross_attention
    # A norm of queries and keys has one weight for all heads, or statistics over them; an aggregation joins all heads,
    # and losses compare them. Sinks and gates belong to single heads, and are whole in every process.
    alone = spec.query_key_norm == "none" and spec.aggregation is None and not spec.losses
    alone = alone and spec.output_gate == "none" and not spec.learned_sinks
    alone = alone and layer.key_value_heads > 1  # or all processes need the one
    return "heads" in spec.splits and alone and not (own and layer.position.acts & _ALL_HEADS)


def _undivided(config: Any) -> Any:
    """The first component that no process of a tensor-parallel group may run by itself; None if all may."""
    for view in config.tower_configs():
        for layer in view.layer_configs():
            for slot in SLOTS:
                if not getattr(layer, slot).tensor_parallel:
                    return getattr(layer, slot)
    return None


def tensor_parallel_plan(config: Any) -> dict[str, str] | None:
    """Names of a base model's modules -> how they are split over processes; None where nothing is.

    Attention is split by heads where heads know nothing of each other (`Spec.splits`, no position that
    acts inside the attention of single heads, and more than one key/value head), dense feed-forward networks by inner
    channels, the token table by rows, where the head that may be tied to it can be. All else is whole in every
    process.
    """
    if _undivided(config) is not None:
        return None
    plan: dict[str, str] = {}
    for tower, view in zip(("trunk", "decoder"), config.tower_configs()):
        layers = view.layer_configs()
        for index in range(view.num_hidden_layers):
            for entry in view.layer(index).block.plan(view.layer(index), index, tower == "decoder"):
                if entry.kind == "feedforward":
                    rules = _INNER if all("inner" in layer.feedforward.splits for layer in layers) else {}
                    gated = any(layer.feedforward.gated for layer in layers)
                    rules = {name: rule for name, rule in rules.items() if gated or name != "gate_proj"}
                elif entry.name != entry.kind:  # what a block adds of its own, which gets the cache as attention does
                    continue
                else:
                    rules = _HEADS if all(_splits_heads(layer, entry.kind) for layer in layers) else {}
                plan.update({f"{tower}.layers.*.{entry.name}.{name}": rule for name, rule in rules.items()})
    if plan and "table" in config.embedding.splits and "vocabulary" in config.head.splits:
        towers = ("trunk", "decoder") if config.is_encoder_decoder else ("trunk",)
        plan.update({f"{tower}.embedding.tokens": "embedding_rowwise" for tower in towers})
    return plan or None


def expert_parallel_plan(config: Any) -> dict[str, str] | None:
    """Names of a base model's modules and parameters -> how their experts are split over processes; None where
    nothing is.

    Each process holds some of the stacked experts of every feed-forward network that has them, and transformers
    brings tokens there and back. Routers, and all that is no expert, are whole in every process.
    """
    plan: dict[str, str] = {}
    for tower, view in zip(("trunk", "decoder"), config.tower_configs()):
        specs = [layer.feedforward for layer in view.layer_configs()]
        names = dict.fromkeys(name for spec in specs for name in spec.expert_parameters())
        if not names or not all("experts" in spec.splits for spec in specs if spec.expert_parameters()):
            continue
        for index in range(view.num_hidden_layers):
            for entry in view.layer(index).block.plan(view.layer(index), index, tower == "decoder"):
                if entry.kind == "feedforward":
                    experts = f"{tower}.layers.*.{entry.name}.experts"
                    plan[experts] = "ep_dispatch_experts"
                    plan.update({f"{experts}.{name}": "grouped_gemm" for name in names})
    return plan or None


def layers_apart(config: Any) -> bool:
    """Whether every layer's parameters are read inside that layer's call alone."""
    if any(shares_parts(view) for view in config.tower_configs()):
        return False
    return all(
        getattr(layer, slot).layers_apart
        for view in config.tower_configs()
        for layer in view.layer_configs()
        for slot in SLOTS
    )


def fully_sharded_plan(config: Any) -> dict[Any, str]:
    """Names of a base model's modules that FSDP2 gathers one at a time; all else is gathered with the whole model.

    That is all layers of a model whose layers share parameters or are run in pieces (`Spec.layers_apart`): parameters,
    gradients and optimizer states are sharded there, too, but a pass holds the whole parameters.
    """
    towers = ("trunk", "decoder") if config.is_encoder_decoder else ("trunk",)
    plan: dict[Any, str] = {"trunk.embedding.tokens": "free_full_weight"} if config.modality == "text" else {}
    if layers_apart(config):
        plan.update({f"{tower}.layers.*": "free_full_weight" for tower in towers})
    return plan


def check_expert_parallel(config: Any, size: int, option: str = "ep_size") -> None:
    """Refuses `size` processes for experts that they cannot share. option: what the user calls their number.

    Raises:
        ValueError: there are no experts, or they cannot be told apart, or their number does not divide.
    """
    if size <= 1:
        return
    specs = [layer.feedforward for view in config.tower_configs() for layer in view.layer_configs()]
    instead = f"leave `{option}` out and shard the whole model by FSDP2 instead"
    if not any(spec.expert_count() for spec in specs):
        raise ValueError(
            f"feedforward {config.feedforward.type!r} has no experts that `{option}={size}` could split; {instead}, or"
            " choose a feedforward with experts, such as 'switch_transformer'."
        )
    for spec in specs:
        count = spec.expert_count()
        if count and "experts" not in spec.splits:
            raise ValueError(
                f"feedforward {spec.type!r} puts the network of a token together from slices of several experts, which"
                f" `{option}={size}` processes cannot hold apart; {instead}, or take one hash (`multi_hash=1`)."
            )
        if count % size:
            fits = ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
            raise ValueError(
                f"{count} experts cannot be split over {size} processes; take an `{option}` that divides them"
                f" ({fits})."
            )


def check_tensor_parallel(config: Any, size: int, splits: bool = True) -> None:
    """Refuses `size` processes for a config that they cannot share.

    splits: whether the config's plan is to be used; otherwise the processes have one batch, and whole modules.

    Raises:
        ValueError: a component must see its own batch in every process, nothing can be split, or the heads do not
            divide.
    """
    if size <= 1:
        return
    instead = "use data parallelism (DDP or FSDP2) instead"
    whole = _undivided(config)
    if whole is not None:
        raise ValueError(
            f"{whole.slot} {whole.type!r} keeps statistics of the batches of all processes, which under tensor"
            f" parallelism are one and the same batch; {instead}."
        )
    if not splits:
        return
    plan = tensor_parallel_plan(config)
    if plan is None:
        raise ValueError(
            f"attention {config.attention.type!r} with position {config.position.type!r} and feedforward"
            f" {config.feedforward.type!r} has nothing that tensor parallelism could split over {size} processes;"
            f" {instead}."
        )
    if not any(name.endswith("q_proj") for name in plan):
        return
    for view in config.tower_configs():
        for layer in view.layer_configs():
            for name, heads in (("heads", layer.num_attention_heads), ("key/value heads", layer.key_value_heads)):
                if heads % size:
                    fits = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
                    raise ValueError(
                        f"{heads} {name} cannot be split over {size} processes; take a `tp_size` that divides them"
                        f" ({fits}), or {instead}."
                    )
