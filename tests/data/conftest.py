"""Every test here runs offline, with a cache of its own, and with the same small corpus."""

import datasets
import huggingface_hub
import pytest

from hf_xformers.data import stdlib_documents, train_tokenizer

datasets.disable_progress_bars()


@pytest.fixture(autouse=True)
def offline_and_private_cache(tmp_path_factory, monkeypatch):
    """The variables serve child processes; the attributes, libraries that have read the variables already."""
    home = tmp_path_factory.mktemp("hf_home")
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(home / "datasets"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(home / "datasets"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return home


@pytest.fixture(scope="session")
def corpus():
    """About 100,000 characters of the embedded corpus."""
    return [document.text for document in stdlib_documents() if 1000 < len(document.text) < 4000][:50]


@pytest.fixture(scope="session")
def tokenizer(corpus):
    """Byte-level BPE with 600 ids; pad 0, unk 1, cls 2, sep 3, mask 4, no sentinels."""
    return train_tokenizer(corpus, "bpe", 600, num_sentinels=0)
