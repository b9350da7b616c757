"""Tiny models of every class, written once for all tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.models.huggingface.tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a kind's model, which no test changes."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = write_tiny_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder
