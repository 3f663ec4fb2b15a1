"""Classification of images from raw files: folders, tables of paths, Parquet; and what is refused."""

import io
import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

from hf_xformers.cli import main
from hf_xformers.finetuning import TaskData
from hf_xformers.finetuning.image_rows import check_image, hold_out, load_images
from hf_xformers.finetuning.tasks.images import ImageCollator

from .task_data import picture_folder

Image = pytest.importorskip("PIL.Image")

SIDE = 8
OPTIONS = (
    "--task image-classification --variant vision_transformer --image_size 8 --patch_size 2 --hidden_size 32"
    " --num_hidden_layers 1 --num_attention_heads 2 --intermediate_size 64 --learning_rate 5e-3 --use_cpu true"
    " --report_to none --warmup_steps 0 --hidden_dropout_prob 0 --attention_probs_dropout_prob 0"
).split()


def picture(kind, seed):
    """A bright bar, lying or standing, somewhere in noise."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 60, (SIDE + 2, SIDE + 2), dtype=np.uint8)
    at = generator.integers(2, SIDE)
    pixels[(at, slice(None)) if kind == "lying" else (slice(None), at)] = 250
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return picture_folder(tmp_path_factory.mktemp("pictures"), picture, ("lying", "standing"))


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A model that was trained by the command."""
    target = tmp_path_factory.mktemp("run") / "model"
    command = ["finetune", *OPTIONS, "--data", str(folder), "--output_dir", str(target), "--num_train_epochs", "20"]
    command += ["--per_device_train_batch_size", "8", "--augment", "flip", "--metric_for_best_model", "loss"]
    assert main(command) == 0
    return target


def test_a_folder_of_classes_is_learnt_and_stands_beside_its_floor(run):
    summary = json.loads((run / "training_summary.json").read_text())
    assert (summary["train_rows"] + summary["validation_rows"], summary["test_rows"]) == (60, 12)
    assert summary["labels"] == ["lying", "standing"]
    assert summary["test_accuracy"] >= 0.9 and summary["baseline_test"]["accuracy"] == 0.5
    rows = [json.loads(line) for line in (run / "predictions_test.jsonl").read_text().splitlines()]
    assert len(rows) == 12 and all(row["image"].endswith(".png") and row["reference"] in row["image"] for row in rows)


def test_the_saved_processor_gives_what_training_gave(run, folder):
    """Of the model's own size, scaled to [-1, 1]: by hand."""
    processor = AutoImageProcessor.from_pretrained(run)
    image = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).convert("RGB")
    made = processor(images=image, return_tensors="pt")["pixel_values"]
    by_hand = torch.from_numpy(np.asarray(image).astype(np.float32) / 255 * 2 - 1).permute(2, 0, 1)
    torch.testing.assert_close(made[0], by_hand, rtol=0, atol=1e-6)
    model = AutoModelForImageClassification.from_pretrained(run)
    guess = pipeline("image-classification", model=model, image_processor=processor)
    found = guess(str(folder / "test" / "lying" / "0.png"))
    said = json.loads((run / "predictions_test.jsonl").read_text().splitlines()[0])
    assert said["image"].endswith("lying/0.png")
    assert found[0]["label"] == said["prediction"]
    assert found[0]["score"] == pytest.approx(said["probability"], abs=1e-4)


def test_pipelines_read_color_for_a_model_of_one_channel(folder, tmp_path):
    """They give every picture in three colors, which its processor makes grey."""
    target = tmp_path / "model"
    command = ["finetune", *OPTIONS, "--data", str(folder), "--num_channels", "1", "--output_dir", str(target)]
    assert main([*command, "--max_steps", "1", "--save_strategy", "no", "--eval_strategy", "no"]) == 0
    said = [json.loads(line) for line in (target / "predictions_test.jsonl").read_text().splitlines()]
    guess = pipeline("image-classification", model=str(target))
    for row in said:
        found = guess(Image.open(row["image"]).convert("RGB"))[0]
        assert found["label"] == row["prediction"]
        assert found["score"] == pytest.approx(row["probability"], abs=1e-4)
    states = pipeline("image-feature-extraction", model=str(target))(said[0]["image"])
    assert np.shape(states) == (1, 17, 32)


