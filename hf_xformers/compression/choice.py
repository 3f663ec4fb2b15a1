# SPDX-License-Identifier: Apache-2.0
"""What a pruning can be asked for."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Literal

from ..core.given_options import changed, refuse_alone
from .weights import check_sparsity

BY = {
    "heads": ("gradient", "gates"),
    "layers": ("top", "alternate", "loss", "angle"),
    "weights": ("magnitude", "movement"),
}
OWN = {
    "heads": ("share", "by_layer", "heads", "gate_penalty", "gate_learning_rate"),
    "layers": ("keep_layers", "layers"),
    "weights": ("sparsity", "pattern", "granularity", "exclude", "train_masked"),
}


@dataclass
class Pruning:
    """What goes, and by which measure."""

    _argument_group_name = "pruning"

    model: str = field(metadata={"help": "Trained model of this package: a folder, or a Hub id."})
    method: str = field(metadata={"help": "What is removed: 'heads', 'layers' or 'weights'."})
    by: str | None = field(
        default=None,
        metadata={
            "help": (
                "How it is chosen. Heads: 'gradient' of their gates, or 'gates' that training closes. Layers: the"
                " 'top' ones, 'alternate' ones, the 'loss' without each, the 'angle' that states turn. Weights:"
                " 'magnitude', or 'movement' while training. Default: the first."
            )
        },
    )
    share: float = field(default=0.4, metadata={"help": "heads: the share that goes (of gates, training decides)."})
    by_layer: bool = field(default=False, metadata={"help": "heads: the same share of every layer."})
    heads: list[str] = field(
        default_factory=list, metadata={"help": "heads: these go, as LAYER:HEAD,HEAD, such as 0:1,3 2:0."}
    )
    gate_penalty: float = field(
        default=0.5, metadata={"help": "heads by gates: the loss of all gates being open; more closes more."}
    )
    gate_learning_rate: float = field(default=0.1, metadata={"help": "heads by gates: that of the gates."})
    keep_layers: int | None = field(default=None, metadata={"help": "layers: how many stay. Default: half."})
    layers: str | None = field(default=None, metadata={"help": "layers: these stay, such as '0-3,6'."})
    sparsity: float = field(default=0.5, metadata={"help": "weights: the share that becomes zero."})
    pattern: Literal["unstructured", "2:4"] = field(
        default="unstructured", metadata={"help": "weights: anywhere, or two of every four along a row."}
    )
    granularity: Literal["matrix", "model"] = field(
        default="matrix", metadata={"help": "weights: the share of every matrix, or of all together."}
    )
    exclude: list[str] = field(
        default_factory=list, metadata={"help": "weights: parts of names that stay whole, such as o_proj layers.0."}
    )
    train_masked: bool = field(
        default=False, metadata={"help": "weights by magnitude: train while the zeros grow to their share."}
    )
    data: list[str] = field(
        default_factory=list,
        metadata={"help": "Rows or text to measure importance on, or to train on. Default: the model's own."},
    )
    rows: int = field(default=512, metadata={"help": "Rows that importance is measured on."})
    measure: bool = field(default=True, metadata={"help": "Measure before and after; --no_measure: do not."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace an earlier result in --output_dir."})

    @property
    def chosen_by(self) -> str:
        return self.by or BY[self.method][0]

    @property
    def trains(self) -> bool:
        return self.chosen_by in ("gates", "movement") or (self.method == "weights" and self.train_masked)

    @property
    def reads_rows(self) -> bool:
        """Whether importance is measured on rows."""
        return self.told_by in ("gradient", "loss", "angle")

    @property
    def told_by(self) -> str:
        """How it was chosen, for the record: by `number` where heads or layers are named."""
        return "number" if self.heads or self.layers is not None else self.chosen_by

    def _given(self, name: str) -> bool:
        return name in changed(self)

    def check(self) -> None:
        """Raises `ValueError` for an unknown method, and for settings that are another one's or make no sense."""
        if self.method not in BY:
            close = difflib.get_close_matches(self.method, BY, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"there is no --method {self.method!r}.{hint} Choose one of {', '.join(BY)}")
        if self.chosen_by not in BY[self.method]:
            raise ValueError(f"--method {self.method} is chosen by {' or '.join(BY[self.method])}, not by {self.by!r}")
        for method, names in OWN.items():
            for name in names if method != self.method else ():
                if self._given(name):
                    raise ValueError(f"--{name} is for --method {method}, and this is --method {self.method}")
        if self.pattern == "2:4" and (self._given("sparsity") or self._given("granularity")):
            raise ValueError("--pattern 2:4 takes half of every four; leave out --sparsity and --granularity")
        if self.rows < 1:
            raise ValueError(f"--rows {self.rows} must be at least 1")
        if self.method == "weights":
            check_sparsity(self.sparsity)
            if self.pattern == "2:4" and self.chosen_by == "movement":
                raise ValueError("--pattern 2:4 is chosen by magnitude; leave out --by movement")
            if self.train_masked and self.chosen_by == "movement":
                raise ValueError("--by movement trains, with masks that grow; leave out --train_masked")
            if self.granularity == "model" and self.trains:
                raise ValueError("while training the share is that of every matrix; leave out --granularity model")
        if self.method == "heads":
            if self.heads and self.chosen_by == "gates":
                raise ValueError("--heads says which go, and --by gates lets training say so; give one of the two")
            if (self.heads or self.chosen_by == "gates") and (self._given("share") or self.by_layer):
                why = "--heads says which go" if self.heads else "--by gates lets training say how many go"
                raise ValueError(f"{why}; leave out --share and --by_layer")
            if not 0 < self.share < 1:
                raise ValueError(f"--share {self.share} is a share of heads between 0 and 1; take one inside")
            if self.chosen_by != "gates":
                refuse_alone(self, ("gate_penalty", "gate_learning_rate"), "--by gates")
            if self.heads and self.by is not None:
                raise ValueError("--heads says which go; leave out --by")
            if self.gate_penalty <= 0 or self.gate_learning_rate <= 0:
                raise ValueError("--gate_penalty and --gate_learning_rate must be above 0")
        if self.layers is not None and (self.keep_layers is not None or self.by is not None):
            raise ValueError("--layers says which stay; leave out --keep_layers and --by")
