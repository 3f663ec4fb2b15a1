"""transformers' pipelines, for every head that one serves, and families with all that a pipeline can see of any.

Each test gives two texts of different lengths as one batch and compares with the model's own output on each text
alone.
"""

import logging

import pytest
import torch
from transformers import pipeline
from transformers.pipelines import SUPPORTED_TASKS

from hf_xformers.variants import family
from tests.clients.checkpoints import TEXT_TYPES, TEXTS, build, excused, met, save, template, tokenizer

TASKS = {
    "fill-mask": "ForMaskedLM",
    "text-generation": "ForCausalLM",
    "text-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "feature-extraction": "Model",
}
PAIRS = [(name, task) for task, head in TASKS.items() for name in met([n for n in TEXT_TYPES if head in family(n)])]
BATCH = [TEXTS[0], TEXTS[2]]


def alone(model, words, text):
    """The model's output on one text without padding."""
    with torch.no_grad():
        return model(**words(text, return_tensors="pt", return_token_type_ids=False))


def check_fill_mask(model, words, pipe):
    texts = ["the small [MASK] sat on the warm mat", "rain [MASK]"]
    for text, found in zip(texts, pipe(texts, batch_size=2, top_k=3)):
        place = words(text).input_ids.index(words.mask_token_id)
        expected = alone(model, words, text).logits[0, place].softmax(-1).topk(3)
        assert [entry["token"] for entry in found] == expected.indices.tolist()
        assert [entry["score"] for entry in found] == pytest.approx(expected.values.tolist(), abs=1e-5)


def check_text_generation(model, words, pipe):
    settings = {"max_new_tokens": 3, "do_sample": False}
    for text, found in zip(BATCH, pipe(BATCH, batch_size=2, return_full_text=False, **settings)):
        ids = words(text, return_tensors="pt").input_ids
        expected = model.generate(ids, **settings)[0, ids.shape[1] :]
        assert found[0]["generated_text"] == words.decode(expected, skip_special_tokens=True)


def check_text_classification(model, words, pipe):
    for text, found in zip(BATCH, pipe(BATCH, batch_size=2, top_k=None)):
        expected = alone(model, words, text).logits[0].softmax(-1)
        assert len(found) == 3
        for entry in found:
            assert entry["score"] == pytest.approx(expected[model.config.label2id[entry["label"]]].item(), abs=1e-5)


def check_token_classification(model, words, pipe):
    for text, found in zip(BATCH, pipe(BATCH, batch_size=2, ignore_labels=[])):
        expected = alone(model, words, text).logits[0].softmax(-1)
        ids = words(text).input_ids
        assert [entry["index"] for entry in found] == list(range(1, len(ids) - 1))  # without [CLS] and [SEP]
        for entry in found:
            best = expected[entry["index"]].max(-1)
            assert model.config.label2id[entry["entity"]] == best.indices
            assert entry["score"] == pytest.approx(best.values.item(), abs=1e-5)


def check_feature_extraction(model, words, pipe):
    for text, found in zip(BATCH, pipe(BATCH, batch_size=2, return_tensors=True)):
        expected = alone(model, words, text).last_hidden_state
        torch.testing.assert_close(found[:, : expected.shape[1]], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "task"), PAIRS)
def test_pipeline(name, task, tmp_path, caplog, monkeypatch):
    head = TASKS[task]
    reason = excused(task, name, head)
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    words, model = tokenizer(template(head)), build(name, head)
    # One head of each family goes through files: how the others are saved and loaded is tests/common's matter.
    first = next(entry for entry in TASKS.values() if entry in family(name))
    given = {"model": save(model, head, tmp_path)} if head == first else {"model": model, "tokenizer": words}
    pipe = pipeline(task, **given, device="cpu")
    globals()[f"check_{task.replace('-', '_')}"](model, words, pipe)
    complaints = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not complaints, complaints


def test_zero_shot_classification():
    """An entailment classifier names the labels of the caller."""
    model = build("xf_bert", "ForSequenceClassification")
    model.config.label2id = {"contradiction": 0, "neutral": 1, "entailment": 2}
    model.config.id2label = {index: name for name, index in model.config.label2id.items()}
    words = tokenizer()
    found = pipeline("zero-shot-classification", model=model, tokenizer=words, device="cpu")(
        TEXTS[0], ["cat", "dog"], hypothesis_template="the {}"
    )
    with torch.no_grad():
        rows = words([TEXTS[0]] * 2, ["the cat", "the dog"], return_tensors="pt", padding=True)
        expected = model(**rows).logits[:, 2].softmax(0)
    assert dict(zip(found["labels"], found["scores"])) == pytest.approx(
        {"cat": expected[0].item(), "dog": expected[1].item()}, abs=1e-5
    )


def test_tasks_that_transformers_has():
    """Question answering, summarisation and translation have no pipeline in transformers 5; if one comes back, it
    belongs into the table above."""
    assert set(TASKS) <= set(SUPPORTED_TASKS)
    assert not {"question-answering", "summarization", "translation", "text2text-generation"} & set(SUPPORTED_TASKS)
