"""lm-eval: scores and continuations of causal models, each request against the model's own output."""

import os

import pytest
import torch

from tests.clients.checkpoints import CAUSAL, build, met, save, tokenizer

pytest.importorskip("lm_eval")

PAIRS = [("the small cat", " sat on the mat"), ("a dog", " ran"), ("rain fell", " and then slept in the green field")]


@pytest.mark.parametrize("name", met(CAUSAL))
def test_requests(name):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, words = build(name, "ForCausalLM"), tokenizer("bos")
    client = HFLM(pretrained=model, tokenizer=words, batch_size=2, max_length=24)
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
    for (context, continuation), (total, greedy) in zip(PAIRS, client.loglikelihood(asked, disable_tqdm=True)):
        whole = words(context + continuation, return_tensors="pt").input_ids
        start = len(words(context).input_ids)
        with torch.no_grad():
            scores = model(whole).logits[0, start - 1 : -1].log_softmax(-1)
        target = whole[0, start:]
        assert total == pytest.approx(scores.gather(1, target[:, None]).sum().item(), abs=1e-3)
        assert greedy == bool((scores.argmax(-1) == target).all())

    settings = {"until": ["\n"], "max_gen_toks": 4, "do_sample": False}
    asked = [Instance("generate_until", {}, (context, settings), i) for i, (context, _) in enumerate(PAIRS)]
    for (context, _), found in zip(PAIRS, client.generate_until(asked, disable_tqdm=True)):
        ids = words(context, return_tensors="pt").input_ids
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        assert found == words.decode(expected, skip_special_tokens=True)

    rolling = client.loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, ("the cat sat",), 0)], disable_tqdm=True
    )
    assert torch.isfinite(torch.tensor(rolling)).all()


@pytest.mark.parametrize("name", ["xf_t5", "xf_bart"])
def test_encoder_decoders(name, tmp_path):
    """lm-eval goes by the model type, and takes what it does not know for a decoder: that would have the encoder's
    weights. A type of encoder-decoders alone is known."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    folder, settings = save(build(name, "ForSeq2SeqLM"), "ForSeq2SeqLM", tmp_path), {}
    if name == "xf_bart":
        with pytest.raises(ValueError, match="is an encoder-decoder, .* `AutoModelForSeq2SeqLM`"):
            HFLM(pretrained=folder, device="cpu")
        settings = {"backend": "seq2seq"}
    client = HFLM(pretrained=folder, device="cpu", batch_size=3, **settings)
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
    for pair, (total, _) in zip(PAIRS, client.loglikelihood(asked, disable_tqdm=True)):
        context, continuation = map(torch.tensor, client._encode_pair(*pair))
        with torch.no_grad():
            scores = client.model(context[None], labels=continuation[None]).logits[0].log_softmax(-1)
        assert total == pytest.approx(scores.gather(1, continuation[:, None]).sum().item(), abs=1e-3)
