# SPDX-License-Identifier: Apache-2.0
"""Writing with an encoder under the mask of source and target: a mask at the end is told, and becomes the next token.

Dong et al. 2019 (UniLM, arXiv 1905.03197), section 2.5.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..core.mask_modes import MODES, SEQ2SEQ, target_types
from ..ops.common.real_tokens import real_last, real_places
from .language import XFormerForMaskedLM


@torch.no_grad()
def write_targets(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    mask_token_id: int,
    ends: Collection[int],
    max_new_tokens: int = 32,
    types: tuple[int, int] | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """The targets that a model with stack 'mask_modes' and a head for tokens writes, each with the likeliest token.

    Args:
        input_ids, attention_mask: [B, T]: sources [SOS] S1 [EOS], padding on either side.
        ends: tokens after which a target is done (not part of what is returned).
        types: token types of source and target; default: as the model has them.
        use_cache: source and written tokens are read once; False: everything again for each token, with the same
            result.

    Raises:
        ValueError: a model without the stack, or nothing to write.
    """
    _check_stack(model.config, "write_targets")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
    source_type, target_type = target_types(model.config.type_vocab_size) if types is None else types
    real = torch.ones_like(input_ids) if attention_mask is None else (attention_mask != 0).long()
    order = real_last(real.bool())  # targets continue where sources end
    ids, real = input_ids.gather(1, order), real.gather(1, order)
    token_types = torch.full_like(ids, source_type)
    modes = torch.stack([torch.full_like(real.sum(-1), SEQ2SEQ), real.sum(-1)], dim=-1)
    mask = torch.full_like(ids[:, :1], mask_token_id)
    one, target = torch.ones_like(mask), torch.full_like(mask, target_type)
    cache = DynamicCache() if use_cache else None
    written: list[Tensor] = []
    done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        fresh = slice(0 if cache is None else cache.get_seq_length(), None)
        states = model.model(
            input_ids=torch.cat([ids, mask], dim=1)[:, fresh],
            token_type_ids=torch.cat([token_types, target], dim=1)[:, fresh],
            attention_mask=torch.cat([real, one], dim=1),
            past_key_values=cache,
            **{MODES: modes},
        ).last_hidden_state
        if cache is not None:
            cache.crop(-1)  # of the mask nothing stays
        token = model.lm_head(states[:, -1]).argmax(-1)
        written.append(token)
        for end in ends:
            done = done | (token == end)
        if bool(done.all()):
            break
        ids, real = torch.cat([ids, token[:, None]], dim=1), torch.cat([real, one], dim=1)
        token_types = torch.cat([token_types, target], dim=1)
    rows: list[list[int]] = []
    for row in torch.stack(written, dim=1).tolist():
        stop = next((place for place, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:stop])
    return rows


def _check_stack(config: Any, name: str) -> None:
    if MODES not in config.stack.inputs:
        raise ValueError(
            f"{name} reads under the mask of source and target, and the model has stack {config.stack.type!r}; take a"
            " model with stack 'mask_modes'."
        )


class XFormerForClozeWriting(XFormerForMaskedLM):
    """An encoder that writes a target for a source: both stand in one row, under the mask of source and target.

    Trained on rows in which tokens of the target, its end among them, are masked (Dong et al. 2019, UniLM, arXiv
    1905.03197, section 2.4). It writes by telling a mask behind what is there, token by token.

    Raises:
        ValueError: a stack without that mask.
    """

    def __init__(self, config):
        super().__init__(config)
        self.model.trunk.reads_tokens_alone = False
        _check_stack(self.config, type(self).__name__)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        mask_modes: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        max_new_tokens: int = 32,
        use_cache: bool = True,
        do_sample: bool = False,
        num_beams: int = 1,
    ) -> Tensor:
        """[B, 1 + n]: as of an encoder-decoder, a start, what is written, its end, padding.

        input_ids, attention_mask [B, T]: sources [SOS] S1 [EOS], padding on either side. mask_modes [B, 2]: of rows
        with a target behind their source, which is not read, the length of the source. token_type_ids are those of
        the mode, whatever is given.

        Raises:
            ValueError: sampling or beams, or a config that does not name the mask, or no end.
        """
        config = self.config
        if do_sample or num_beams != 1:
            raise ValueError(
                f"{type(self).__name__} writes the likeliest token each time, got do_sample={do_sample} and"
                f" num_beams={num_beams}; leave them out."
            )
        end = config.eos_token_id if config.sep_token_id is None else config.sep_token_id
        if config.mask_token_id is None or end is None:
            raise ValueError(
                f"{type(self).__name__} writes with a mask, and up to a separator; set `mask_token_id` and"
                f" `sep_token_id` of the config, which are {config.mask_token_id} and {config.sep_token_id}."
            )
        real = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask != 0
        if mask_modes is not None:
            real = real & (real_places(real) < mask_modes[:, 1:])
        ends = [end] if isinstance(end, int) else list(end)
        rows = write_targets(
            self,
            input_ids,
            real,
            mask_token_id=config.mask_token_id,
            ends=ends,
            max_new_tokens=max_new_tokens,
            use_cache=use_cache,
        )
        padding = ends[0] if config.pad_token_id is None else config.pad_token_id
        made = input_ids.new_full((len(rows), 1 + max(map(len, rows), default=0) + 1), padding)
        for place, row in enumerate(rows):
            finished = row if len(row) == max_new_tokens else [*row, ends[0]]
            made[place, : 1 + len(finished)] = input_ids.new_tensor([ends[0], *finished])
        return made[:, : 1 + max_new_tokens]
