from tests.training.conftest import own_cache  # noqa: F401  `datasets` caches what it reads
