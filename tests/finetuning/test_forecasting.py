"""Models that forecast against their equations, and the task from a file of numbers to a forecast."""

import csv
import datetime
import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from datasets import Dataset
from transformers import AutoModelForTimeSeriesPrediction, Seq2SeqTrainingArguments

from hf_xformers import XFormerConfig, XFormerForMaskedLM
from hf_xformers.finetuning import FineTuning
from hf_xformers.finetuning.options import ModelOptions, RunOptions, TaskData, TaskOptions
from hf_xformers.finetuning.predicting import Prediction, predict
from hf_xformers.finetuning.presets import finetuning_defaults
from hf_xformers.finetuning.tasks import Forecasting
from hf_xformers.modeling.forecasting import XFormerForTimeSeriesPrediction
from hf_xformers.variants.informer import XFInformerConfig, XFInformerForTimeSeriesPrediction
from tests.helpers import NO_DROPOUT, close, make_strong

TINY = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
SERIES = {"type": "series", "channels": 2, "time_features": 3}
CONTEXT, HORIZON = 13, 4


def forecaster(cls=XFInformerForTimeSeriesPrediction, config=XFInformerConfig, embedding=None, **head):
    torch.manual_seed(0)
    made = config(
        **{**TINY, **NO_DROPOUT, "is_encoder_decoder": True},
        embedding={**SERIES, **(embedding or {})},
        head={"type": "forecast", "context_length": CONTEXT, "prediction_length": HORIZON, **head},
    )
    return make_strong(cls(made).double().eval())


def series(seed=0, batch=3):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"past_values": (CONTEXT, 2), "past_time_features": (CONTEXT, 3)}
    shapes |= {"future_values": (HORIZON, 2), "future_time_features": (HORIZON, 3)}
    return {name: torch.randn(batch, *s, generator=generator).double() for name, s in shapes.items()}


@pytest.mark.parametrize("loss", ["mse", "mae", "student_t"])
def test_loss(loss):
    model, given = forecaster(loss=loss), series()
    found = model(**given)
    past = given["past_values"].numpy()
    mean, spread = past.mean(1, keepdims=True), past.std(1, keepdims=True)
    parameters = [p.detach().numpy() for p in found.params]
    np.testing.assert_allclose(found.prediction_outputs.detach().numpy(), parameters[0] * spread + mean)
    target = (given["future_values"].numpy() - mean) / spread
    if loss == "student_t":
        place, scale, freedom = parameters
        expected = -scipy.stats.t.logpdf(target, freedom, place, scale).mean()
    else:
        error = parameters[0] - target
        expected = (error**2).mean() if loss == "mse" else abs(error).mean()
    assert found.loss.item() == pytest.approx(expected, rel=1e-9)


def test_one_pass_reads_no_future():
    """The truth changes the loss alone, and neither does another row; units change nothing but the units."""
    model, given = forecaster(), series()
    whole = model(**given).prediction_outputs
    alone = {name: value for name, value in given.items() if name != "future_values"}
    close(model(**alone).prediction_outputs, whole)
    close(model(**{name: value[1:2] for name, value in alone.items()}).prediction_outputs, whole[1:2])
    other = {**alone, "past_values": alone["past_values"] * 7.0 + 1000}
    close(model(**other).prediction_outputs, whole * 7.0 + 1000, 1e-7)
    later = {**alone, "future_time_features": alone["future_time_features"] + 1}
    assert (model(**later).prediction_outputs - whole).abs().max() > 1e-3


def test_label_part():
    """With no known steps the decoder sees zeros and times; with them the last values as well."""
    for known, length in ((0, HORIZON), (5, 5 + HORIZON)):
        model, seen = forecaster(label_length=known), []
        model.get_decoder().embedding.tokens.register_forward_pre_hook(lambda m, given: seen.append(given[0]))
        given = series()
        model(**given)
        values = seen[0].transpose(1, 2)
        assert values.shape[1] == length and not values[:, known:].any()
        past = given["past_values"]
        scaled = (past - past.mean(1, keepdim=True)) / past.std(1, keepdim=True, correction=0)
        close(values[:, :known], scaled[:, CONTEXT - known :])


def test_unknown_values_count_nowhere():
    model, given = forecaster(), series()
    past_mask, future_mask = torch.ones(3, CONTEXT, 2), torch.ones(3, HORIZON, 2)
    past_mask[0, 2:5, 1], future_mask[1, 1] = 0, 0
    masks = {"past_observed_mask": past_mask, "future_observed_mask": future_mask}
    first = model(**given, **masks)
    for name, mask in (("past_values", past_mask), ("future_values", future_mask)):
        given[name] = given[name].masked_fill(mask == 0, math.nan)
    second = model(**given, **masks)
    close(first.prediction_outputs, second.prediction_outputs)
    close(first.loss, second.loss)


