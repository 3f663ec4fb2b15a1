# SPDX-License-Identifier: Apache-2.0
"""What language models share: a base model, and a vocabulary head tied to its token table."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from ..compat import check_saved_names, is_trls
from ..configuration_xformer import XFormerConfig
from ..core.choices import token_rows
from ..core.inputs import check_token_labels
from ..core.losses import step_share, token_cross_entropy
from ..core.whole_modules import end_for
from ..modeling_base import XFormerPreTrainedModel
from ..modeling_xformer import XFormerModel


class LanguageModel(XFormerPreTrainedModel):
    """A base model and a vocabulary head, tied to the token table unless the config unties it."""

    reads_pooler = False
    reads_every_token = True

    def __init__(self, config: XFormerConfig):
        super().__init__(config)
        self.model = XFormerModel(config, add_pooling_layer=self.reads_pooler)
        self.model.under_a_head = True
        view = config.layer(max(config.num_hidden_layers - 1, 0))
        if not config.shares_token_table:  # what is predicted are ids of the decoder
            view = copy.copy(view)
            view.vocab_size = config.decoder_vocab_size  # type: ignore[assignment]
        self.lm_head = config.head.build(view)
        table = "model.trunk.embedding" if config.shares_token_table else "model.decoder.embedding"
        self._tied_weights_keys = {
            f"lm_head.{name}": f"{table}.{there}" for name, there in config.head.tied(config).items()
        }
        tower = config.tower("decoder") if config.is_encoder_decoder else config
        self.exits: Any = tower.stack.build_exits(tower) if tower.stack.exits == "decoder" else None
        self.post_init()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and is_trls(value):
            if not self.config.head.logits(self.config).projects:
                raise ValueError(
                    f"trl makes logits of the last states by the output matrix alone, and head"
                    f" {self.config.head.type!r} does more; train with transformers' Trainer, or build the model with"
                    " head='linear'."
                )
        super().__setattr__(name, value)
        if name == "peft_config":
            check_saved_names(self, value)

    def init_parallel_plans(self) -> None:
        super().init_parallel_plans()
        plan = self._tp_plan or {}
        if not any(name.endswith("embedding.tokens") for name in plan):
            return
        for name, table in (self._tied_weights_keys or {}).items():  # what is tied to the table is split as it is
            module, _, kind = name.rpartition(".")
            if kind == "weight" and table.endswith("embedding.tokens.weight"):
                plan[module] = "colwise_gather_output"

    def labelled_loss(
        self, base: Any, logits: Tensor, labels: Tensor, count: Tensor | int | None, watch: Any = None
    ) -> Tensor:
        """The loss of tokens with a label each (or of all exits, where `watch` learns), and what `base` adds to it."""
        check_token_labels(labels, logits)
        if watch is not None and watch.learns:
            loss = self.exits.loss(self, watch, logits, labels, count)
        else:
            loss = token_cross_entropy(logits, labels, count)
        rows, share = partial(token_rows, logits, labels, count), step_share(labels, count)
        return cast(Tensor, self.with_aux_losses(loss, base, rows, share=share))

    def own_inputs(self) -> dict[str, Tensor]:
        """Inputs of the model under this head that the head itself has, by name."""
        return {}

    def get_output_embeddings(self) -> nn.Module | None:
        return end_for(self, self.lm_head.decoder)

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head.decoder = value

    def why_not_resized(self) -> str:
        head = self.config.head
        outputs = head.num_outputs(self.config)
        if outputs != self.config.vocab_size:
            return f"the head predicts the first {outputs} ids alone (`unpredicted`)"
        if not head.resizes:
            return f"head {head.type!r} does not predict tokens one by one"
        if head.clusters(self.config) is not None:
            return f"head {head.type!r} predicts it in clusters of fixed size"
        return super().why_not_resized()

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        found = self.model.get_encoder(modality)
        return self if found is self.model else found

    def get_decoder(self) -> nn.Module:
        return self.model.get_decoder()

    def exit_watch(self, labelled: bool, inputs: dict[str, Any]) -> Any:
        """Attaches the early-exit observer, if the model has one, to the inputs."""
        watch = None if self.exits is None else self.exits.watch(self, labelled and self.training)
        if watch is not None:
            inputs["exit_watch"] = watch
        return watch
