# SPDX-License-Identifier: Apache-2.0
"""Weights in 8 or 4 bits through torchao, saved so that `from_pretrained` reads them as they are; with a training
beforehand that knows of it, if asked for.

trained/            of such a training: the run, with its model in full precision, and quantization.json, the rounding
                    that it was begun with
model.safetensors   the quantized weights
compression.json    the table before and after
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..core.given_options import refuse_alone
from ..core.saved_files import read_object, write_json
from ..training.folder_lock import folder_lock
from ..training.run import Run
from ..training.run_folder import read_summary, refuse_own_source, result_in
from .quantizable import Split, kind_of, output_errors, random_batch, split
from .report import Measuring, Row, compare, measure, open_model, refuse_any_adapter, refuse_processes, write_table
from .rows import save_rest, saving_result

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

    from ..finetuning.run import FineTuning

TRAINED, SETTINGS = "trained", "quantization.json"
INT4 = getattr(torch, "int4")  # noqa: B009  torch's stubs do not know it
Told = Callable[[str], None]


@dataclass
class Quantizing:
    """What becomes of which model."""

    _argument_group_name = "quantization"

    model: str = field(metadata={"help": "Trained model in full precision: a folder or a Hub id."})
    weights: Literal["int8", "int4"] = field(default="int8", metadata={"help": "Numbers of the weights."})
    activations: Literal["full", "int8"] = field(
        default="full", metadata={"help": "Inputs of projections: as they are, or in 8 bits, by token, as they come."}
    )
    group_size: int = field(default=32, metadata={"help": "int4: inputs of a projection that share a scale."})
    keep: list[str] = field(
        default_factory=list,
        metadata={"help": "Modules that stay as they are besides the usual ones, by the ends of their names: o_proj."},
    )
    sensitivity: bool = field(
        default=False, metadata={"help": "Say how far each type of module by itself moves the outputs."}
    )
    quantization_aware: bool = field(
        default=False,
        metadata={"help": "Train first, on rows of the model's task (--data), with weights rounded in every pass."},
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace an earlier model in --output_dir."})

    def check(self) -> None:
        """Raises `ValueError` for a group that makes no sense, or has no effect."""
        if self.group_size < 2:
            raise ValueError(f"--group_size must be at least 2, got {self.group_size}; 32 is usual")
        if self.grouped is None:
            refuse_alone(self, ("group_size",), "--weights int4")

    @property
    def grouped(self) -> int | None:
        """Inputs that share a scale; None: all of an output's."""
        return self.group_size if self.weights == "int4" else None


def torchao() -> Any:
    """The package that quantizes. Raises `ValueError` where it is not installed, with the extra that brings it."""
    logger = logging.getLogger("torchao")
    before = logger.level
    logger.setLevel(logging.ERROR)  # of kernels for other devices it says that they are not there
    try:
        import torchao.quantization
    except ImportError:
        raise ValueError(
            "quantization needs torchao, which is not installed; install it with `pip install hf_xformers[quantize]`"
        ) from None
    finally:
        logger.setLevel(before)
    return torchao


def recipe(quantizing: Quantizing) -> Any:
    """torchao's configuration.

    Weights are symmetric: q = round(w / s), s the largest of |w| over what the range holds, for each output (int8) or
    group of inputs (int4, one number in a byte: torchao's layout for every device). Activations have a scale and a
    zero for each token, made as they come (Zafrir et al. 2019, arXiv 1910.06188, section 2, without its moving
    averages).
    """
    ao = torchao().quantization
    by_output, groups = ao.PerAxis(0), ao.PerGroup(quantizing.group_size)
    if quantizing.weights == "int8" and quantizing.activations == "full":
        return ao.Int8WeightOnlyConfig(set_inductor_config=False)
    if quantizing.activations == "full":
        return ao.IntxWeightOnlyConfig(weight_dtype=INT4, granularity=groups)
    if quantizing.weights == "int8":
        return ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=by_output)
    return ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=INT4, weight_granularity=groups)


