"""The store that all tests of federated training share."""

from pathlib import Path

import pytest
from tests.tones import pack_tones


@pytest.fixture(scope="session")
def tones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stores") / "tones"
    pack_tones(store)
    return store