def test_constant_and_fixed_scaling():
    given = {**series(), "past_values": torch.full((3, CONTEXT, 2), 5.0).double()}
    assert forecaster()(**given).loss.isfinite()
    fixed = forecaster(scaling="fixed", location=(5.0, 0.0), spread=(2.0, 1.0))(**given)
    close(fixed.prediction_outputs[..., 0], fixed.params[0][..., 0] * 2 + 5)


def test_any_mechanism_and_saving(tmp_path):
    given = series()
    fields = {"attention": "nystromformer", "decoder": {"attention": "performer"}}
    model = forecaster(XFormerForTimeSeriesPrediction, lambda **kw: XFormerConfig(**{**kw, **fields}))
    model.save_pretrained(tmp_path)
    again = AutoModelForTimeSeriesPrediction.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert type(again) is XFormerForTimeSeriesPrediction
    close(again(**given).prediction_outputs, model(**given).prediction_outputs)
    made = AutoModelForTimeSeriesPrediction.from_config(XFInformerConfig(**TINY))
    assert (made.config.embedding.type, made.config.head.type) == ("series", "forecast")
    assert made(torch.randn(2, 96)).prediction_outputs.shape == (2, 24)


def test_refusals():
    model, given = forecaster(), series()
    for change, message in (
        ({"past_values": given["past_values"][:, 1:]}, "13 steps, 2 channels"),
        ({"past_values": given["past_values"][..., :1]}, "13 steps, 2 channels"),
        ({"past_time_features": None}, "past_time_features` are missing"),
        ({"future_time_features": given["future_time_features"][:, :, :2]}, "."),
        ({"past_observed_mask": torch.ones(3, 2)}, "must be like the values"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            model(**{**given, **change})
    with pytest.raises(ValueError, match="label_length"):
        forecaster(label_length=14)
    with pytest.raises(ValueError, match="a number of both for each channel"):
        forecaster(scaling="fixed")
    with pytest.raises(ValueError, match="2 channels|has 2|for 1 channels"):
        forecaster(scaling="fixed", location=(0.0,), spread=(1.0,))
    with pytest.raises(ValueError, match="ForTimeSeriesPrediction"):
        XFormerConfig(**TINY, embedding="series")
    with pytest.raises(ValueError, match="embedding='series'"):
        XFormerForMaskedLM(XFormerConfig(**TINY, head="forecast"))


# ------------------------------------------------------------------------------------------------ the task


def write(path, hours=240, change=None):
    """A daily season and a wave of 16 hours, which turns round from one day to the next, by the hour."""
    rows = []
    for t in range(hours):
        moment = datetime.datetime(2024, 1, 1) + datetime.timedelta(hours=t)
        day, wave = 2 * math.pi * t / 24, 2 * math.pi * t / 16
        rows.append(
            [str(moment), f"{10 + math.sin(day) + math.sin(wave):.4f}", f"{math.cos(day) + math.cos(wave):.4f}"]
        )
    if change is not None:
        change(rows)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["date", "load", "wind"], *rows])
    return str(path)


