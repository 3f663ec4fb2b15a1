# SPDX-License-Identifier: Apache-2.0
"""What every X-former class shares, from a tower to a model with a head."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers import initialization as init

from .attention.shared.base import Attention
from .blocks.base import XFormerLayer
from .compat import OutputRecorder
from .configuration_xformer import XFormerConfig
from .core.call import add_losses
from .core.call_readers import why_not_context_parallel
from .core.choices import RowLosses, joint
from .core.initialization import Initialized, start_linear
from .core.inputs import naming
from .core.losses import StepShare, with_aux_losses
from .core.parallel_plans import check_expert_parallel, check_tensor_parallel, layers_apart, tensor_parallel_plan
from .core.precision import computing_dtype, float32_names
from .core.serving import ServedByEngines
from .core.weight_decay import declared_undecayed
from .core.whole_modules import KeptWhole, end_for, whole_on_a_device
from .ops.common.real_tokens import up_to_last_real


@runtime_checkable
class Distributed(Protocol):
    """A module with something to do once a model is divided over processes."""

    def after_distribution(self, batches: int) -> None:
        """batches: processes that read batches of their own, where each holds whole experts."""


def objects_for_heads(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a base model's `forward`, which gives its head an output with names, whatever the config's
    `return_dict` says."""

    @wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.under_a_head:
            kwargs["return_dict"] = True
        return forward(self, *args, **kwargs)

    return call


