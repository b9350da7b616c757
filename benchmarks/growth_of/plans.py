"""What a client of a cohort takes before it is read: its plan, with texts, and what is held in its place; counted.

An engine that forms groups of clients (stacks) plans all of a cohort first. Plans are counted by `tracemalloc`, not by
resident pages: the same on every machine with the same Python.
"""

import gc
import platform
import tempfile
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from growth_of.setting import Speech, make_context
from sottovoce.federated.client import ClientContext, plan_client
from sottovoce.federated.engines.engine import PLANS_BYTES, Member
from sottovoce.federated.feature_cache import SizedCache
from sottovoce.models.transformer.settings import Settings

# Speech of each client, seconds of a batch, local steps; the second as the flagship's clients in `benchmarks/round.py`.
CLIENTS: Mapping[str, tuple[Speech, float, int]] = {
    "one utterance, one step": (Speech(users=400, seconds=0.2), 0.2, 1),
    "100 utterances of 6 s, ten steps": (Speech(users=12, seconds=600.0, utterances=100, letters=84), 120.0, 10),
}
MODEL = Settings(tokens=11, layers=1, width=8, heads=2, dropout=0.0, layer_drop=0.0)


def traced_bytes(make: Callable[[], Any]) -> int:
    """What is held for what `make` returns."""
    gc.collect()
    tracemalloc.start()
    made = make()
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del made
    return held


def count_bytes(context: ClientContext) -> tuple[float, float]:
    """For each client: of its plan, whose speech nothing else keeps, and of what stands in for it."""
    context = replace(context, _known=SizedCache(0))
    everybody = range(len(context.population))
    plan_client(context, 0, step=0)  # what is made once
    plans = traced_bytes(lambda: [plan_client(context, client, step=0) for client in everybody])
    members = traced_bytes(lambda: [Member(10_000 + client, 0, 1_000, 10**6 + client) for client in everybody])
    return plans / len(everybody), members / len(everybody)


def measure() -> dict[str, Any]:
    rows = []
    for what, (speech, batch_seconds, steps) in CLIENTS.items():
        with tempfile.TemporaryDirectory() as folder:
            context = make_context(
                Path(folder) / "store", speech, MODEL, batch_seconds=batch_seconds, local_steps=steps
            )
            plan, member = count_bytes(context)
        rows.append({"client": what, "plan_bytes": round(plan), "member_bytes": round(member)})
    return {"machine": f"Python {platform.python_version()}", "bound_bytes": PLANS_BYTES, "plans": rows}
