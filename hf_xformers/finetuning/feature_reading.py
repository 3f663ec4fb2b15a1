# SPDX-License-Identifier: Apache-2.0
"""What features are read off: which layers of which model, and the model that reads texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.given_options import refuse_alone
from . import loading

POOLINGS = ("first", "mean", "last", "none")
FORMATS = ("parquet", "safetensors")


@dataclass
class FeatureOptions:
    """What is read off which layers of which model, and where it goes."""

    _argument_group_name = "features"

    model: str = field(metadata={"help": "Folder of a saved model, or a Hub id. It is not trained."})
    output: str = field(metadata={"help": "Folder of the files, with a subfolder for each split of the data."})
    layers: list[str] = field(
        default_factory=lambda: ["last"],
        metadata={
            "help": (
                "embedding, last (what heads read), last4 (the last four side by side), mix (a weighted mean of all),"
                " or numbers: 0 is the embedding, 1 the first layer. Each becomes a column."
            )
        },
    )
    pool: str = field(
        default="mean",
        metadata={"help": "One vector for a text: its first, last or mean real token; none for one for every token."},
    )
    mix_scores: list[float] = field(
        default_factory=list,
        metadata={
            "help": (
                "Scores s of embedding and layers, from below, for mix: the sum of softmax(s)_l h^l. Default: equal"
                " ones, which is the mean."
            )
        },
    )
    normalize: bool = field(
        default=False,
        metadata={"help": "Give every state mean 0 and variance 1 before mixing: for models that normalize first."},
    )
    format: str = field(default="parquet", metadata={"help": "parquet or safetensors."})
    rows_per_file: int = field(default=2048, metadata={"help": "Texts of a file; a resumed run continues by files."})
    batch_size: int = field(default=16, metadata={"help": "Texts of a batch; those of like lengths are together."})
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens of a text. Default: 256, at most what positions cover."}
    )
    tokenizer: str | None = field(default=None, metadata={"help": "Default: the tokenizer saved with the model."})
    text_column: str | None = field(default=None, metadata={"help": "Column of the text. Default: a usual name."})
    text_pair_column: str | None = field(default=None, metadata={"help": "Column of a second text."})
    image_column: str | None = field(default=None, metadata={"help": "Column of the image. Default: a usual name."})
    probe: str | None = field(
        default=None,
        metadata={
            "help": (
                "Also fit a linear classifier of this column's labels on the features of the training rows, and"
                " measure it on the others, besides always saying the most frequent label."
            )
        },
    )
    learn_mix: bool = field(
        default=False,
        metadata={
            "help": (
                "With --layers mix and --probe: write every layer, and learn the scores of the mix with the probe,"
                " which probe.json then has for --mix_scores."
            )
        },
    )
    probe_l2: float = field(default=1e-3, metadata={"help": "Weight of the squared weights in the probe's loss."})
    overwrite: bool = field(default=False, metadata={"help": "Replace the features that --output holds."})
    use_cpu: bool = field(default=False, metadata={"help": "Leave an accelerator alone."})
    progress: bool = field(default=True, metadata={"help": "Show a bar; --no_progress for none."})

    def check(self) -> None:
        """Raises ValueError for values out of range, for what does not go together, and for a model that reads
        sounds."""
        for name, known in (("pool", POOLINGS), ("format", FORMATS)):
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} {getattr(self, name)!r} is unknown; take one of {', '.join(known)}")
        for name in ("rows_per_file", "batch_size", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value} must be at least 1")
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"--layers {' '.join(self.layers)} must name one layer or more, each once")
        if not 0 <= self.probe_l2 < float("inf"):
            raise ValueError(f"--probe_l2 {self.probe_l2:g} must be at least 0")
        if self.probe is not None and self.pool == "none":
            raise ValueError("--probe classifies texts, which need one vector each; take --pool mean, first or last")
        if self.learn_mix and (self.layers != ["mix"] or self.probe is None):
            raise ValueError(
                "--learn_mix learns the scores of --layers mix with the classifier of --probe; give both, and no other"
                " layers"
            )
        if self.mix_scores and "mix" not in self.layers:
            raise ValueError("--mix_scores are of --layers mix; add it, or leave the scores out")
        if "mix" not in self.layers:
            refuse_alone(self, ("normalize",), "--layers mix")
        if self.probe is None:
            refuse_alone(self, ("probe_l2",), "--probe")
        if getattr(loading.open_config(self.model), "modality", "text") == "sound":
            raise ValueError(
                f"--model {self.model!r} reads sounds, and features are of texts or images; take its hidden states in"
                " Python (AutoModel, output_hidden_states=True) of what its feature extractor gives"
            )


# ------------------------------------------------------------------------------------------------ layers


class ScalarMix(nn.Module):
    """gamma sum_l softmax(s)_l h^l over L states (Peters et al. 2018, arXiv 1802.05365, equation 1).

    normalize: give every state mean 0 and variance 1 over its width first.
    """

    def __init__(self, count: int, scores: Sequence[float] = (), normalize: bool = False) -> None:
        super().__init__()
        start = torch.zeros(count) if not len(scores) else torch.tensor(list(scores), dtype=torch.float32)
        if len(start) != count:
            raise ValueError(
                f"--mix_scores has {len(start)} numbers, and the model has {count} states, the embedding and"
                f" {count - 1} layers; give one for each"
            )
        self.scores, self.gamma, self.normalize = nn.Parameter(start), nn.Parameter(torch.ones(())), normalize

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        weights = self.scores.softmax(0)
        if self.normalize:
            states = [nn.functional.layer_norm(state, state.shape[-1:]) for state in states]
        return self.gamma * sum(weight * state for weight, state in zip(weights, states))


class LayerChoice:
    """Which of a model's states make each column. count: of states, the embedding among them. apart: the states that
    a mix is to be learned of are columns, in place of the mix.

    Raises ValueError for an unknown layer, and for one that the model does not have.
    """

    def __init__(
        self, layers: Sequence[str], count: int, scores: Sequence[float], normalize: bool, *, apart: bool = False
    ) -> None:
        self.count, self.layers, self.normalize = count, list(layers), normalize and apart
        self.mix = ScalarMix(count, scores, normalize) if "mix" in layers else None
        self.columns: dict[str, list[int]] = {}
        if apart:
            layers = [str(place) for place in range(count)]
        for layer in layers:
            if layer == "last4" and count < 5:
                raise ValueError(f"--layers last4 needs four layers, and the model has {count - 1}; take last")
            known = {"embedding": [0], "last": [count - 1], "last4": list(range(count - 4, count)), "mix": []}
            if layer not in known and not layer.lstrip("-").isdecimal():
                raise ValueError(f"--layers {layer!r} is unknown; take {', '.join(known)} or a number")
            places = known.get(layer) or ([] if layer == "mix" else [int(layer)])
            if any(not 0 <= place < count for place in places):
                raise ValueError(
                    f"--layers {layer} is not there: the model has the layers 1 to {count - 1}, and 0 is its embedding"
                )
            self.columns[layer if layer in known else f"layer_{int(layer)}"] = places

    def read(self, states: Sequence[Tensor]) -> dict[str, Tensor]:
        """[B, T, D] of every state -> [B, T, D] of every column, or [B, T, 4 D]."""
        found = {}
        for name, places in self.columns.items():
            if name == "mix" and self.mix is not None:
                found[name] = self.mix(states)
            else:
                found[name] = torch.cat([self._given(states[place]) for place in places], dim=-1)
        return found

    def _given(self, state: Tensor) -> Tensor:
        """A state as a mix would read it."""
        return nn.functional.layer_norm(state, state.shape[-1:]) if self.normalize else state


# ------------------------------------------------------------------------------------------------ the model


class Reader:
    """A saved model's encoder (or decoder alone) that reads texts, without gradients and without dropout."""

    def __init__(self, options: FeatureOptions) -> None:
        from ..data import check_tokenizer, load_tokenizer

        self.config = loading.open_config(options.model)
        self.tokenizer = load_tokenizer(options.tokenizer or options.model)
        loading.fit_tokenizer(self.tokenizer, self.config)
        check_tokenizer(self.tokenizer, self.config)
        self.tokenizer.padding_side = "right"
        self.max_length = _length(options.max_length, self.config)
        model, _ = loading.load_trunk(options.model)
        model = model.get_encoder() if self.config.is_encoder_decoder else model
        on_cpu = options.use_cpu or not torch.cuda.is_available()
        self.model = model.eval().requires_grad_(False).to("cpu" if on_cpu else "cuda")
        self.count = len(self.states(self.batch([[""]]))[0])
        self.choice = LayerChoice(
            options.layers, self.count, options.mix_scores, options.normalize, apart=options.learn_mix
        )

    def batch(self, texts: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        """texts: of each row its text, or its two."""
        columns = [list(column) for column in zip(*texts)]
        made = self.tokenizer(*columns, truncation=True, max_length=self.max_length, padding=True, return_tensors="pt")
        if not made["input_ids"].numel():  # no text has a token, where a tokenizer adds none: rows of padding
            nothing = torch.zeros(len(texts), 1, dtype=torch.long)
            made = {"input_ids": nothing + self.tokenizer.pad_token_id, "attention_mask": nothing}
        return {name: value.to(self.model.device) for name, value in made.items()}

    def states(self, batch: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """([B, T, D] of the embedding and every layer, [B, T] real tokens). The last is what heads read.

        Raises ValueError for a model that does not have a state of every token in every layer.
        """
        with torch.no_grad():
            out = self.model(**batch, output_hidden_states=True)
        mask = batch.get("attention_mask")
        mask = torch.ones_like(batch["input_ids"]) if mask is None else mask
        found = list(out.hidden_states or ())
        if len(found) < 2 or any(state.shape[:2] != mask.shape for state in [*found, out.last_hidden_state]):
            raise ValueError(
                f"a model of type {self.config.model_type!r} does not have a state of every token after every layer;"
                " take a model of another type"
            )
        return [*(state.float() for state in found[:-1]), out.last_hidden_state.float()], mask.bool()


def _length(given: int | None, config: Any) -> int:
    from ..training.building import longest_input

    limit = longest_input(config)
    if given is not None and limit is not None and given > limit:
        raise ValueError(
            f"--max_length {given} is more than the {limit} tokens that the model's positions cover; take at most"
            f" {limit}"
        )
    return given or min(256, limit or 256)