class XFormerPreTrainedModel(PreTrainedModel):
    """What every X-former class shares: how weights start, what can be recorded, which back-ends fit."""

    config_class = XFormerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = KeptWhole()
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_flash_attn = True
    _supports_attention_backend = ServedByEngines()
    _can_compile_fullgraph = True
    under_a_head = False
    reads_every_token: ClassVar[bool] = False  # whether a head predicts something for each token of its last tower
    made_of: ClassVar[tuple[str, ...]] = ()  # other heads of its family, whose classes it makes
    _can_record_outputs = {
        "hidden_states": OutputRecorder(XFormerLayer, index=0),
        "attentions": OutputRecorder(Attention, index=1, layer_name="attention"),
        "cross_attentions": OutputRecorder(Attention, index=1, layer_name="cross_attention"),
    }

    def __init__(self, config: XFormerConfig, *inputs: Any, **kwargs: Any):
        super().__init__(config, *inputs, **kwargs)
        if self.reads_every_token:
            last = config.tower_configs()[-1]
            if not last.stack.gives_every_token(last):
                raise ValueError(
                    f"{type(self).__name__} predicts something for every token, but stack {last.stack.type!r} ends"
                    " with fewer states than tokens here; let it come back to the length of the text, e.g."
                    ' `stack={"type": "funnel", "upsample": True}`.'
                )
        self.model_tags = ["hf_xformers", config.model_type]  # what `push_to_hub` writes into the model card

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        if cls.__module__.startswith("hf_xformers."):
            raise ValueError(
                f"{cls.__name__} is a class of hf_xformers, whose files cannot be saved one by one; write a checkpoint"
                " with its code by `hf_xformers.hub.bundle(model, folder)`."
            )
        super().register_for_auto_class(auto_class)

    @classmethod
    def part_configs(cls, config: XFormerConfig) -> tuple[XFormerConfig, ...]:
        """Configs of further models that a model of `config` is made of."""
        return ()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        config = self.config
        if isinstance(module, nn.Linear):
            start_linear(config, init, module)
        if isinstance(module, Initialized):
            module.initialize(config, init)

    def _initialize_weights(self, module: nn.Module, *_: Any, **__: Any) -> None:
        # transformers leaves out every module without parameters of its own where a model's code is not its own, to
        # spare what was loaded. Those are the components here, and their starts spare it themselves: they go through
        # `init`.
        super()._initialize_weights(module)

    def post_init(self) -> None:
        super().post_init()
        # What device maps keep together and what Accelerate's FSDP wraps, by names, which these must find.
        models = [module for module in self.modules() if isinstance(module, XFormerPreTrainedModel)]
        layers = {type(layer).__name__ for model in models for layer in model.own_layers()}
        apart = layers if layers_apart(self.config) else set()
        self._no_split_modules = apart, layers | whole_on_a_device(self, XFormerLayer)
        self._keep_in_fp32_modules_strict = float32_names(self)
        # What components of this model read besides: a mix, or a family with other components than its own.
        further = dict.fromkeys(name for model in models for name in model.further_inputs())
        if further.keys() - set(inspect.signature(type(self).forward).parameters):
            type(self).forward = naming(type(self).forward, further)

    def further_inputs(self) -> tuple[str, ...]:
        """Names of inputs besides those that `forward` names, which components of this model read."""
        return ()

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> nn.Embedding:
        size, reason = self.config.vocab_size, self.why_not_resized()
        if reason:
            wanted = size if new_num_tokens is None else new_num_tokens
            wanted += -wanted % (pad_to_multiple_of or 1)
            if wanted != size:
                raise ValueError(f"The vocabulary of {size} cannot become one of {wanted}: {reason}; keep its size.")
            return self.get_input_embeddings()
        table = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, *args, **kwargs)
        for module in self.modules():  # what else has an entry for each id
            resize: Any = getattr(module, "resize_vocabulary", None)
            if resize is not None:
                resize(self.config.vocab_size)
        return table

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Refused: more than a table may depend on the longest text, so that a model for another one is made anew."""
        most = self.config.max_position_embeddings
        if new_num_position_embeddings != most:
            raise ValueError(
                f"This {self.config.model_type!r} model is made for texts of {most} tokens (`max_position_embeddings`)"
                " and stays so; write one for longer texts by `hf-xformers convert --from FOLDER --to FOLDER"
                f" --max-length {new_num_position_embeddings}`."
            )

    def why_not_resized(self) -> str:
        """Why the vocabulary keeps its size, in a clause; empty: it may change."""
        config = self.config
        if not config.shares_token_table:
            rows = config.decoder_vocab_size
            return f"the decoder has a token table of its own (`decoder_vocab_size` {rows})"
        if config.embedding.clusters(config) is not None:
            return f"embedding {config.embedding.type!r} has it in clusters of fixed size"
        return ""

    def get_input_embeddings(self) -> Any:
        return end_for(self, super().get_input_embeddings())

    def get_submodule(self, target: str) -> nn.Module:
        # peft asks for the token table by BERT's name, and otherwise guesses it by its size.
        return self.get_input_embeddings() if target == "embeddings.word_embeddings" else super().get_submodule(target)

    def own_layers(self) -> Iterable[nn.Module]:
        """The layers that this model runs itself: a tower's; what stands around towers has none."""
        return ()

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that weight decay must leave alone: what components declare ([`Undecayed`]), and the
        biases and norms that Trainer leaves out by itself. `XFormerTrainer` respects this. The stock Trainer does
        not, so give it an optimizer with such groups: `Trainer(..., optimizers=(optimizer, None))`."""
        names = declared_undecayed(self)
        for prefix, module in self.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                if name == "bias" or isinstance(module, nn.LayerNorm):
                    names.add(f"{prefix}.{name}")
        return names

    @property
    def supports_context_parallel(self) -> bool:
        """transformers' question whether each process may be given a part of every text."""
        return bool(super().supports_context_parallel) and not why_not_context_parallel(self.config)

    @property
    def dtype(self) -> torch.dtype:
        """The type that layers compute in; some parameters may be in float32 all the same ([`Float32Module`])."""
        found = computing_dtype(self)
        return super().dtype if found is None else found

    def _resolve_parallel_plans(self, distributed_config: Any) -> Any:
        given = distributed_config.tp_plan
        rules = given if isinstance(given, dict) else tensor_parallel_plan(self.config)
        experts_alone = distributed_config.ep_size > 1 and not rules
        check_tensor_parallel(self.config, distributed_config.tp_size, splits=not experts_alone)
        check_expert_parallel(self.config, distributed_config.ep_size)
        if experts_alone:  # transformers takes an empty plan, and then asks for one where `tp_size` is above 1
            distributed_config = copy.copy(distributed_config)
            distributed_config.tp_size = 1
        return super()._resolve_parallel_plans(distributed_config)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        model = super().maybe_distribute_model(model, distributed_config, mesh_manager)
        batches = distributed_config is not None and distributed_config.dp_size > 1 and distributed_config.ep_size > 1
        if mesh_manager is not None and batches and distributed_config.efsdp_size == 1:
            for module in model.modules():
                if isinstance(module, Distributed):
                    module.after_distribution(distributed_config.dp_size)
        return model

    def gather_sharded_state_dict_for_save(self, model_to_save: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Whole tensors to save; one that is tied to another stands there once, as it does without processes."""
        state = super().gather_sharded_state_dict_for_save(model_to_save, *args, **kwargs)
        if not model_to_save.is_distributed_loading_by_transformers:
            return state
        tied = model_to_save.all_tied_weights_keys or {}
        return {name: tensor for name, tensor in state.items() if tied.get(name) not in state}

    def real_tokens(self, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """The mask under which a causal model is asked for its last token: `attention_mask`, or where there is none
        the tokens [B, T] up to the last that is not `pad_token_id`, by which transformers' decoders go, too."""
        padding = self.config.pad_token_id
        if attention_mask is not None or input_ids is None or padding is None or not self.config.is_decoder:
            return attention_mask
        return pad(up_to_last_real(input_ids != padding)[:, 1:], (1, 0), value=True)  # a text has a token at least

    def reported(self, aux_losses: dict[str, Tensor] | None, loss: Tensor | None = None) -> dict[str, Tensor] | None:
        """The auxiliary losses that an output gives: next to a loss, in training, and wherever gradients are recorded.
        An output for use alone has none: pipelines cut outputs into rows, which these losses are not made of. The base
        model under a head leaves that to the head."""
        needed = loss is not None or self.under_a_head or self.training or torch.is_grad_enabled()
        return aux_losses if needed else None

    def with_aux_losses(
        self,
        loss: Tensor | None,
        base: Any,
        rows: Callable[[], RowLosses | None] | None = None,
        aux_losses: dict[str, Tensor] | None = None,
        share: StepShare | None = None,
    ) -> Tensor | None:
        """The loss of the task plus all auxiliary losses of `base`, the output of the model under this head (or the
        `aux_losses` given), and plus that of choices which learn from the task's loss. rows: makes the loss by rows of
        the batch, where the head knows it (`core/choices.py`). share: of the batch in its step (`core/losses.py`)."""
        total = with_aux_losses(loss, base.aux_losses if aux_losses is None else aux_losses, share)
        if loss is None or total is None or base.log_probs is None:
            return total
        return total + self.model.choice_loss(base.log_probs, loss, None if rows is None else rows())

    @staticmethod
    def add_pass(base: Any, again: Any) -> None:
        """Adds to the output `base` of the model under this head what another pass of it is taught by next to the
        task's loss: its auxiliary losses, by name, and its choices."""
        losses = dict(base.aux_losses or {})
        add_losses(losses, again.aux_losses)
        chosen = [found for found in (base.log_probs, again.log_probs) if found is not None]
        base.aux_losses, base.log_probs = losses or None, joint(chosen) if chosen else None

    @staticmethod
    def shaped(config: XFormerConfig, *, is_decoder: bool, is_encoder_decoder: bool) -> XFormerConfig:
        """`config` in the shape that a head needs; a copy when that changes anything, so the caller's stays as it
        is."""
        if config.is_decoder == is_decoder and config.is_encoder_decoder == is_encoder_decoder:
            return config
        return config.changed(is_decoder=is_decoder, is_encoder_decoder=is_encoder_decoder)
