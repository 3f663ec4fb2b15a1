"""Makes one unittest class for each registered family: transformers' common tests, with this project's beside them."""

from __future__ import annotations

import copy
import fnmatch
import inspect
import json
import os
import tempfile
import traceback
import unittest
import unittest.mock
from typing import Any

import torch
import transformers
from discovery import AUTO_TABLES, Family, components_of, discover, load_overrides, overrides_for, waived
from model_tester import Case, GenericModelTester, vision_length
from tiny_configs import config_fields, tiny_kwargs
from transformers.testing_utils import torch_device
from transformers_tests import PACKAGE

LARGEST = 1_000_000  # parameters of a tiny model
# What a family of a sample is tested with, when another one stands for the heads.
WITHOUT_HEADS = ("AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
# What it leaves to those with every head: tests that depend on no mechanism.
LEFT_TO_OTHERS = ("test_bc_torch_dtype", "test_training_overfit")
# What all leave to the family of two towers with every head, which has each direction of attention: tests that go
# through the same in further precisions, in which the package's own suite tests every family.
LEFT_TO_TWO_TOWERS = ("test_eager_matches_sdpa_inference_*_fp16_*", "test_eager_matches_sdpa_inference_*_bf16_*")
# Tests in which each class of a sample is tested on one family, the first that has it.
EACH_CLASS_ONCE = ("test_bc_torch_dtype", "test_ours_export_*")


def build_cases(spec: dict[str, Any]) -> list[type[unittest.TestCase]]:
    """The test classes for what the runner was asked; a family that cannot be built becomes one failing test."""
    families = discover(spec["package"], spec["builtin"])
    common = _teach_names(families)
    rules = load_overrides(spec["overrides"])
    if spec["sample"]:  # in its order, in which those come first that have every head and are quickly exported
        families.sort(key=lambda family: [*spec["model_types"], family.model_type].index(family.model_type))
    made, heads = [], set()  # the heads of a sample's families so far
    for family in families:
        if spec["model_types"] and not any(fnmatch.fnmatchcase(family.model_type, p) for p in spec["model_types"]):
            continue
        overrides = overrides_for(family.model_type, rules, components_of(family.config_class))
        sampled = not any(fnmatch.fnmatchcase(family.model_type, p) for p in spec["every_head"])
        if sampled:
            family.models = {name: models for name, models in family.models.items() if name in WITHOUT_HEADS}
        in_two_towers = any(fnmatch.fnmatchcase(family.model_type, p) for p in spec["two_towers"])
        for kind, models in _shapes(family, overrides):
            if spec["kinds"] and kind not in spec["kinds"]:
                continue
            suffix = "" if kind == (overrides.get("kind") or family.kind) else f"__{kind}"
            if suffix and not in_two_towers:
                continue
            name = "Test_" + "".join(c if c.isalnum() else "_" for c in family.model_type) + suffix
            try:
                made.append(_build(name, family, kind, models, overrides, common, sampled))
                if spec["sample"]:
                    case = made[-1].conformance_case
                    case.alone = () if in_two_towers and not suffix else _not_seen(models, heads)
                    case.one_layer = "stack:plain" in components_of(family.config_class)
                    heads |= set(models)
            except Exception:
                made.append(_broken(name, family.model_type, traceback.format_exc()))
    return made


def _not_seen(models: dict[str, list[type]], heads: set[str]) -> tuple[type, ...]:
    """The classes of the heads that are not among `heads`, and always those that predict tokens; the base model where
    there are no others, since it is inside them."""
    kept = [name for name in models if name in WITHOUT_HEADS or name not in heads]
    kept = [name for name in kept if name != "AutoModel"] or kept
    return tuple(dict.fromkeys(cls for name in kept for cls in models[name]))


def _shapes(family: Family, overrides: dict[str, Any]) -> list[tuple[str, dict[str, list[type]]]]:
    """The shapes that a family is tested in, each with its classes.

    A class for sequence-to-sequence makes an encoder-decoder of a family whose other classes have one tower; it takes
    other inputs and gives other outputs, so it is a case of its own.
    """
    kind = overrides.get("kind") or family.kind
    models = dict(family.models)
    if kind == "seq2seq" and not family.builtin:
        models.pop("AutoModelForCausalLM", None)  # one tower of a family of two: the package's own suite runs it
    if family.builtin or kind == "seq2seq" or "AutoModelForSeq2SeqLM" not in models:
        return [(kind, models)]
    towers = {"AutoModelForSeq2SeqLM": models.pop("AutoModelForSeq2SeqLM")}
    return [(kind, models), ("seq2seq", towers)]


def _teach_names(families: list[Family]):
    """transformers' tests know classes by their names in fixed tables: gives them copies with the registered ones."""
    common = __import__(f"{PACKAGE}.test_modeling_common", fromlist=["ModelTesterMixin"])
    for auto_name, table in AUTO_TABLES.items():
        known = getattr(common, table, None)
        if known is None:
            continue
        names = type(known)(known)
        for family in families:
            found = tuple(cls.__name__ for cls in family.models.get(auto_name, ()))
            if found and not family.builtin:
                names[family.model_type] = found[0] if len(found) == 1 else found
        setattr(common, table, names)
    return common


def _broken(name: str, model_type: str, text: str) -> type[unittest.TestCase]:
    def test_tiny_model_can_be_built(self):
        self.fail(f"no tests could be made for {model_type}: {text.strip().splitlines()[-1]}\n{text}")

    body = {"__module__": __name__, "test_tiny_model_can_be_built": test_tiny_model_can_be_built}
    return type(name, (unittest.TestCase,), body)


def _build(name, family: Family, kind: str, models, overrides, common, sampled: bool) -> type[unittest.TestCase]:
    kwargs, unknown = tiny_kwargs(family.config_class, overrides["config"], kind)
    if kind == "seq2seq" and not family.builtin:
        kwargs["is_encoder_decoder"] = True
    case = Case(family.model_type, kind, family.config_class, models, overrides, kwargs, sampled=sampled)
    if not case.classes:
        raise RuntimeError(f"{family.config_class.__name__} is registered, but no class to test is registered for it")
    size = sum(parameter.numel() for parameter in case.classes[0](case.config()).parameters())
    if size > LARGEST:
        raise RuntimeError(
            f"the tiny {family.model_type} has {size:,} parameters; large fields that no rule shrinks: "
            f"{', '.join(unknown) or 'none'}; give them under 'config' in overrides.json"
        )
    case.vision_length = vision_length(case)

    body = {
        "__module__": __name__,
        "all_model_classes": tuple(case.classes),
        "is_encoder_decoder": kind == "seq2seq",
        "model_tester": None,
        "conformance_case": case,
    }
    if kind in ("vision", "sound"):
        body["test_resize_embeddings"] = False
    if not family.builtin:  # transformers lets files off this test that have no copyright line later than 2022
        body["test_can_init_all_missing_weights_before_2023"] = True
    if not overrides.get("generate", True):  # the way transformers' own exceptions do it
        body["all_generative_model_classes"] = ()
    body.update(overrides["class"])
    return type(name, (OurChecks, *_mixins(case, common), unittest.TestCase), body)


def _mixins(case: Case, common) -> list[type]:
    mixins = [common.ModelTesterMixin]
    if case.overrides.get("generate", True) and any(cls.can_generate() for cls in case.classes):
        module = __import__(f"{PACKAGE}.generation.test_utils", fromlist=["GenerationTesterMixin"])
        mixins.append(module.GenerationTesterMixin)
    if case.kind == "decoder" and "AutoModelForCausalLM" in case.models:
        module = __import__(f"{PACKAGE}.test_training_mixin", fromlist=["TrainingTesterMixin"])
        mixins.append(module.TrainingTesterMixin)
    return mixins


class OurChecks:
    """Set-up of a case, and the checks on configs and Auto classes."""

    conformance_case: Case

    def setUp(self):
        self.model_tester = GenericModelTester(self, self.conformance_case)
        reason = waived(self._testMethodName, self.conformance_case.kind, self.conformance_case.overrides["waive"])
        if reason is not None:
            self.skipTest(f"WAIVED: {reason}")
        if self._is_one_of(LEFT_TO_OTHERS) and self.conformance_case.sampled:
            self.skipTest("the families of the sample that have every head show it")
        if self.conformance_case.alone is None:
            return
        two_towers = self.conformance_case.kind == "seq2seq" and not self.conformance_case.sampled
        if self._is_one_of(LEFT_TO_TWO_TOWERS) and not two_towers:
            self.skipTest("the family of the sample that has two towers and every head shows it")
        if self._is_one_of(EACH_CLASS_ONCE):
            kept = self.conformance_case.alone
            self.all_model_classes = tuple(cls for cls in self.all_model_classes if cls in kept)

    def _is_one_of(self, patterns: tuple[str, ...]) -> bool:
        return any(fnmatch.fnmatchcase(self._testMethodName, pattern) for pattern in patterns)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        """Adds the labels of a class with two objectives, as the tests of each such model in transformers do."""
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        accepted = inspect.signature(model_class.forward).parameters
        binary_or_text = (
            "ForReplacedTokenDetection",
            "ForReplacedTokenPreTraining",
            "ForMaskedSentences",
            "ForMultiTokenPrediction",
            "ForBidirectionalLM",
            "ForClozeWriting",
        )
        if return_labels and "labels" not in inputs and model_class.__name__.endswith(binary_or_text):
            inputs["labels"] = inputs["input_ids"].new_zeros(inputs["input_ids"].shape)
        if return_labels and model_class.__name__.endswith("ForCTC"):
            inputs["labels"] = torch.ones(inputs["input_features"].shape[0], 2, dtype=torch.long, device=torch_device)
        if return_labels and "labels" not in inputs and {"labels", "next_sentence_label"} <= set(accepted):
            inputs["labels"] = torch.zeros_like(inputs["input_ids"])
            inputs["next_sentence_label"] = inputs["input_ids"].new_zeros(inputs["input_ids"].shape[0])
        if return_labels and "span_labels" in accepted:
            inputs["labels"] = torch.zeros_like(inputs["input_ids"])
            inputs["span_labels"] = inputs["span_target_places"] = inputs["labels"][:, :1]
            inputs["span_boundaries"] = inputs["labels"][:, :2].unsqueeze(1)
        if return_labels and "entity_labels" in accepted:
            inputs["labels"] = torch.zeros_like(inputs["input_ids"])
            inputs["entity_labels"] = inputs["labels"][:, :1]
            inputs["entity_boundaries"] = inputs["labels"][:, :2].unsqueeze(1)
        if return_labels and "reordering_labels" in accepted:
            inputs["labels"] = torch.zeros_like(inputs["input_ids"])
            inputs["reordering_labels"] = inputs["input_ids"].new_zeros(inputs["input_ids"].shape[0])
        return inputs

    def test_config(self):
        module = __import__(f"{PACKAGE}.test_configuration_common", fromlist=["ConfigTester"])
        case = self.conformance_case
        width = getattr(case.config_class, "attribute_map", {}).get("hidden_size", "hidden_size")
        default = case.config_class()
        heads = getattr(default, "num_attention_heads", 12)  # an even head width, which rotations need
        change = {width: 4 * heads} if width in config_fields(case.config_class) else {}
        if getattr(default, "is_decoder", False):  # a family of decoders, which need not have an encoder
            shape = {"is_decoder": True, "is_encoder_decoder": False}
            self.enterContext(unittest.mock.patch.dict(module.config_common_kwargs, shape))
        vision = case.kind == "vision"
        module.ConfigTester(
            self,
            config_class=case.config_class,
            has_text_modality=not vision,
            common_properties=["hidden_size", "num_attention_heads", "num_hidden_layers"] if vision else None,
            **change,
        ).run_common_tests()

    def test_auto_classes_roundtrip(self):
        """Every registration is found again from a saved folder, with the same class and the same output."""
        case = self.conformance_case
        for auto_name, classes in case.models.items():
            if classes[0] not in case.classes:
                continue
            with self.subTest(auto_name):
                config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
                auto_class = getattr(transformers, auto_name)
                model = auto_class.from_config(copy.deepcopy(config)).to(torch_device).eval()
                self.assertIn(type(model), classes)
                with tempfile.TemporaryDirectory() as folder:
                    model.save_pretrained(folder)
                    with open(os.path.join(folder, "config.json")) as file:
                        self.assertEqual(json.load(file)["architectures"], [type(model).__name__])
                    self.assertIs(type(transformers.AutoConfig.from_pretrained(folder)), case.config_class)
                    again = auto_class.from_pretrained(folder).to(torch_device).eval()
                self.assertIs(type(again), type(model))
                prepared = self._prepare_for_class(inputs, type(model))
                with torch.no_grad():
                    torch.testing.assert_close(again(**prepared)[0], model(**prepared)[0])
