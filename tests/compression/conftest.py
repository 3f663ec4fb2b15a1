import pytest
from transformers.utils import logging

logging.get_logger("transformers")  # now, so that its handler does not keep the captured stream of the first test


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """`datasets` caches what it reads; not in the user's folder."""
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    yield
    datasets.config.HF_DATASETS_CACHE = before
