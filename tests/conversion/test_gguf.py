"""GGUF files: what to do is said, and transformers reads them where it is asked to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from hf_xformers.cli import main
from hf_xformers.conversion import convert_checkpoint, gguf, swap_checkpoint

NAME = "tiny.gguf"
WIDTH, HEADS, LAYERS, INNER, VOCAB = 32, 4, 2, 64, 40


@pytest.fixture
def folder(tmp_path):
    """A Llama in a GGUF file alone, and the tensors in it under transformers' names."""
    writers = pytest.importorskip("gguf")
    place = tmp_path / "model"
    place.mkdir()
    writer = writers.GGUFWriter(str(place / NAME), "llama")
    for name, value in (
        *(("context_length", 48), ("embedding_length", WIDTH), ("block_count", LAYERS), ("head_count", HEADS)),
        *(("feed_forward_length", INNER), ("head_count_kv", HEADS), ("layer_norm_rms_eps", 1e-5)),
        *(("rope_dimension_count", WIDTH // HEADS), ("vocab_size", VOCAB)),
    ):
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"w{index}" for index in range(VOCAB)])
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges([])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    generator = torch.Generator().manual_seed(0)
    shapes = {"token_embd": (VOCAB, WIDTH), "output_norm": (WIDTH,), "output": (VOCAB, WIDTH)}
    for index in range(LAYERS):
        shapes |= {f"blk.{index}.{name}": (WIDTH, WIDTH) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        shapes |= {f"blk.{index}.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{index}.{name}": (INNER, WIDTH) for name in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{index}.ffn_down"] = (WIDTH, INNER)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return place


def test_converts_and_swaps(folder, tmp_path):
    """The numbers are those that transformers reads; the account names the folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=NAME).eval()
    report = convert_checkpoint(folder, tmp_path / "ours", gguf_file=NAME)
    assert report.complete and report.source == "LlamaForCausalLM"
    swap_checkpoint(
        folder,
        tmp_path / "new",
        gguf_file=NAME,
        attention={"type": "sliding_window", "window_size": 48},
        measure=False,
    )
    ids = torch.arange(2, 20)[None]
    for place in ("ours", "new"):
        ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / place).eval()
        with torch.no_grad():
            torch.testing.assert_close(ours(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
        said = json.loads((tmp_path / place / "conversion.json").read_text())
        assert said["source"] == str(folder)
    assert main(["convert", "--from", str(folder), "--to", str(tmp_path / "cli"), "--gguf-file", NAME]) == 0
    swap = ["--from", str(folder), "--to", str(tmp_path / "cli2"), "--gguf_file", NAME, "--residual", "post_ln"]
    assert main(["convert", *swap]) == 0


def test_a_file_that_is_none(folder, tmp_path, capfd):
    (folder / "broken.gguf").write_bytes(b"GGUF and nothing else")
    for name, message in (("no.gguf", "There is no file 'no.gguf'"), ("broken.gguf", "cannot read the GGUF file")):
        assert main(["convert", "--from", str(folder), "--to", str(tmp_path / "no"), "--gguf-file", name]) == 2
        assert message in capfd.readouterr().err
    assert not (tmp_path / "no").exists()


def test_what_to_do_is_said(tmp_path, capfd, monkeypatch):
    (tmp_path / "some.Q4_0.gguf").write_bytes(b"GGUF")
    for source in (tmp_path, tmp_path / "some.Q4_0.gguf"):
        assert main(["convert", "--from", str(source), "--to", str(Path(tmp_path, "..", "no"))]) == 2
        said = " ".join(capfd.readouterr().err.split())
        assert f"give the folder '{tmp_path}' and --gguf-file 'some.Q4_0.gguf'" in said
    monkeypatch.setattr(gguf, "is_gguf_available", lambda: False)
    with pytest.raises(ValueError, match="pip install gguf"):
        convert_checkpoint(tmp_path, tmp_path / "no", gguf_file="some.Q4_0.gguf")
