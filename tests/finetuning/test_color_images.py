"""Classification of images by models whose tokens are colors: saved clusters, what is pooled, what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

from hf_xformers.cli import main
from hf_xformers.data.colors import color_processor
from hf_xformers.finetuning.tasks.color_images import ColorCollator

from .task_data import picture_folder

Image = pytest.importorskip("PIL.Image")

SIDE = 8
SHAPE = (
    "--hidden_size 32 --num_hidden_layers 1 --num_attention_heads 2 --intermediate_size 64 --use_cpu true"
    " --report_to none --hidden_dropout_prob 0 --attention_probs_dropout_prob 0 --disable_tqdm true"
).split()
TASK = "finetune --task image-classification --learning_rate 1e-2 --warmup_steps 0".split()


def picture(kind, seed):
    """Noise with a bright stain, large or small."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 60, (SIDE, SIDE), dtype=np.uint8)
    side = {"large": 4, "small": 2}[kind]
    top, left = generator.integers(0, SIDE - side, 2)
    pixels[top : top + side, left : left + side] = 250
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return picture_folder(tmp_path_factory.mktemp("pictures"), picture, ("large", "small"))


@pytest.fixture(scope="module")
def pretrained(folder, tmp_path_factory):
    """Image GPT with four colors, after a step."""
    target = tmp_path_factory.mktemp("pretrained") / "model"
    command = ["pretrain", "--variant", "image_gpt", *SHAPE, "--data", str(folder / "train"), "--colors", "4"]
    assert main([*command, "--max_steps", "1", "--output_dir", str(target), "--save_strategy", "no"]) == 0
    return target


@pytest.fixture(scope="module")
def run(folder, pretrained, tmp_path_factory):
    target = tmp_path_factory.mktemp("run") / "model"
    command = [*TASK, "--model", str(pretrained), "--data", str(folder), "--output_dir", str(target)]
    command += ["--num_train_epochs", "6", "--per_device_train_batch_size", "8", "--disable_tqdm", "true"]
    assert main([*command, "--use_cpu", "true", "--report_to", "none", "--metric_for_best_model", "loss"]) == 0
    return target


def test_it_learns_and_stands_beside_its_floor(run):
    summary = json.loads((run / "training_summary.json").read_text())
    assert summary["variant"] == "xf_image_gpt" and summary["labels"] == ["large", "small"]
    assert summary["test_accuracy"] >= 0.9 and summary["baseline_test"]["accuracy"] == 0.5


def ids_by_hand(image, clusters):
    """Of every pixel, row by row, the number of the nearest cluster."""
    pixels = np.asarray(image.convert("RGB")).astype(np.float64) / 127.5 - 1.0
    distance = ((pixels.reshape(-1, 1, 3) - clusters[None].astype(np.float64)) ** 2).sum(-1)
    return torch.from_numpy(distance.argmin(-1))


def test_it_reads_the_clusters_of_pretraining_and_pools_the_mean(run, pretrained, folder):
    """Every probability that the run wrote, from the last layer's states by hand."""
    processor = AutoImageProcessor.from_pretrained(run)
    clusters = np.asarray(AutoImageProcessor.from_pretrained(pretrained).clusters)
    np.testing.assert_array_equal(np.asarray(processor.clusters), clusters)
    assert dict(processor.size) == {"height": SIDE, "width": SIDE}
    model = AutoModelForImageClassification.from_pretrained(run).eval()
    said = [json.loads(line) for line in (run / "predictions_test.jsonl").read_text().splitlines()]
    assert len(said) == 12
    for row in said:
        ids = ids_by_hand(Image.open(row["image"]), clusters)[None]
        with torch.no_grad():
            states = model.model(ids).last_hidden_state[0]
            shares = (model.classifier.weight @ states.mean(0) + model.classifier.bias).softmax(-1)
        for number, name in model.config.id2label.items():
            assert row["probabilities"][name] == pytest.approx(float(shares[number]), abs=1e-5)


