"""What all tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Test processes run side by side, one per core: threads of torch on top of that only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Whole runs are compared to the bit, which a GPU does not promise; what is meant for a GPU says so itself.
os.environ.setdefault("SOTTOVOCE_DEVICE", "cpu")

# How long an example takes, or making one up, says nothing about the code on a machine that is busy.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Make golden values anew; need optax and jax_privacy, which nothing else here does.
collect_ignore = ["golden/make_optimisers.py", "golden/make_strategies.py"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For whoever compares bits with those of a process that has one thread: products of two add up otherwise."""
    import torch  # not before OMP_NUM_THREADS is set

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have empty figures: drawing takes longer than a short run, and tests/report looks at what is drawn."""
    monkeypatch.setattr("sottovoce.report.page.inline_svg", lambda _: "<svg />")


@pytest.fixture(scope="session")
def real_speech() -> Path:
    """The folder of real recordings named by SOTTOVOCE_DATA; tests that ask for it skip where there is none."""
    folder = os.environ.get("SOTTOVOCE_DATA")
    if not folder:
        pytest.skip("SOTTOVOCE_DATA is not set: no real speech to test on")
    return Path(folder)
