"""The card of one checkpoint: what it is, how it was trained, how good it is, how to load it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .adapter_card import Adapter, read_adapter
from .checkpoint_files import BOTTLENECK, CONFIG, MARK, MODEL, PEFT, Kind, kind_of
from .model_card import PIPELINES, _component_table, _table
from .training_record import TrainingRecord, read_record

_TASKS = {
    **PIPELINES,
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "Model": "feature-extraction",
}
_OF_TASK = {"summarization": "summarization", "translation": "translation"}


@dataclass
class CardFacts:
    """What the folder does not say. license: an id of the Hub's list, e.g. "apache-2.0". language: codes such as "en".
    base_model, datasets: ids on the Hub; by default those that the record of the training names."""

    license: str | None = None
    language: list[str] = field(default_factory=list)
    base_model: str | None = None
    datasets: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)


def checkpoint_card(
    folder: str | Path, repo_id: str, *, self_contained: bool = False, facts: CardFacts | None = None
) -> ModelCard:
    """The card of a checkpoint or adapter folder as it will be in the repository `repo_id`.

    self_contained: the code goes with it. Figures come from the run's `training_summary.json`, or from Trainer's
    `all_results.json` and `trainer_state.json`. Local paths are never named.

    Raises:
        ValueError: the folder is no checkpoint.
    """
    folder, facts = Path(folder).expanduser(), facts or CardFacts()
    kind, record = kind_of(folder), read_record(folder)
    if kind == MODEL:
        about = _About.of_model(folder)
    else:
        about = _About.of_adapter(folder, kind, facts.base_model)
    name = repo_id.rpartition("/")[2]
    base = facts.base_model or (about.adapter and about.adapter.base) or record.base_model
    datasets = facts.datasets or record.datasets
    results = _results(record, about, datasets)
    relation: dict[str, Any] = {"base_model_relation": "adapter"} if base and kind != MODEL else {}
    data = ModelCardData(
        language=facts.language or record.languages or None,
        license=facts.license,
        library_name={MODEL: "transformers", PEFT: "peft", BOTTLENECK: "hf_xformers"}[kind],
        pipeline_tag=_OF_TASK.get(record.task or "", about.pipeline),
        tags=list(dict.fromkeys(["hf_xformers", *about.tags, *facts.tags])),
        base_model=base,
        datasets=datasets or None,
        model_name=name if results else None,
        eval_results=results or None,
        **relation,
    )
    parts = [f"---\n{data.to_yaml()}\n---", f"# {name}", about.summary, *about.sections]
    if record.facts:
        parts += ["## Training", _table([{"": key, " ": _figure(value)} for key, value in record.facts.items()])]
    if record.scores:
        rows = [{"split": key[0], "metric": key[1], "value": _figure(value)} for key, value in record.scores.items()]
        parts += ["## Evaluation", _table(rows)]
    parts += ["## Use", about.use(repo_id, self_contained), *about.citation, MARK]
    return ModelCard("\n\n".join(parts) + "\n")


@dataclass
class _About:
    """What config and weights say."""

    summary: str
    auto: str = "AutoModel"
    pipeline: str | None = None
    tags: list[str] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)
    citation: list[str] = field(default_factory=list)
    adapter: Adapter | None = None

    @classmethod
    def of_model(cls, folder: Path) -> _About:
        from ..configuration_xformer import XFormerConfig

        config = _config(folder)
        head, architecture = _head(config)
        auto = "AutoModel" if head == "Model" else f"AutoModelF{head[1:]}"
        if not isinstance(config, XFormerConfig):
            return cls(f"`{architecture}` of transformers.", auto, _TASKS.get(head), [config.model_type])
        info = config.info
        summary = f"`{architecture}`: the Transformer with {info.summary} ([{info.paper}]({info.url}))."
        rows = [{"": name, " ": _figure(value)} for name, value in _geometry(config, folder).items()]
        return cls(
            summary,
            auto,
            "image-feature-extraction" if head == "Model" and config.modality == "image" else _TASKS.get(head),
            [config.model_type],
            ["## Model", _table(rows), _component_table(config)],
            ["## Citation", f"```bibtex\n{info.bibtex.strip()}\n```"],
        )

    @classmethod
    def of_adapter(cls, folder: Path, kind: Kind, base_model: str | None) -> _About:
        adapter = read_adapter(folder, kind, base_model)
        of = f" of `{adapter.base}`" if adapter.base else ""
        if kind == PEFT:
            summary, tags = f"An adapter{of} ({adapter.method}, PEFT).", [adapter.method]
        else:
            summary = f"A bottleneck adapter{of} ({adapter.method}) for `{adapter.architecture}`."
            tags = ["bottleneck-adapter", *([adapter.model_type] if adapter.model_type else [])]
        return cls(summary, pipeline=_TASKS.get(adapter.head), tags=tags, adapter=adapter)

    def use(self, repo_id: str, self_contained: bool) -> str:
        """A code block that loads it from the Hub."""
        if self.adapter is not None:
            lines = self.adapter.use(repo_id)
        elif self_contained:
            lines = [
                f"from transformers import {self.auto}",
                "",
                f'model = {self.auto}.from_pretrained("{repo_id}", trust_remote_code=True)',
            ]
        else:
            lines = [
                f"from transformers import {self.auto}",
                "",
                *(["import hf_xformers  # makes the variants known to the Auto classes", ""] if self.sections else []),
                f'model = {self.auto}.from_pretrained("{repo_id}")',
            ]
        return "```python\n" + "\n".join(lines) + "\n```"


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, TypeError, OSError, KeyError) as error:
        first = str(error).strip().splitlines()
        raise ValueError(
            f"{str(folder / CONFIG)!r} cannot be read: {first[0] if first else type(error).__name__}"
        ) from error


def _head(config: Any) -> tuple[str, str]:
    architecture = (
        config.architectures[0] if config.architectures else type(config).__name__.removesuffix("Config") + "Model"
    )
    heads = sorted((head for head in _TASKS if architecture.endswith(head)), key=len)
    if heads:
        return heads[-1], architecture
    return ("ForCausalLM" if architecture.endswith("LMHeadModel") else "Model"), architecture


def _geometry(config: Any, folder: Path) -> dict[str, Any]:
    found = {
        "variant": f"`{config.model_type}`",
        "parameters": _parameters(folder),
        "layers": config._getattr_without_heterogeneous_validation("num_hidden_layers"),
        "decoder layers": config.num_decoder_layers if config.is_encoder_decoder else None,
        "width": config._getattr_without_heterogeneous_validation("hidden_size"),
        "heads": config._getattr_without_heterogeneous_validation("num_attention_heads"),
        "feed-forward width": config._getattr_without_heterogeneous_validation("intermediate_size"),
        "vocabulary": config.vocab_size if config.modality == "text" else None,
        "longest input (tokens)": config.max_position_embeddings if config.modality == "text" else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _parameters(folder: Path) -> int | None:
    """The numbers that the weight files hold, from their headers."""
    import math

    from safetensors import SafetensorError, safe_open

    total = 0
    for path in folder.glob("model*.safetensors"):
        try:
            with safe_open(path, framework="np") as file:
                total += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())
        except SafetensorError as error:
            raise ValueError(f"{str(path)!r} is damaged ({error}); save or download the checkpoint again") from None
    return total or None


def _results(record: TrainingRecord, about: _About, datasets: list[str]) -> list[EvalResult]:
    """The scores as the Hub's model-index wants them; those of several datasets belong to none of them alone."""
    dataset = datasets[0] if len(datasets) == 1 and len(record.data) <= 1 else None
    name = ", ".join(record.data) or "held-out data"
    return [
        EvalResult(
            task_type=_OF_TASK.get(record.task or "", about.pipeline or "other"),
            dataset_type=dataset or "custom",
            dataset_name=name,
            dataset_split=split,
            metric_type=metric,
            metric_value=round(value, 6),
            verified=False,
        )
        for (split, metric), value in record.scores.items()
    ]


def _figure(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
