"""Few parameters of a model that reads images: trained, saved and read again by the commands."""

import json

import numpy as np
import pytest

from hf_xformers.cli import main

Image = pytest.importorskip("PIL.Image")

TASK = "--task image-classification --validation_fraction 0 --eval_strategy no --save_strategy no".split()
STEP = "--max_steps 1 --use_cpu true --report_to none --warmup_steps 0 --load_best_model_at_end false".split()
SHAPE = (
    "--variant vision_transformer --image_size 8 --patch_size 4 --hidden_size 16 --num_hidden_layers 1"
    " --num_attention_heads 2 --intermediate_size 16"
).split()


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A folder of images and a model after one step."""
    root = tmp_path_factory.mktemp("images")
    for number in range(8):
        place = root / "data" / ("dark", "light")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 100, (8, 8)) + 150 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    target = root / "model"
    assert main(["finetune", *TASK, *SHAPE, *STEP, "--data", str(root / "data"), "--output_dir", str(target)]) == 0
    return root


def loss_of(model, places, capsys):
    capsys.readouterr()
    command = ["evaluate", "--model", str(model), "--data", str(places / "data"), "--use_cpu", "--no_progress"]
    assert main([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["loss"]


@pytest.mark.parametrize("method", ["lora", "pfeiffer"])
def test_methods_with_images(method, places, tmp_path, capsys):
    target = tmp_path / "adapter"
    command = ["finetune", *TASK, *STEP, "--data", str(places / "data"), "--model", str(places / "model")]
    command += ["--test_data", str(places / "data")]
    assert main([*command, "--learning_rate", "0.1", "--peft", method, "--output_dir", str(target)]) == 0
    assert not (target / "model.safetensors").exists()
    summary = json.loads((target / "training_summary.json").read_text())
    assert 0 < summary["trained_parameters"] < summary["parameters"]
    found = loss_of(target, places, capsys)
    assert found == pytest.approx(summary["test_loss"], abs=1e-5)
    assert found != loss_of(places / "model", places, capsys)
