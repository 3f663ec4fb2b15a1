"""What transformers' common tests ask of a model's own test file, derived from a tiny config."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from tiny_configs import FIRST_FREE_ID, HEADS, HIDDEN, LAYERS, VOCAB
from transformers.testing_utils import torch_device

# ConfigTester passes these to every config and reads them back; none is the default of its field.
CONFIG_COMMON_KWARGS = {
    "architectures": ["BertModel"],
    "chunk_size_feed_forward": 5,
    "dtype": "float16",
    "id2label": {0: "label"},
    "is_encoder_decoder": True,
    "label2id": {"label": "0"},
    "output_attentions": True,
    "output_hidden_states": True,
    "problem_type": "regression",
    "return_dict": False,
}


@dataclass
class Case:
    """One family in one shape: the classes under test and the arguments of their tiny config."""

    model_type: str
    kind: str
    config_class: type
    models: dict[str, list[type]]  # by Auto class
    overrides: dict[str, Any]
    kwargs: dict[str, Any]
    sampled: bool = False  # one of a few families that stand for all: what others of them show is left out
    alone: tuple[type, ...] | None = None  # in a sample: classes that no other of its families has; None: all
    one_layer: bool = False  # whether its export needs no more: in a sample, where layers stand one on another
    vision_length: int | None = None  # length of the sequence that an image becomes, found by running one

    @property
    def classes(self) -> list[type]:
        kept = [cls for group in self.models.values() for cls in group]
        return [cls for cls in dict.fromkeys(kept) if cls.__name__ not in self.overrides["drop_classes"]]

    def config(self, **changes: Any):
        return self.config_class(**copy.deepcopy({**self.kwargs, **changes}))

    def accepts(self, name: str) -> bool:
        """Whether the forward method of the family's first class (its base model, if there is one) takes `name`."""
        return name in inspect.signature(self.classes[0].forward).parameters


class GenericModelTester:
    """Stands where a model's test file in transformers has its `ModelTester`: attributes and random inputs."""

    def __init__(self, parent, case: Case):
        self.parent, self.case = parent, case
        self.batch_size, self.seq_length, self.is_training = 7, 8, True
        self.num_labels, self.num_choices = 2, 4
        config = case.config()
        text = config.get_text_config()
        self.hidden_size = getattr(text, "hidden_size", HIDDEN)
        self.num_hidden_layers = getattr(text, "num_hidden_layers", LAYERS)
        self.num_attention_heads = getattr(text, "num_attention_heads", HEADS)
        self.vocab_size = getattr(text, "vocab_size", VOCAB)
        if case.kind == "vision":
            for name, fallback in (("image_size", 16), ("patch_size", 4), ("num_channels", 3)):
                value = getattr(config, name, fallback)
                setattr(self, name, value[0] if isinstance(value, (list, tuple)) else value)
            self.seq_length = case.vision_length or (self.image_size // self.patch_size) ** 2 + 1
        self.base_model_class = next(iter(case.models.get("AutoModel", [])), None)
        self.causal_lm_class = next(iter(case.models.get("AutoModelForCausalLM", [])), None)
        self.sequence_classification_class = None
        for name, value in case.overrides["tester"].items():
            setattr(self, name, value)
        if case.kind == "seq2seq":
            for name in ("encoder_seq_length", "decoder_seq_length"):
                if not hasattr(self, name):
                    setattr(self, name, self.seq_length)

    def get_config(self):
        """For the over-fitting test, which wants no dropout."""
        config = self.case.config()
        for name, value in list(vars(config).items()):
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(config, name, 0.0)
        return config

    def prepare_config_and_inputs_for_common(self):
        case, config = self.case, self.case.config()
        if case.kind == "vision":
            shape = (self.batch_size, self.num_channels, self.image_size, self.image_size)
            return config, {"pixel_values": torch.rand(shape, device=torch_device)}
        if case.kind == "sound":  # four frames to a state
            size = (self.batch_size, 4 * self.seq_length)
            mask = torch.ones(size, dtype=torch.long, device=torch_device)
            mask[1::3, -3:] = 0
            features = torch.rand((*size, config.num_mel_bins), device=torch_device)
            return config, {"input_features": features, "attention_mask": mask}
        size = (self.batch_size, self.seq_length)
        inputs = {"input_ids": self._ids(self.seq_length)}
        if case.kind == "seq2seq" and getattr(config, "eos_token_id", None) is not None:
            inputs["input_ids"][:, -1] = config.eos_token_id
        if case.accepts("attention_mask"):
            mask = torch.ones(size, dtype=torch.long, device=torch_device)
            mask[1::3, -1:] = 0  # a third of the rows ends with one padded position, a third with two
            mask[2::3, -2:] = 0
            inputs["attention_mask"] = mask
        types = getattr(config, "type_vocab_size", 0)
        if case.accepts("token_type_ids") and types:
            inputs["token_type_ids"] = torch.randint(0, types, size, device=torch_device)
        if case.kind == "seq2seq":
            inputs["decoder_input_ids"] = self._ids(self.decoder_seq_length)
            if case.accepts("decoder_attention_mask"):
                inputs["decoder_attention_mask"] = torch.ones_like(inputs["decoder_input_ids"])
        for name, how in case.overrides["inputs"].items():
            extra = torch.full(size, int(how == "ones"), dtype=torch.long, device=torch_device)
            if how in ("first", "last"):
                extra[:, 0 if how == "first" else -1] = 1
            inputs[name] = extra
        return config, inputs

    prepare_config_and_inputs = prepare_config_and_inputs_for_common

    def _ids(self, length: int) -> torch.Tensor:
        return torch.randint(FIRST_FREE_ID, self.vocab_size, (self.batch_size, length), device=torch_device)


def vision_length(case: Case) -> int | None:
    """How many positions an image becomes in this family's base model, if that has a sequence at all."""
    base = next(iter(case.models.get("AutoModel", [])), None)
    if case.kind != "vision" or base is None:
        return None
    config, inputs = GenericModelTester(None, case).prepare_config_and_inputs_for_common()
    with torch.no_grad():
        hidden = base(config).to(torch_device).eval()(**inputs)[0]
    return hidden.shape[1] if hidden.ndim == 3 else None