def made(data, folder, **options):
    task = {"task": "forecasting", "context_length": 24, "prediction_length": 6, **options}
    defaults = finetuning_defaults("forecasting", None, "tiny", None)
    settings = {"num_train_epochs": 3.0, "learning_rate": 5e-3, "per_device_train_batch_size": 16}
    settings |= {"output_dir": str(folder), "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    args = Seq2SeqTrainingArguments(**{**defaults, **settings})
    return FineTuning(
        ModelOptions(variant="informer"), TaskData(data=[data]), TaskOptions(**task), RunOptions(), args, fields=TINY
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecasting")
    data = write(folder / "hours.csv")
    tuning = made(data, folder / "run")
    prepared = tuning.prepare()
    return data, folder / "run", prepared, tuning.train(prepared)


def test_split_in_time(trained):
    """No training future reaches into the validation rows, whose first future is their first row."""
    _, _, prepared, _ = trained
    train, validation = prepared.splits["train"], prepared.splits["validation"]
    assert train.rows[-1]["first"] == "2024-01-09T18:00:00"  # its six steps end with row 216 of 240
    assert validation.rows[0]["first"] == "2024-01-10T00:00:00"
    assert len(train.rows) == 216 - 30 + 1 and len(validation.rows) == 24 - 6 + 1
    assert prepared.config.embedding.time_features == 4 and prepared.task.season == 24


def test_limits_are_of_each_part(tmp_path):
    source = TaskData(data=[write(tmp_path / "hours.csv")], max_eval_rows=8)
    rows = Forecasting(TaskOptions(task="forecasting")).load(source)
    assert len(rows["train"]) == 216 and len(rows["validation"]) == 216 + 8  # after their past


def test_a_column_of_one_value_keeps_its_unit(tmp_path):
    """What rounding leaves of its spread is none."""
    data = write(tmp_path / "hours.csv", change=lambda rows: [row.__setitem__(2, "0.19") for row in rows])
    spread = made(data, tmp_path / "run").prepare().task.spread
    assert np.std([0.19] * 216) > 0 and spread[1] == 1 and 0.5 < spread[0] < 2


@pytest.mark.parametrize(
    ("steps", "context", "times"),
    [
        ("Y", 3, ["2021-01-01", "2022-01-01", "2023-01-01"]),  # 365 days apart, both
        ("M", 2, ["2021-11-01", "2021-12-01"]),
        ("M", 1, ["2021-11-01"]),
    ],
)
def test_few_rows_may_continue_the_training_rows(steps, context, times, tmp_path):
    def dated(rows):
        for n, row in enumerate(rows):
            row[0] = str((np.datetime64("1901", steps) + n).astype("datetime64[D]"))

    data = write(tmp_path / "steps.csv", hours=100, change=dated)
    task = made(data, tmp_path / "run", context_length=context, label_length=1, prediction_length=2).prepare().task
    task._beyond = True
    rows = Dataset.from_list([{"date": time, "load": 1.0, "wind": 1.0} for time in times])
    assert len(task.encode(rows, None, "test").features) == 1


def test_better_than_the_floor(trained):
    _, run, _, summary = trained
    floor = summary["baseline_validation"]
    assert summary["eval_mse"] < floor["mse"] <= floor["mse_of_last_value"]
    rows = [json.loads(line) for line in (run / "predictions_validation.jsonl").read_text().splitlines()]
    errors = [
        (np.array(row["prediction"][name]) - row["reference"][name]) / spread
        for row in rows
        for name, spread in zip(("load", "wind"), summary["task_facts"]["spread"])
    ]
    assert summary["eval_mse"] == pytest.approx(np.square(errors).mean(), rel=1e-6)
    assert summary["best_checkpoint"] is not None


def test_another_file(trained, tmp_path):
    data, run, _, summary = trained
    wanted = {"model": str(run), "use_cpu": True, "progress": False}
    measured = predict(Prediction(**wanted, split="validation"), answers=True)
    assert measured.metrics["mse"] == pytest.approx(summary["eval_mse"], rel=1e-5)
    (ahead,) = predict(Prediction(**wanted, data=[data])).rows
    assert ahead["first"] == "2024-01-11T00:00:00" and len(ahead["prediction"]["load"]) == 6
    lines = Path(data).read_text().splitlines()
    named = tmp_path / "named.csv"
    named.write_text("\n".join([f"{lines[0]},id", *(f"{line},r{n}" for n, line in enumerate(lines[1:]))]))
    assert predict(Prediction(**wanted, data=[str(named)])).rows == [ahead]  # a forecast is none of the rows
    with pytest.raises(ValueError, match="2 hours apart.*training rows 1 hour"):
        other = write(tmp_path / "other.csv", change=lambda rows: rows.__delitem__(slice(1, None, 2)))
        predict(Prediction(**wanted, data=[other]))


def _hole(rows):
    rows[7][1] = ""


def _gap(rows):
    del rows[9]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (_hole, {}, "line 9.*no finite number.*--value_columns"),
        (_gap, {}, "comes 2 hours after the row before, and most rows 1 hour"),
        (None, {"value_columns": ["rain"]}, "no column 'rain'.*--value_columns"),
        (None, {"time_column": "when"}, "no column 'when'.*--time_column"),
        (None, {"context_length": 400}, "too few for a window of 400 past"),
        (None, {"prediction_length": 60}, "leave no whole future of 60 steps"),
        (None, {"label_length": 25}, "between 0 and the 24"),
        (None, {"prediction_length": 0}, "at least 1"),
    ],
)
def test_what_is_no_series(tmp_path, change, options, message):
    data = write(tmp_path / "hours.csv", change=change)
    with pytest.raises(ValueError, match=message):
        made(data, tmp_path / "run", **options).prepare()


def test_columns_without_times(tmp_path):
    data = write(
        tmp_path / "numbers.csv", change=lambda rows: [row.__setitem__(0, f"n{i}") for i, row in enumerate(rows)]
    )
    with pytest.raises(ValueError, match="no date or time"):
        made(data, tmp_path / "run").prepare()
