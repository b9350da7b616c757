"""Write the filled `privacy.json` on docs/verifying.md: `make docs`.

The release was made up: its ledger is written by the ledger itself, with fixed digests, so that every figure follows
from the settings below. A test compares the page with what comes out here.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from sottovoce.export.privacy_file import Asserted, Evidence, describe_privacy
from sottovoce.flat.layout import Layout
from sottovoce.privacy.description import ledger_header
from sottovoce.privacy.ledger import Ledger, verify
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode, PrivacySettings

PAGE = Path(__file__).parent / "verifying.md"
BEGIN, END = "<!-- privacy.json: written by `make docs` -->\n```json\n", "\n```\n<!-- end -->"
ROUNDS = 90
SHAPES = {"blocks.00.mlp.hidden.weight": (128, 32), "output.weight": (30, 32)}


def digest(what: str) -> str:
    """A SHA-256 that stands for that of a file."""
    return hashlib.sha256(what.encode()).hexdigest()


def example() -> dict[str, Any]:
    """The statement on a release that nobody made."""
    settings = PrivacySettings(
        population_size=208,
        privacy_unit="speaker",
        cohort_size=20,
        clip_bound=0.5,
        noise_multiplier=0.959774,
        delta=1e-6,
        mode=Mode.SECURE,
    )
    plan = Plan(settings, Layout(tuple(SHAPES), tuple(SHAPES.values())))
    model = {name: digest(name) for name in ("description", "tokens", "weights")}
    names = ("config.json", "ledger.jsonl", "model.safetensors", "recipe.yaml", "tokens.json")
    files = {name: digest(name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        header = ledger_header(plan, run="an example", central_steps=ROUNDS, recipe=files["recipe.yaml"])
        ledger = Ledger(path, header=header)
        for step in range(ROUNDS):
            parameters, cohort = digest(f"parameters {step}"), digest(f"cohort {step}")
            ledger.intend(plan.event, step=step, clip_bound=0.5, parameters=parameters, cohort=cohort)
        ledger.commit(step=ROUNDS - 1, result=digest("result"), model=model)
        ledger.close()
        evidence = Evidence(
            title="an example",
            ledger=verify(path),
            recipe=files["recipe.yaml"],
            model={"step": ROUNDS, "in_ledger": True, "committed": model},
            files=files,
            asserted=Asserted(
                software={
                    "export": "sottovoce 0.1.0",
                    "accountant": "dp-accounting 0.6.0",
                    "run": "sottovoce 0.1.0",
                },
                start_model={"began_with": "a model that was trained before", "digest": digest("seed model")[:32]},
                base_model={},
                tokens="the alphabet of the language: nobody's texts",
            ),
        )
        return describe_privacy(evidence)


def shown() -> dict[str, Any]:
    """What the page has."""
    found: dict[str, Any] = json.loads(PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0])
    return found


def main() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    made = json.dumps(example(), indent=2, ensure_ascii=False)
    PAGE.write_text(f"{before}{BEGIN}{made}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