def test_pipelines_and_commands_say_what_the_run_said(run, folder, capsys):
    guess = pipeline("image-classification", model=str(run))
    for line in (run / "predictions_test.jsonl").read_text().splitlines()[::4]:
        row = json.loads(line)
        found = guess(row["image"])
        assert found[0]["label"] == row["prediction"]
        assert found[0]["score"] == pytest.approx(row["probability"], abs=1e-4)
    before = json.loads((run / "training_summary.json").read_text())
    assert main(["evaluate", "--model", str(run), "--data", str(folder / "test"), "--json", "--use_cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(before["test_accuracy"])


def test_a_variant_without_weights_gets_clusters_of_the_training_images(folder, tmp_path):
    """Of local attention, which reads a plane: the ids that it was given, and those of the pipeline."""
    command = [*TASK, "--variant", "image_transformer", *SHAPE, "--data", str(folder / "train"), "--colors", "3"]
    assert main([*command, "--max_steps", "1", "--output_dir", str(tmp_path / "run"), "--save_strategy", "no",
                 "--eval_strategy", "no", "--load_best_model_at_end", "false"]) == 0  # fmt: skip
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "run")
    config = model.config
    assert (config.vocab_size, config.max_position_embeddings) == (4, SIDE * SIDE)
    assert tuple(config.attention.image_size) == (SIDE, SIDE) and config.classifier_pooling == "mean"
    row = json.loads((tmp_path / "run" / "predictions_validation.jsonl").read_text().splitlines()[0])
    found = pipeline("image-classification", model=str(tmp_path / "run"))(row["image"])
    assert found[0]["score"] == pytest.approx(row["probability"], abs=1e-4)


def test_ids_are_augmented_as_pixels_are():
    """What stands at an edge that an image was moved from is the cluster nearest to black."""
    clusters = torch.tensor([[1.0, 1.0, 1.0], [-0.9, -1.0, -1.0], [0.0, 0.0, 0.0]])
    ids = torch.tensor([0, 2] * 128).view(16, 16)
    collator = ColorCollator(color_processor(clusters, (16, 16)), ("flip", "crop"), seed=1)
    row, seen = {"input_ids": ids.flatten().tolist(), "labels": 1}, set()
    for epoch in range(20):
        collator.set_epoch(epoch)
        made = collator([row])["input_ids"].view(16, 16)
        possible = []
        for top in range(-2, 3):
            for left in range(-2, 3):
                for flip in (False, True):
                    moved = torch.ones(20, 20, dtype=torch.long)
                    moved[2:18, 2:18] = ids
                    moved = moved[2 + top : 18 + top, 2 + left : 18 + left]
                    possible.append(moved.flip(1) if flip else moved)
        assert any(torch.equal(made, other) for other in possible)
        seen.add(tuple(made.flatten().tolist()))
    assert len(seen) > 5
    batch = collator.as_static()([row, row])
    assert torch.equal(batch["input_ids"], ids.flatten().expand(2, -1)) and batch["labels"].tolist() == [1, 1]


REFUSED = {
    "another size": "has 9 x 8 pixels, and the model reads images of 8 x 8; resize it",
    "colors of a saved model": "has those that it has learnt; leave it out",
    "no processor": "has no image processor (preprocessor_config.json) with the clusters that its tokens are",
    "sizes that differ": "have 2 sizes (8 x 8, 9 x 8 pixels); resize them to one",
    "a vocabulary": "--vocab_size follows from the colors of the images; give --colors in its place",
    "blocks": "goes through an image block by block, and image processors write it row by row",
    "too few colors": "--colors 1 must be at least 2",
    "patches": "--colors 4 is for models whose tokens are colors, such as image_gpt",
    "few positions": "are 64 tokens, and the model has positions for 63",
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused(name, folder, pretrained, tmp_path, capsys):
    data, start = folder / "train", ["--variant", "image_gpt", *SHAPE]
    if name in ("another size", "sizes that differ"):
        data = shutil.copytree(data, tmp_path / "data")
        Image.new("RGB", (8, 9)).save(data / "large" / "0.png")
    if name in ("another size", "colors of a saved model", "no processor"):
        start = ["--model", str(pretrained)]
    if name == "no processor":
        start[1] = str(shutil.copytree(pretrained, tmp_path / "bare"))
        (tmp_path / "bare" / "preprocessor_config.json").unlink()
    more = {
        "colors of a saved model": ["--colors", "8"],
        "a vocabulary": ["--vocab_size", "9"],
        "blocks": ["--variant", "image_transformer", "--attention.local", "2d", "--attention.block_length", "4"],
        "too few colors": ["--colors", "1"],
        "patches": ["--variant", "vision_transformer", "--image_size", "8", "--patch_size", "2", "--colors", "4"],
        "few positions": ["--max_position_embeddings", "63"],
    }.get(name, [])
    command = [*TASK, *start, "--data", str(data), "--max_steps", "1", "--use_cpu", "true", *more]
    assert main([*command, "--output_dir", str(tmp_path / "run")]) == 2
    assert REFUSED[name] in capsys.readouterr().err