def quantize_module(module: nn.Linear, configuration: Any) -> None:
    """Quantizes one linear module in place."""
    torchao().quantization.quantize_(module, configuration)


class FakeQuantized:
    """Training that knows of the rounding: linear modules compute with quantized weights (and inputs), and gradients
    go straight through to the full ones (torchao's quantization-aware training)."""

    def __init__(self, quantizing: Quantizing) -> None:
        self.quantizing = quantizing

    def put(self, model: Any) -> None:
        torchao()
        from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

        chosen = set(split(model, group_size=self.quantizing.grouped, keep=self.quantizing.keep).chosen)
        if self.quantizing.weights == "int8":
            weights = IntxFakeQuantizeConfig(torch.int8, "per_channel", is_symmetric=True)
        else:
            weights = IntxFakeQuantizeConfig(INT4, group_size=self.quantizing.group_size, is_symmetric=True)
        inputs = None
        if self.quantizing.activations == "int8":
            inputs = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
        configuration = QATConfig(activation_config=inputs, weight_config=weights, step="prepare")
        torchao().quantization.quantize_(model, configuration, filter_fn=lambda module, name: name in chosen)

    def merge(self, model: Any) -> None:
        torchao()
        from torchao.quantization.qat.linear import FakeQuantizedLinear

        found = [(name, module) for name, module in model.named_modules() if isinstance(module, FakeQuantizedLinear)]
        for name, module in found:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, module.to_linear())


