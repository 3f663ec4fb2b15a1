"""Stands in for the generation tests that transformers' source archive leaves out.

Every test here is named `test_ours_*`, so that a report tells which checks are whose.
"""

from __future__ import annotations

import copy
import inspect
import tempfile

import torch
from tiny_configs import FIRST_FREE_ID
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationMixin
from transformers.cache_utils import Cache
from transformers.testing_utils import torch_device

NEW_TOKENS = 3


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def _parameters(function):
    return inspect.signature(function).parameters


def _has_cache(model) -> bool:
    return "past_key_values" in _parameters(model.forward)


def _prompt_length(model, inputs) -> int:
    return 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]


def _generate(model, inputs, **options):
    """Greedy, and always `NEW_TOKENS` long, unless `options` say otherwise."""
    defaults = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    return model.generate(**copy.deepcopy(inputs), **{**defaults, **options})


def each_generating_class(*, decoder_only: bool = False, cache: bool = False):
    """Makes a test of a check on one model: a subtest for each class, skipped where it does not apply."""

    def decorate(check):
        def test(self):
            for model_class in self.all_generative_model_classes:
                with self.subTest(model_class.__name__):
                    model, inputs = self._generating_model(model_class)
                    if decoder_only and model.config.is_encoder_decoder:
                        self.skipTest("for decoder-only models")
                    if cache and not _has_cache(model):
                        self.skipTest("forward takes no past_key_values")
                    check(self, model, inputs)

        test.__name__, test.__qualname__ = check.__name__, check.__qualname__
        return test

    return decorate


