# SPDX-License-Identifier: Apache-2.0
"""Self-speculative decoding: the modules of multi-token prediction draft tokens, which transformers' assisted
generation checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation import CandidateGenerator

from ..core.cache import XFormerCache, self_attention_layers


class ModuleDrafts(CandidateGenerator):
    """Drafts a token with each module after every pass of the decoder, whose next pass checks them all (DeepSeek-AI
    2024, arXiv 2412.19437, section 2.2, "MTP in inference").

    Module k reads at place i the state of the module before it and the token i + k, which is a draft at the last
    k - 1 places. So after each call the last n - 1 places of all n modules are taken back out of their caches, and
    computed again with the tokens that came to stand there.

    Args:
        model: a [`XFormerForMultiTokenPrediction`].
        generation_config: says whether drafts are drawn, and how long the text may get.
        logits_processor: what changes the model's scores.
    """

    requires_model_outputs = True

    def __init__(self, model: Any, generation_config: Any, logits_processor: Any):
        self.model, self.logits_processor = model, logits_processor
        last = -1  # of the decoder's states; those of all layers where the caller wants them
        self.model_kwargs_overrides = {"output_hidden_states": generation_config.output_hidden_states or last}
        self.samples, self.longest = generation_config.do_sample, generation_config.max_length
        self.caches = [XFormerCache(self_attention_layers(model.config)[-1:]) for _ in model.mtp]
        if len(self.caches) > 1:
            for cache in self.caches:  # windows keep what they go back to
                cache.activate_past_recording()
        self.taken_back: Tensor | None = None  # [1, n - 1, D]: what the first module is given again
        self.drafted = 0

    def get_candidates(  # type: ignore[override]  # where there are no drafts, they have no scores
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        n_last_matches: int = 0,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The text so far [1, N] -> with drafts [1, N + n], and their scores [1, n, V]; nothing new before the decoder
        has read the prompt, nor where one token is left to write.

        Args:
            input_ids: all tokens, the last of which the decoder has not read yet.
            model_kwargs: the decoder's inputs, as long as the text.
            model_outputs: of its last pass, with its last states.
            n_last_matches: how many of the last drafts were right.
        """
        count = min(len(self.caches), self.longest - input_ids.shape[1] - 1)  # never more than before
        if model_outputs is None or count < 1:
            return input_ids, None
        states = model_outputs.hidden_states[-1]
        states = states[:, : states.shape[1] - self.drafted + int(n_last_matches)]
        if self.taken_back is not None:
            states = torch.cat((self.taken_back, states), dim=1)
        back = min(len(self.caches) - 1, states.shape[1])
        self.drafted, self.taken_back = count, states[:, states.shape[1] - back :]
        found, scores = self._draft(count, input_ids, states, model_kwargs or {})
        if back:
            for cache in self.caches[:count]:
                cache.crop(-back)
        return found, scores

    def _draft(self, count: int, input_ids: Tensor, states: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The same with `count` modules, from the decoder's states [1, T, D] of the last places before input_ids[:,
        -1]."""
        trunk, places = self.model.model.trunk, states.shape[1]
        mask, vectors = given.get("attention_mask"), given.get("inputs_embeds")
        if mask is not None:
            mask = mask[:, -1 - places - self.caches[0].get_seq_length() : -1]
        context = trunk.make_context(states, mask, cache=self.caches[0])
        trunk.position.share(context, states)
        ahead = trunk._token_vectors(input_ids[:, -places:], None)
        if vectors is not None:  # the prompt, of which there are no ids
            ahead = torch.cat((vectors, ahead), dim=1)[:, -places:]
        found = []
        for module, cache in zip(self.model.mtp[:count], self.caches, strict=False):
            states, _ = module(ahead, states, context, trunk.position, cache)
            scores = self.model.lm_head(states[:, -1:])[:, -1].to(input_ids.device, torch.float32)
            scores = self.logits_processor(input_ids, scores)
            found.append(scores)
            token = scores.softmax(-1).multinomial(1) if self.samples else scores.argmax(-1, keepdim=True)
            input_ids = torch.cat((input_ids, token), dim=1)
            ahead = torch.cat((ahead[:, 1:], trunk._token_vectors(token, None)), dim=1)
        return input_ids, torch.stack(found, dim=1)
