"""What all tests share."""

import os
from pathlib import Path

import pytest

# Test processes run side by side, one per core: threads of torch on top of that only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Makes the golden values anew; needs optax, which nothing else here does.
collect_ignore = ["golden/make_optimisers.py"]


@pytest.fixture(scope="session")
def real_speech() -> Path:
    """The folder of real recordings named by SOTTOVOCE_DATA; tests that ask for it skip where there is none."""
    folder = os.environ.get("SOTTOVOCE_DATA")
    if not folder:
        pytest.skip("SOTTOVOCE_DATA is not set: no real speech to test on")
    return Path(folder)