class GenerationTesterMixin:
    """Named as transformers' class, because its tests look for that name among the bases."""

    def prepare_config_and_inputs_for_generate(self, batch_size: int = 2):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        inputs = {name: inputs[name][:batch_size] for name in ("input_ids", "attention_mask") if name in inputs}
        if "attention_mask" in inputs:
            inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
            config.is_decoder = True
        return config, inputs

    def _generating_model(self, model_class):
        config, inputs = self.prepare_config_and_inputs_for_generate()
        torch.manual_seed(0)
        model = model_class(copy.deepcopy(config)).to(torch_device).eval()
        for name in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id"):  # no early end: lengths count
            setattr(model.generation_config, name, None)
            if getattr(model.config, name, None) is not None:
                setattr(model.config, name, None)
        if model.generation_config.pad_token_id is None:
            model.generation_config.pad_token_id = 0
        return model, inputs

    @each_generating_class()
    def test_ours_generation_interface(self, model, inputs):
        self.assertIsInstance(model, GenerationMixin)
        kinds = [parameter.kind for parameter in _parameters(model.prepare_inputs_for_generation).values()]
        self.assertIn(inspect.Parameter.VAR_KEYWORD, kinds)

    # --------------------------------------------------------------------------------------------- ways of decoding

    @each_generating_class()
    def test_ours_generate_greedy(self, model, inputs):
        ids = _generate(model, inputs)
        self.assertEqual(tuple(ids.shape), (2, _prompt_length(model, inputs) + NEW_TOKENS))
        self.assertTrue(torch.equal(ids, _generate(model, inputs)))

    @each_generating_class()
    def test_ours_generate_sample(self, model, inputs):
        ids = _generate(model, inputs, do_sample=True, top_k=10, num_return_sequences=2)
        self.assertEqual(tuple(ids.shape), (4, _prompt_length(model, inputs) + NEW_TOKENS))

    @each_generating_class()
    def test_ours_generate_beam(self, model, inputs):
        ids = _generate(model, inputs, num_beams=3, num_return_sequences=2, length_penalty=2.0)
        self.assertEqual(ids.shape[0], 4)
        self.assertEqual(_generate(model, inputs, num_beams=2, do_sample=True).shape[0], 2)

    @each_generating_class(cache=True)
    def test_ours_assisted_decoding(self, model, inputs):
        if model._is_stateful:
            self.skipTest("needs a cache that can be cropped")
        one = {name: value[:1] for name, value in inputs.items()}
        plain = _generate(model, one, min_new_tokens=None)
        for help in ({"assistant_model": copy.deepcopy(model)}, {"prompt_lookup_num_tokens": 2}):
            self.assertTrue(torch.equal(plain, _generate(model, one, min_new_tokens=None, **help)))

    @each_generating_class()
    def test_ours_generate_bfloat16(self, model, inputs):
        out = _generate(model.to(torch.bfloat16), inputs, return_dict_in_generate=True, output_logits=True)
        self.assertTrue(torch.isfinite(out.logits[-1].float()).all())

    @each_generating_class()
    def test_ours_generate_after_reload(self, model, inputs):
        auto = AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModelForCausalLM
        if auto._model_mapping.get(type(model.config), None) is not type(model):
            self.skipTest("not the class behind the Auto class")
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = auto.from_pretrained(folder).to(torch_device).eval()
        self.assertTrue(torch.equal(_generate(model, inputs), _generate(again, inputs)))

    @each_generating_class(decoder_only=True)
    def test_ours_generate_without_inputs(self, model, inputs):
        model.generation_config.bos_token_id = 1
        self.assertEqual(tuple(model.generate(do_sample=False, max_new_tokens=2).shape), (1, 3))

    @each_generating_class(decoder_only=True)
    def test_ours_generate_from_inputs_embeds(self, model, inputs):
        if "inputs_embeds" not in _parameters(model.prepare_inputs_for_generation):
            self.skipTest("generation from embeddings is not offered")
        embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
        rest = {name: value for name, value in inputs.items() if name != "input_ids"}
        from_ids, from_embeds = _generate(model, inputs), _generate(model, {"inputs_embeds": embeds, **rest})
        self.assertTrue(torch.equal(from_ids[:, -NEW_TOKENS:], from_embeds[:, -NEW_TOKENS:]))

    @each_generating_class()
    def test_ours_generate_dict_outputs(self, model, inputs):
        if self.has_attentions:
            model.set_attn_implementation("eager")
        out = _generate(
            model,
            inputs,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            output_hidden_states=True,
            output_attentions=self.has_attentions,
        )
        prefix = "decoder_" if model.config.is_encoder_decoder else ""
        self.assertEqual(len(out.scores), NEW_TOKENS)
        self.assertEqual(out.logits[0].shape[-1], model.config.get_text_config(decoder=True).vocab_size)
        recorded = {"hidden_states": self.model_tester.num_hidden_layers + 1}
        if self.has_attentions:
            recorded["attentions"] = self.model_tester.num_hidden_layers
        for name, layers in recorded.items():
            steps = out[prefix + name]
            self.assertEqual(len(steps), NEW_TOKENS)
            self.assertEqual(len(steps[0]), layers)

    # --------------------------------------------------------------------------------------------- caches

    @each_generating_class(cache=True)
    def test_ours_generate_cache_equals_no_cache(self, model, inputs):
        options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 6, "min_new_tokens": 6}
        with_cache = _generate(model, inputs, use_cache=True, **options)
        without = _generate(model, inputs, use_cache=False, **options)
        prompt = with_cache.sequences.shape[1] - 6
        for step, (actual, expected) in enumerate(zip(with_cache.logits, without.logits)):
            upto = prompt + step
            if not torch.equal(with_cache.sequences[:, :upto], without.sequences[:, :upto]):
                break  # a tie fell the other way: the two read different tokens from here on
            _assert_close(actual, expected)

    @each_generating_class(cache=True)
    def test_ours_generate_beam_cache_equals_no_cache(self, model, inputs):
        with_cache, without = (_generate(model, inputs, num_beams=3, use_cache=use) for use in (True, False))
        self.assertTrue(torch.equal(with_cache, without), "the cache changes the beams: is it reordered?")

    @each_generating_class()
    def test_ours_generate_static_cache(self, model, inputs):
        if not model._can_compile_fullgraph:
            self.skipTest("_can_compile_fullgraph is False")
        static = _generate(model, inputs, cache_implementation="static", disable_compile=True)
        self.assertTrue(torch.equal(_generate(model, inputs), static))

    @each_generating_class(cache=True)
    def test_ours_cache_is_a_cache_object(self, model, inputs):
        out = _generate(model, inputs, return_dict_in_generate=True, use_cache=True)
        self.assertIsInstance(out.past_key_values, Cache)
        expected = _prompt_length(model, inputs) + NEW_TOKENS - 1
        self.assertEqual(out.past_key_values.get_seq_length(), expected)

    @each_generating_class(decoder_only=True, cache=True)
    def test_ours_cached_forward_equals_full_forward(self, model, inputs):
        ids, past, parts = inputs["input_ids"], None, []
        with torch.no_grad():
            full = model(input_ids=ids, use_cache=False).logits
            for chunk in (ids[:, :3], ids[:, 3:4], ids[:, 4:6], ids[:, 6:]):
                out = model(input_ids=chunk, past_key_values=past, use_cache=True)
                past = out.past_key_values
                self.assertIsNotNone(past, "use_cache=True gave no past_key_values")
                parts.append(out.logits)
        _assert_close(torch.cat(parts, 1), full)

    @each_generating_class(decoder_only=True, cache=True)
    def test_ours_continue_from_past_key_values(self, model, inputs):
        if model._is_stateful:
            self.skipTest("needs a cache that can be cropped")
        whole = _generate(model, inputs, max_new_tokens=NEW_TOKENS + 1, min_new_tokens=NEW_TOKENS + 1)
        part = _generate(model, inputs, return_dict_in_generate=True)
        more = {"input_ids": part.sequences, "past_key_values": part.past_key_values}
        if "attention_mask" in inputs:
            more["attention_mask"] = torch.ones_like(part.sequences)
        self.assertTrue(torch.equal(whole, model.generate(**more, do_sample=False, max_new_tokens=1)))

    # --------------------------------------------------------------------------------------------- what may be read

    @each_generating_class(decoder_only=True)
    def test_ours_causality(self, model, inputs):
        ids, other = inputs["input_ids"], inputs["input_ids"].clone()
        free = self.model_tester.vocab_size - FIRST_FREE_ID
        other[:, -1] = (other[:, -1] - FIRST_FREE_ID + 1) % free + FIRST_FREE_ID
        with torch.no_grad():
            before, after = model(input_ids=ids).logits, model(input_ids=other).logits
        _assert_close(after[:, :-1], before[:, :-1], 1e-5)

    @each_generating_class(decoder_only=True)
    def test_ours_left_padding(self, model, inputs):
        parameters = _parameters(model.forward)
        if "attention_mask" not in parameters:
            self.skipTest("forward takes no attention_mask")
        ids, pad = inputs["input_ids"], inputs["input_ids"].new_zeros(2, 3)
        plain = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        padded = {
            "input_ids": torch.cat([pad, ids], 1),
            "attention_mask": torch.cat([pad, torch.ones_like(ids)], 1),
        }
        calls = [dict(plain), dict(padded)]
        if "position_ids" in parameters:
            for call in calls:
                call["position_ids"] = (call["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            expected, actual = (model(**call).logits[:, -1] for call in calls)
        _assert_close(actual, expected)
        self.assertTrue(torch.equal(_generate(model, plain), _generate(model, padded)[:, 3:]))

    @each_generating_class()
    def test_ours_logits_to_keep(self, model, inputs):
        if "logits_to_keep" not in _parameters(model.forward):
            self.skipTest("forward takes no logits_to_keep")
        with torch.no_grad():
            full, last = model(**inputs).logits, model(**inputs, logits_to_keep=1).logits
        self.assertEqual(last.shape[1], 1)
        _assert_close(last, full[:, -1:])