class Quantizer:
    """Checks a request and runs it; nothing is written before all that can be refused is.

    Args:
        output_dir: where the quantized model goes.
        data, task, args: of a training beforehand.
        say: takes lines about the progress.

    Raises ValueError and TypeError that name the value and the remedy.
    """

    def __init__(
        self,
        choice: Quantizing,
        output_dir: str | Path,
        *,
        measuring: Measuring | None = None,
        data: Any = None,
        task: Any = None,
        args: TrainingArguments | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        say: Told = lambda line: None,
    ) -> None:
        choice.check()
        torchao()
        self.choice, self.folder = choice, Path(output_dir).expanduser()
        self.measuring, self.say = measuring or Measuring(), say
        self.measuring.check()
        self.data, self.task, self.args, self.callbacks = data, task, args, list(callbacks)
        if args is not None:
            refuse_processes(args, trains=choice.quantization_aware)
        if choice.quantization_aware and (args is None or data is None or not data.data):
            raise ValueError("--quantization_aware trains on rows of the model's task; name them with --data")
        self.source = choice.model
        refuse_quantized_source(self.source)

    def run(self) -> tuple[Split, Row, Row]:
        """(what was quantized, the source's row, the result's)."""
        self._check_target()
        model = open_model(self.source)
        refuse_any_adapter(model, repr(self.source))
        parts = split(model, group_size=self.choice.grouped, keep=self.choice.keep)
        if self.choice.sensitivity:
            random_batch(model)  # refuses what none can be made for
        training = None
        if self.choice.quantization_aware:
            training = self._training()
            self.measuring.read_rows_of(self.data, read_summary(self.source).get("dataset") or {})
        first = measure(self.source, self.measuring)  # what cannot be measured is refused before anything is written
        with folder_lock(self.folder):
            trained = self.source if training is None else self._train(training)
            if self.choice.sensitivity:
                self._tell_errors(open_model(trained), parts)
            quantized = self._quantized(model, trained, parts)
            with saving_result(self.folder) as staging:
                quantized.save_pretrained(staging)
                made = {"source": self.source, "weights": self.choice.weights, "activations": self.choice.activations}
                save_rest(trained, staging, quantization=made)
            del quantized
            before, after = compare(first, self.folder, self.measuring)
            settings = {**asdict(self.choice), "quantized": len(parts.chosen), "kept": _by_kind(parts.kept)}
            write_table(before, after, self.folder, command="quantize", settings=settings)
        return parts, before, after

    def _check_target(self) -> None:
        refuse_own_source(self.folder, self.source, "--model", (TRAINED,))
        if result_in(self.folder) and not self.choice.overwrite_output_dir:
            raise ValueError(
                f"{str(self.folder)!r} holds a model already; replace it with --overwrite_output_dir, or take another"
                " --output_dir"
            )

    def _quantized(self, model: PreTrainedModel, source: str, parts: Split) -> PreTrainedModel:
        """The model of a folder, quantized as it is read."""
        from transformers import TorchAoConfig

        from ..conversion.quiet import quiet

        configuration = TorchAoConfig(recipe(self.choice), modules_to_not_convert=list(parts.kept))
        with quiet():
            return type(model).from_pretrained(source, quantization_config=configuration, dtype=model.dtype).eval()

    def _tell_errors(self, model: PreTrainedModel, parts: Split) -> None:
        batch, configuration = random_batch(model), recipe(self.choice)
        errors = output_errors(model, [batch], lambda module: quantize_module(module, configuration), parts.chosen)
        for kind, error in errors.items():
            self.say(f"{kind}: {error:.2e} of the outputs' squares")

    @property
    def _rounding(self) -> dict[str, Any]:
        names = ("model", "weights", "activations", "keep")
        return {**{name: getattr(self.choice, name) for name in names}, "group_size": self.choice.grouped}

    def _training(self) -> FineTuning:
        """The training with rounding. Raises ValueError for another task than the model's, and where it continues one
        with other rounding."""
        from ..finetuning.options import ModelOptions, RunOptions
        from ..finetuning.run import FineTuning

        assert self.args is not None
        if getattr(self.task, "task", None) is None:
            raise ValueError(
                f"--quantization_aware trains on the task of a model, and {self.source!r} does no task; fine-tune it"
                " first with `hf-xformers finetune`"
            )
        place = self.folder / TRAINED
        self.args.output_dir = str(place)
        run = Run(self.args)
        if run.resumes and (place / SETTINGS).is_file():
            run.check_settings(read_object(place / SETTINGS), self._rounding)
        run_options = RunOptions(overwrite_output_dir=self.choice.overwrite_output_dir)
        made = FineTuning(ModelOptions(model=self.source), self.data, self.task, run_options, self.args)  # type: ignore[arg-type]
        if not made.keeps_head:
            raise ValueError(
                f"--quantization_aware trains what a model does already, and {self.source!r} has no head for --task"
                f" {self.task.task}; fine-tune it first with `hf-xformers finetune`"
            )
        made.guest = FakeQuantized(self.choice)
        return made

    def _train(self, made: FineTuning) -> str:
        """Trains, unless that is finished; the folder of the result."""
        place, run = made.folder, made.this_run
        summary = read_summary(place) if place.is_dir() else {}
        if summary.get("status") == "finished" and run.resumes:
            self.say(f"{str(place)!r} is finished already")
            return str(place)
        prepared = made.prepare()
        write_json(place / SETTINGS, self._rounding)
        made.train(prepared, self.callbacks)
        return str(place)


def refuse_quantized_source(name: str) -> None:
    """Raises `ValueError` for a model that is quantized already, or that is none."""
    from ..training.scoring import load_config

    fields = load_config(name).to_dict().get("quantization_config")
    if fields:
        method = fields.get("quant_method", "") if isinstance(fields, dict) else ""
        raise ValueError(
            f"the model {name!r} is quantized already ({getattr(method, 'value', method) or 'by its config'}); give"
            " the model that it was made of, in full precision"
        )


def _by_kind(kept: dict[str, str]) -> dict[str, str]:
    return {kind_of(name): reason for name, reason in kept.items()}


def quantize(choice: Quantizing, output_dir: str | Path, **options: Any) -> tuple[Split, Row, Row]:
    """[`Quantizer`] in one call; what `hf-xformers quantize` does."""
    return Quantizer(choice, output_dir, **options).run()
