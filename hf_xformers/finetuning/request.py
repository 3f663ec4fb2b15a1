# SPDX-License-Identifier: Apache-2.0
"""What a fine-tuning is asked for: a start, a task, ways to train; and what of it does not go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..compat import class_for
from ..configuration_xformer import XFormerConfig
from ..core.given_options import refuse_alone
from ..training.building import choose_block_size, grown_positions, longest_sequence
from ..training.preparation import check_arguments
from ..training.run import Run
from ..training.run_folder import read_summary
from . import loading
from .options import ModelOptions, RunOptions, TaskData, TaskOptions
from .peft_methods import check_method, virtual_tokens
from .tasks import (
    Forecasting,
    LanguageModeling,
    MultiLabelClassification,
    Regression,
    SpeechRecognition,
    build_task,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, Seq2SeqTrainingArguments


class TaskRequest:
    """What is asked for, checked as far as that goes without reading data.

    components, fields: of the configuration; peft_fields: of the PEFT method.

    Raises ValueError and TypeError that name the value and the remedy.
    """

    def __init__(
        self,
        model: ModelOptions,
        source: TaskData,
        task: TaskOptions,
        run: RunOptions,
        args: Seq2SeqTrainingArguments,
        *,
        components: Mapping[str, Any] | None = None,
        fields: Mapping[str, Any] | None = None,
        peft_fields: Mapping[str, Any] | None = None,
    ) -> None:
        check_arguments(args)
        run.check(args)
        if run.average_checkpoints and run.peft is not None:
            raise ValueError("--average_checkpoints is of whole models; leave it or --peft out")
        self.model, self.source, self.options, self.run_options, self.args = model, source, task, run, args
        self.components, self.fields = dict(components or {}), dict(fields or {})
        self.peft_fields = dict(peft_fields or {})
        self.this_run = Run(args, overwrite=run.overwrite_output_dir)
        self.folder = self.this_run.folder
        self.this_run.refuse_own_source(model.model, "the model")
        self.tokenizer: Any = None  # one that several tasks share
        self.start = self._open_start()
        self.task = build_task(task, self._config_class())
        heads = self._heads()
        self.task.choose(heads, None if self.start is None else loading.architecture_of(self.start))
        self.keeps_head = (
            self.start is not None and not model.new_head and loading.has_head(self.start, self.task.head)
        )
        self.size = model.size or "tiny"
        self._check_run()
        self.checkpoint = self.this_run.checkpoint
        first = self._config({})  # refuses parts that do not fit together
        if self.start is None and "max_position_embeddings" not in self.fields:
            self.fields |= grown_positions(cast(XFormerConfig, first), self._longest_wanted())
            first = self._config({})
        self._check_exits(first)
        self._check_tags(first)
        self._check_lengths(first)

    # ------------------------------------------------------------------------------------------------ checks

    def _open_start(self) -> PreTrainedConfig | None:
        if (self.model.model is None) == (self.model.variant is None):
            raise ValueError(
                "give either --model, a saved model to start from, or --variant, to start from random weights"
            )
        if self.model.tokenizer is not None or not (self.model.model is None or self.model.train_tokenizer):
            refuse_alone(self.model, ("tokenizer_type",), "--train_tokenizer")
        if self.model.model is None:
            from ..variants import resolve

            self.variant = resolve(str(self.model.variant))
            return None
        found = loading.open_config(self.model.model)
        if getattr(found, "quantization_config", None) and self.run_options.peft is None:
            raise ValueError(
                f"--model {self.model.model!r} is quantized, and such weights do not learn; fine-tune the model that"
                " it was made of, and quantize the result (`hf-xformers quantize`), or add --peft lora"
            )
        return found

    def _config_class(self) -> Any:
        from ..variants import config_class

        return config_class(self.variant) if self.start is None else type(self.start)

    def _heads(self) -> Sequence[str]:
        if self.start is None:
            return self._config_class().heads
        if isinstance(self.start, XFormerConfig):
            return type(self.start).heads
        return tuple(f"For{name}" for name in ("MaskedLM", "CausalLM", "Seq2SeqLM") if self._has_class(name))

    def _has_class(self, head: str) -> bool:
        return class_for(f"AutoModelFor{head}", type(self.start)) is not None

    def _check_run(self) -> None:
        run, args = self.run_options, self.args
        if run.peft is not None:
            check_method(run.peft, self.task.head)
            if self.start is None:
                raise ValueError(
                    f"--peft {run.peft} trains a small part of a trained model, and --variant starts from random"
                    " weights; give a --model, or leave --peft out"
                )
        elif self.peft_fields:
            raise ValueError("--peft.FIELD options are about a method; name it with --peft")
        if run.max_tokens and not self.task.reads_text:
            raise ValueError(f"--max_tokens counts tokens of texts, and {self.task.id} reads none; leave it out")
        if self.task.one_row and (args.generation_num_beams or 1) != 1:
            raise ValueError(
                f"--generation_num_beams {args.generation_num_beams} searches with an encoder-decoder, and"
                f" a For{self.task.head} class writes the likeliest token each time; leave it out"
            )
        if self.task.generates and args.generation_max_length is not None and args.generation_max_length < 2:
            raise ValueError(
                f"--generation_max_length {args.generation_max_length} counts the token that begins a text; take at"
                " least 2"
            )
        if run.early_stopping_patience is None:
            refuse_alone(run, ("early_stopping_threshold",), "--early_stopping_patience")
        if run.early_stopping_patience is not None and run.early_stopping_patience < 1:
            raise ValueError(f"--early_stopping_patience {run.early_stopping_patience} must be at least 1")
        if run.early_stopping_patience is not None and args.eval_strategy == "no":
            raise ValueError("--early_stopping_patience counts evaluations, and --eval_strategy is no; drop one")
        run.check_layerwise(args, run.peft)
        run.check_self_ensemble(self.task.head, self.task.id, run.average_checkpoints is not None)
        if run.devices():
            layers = run.goes_by_layers
            beside = {"--peft": run.peft, "--self_ensemble": run.self_ensemble, "options by layers": layers}
            for name, chosen in beside.items():
                if chosen:
                    raise ValueError(f"--expert_parallel shards whole models, trained whole; leave it or {name} out")
        wanted = (args.metric_for_best_model or "loss").removeprefix("eval_")
        known = ("loss", *self.task.metric_names)
        generating = not self.task.generates or args.predict_with_generate
        if wanted not in known or not (generating or wanted == "loss"):
            raise ValueError(
                f"--metric_for_best_model {wanted!r} is not measured; choose one of "
                f"{', '.join(known if generating else ('loss',))}"
            )
        if self.task.is_error(wanted):
            args.greater_is_better = False
        without = (Regression, MultiLabelClassification, Forecasting, SpeechRecognition)
        if isinstance(self.task, without) and args.label_smoothing_factor:
            raise ValueError(
                "--label_smoothing_factor spreads probability over classes, of which one is right, and"
                f" {self.task.id} has none; leave it out"
            )
        if args.label_smoothing_factor and run.peft == "prompt":
            raise ValueError(
                "--label_smoothing_factor does not work with the virtual tokens of --peft prompt; drop one"
            )
        if args.label_smoothing_factor and self.task.head == "QuestionAnswering":
            raise ValueError("--label_smoothing_factor reads `labels`, and question answering has two; leave it out")
        if args.label_smoothing_factor and self.options.class_balance:
            raise ValueError("--label_smoothing_factor and --class_balance both make the loss; drop one")

    def _losses(self) -> dict[str, Any]:
        """Options that make a loss of a model's logits, and whether they are chosen."""
        return {
            "class_balance": self.options.class_balance,
            "label_smoothing_factor": self.args.label_smoothing_factor,
            "self_ensemble": self.run_options.distils,
        }

    def _check_exits(self, config: PreTrainedConfig) -> None:
        stack: Any = getattr(config, "stack", None)
        head = self.task.head
        exits = isinstance(config, XFormerConfig) and (
            (stack.exits == "texts" and head == "SequenceClassification")
            or (stack.exits == "tokens" and head == "TokenClassification")
            or (head in ("CausalLM", "Seq2SeqLM") and config.tower_configs()[-1].stack.exits == "decoder")
        )
        for name, value in self._losses().items():
            if value and exits:
                raise ValueError(
                    f"--{name} makes the loss of a model's last logits, and {config.model_type} has a classifier with"
                    " a loss of its own after every layer; leave it out"
                )

    def _check_tags(self, config: PreTrainedConfig) -> None:
        if self.task.head != "TokenClassification" or getattr(config, "tag_decoder", "softmax") == "softmax":
            return
        for name, value in self._losses().items():
            if value and name != "class_balance":  # which weighs sequences as well
                raise ValueError(
                    f"--{name} makes the loss of single tags, and a model with tag_decoder 'crf' has that of whole"
                    " sequences; leave it out, or take --tag_decoder softmax"
                )

    def _longest_wanted(self) -> int:
        """The longest text that the options ask for, 0 where they leave lengths open."""
        inputs = self.options.max_length or 0
        if isinstance(self.task, LanguageModeling):
            return longest_sequence(self.task.objective, inputs) if inputs else 0
        targets = (self.options.max_target_length or 0) if self.task.generates else 0
        if self.task.one_row and (inputs or targets):
            return self.task.max_length + self.task.max_target_length  # type: ignore[attr-defined]
        return max(inputs, targets)

    def _check_lengths(self, config: PreTrainedConfig) -> None:
        reserved = virtual_tokens(self.run_options.peft, self.peft_fields)
        loading.check_lengths(self.task, config, self.options.max_length, reserved)
        if isinstance(self.task, LanguageModeling) and isinstance(config, XFormerConfig):
            before = read_summary(self.model.model).get("block_size") if self.model.model else None
            given = self.options.max_length or before
            self.task.max_length = choose_block_size(config, self.task.objective, self.size, given)

    def _config(self, settled: Mapping[str, Any]) -> PreTrainedConfig:
        if self.start is not None:
            return loading.saved_config_with(self.start, self.task.head, self.components, self.fields, settled)
        from ..variants import config_class

        return loading.fresh_config(
            config_class(self.variant), self.size, self.task, self.components, self.fields, settled
        )
