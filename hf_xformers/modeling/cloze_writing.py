"""Writing with an encoder under the mask of source and target: a mask at the end is told, and becomes the next token.

Dong et al. 2019 (UniLM, arXiv 1905.03197), section 2.5.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..core.mask_modes import MODES, SEQ2SEQ
from ..ops.common.real_tokens import real_last

SOURCE_TYPE, TARGET_TYPE = 4, 5


@torch.no_grad()
def write_targets(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    mask_token_id: int,
    ends: Collection[int],
    max_new_tokens: int = 32,
    types: tuple[int, int] = (SOURCE_TYPE, TARGET_TYPE),
    use_cache: bool = True,
) -> list[list[int]]:
    """The targets that a model with stack 'mask_modes' and a head for tokens writes, each with the likeliest token.

    input_ids, attention_mask [B, T]: sources [SOS] S1 [EOS], padding on either side. ends: tokens after which a
    target is done (not part of what is returned). types: token types of source and target. use_cache: source and
    written tokens are read once; False: everything again for each token, with the same result.

    Raises:
        ValueError: a model without the stack, or nothing to write.
    """
    if MODES not in model.config.stack.inputs:
        raise ValueError(
            f"write_targets reads under the mask of source and target, and the model has stack"
            f" {model.config.stack.type!r}; take a model with stack 'mask_modes'."
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
    real = torch.ones_like(input_ids) if attention_mask is None else (attention_mask != 0).long()
    order = real_last(real.bool())  # targets go on where sources end
    ids, real = input_ids.gather(1, order), real.gather(1, order)
    token_types = torch.full_like(ids, types[0])
    modes = torch.stack([torch.full_like(real.sum(-1), SEQ2SEQ), real.sum(-1)], dim=-1)
    mask = torch.full_like(ids[:, :1], mask_token_id)
    one, target = torch.ones_like(mask), torch.full_like(mask, types[1])
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


__all__ = ["write_targets"]
