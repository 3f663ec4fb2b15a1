"""Features of a frozen model: layers, mixes and pooling against the model itself, files, resuming, the probe,
refusals."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, PreTrainedTokenizerFast

import hf_xformers.cli
from hf_xformers.data import load_tokenizer
from hf_xformers.finetuning import features as module
from hf_xformers.finetuning.features import ABOUT_FILE, LayerChoice, ScalarMix, read_features
from hf_xformers.finetuning.probe import learned_mix, linear_probe, mixed_states
from tests.finetuning.task_data import classification, pretrained, sentences, write_lines
from tests.training.runs import flags

LAYERS = ["embedding", "1", "last", "last4", "mix"]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    for variant, head in (("bert", "Model"), ("t5", "ForSeq2SeqLM")):
        pretrained(folder / variant, variant, head, num_hidden_layers=4, max_position_embeddings=32)
    return {"bert": folder / "bert", "t5": folder / "t5", "data": classification(folder, count=40)}


def features(places, output, *extra, model="bert", layers=LAYERS, **options):
    options = {"model": places[model], "output": output, "rows_per_file": 16, "use_cpu": True, **options}
    line = [*flags(**options), "--layers", *layers, "--no_progress", "--data", *places["data"], *extra]
    return hf_xformers.cli.main(["features", *line])


def by_hand(folder, text, decoder=False):
    """States of one text by itself: without padding, without neighbours."""
    model = AutoModel.from_pretrained(folder).eval()
    model = model.get_encoder() if decoder else model
    batch = load_tokenizer(folder)(text, return_tensors="pt")
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        out = model(**batch, output_hidden_states=True)
    return [*out.hidden_states[:-1], out.last_hidden_state]


@pytest.mark.parametrize("kind, how", [("parquet", "mean"), ("safetensors", "first"), ("parquet", "none")])
def test_columns_against_the_model(kind, how, places, tmp_path):
    assert features(places, tmp_path / "out", format=kind, pool=how) == 0
    texts = [text for text, _ in sentences(40, 0)]
    rows = list(read_features(tmp_path / "out"))
    assert [row["row"] for row in rows] == list(range(40))
    assert len(list(read_features(tmp_path / "out", "validation"))) == 24
    for index in (0, 17, 39):
        states = [state[0] for state in by_hand(places["bert"], texts[index])]
        wanted = {
            "embedding": states[0],
            "layer_1": states[1],
            "last": states[4],
            "last4": torch.cat(states[1:], -1),
            "mix": sum(states) / 5,
        }
        assert rows[index].keys() == {"row", *wanted}
        for name, value in wanted.items():
            pooled = {"mean": value.mean(0), "first": value[0], "none": value}[how]
            torch.testing.assert_close(rows[index][name], pooled, rtol=1e-4, atol=1e-5)


def test_an_encoder_decoder_is_read_by_its_encoder(places, tmp_path):
    assert features(places, tmp_path / "out", model="t5", layers=["last"]) == 0
    states = by_hand(places["t5"], sentences(40, 0)[3][0], decoder=True)
    found = list(read_features(tmp_path / "out"))[3]["last"]
    torch.testing.assert_close(found, states[-1][0].mean(0), rtol=1e-4, atol=1e-5)


def test_texts_without_a_token(places, tmp_path):
    """Of a tokenizer that adds none: zeros, as of any row of padding alone."""
    folder = pretrained(tmp_path / "gpt2", "gpt2", "ForCausalLM")
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "it": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]").save_pretrained(folder)
    texts = write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in ("it was", "", "it")])
    given = {"bert": folder, "data": [str(texts)]}
    assert features(given, tmp_path / "out", layers=["last"], batch_size=1) == 0
    states = [row["last"] for row in read_features(tmp_path / "out")]
    assert [bool(state.any()) for state in states] == [True, False, True]


def test_scalar_mix():
    states = [torch.randn(2, 3, 8) for _ in range(4)]
    for layer in range(4):
        scores = [0.0 if index == layer else -1e9 for index in range(4)]
        assert torch.equal(ScalarMix(4, scores)(states), states[layer])
    torch.testing.assert_close(ScalarMix(4)(states), sum(states) / 4)
    mix = ScalarMix(4, [0.3, -1.0, 2.0, 0.0], normalize=True)
    weights = torch.tensor([0.3, -1.0, 2.0, 0.0]).softmax(0)
    plain = [(s - s.mean(-1, keepdim=True)) / (s.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() for s in states]
    torch.testing.assert_close(mix(states), sum(w * s for w, s in zip(weights, plain)))
    mix(states).sum().backward()
    assert mix.scores.grad is not None and states[0].grad is None
    assert LayerChoice(["2", "embedding"], 4, (), False).columns == {"layer_2": [2], "embedding": [0]}


def test_a_stopped_run_goes_on(places, tmp_path, monkeypatch):
    """What was written stays as it is, what is missing is read, and the rest is as in one go."""
    assert features(places, tmp_path / "whole") == 0
    real, calls = module.write_file, []

    def stops(path, columns, first):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(path)
        real(path, columns, first)

    monkeypatch.setattr(module, "write_file", stops)
    assert features(places, tmp_path / "out") == 130
    monkeypatch.setattr(module, "write_file", real)
    stamps = {path: path.stat().st_mtime_ns for path in calls}
    assert features(places, tmp_path / "out") == 0
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    for split in ("train", "validation"):
        for one, other in zip(read_features(tmp_path / "whole", split), read_features(tmp_path / "out", split)):
            assert all(torch.equal(one[name], other[name]) for name in ("last", "mix", "last4"))


def test_the_probe_is_the_minimum_of_its_loss():
    """The gradient of the mean cross-entropy and the penalty, by hand, is zero; scikit-learn finds the same."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 5, generator=draw), torch.randint(0, 3, (60,), generator=draw)
    found = linear_probe(x, y, 3, 0.1)
    chances = (x.double() @ found.weight.T + found.bias).softmax(-1)
    error = chances - torch.nn.functional.one_hot(y, 3)
    assert (error.T @ x.double() / 60 + 0.1 * found.weight).abs().max() < 1e-5
    assert error.mean(0).abs().max() < 1e-5
    linear = pytest.importorskip("sklearn.linear_model")
    theirs = linear.LogisticRegression(C=1 / (60 * 0.1), tol=1e-8, max_iter=1000).fit(x.double().numpy(), y.numpy())
    torch.testing.assert_close(found.weight, torch.tensor(theirs.coef_), rtol=1e-3, atol=1e-4)