def test_predict_and_evaluate_read_other_files(run, folder, tmp_path, capsys):
    table = tmp_path / "new.jsonl"
    paths = sorted((folder / "test").rglob("*.png"))
    table.write_text("".join(json.dumps({"image": str(path), "label": path.parent.name}) + "\n" for path in paths))
    assert main(["evaluate", "--model", str(run), "--data", str(table), "--json", "--use_cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    before = json.loads((run / "training_summary.json").read_text())
    assert found["accuracy"] == pytest.approx(before["test_accuracy"])
    capsys.readouterr()
    assert main(["predict", "--model", str(run), "--data", str(folder / "test"), "--use_cpu", "--no_progress"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(rows) == 12 and {row["prediction"] for row in rows} <= {"lying", "standing"}
    # one image by itself, or several
    few = [str(folder / "test" / "lying" / "0.png"), str(folder / "test" / "standing" / "1.png")]
    assert main(["predict", "--model", str(run), "--data", *few, "--use_cpu", "--no_progress"]) == 0
    alone = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["image"] for row in alone] == few
    whole = {str(row["image"]): row["prediction"] for row in rows}
    assert [row["prediction"] for row in alone] == [whole[name] for name in few]
    for wrong, said in (
        ([few[0], str(table)], "is a row by itself and"),
        ([str(tmp_path / "none.png")], "there is no file"),
    ):
        assert main(["predict", "--model", str(run), "--data", *wrong, "--use_cpu"]) == 2
        assert said in capsys.readouterr().err


def test_folders_with_different_classes(tmp_path):
    for place in ("a/cat", "a/dog", "b/dog", "b/frog"):
        (tmp_path / place).mkdir(parents=True)
        picture("lying", 0).save(tmp_path / place / "0.png")
    names = [str(tmp_path / name) for name in "ab"]
    rows = load_images(TaskData(data=names, validation_fraction=0))["train"]
    assert rows.features["label"].names == ["cat", "dog", "frog"] and rows["label"][:] == [0, 1, 1, 2]


def test_bytes_in_parquet(tmp_path):
    def stored(kind, seed):
        buffer = io.BytesIO()
        picture(kind, seed).save(buffer, "png")
        return {"bytes": buffer.getvalue(), "path": None}

    rows = [{"img": stored(("lying", "standing")[n % 2], n), "class": n % 2} for n in range(10)]
    Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    command = ["finetune", *OPTIONS, "--data", str(tmp_path / "train.parquet"), "--max_steps", "1", "--num_channels"]
    assert main([*command, "1", "--output_dir", str(tmp_path / "run")]) == 0
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "run")
    assert model.config.num_channels == 1 and model.config.id2label == {0: "0", 1: "1"}


def test_equal_images_are_held_out_together(tmp_path):
    for number in range(24):
        place = tmp_path / "pictures" / ("lying", "standing")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        picture("lying", number // 4).save(place / f"{number}.png")  # four copies of each
    source = TaskData(data=[str(tmp_path / "pictures")], validation_fraction=0.4)
    splits = hold_out(load_images(source), "image", source)
    sides = {split: {picture.tobytes() for picture in rows["image"]} for split, rows in splits.items()}
    assert sides["train"] and sides["validation"] and not sides["train"] & sides["validation"]
    assert sum(map(len, splits.values())) == 24


class Bare:
    """A processor that scales nothing."""

    def __call__(self, images, **options):
        return {"pixel_values": torch.stack([image.float() for image in images])}


def test_what_happens_to_an_image_depends_on_seed_epoch_and_image():
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8, generator=generator)
    rows = [{"pixel_values": image, "labels": n} for n, image in enumerate(images)]
    collator = ImageCollator(Bare(), ("flip", "crop"), seed=3)
    first = collator(rows)["pixel_values"]
    torch.testing.assert_close(collator(rows[::-1])["pixel_values"].flip(0), first, rtol=0, atol=0)
    torch.testing.assert_close(ImageCollator(Bare(), ("flip", "crop"), seed=3)(rows)["pixel_values"], first)
    seen = []
    for epoch in range(24):
        collator.set_epoch(epoch)
        seen.append(collator(rows)["pixel_values"][0])
    assert len({tuple(image.flatten().tolist()) for image in seen}) > 10
    original = images[0].float()
    moved = [(top, left, flip) for top in range(-2, 3) for left in range(-2, 3) for flip in (False, True)]

    def by_hand(top, left, flip):
        made = torch.zeros_like(original)
        for y in range(16):
            for x in range(16):
                if 0 <= y + top < 16 and 0 <= x + left < 16:
                    made[:, y, x] = original[:, y + top, x + left]
        return made.flip(-1) if flip else made

    possible = [by_hand(*how) for how in moved]
    assert all(any(torch.equal(image, other) for other in possible) for image in seen)
    torch.testing.assert_close(collator.as_static()(rows)["pixel_values"][0], original)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_file_that_ends_too_early_is_named(suffix, tmp_path):
    """Its head is whole; training would have come to the rest of it later."""
    path = tmp_path / f"cut.{suffix}"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    check_image({"bytes": None, "path": str(path)}, [repr(str(path))], 0)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"cut.{suffix}' is no image that can be read .*; replace it or remove it$"):
        check_image({"bytes": None, "path": str(path)}, [repr(str(path))], 0)


@pytest.mark.parametrize(
    "change, message",
    [
        ("augment", "--augment 'turn' is unknown; take some of flip, crop"),
        ("flat", "put those of each class in a folder that is called as the class"),
        ("broken", "is no image that can be read"),
        ("empty", "holds no file that ends in"),
        ("channels", "set --num_channels to 1 or 3"),
        ("text", "variant 'xf_bert' has no ForImageClassification class"),
    ],
)
def test_what_is_refused(change, message, tmp_path, capsys):
    root = tmp_path / "pictures"
    root.mkdir()
    more = []
    for number in range(4):
        kind = ("lying", "standing")[number % 2]
        place = root if change == "flat" else root / kind
        place.mkdir(exist_ok=True)
        if change != "empty":
            picture("lying", number).save(place / f"{number}.png")
    if change == "broken":
        (root / "lying" / "0.png").write_bytes(b"no picture")
    if change == "augment":
        more = ["--augment", "turn"]
    if change == "channels":
        more = ["--num_channels", "2"]
    if change == "text":
        more = ["--variant", "bert"]
    options = OPTIONS if change != "text" else ["--task", "image-classification", "--use_cpu", "true"]
    assert main(["finetune", *options, "--data", str(root), "--output_dir", str(tmp_path / "run"), *more]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run" / "config.json").exists()
