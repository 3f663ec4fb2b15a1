"""Which model families are registered with the Auto classes, and the overrides that belong to each."""

from __future__ import annotations

import fnmatch
import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Auto class -> the table in which transformers' tests look up the names of its classes
AUTO_TABLES = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "AutoModelForMultipleChoice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "AutoModelForNextSentencePrediction": "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES",
    "AutoModelForPreTraining": "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForCTC": "MODEL_FOR_CTC_MAPPING_NAMES",
}
KINDS = ("encoder", "decoder", "seq2seq", "vision", "sound")


@dataclass
class Family:
    """A registered config and the model classes behind it, by Auto class."""

    model_type: str
    config_class: type
    builtin: bool = False
    models: dict[str, list[type]] = field(default_factory=dict)
    untested: list[str] = field(default_factory=list)  # Auto classes for which there are no common tests

    @property
    def kind(self) -> str:
        """One of `KINDS`: what the family's default config and its classes make of it."""
        classes = [cls for group in self.models.values() for cls in group]
        if classes and classes[0].main_input_name == "pixel_values":
            return "vision"
        if classes and classes[0].main_input_name == "input_features":
            return "sound"
        try:
            config = self.config_class()
        except Exception:  # a config without defaults: judged by its classes alone
            config = None
        if getattr(config, "is_encoder_decoder", False):
            return "seq2seq"
        if getattr(config, "is_decoder", False) and "AutoModelForCausalLM" in self.models:
            return "decoder"
        if "AutoModelForSeq2SeqLM" in self.models and not {"AutoModelForCausalLM", "AutoModelForMaskedLM"} & set(
            self.models
        ):
            return "seq2seq"
        if "AutoModelForCausalLM" in self.models and "AutoModelForMaskedLM" not in self.models:
            return "decoder"
        return "encoder"


def discover(package: str | None, builtin: Iterable[str] = ()) -> list[Family]:
    """The families that importing `package` registers, in order of registration, and the named built-in ones.

    Raises:
        ValueError: a name in `builtin` is no model type of transformers.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    families = []
    if package is not None:
        importlib.import_module(package)
        for model_type, config_class in CONFIG_MAPPING._extra_content.items():
            if config_class.__module__ == package or config_class.__module__.startswith(package + "."):
                families.append(Family(model_type, config_class))
    for model_type in builtin:
        if model_type not in CONFIG_MAPPING:
            raise ValueError(f"{model_type!r} is no model type of transformers; name one such as 'bert'.")
        families.append(Family(model_type, CONFIG_MAPPING[model_type], builtin=True))

    auto_classes = {
        name: getattr(transformers, name)._model_mapping
        for name in dir(transformers)
        if name.startswith("AutoModel") and hasattr(getattr(transformers, name), "_model_mapping")
    }
    for family in families:
        for name in AUTO_TABLES:
            value = auto_classes[name].get(family.config_class, None)
            if value is not None:
                family.models[name] = list(value) if isinstance(value, (tuple, list)) else [value]
        family.untested = sorted(
            name
            for name, mapping in auto_classes.items()
            if name not in AUTO_TABLES and family.config_class in mapping._extra_content
        )
    return families


def print_families(families: Iterable[Family]) -> None:
    for family in families:
        print(f"{family.model_type}  ({family.kind}, {family.config_class.__name__})")
        for name, classes in family.models.items():
            print(f"    {name}: {', '.join(cls.__name__ for cls in classes)}")
        for name in family.untested:
            print(f"    {name}: registered, and without common tests")


# What one rule of overrides.json may say; README.md beside this file explains each.
RULES: dict[str, type] = {
    "config": dict,
    "tester": dict,
    "class": dict,
    "inputs": dict,
    "waive": dict,
    "drop_classes": list,
    "kind": str,
    "generate": bool,
}


def components_of(config_class: type) -> list[str]:
    """`slot:component` of every component of a config class of this package; of others, none."""
    from hf_xformers.core.components import Spec

    try:
        values = vars(config_class()).values()
    except Exception:  # a config without defaults
        return []
    return sorted({f"{value.slot}:{value.type}" for value in values if isinstance(value, Spec)})


def waived(test: str, kind: str, rules: Mapping[str, str]) -> str | None:
    """Why `test` is waived in a family of this kind, by `{test or glob[:kind]: reason}`; None: it is not."""
    for key, reason in rules.items():
        name, _, only = key.partition(":")
        if fnmatch.fnmatchcase(test, name) and only in ("", kind):
            return reason
    return None


def load_overrides(paths: Iterable[str | Path]) -> list[tuple[str, dict[str, Any]]]:
    """The rules of these files, as (model type or glob, rule), checked.

    Raises:
        ValueError: a rule has an unknown key, a value of the wrong sort, or a waived test without a reason.
    """
    rules = []
    for path in paths:
        for pattern, rule in json.loads(Path(path).read_text()).items():
            for key, value in rule.items():
                if key not in RULES:
                    raise ValueError(
                        f"{path}: {pattern!r} has the unknown key {key!r}; valid are: {', '.join(RULES)}."
                    )
                if not isinstance(value, RULES[key]):
                    raise ValueError(f"{path}: {key!r} of {pattern!r} must be a {RULES[key].__name__}, got {value!r}.")
            for test, reason in rule.get("waive", {}).items():
                if not (isinstance(reason, str) and reason.strip()):
                    raise ValueError(f"{path}: {pattern!r} waives {test!r} without a reason; say why in a sentence.")
            rules.append((pattern, rule))
    return rules


def overrides_for(
    model_type: str, rules: Iterable[tuple[str, dict[str, Any]]], components: Iterable[str] = ()
) -> dict[str, Any]:
    """All rules that match `model_type` or are those of one of its `components` ([`components_of`]), merged; a later
    rule wins."""
    merged: dict[str, Any] = {key: kind() for key, kind in RULES.items() if kind in (dict, list)}
    for pattern, rule in rules:
        if pattern not in components and not fnmatch.fnmatchcase(model_type, pattern):
            continue
        for key, value in rule.items():
            if isinstance(value, dict):
                merged[key] = {**merged[key], **value}
            elif isinstance(value, list):
                merged[key] = merged[key] + value
            else:
                merged[key] = value
    return merged