def test_the_probe_in_one_call(places, tmp_path, capsys):
    places = {**places, "data": classification(tmp_path, count=200)}
    hidden = write_lines(tmp_path / "test.jsonl", [{"text": "a day", "label": -1}])
    assert features(places, tmp_path / "out", probe="label", layers=["embedding", "last"], test_data=hidden) == 0
    figures = json.loads((tmp_path / "out" / "probe.json").read_text())
    labels = [label for _, label in sentences(24, 1)]
    assert "test" not in figures
    floor = figures["validation"]["baseline"]
    assert floor in (pytest.approx(sum(labels) / 24), pytest.approx(1 - sum(labels) / 24))
    # Good and bad words are words: their embeddings tell them apart.
    assert figures["train"]["accuracy"]["embedding"] > floor + 0.2
    assert figures["validation"]["accuracy"]["embedding"] > floor
    shown = capsys.readouterr().out
    assert "accuracy of embedding (validation)" in shown and "baseline" in shown


def test_a_learned_mix_finds_the_layer_that_knows():
    """Labels that one layer alone tells apart: its weight is the largest, the gradient by the scores is zero, and the
    loss is below those of the mean and of learning with the scores held."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (80,), generator=draw)
    states = torch.randn(80, 4, 6, generator=draw)
    states[:, 2, 0] += 3.0 * (2 * y - 1)
    scores, layer = learned_mix(states, y, 2, 0.01)

    def loss(scores, layer):
        mixed = sum(weight * states[:, place].double() for place, weight in enumerate(scores.softmax(0)))
        mixed = (mixed - mixed.mean(0)) / mixed.std(0)
        chances = (mixed @ layer.weight.T + layer.bias).log_softmax(-1)
        right = -chances[torch.arange(80), y].mean()
        return right + 0.005 * (layer.weight.square().sum() + scores.square().sum())

    assert scores.argmax() == 2 and scores.softmax(0)[2] > 0.5
    free = scores.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(free, layer), free)
    assert slope.abs().max() < 1e-4
    even = torch.zeros(4, dtype=torch.float64)
    mean = states.double().mean(1)
    held = linear_probe((mean - mean.mean(0)) / mean.std(0), y, 2, 0.01)
    assert loss(scores, layer) < loss(even, held) - 0.05
    only = torch.tensor([-1e4, -1e4, 0, -1e4], dtype=torch.float64)
    torch.testing.assert_close(mixed_states(states.double(), only), states[:, 2].double())


def test_scores_that_were_learned_make_the_mix(places, tmp_path, capsys):
    """Every layer is written; with the scores of probe.json the mix gives the accuracy that is told beside them."""
    places = {**places, "data": classification(tmp_path, count=120)}
    options = {"layers": ["mix"], "probe": "label", "normalize": True}
    assert features(places, tmp_path / "all", learn_mix=True, **options) == 0
    shown = capsys.readouterr().out
    figures = json.loads((tmp_path / "all" / "probe.json").read_text())
    assert sum(figures["mix"]["weights"]) == pytest.approx(1, abs=1e-5)
    assert set(next(iter(read_features(tmp_path / "all")))) == {"row", *(f"layer_{place}" for place in range(5))}
    scores = [f"{value:g}" for value in figures["mix"]["scores"]]
    assert f"--mix_scores {' '.join(scores)}" in " ".join(shown.split())
    assert features(places, tmp_path / "mix", "--mix_scores", *scores, **options) == 0
    again = json.loads((tmp_path / "mix" / "probe.json").read_text())
    for split in ("train", "validation"):
        assert again[split]["accuracy"]["mix"] == pytest.approx(figures[split]["accuracy"]["mix"], abs=0.05)


REFUSED = [
    ({"layers": ["first"]}, [], "--layers 'first' is unknown; take embedding, last"),
    ({"layers": ["5"]}, [], "--layers 5 is not there: the model has the layers 1 to 4"),
    ({"layers": ["last", "last"]}, [], "must name one layer or more, each once"),
    ({"pool": "max"}, [], "--pool 'max' is unknown; take one of first, mean"),
    ({"format": "csv"}, [], "--format 'csv' is unknown"),
    ({"batch_size": 0}, [], "--batch_size 0 must be at least 1"),
    ({"pool": "none", "probe": "label"}, [], "--probe classifies texts, which need one vector each"),
    ({"probe": "lable"}, [], "there is no column 'lable'"),
    ({}, ["--mix_scores", "1", "2"], "--mix_scores has 2 numbers, and the model has 5 states"),
    ({"layers": ["last"]}, ["--mix_scores", "1", "2"], "--mix_scores are of --layers mix"),
    ({"layers": ["last"], "normalize": True}, [], "--normalize True has no effect without --layers mix"),
    ({"probe_l2": 0.1}, [], "--probe_l2 0.1 has no effect without --probe"),
    ({"validation_fraction": 0.5}, [], "--validation_fraction 0.5 has no effect without --probe"),
    ({"layers": ["mix"], "learn_mix": True}, [], "--learn_mix learns the scores of --layers mix with the classifier"),
    ({"layers": ["mix", "last"], "learn_mix": True, "probe": "label"}, [], "give both, and no other layers"),
    ({"max_length": 100}, [], "--max_length 100 is more than the 32 tokens"),
    ({"model": "data"}, [], "is neither a folder nor a repository id"),
]


@pytest.mark.parametrize("options, extra, message", REFUSED)
def test_refusals(options, extra, message, places, tmp_path, capsys):
    options = dict(options)
    given = {**places, "data": places["data"]}
    if options.get("model") == "data":
        options.pop("model")
        given["bert"] = "./nowhere"
    assert features(given, tmp_path / "out", *extra, **options) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_other_features_are_not_replaced(places, tmp_path, capsys):
    assert features(places, tmp_path / "out", layers=["last"]) == 0
    assert features(places, tmp_path / "out", layers=["1"]) == 2
    assert "holds features of another request" in " ".join(capsys.readouterr().err.split())
    assert features(places, tmp_path / "out", "--overwrite", layers=["1"]) == 0
    assert set(next(iter(read_features(tmp_path / "out")))) == {"row", "layer_1"}
    for path in (tmp_path / "out").glob("*/features-*"):
        path.write_bytes(b"of another model in the same folder")
    own = [tmp_path / "out" / "docs" / "features-00000.parquet", tmp_path / "out" / "train" / "features-list.md"]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_text("a user's own")
    assert features(places, tmp_path / "out", "--overwrite", layers=["1"]) == 0
    assert len(list(read_features(tmp_path / "out"))) == 40
    assert all(path.read_text() == "a user's own" for path in own)


def test_features_of_other_weights_are_not_continued(places, tmp_path, capsys):
    model = Path(shutil.copytree(places["bert"], tmp_path / "model"))
    assert features({**places, "bert": str(model)}, tmp_path / "out", layers=["last"]) == 0
    about = tmp_path / "out" / ABOUT_FILE
    early = json.loads(about.read_text())
    early["request"].pop("weights")
    about.write_text(json.dumps(early))
    assert features({**places, "bert": str(model)}, tmp_path / "out", layers=["last"]) == 0
    tensors = load_file(model / "model.safetensors")
    next(iter(tensors.values())).add_(1)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert features({**places, "bert": str(model)}, tmp_path / "out", layers=["last"]) == 2
    assert "holds features of another request" in " ".join(capsys.readouterr().err.split())
