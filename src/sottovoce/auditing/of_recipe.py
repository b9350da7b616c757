"""From a recipe to its audit: its people, its model and its rounds, with canaries among them; kept beside the run."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sottovoce import __version__
from sottovoce.auditing.audit import Audit, Observer, audit_rounds
from sottovoce.auditing.canaries import FEWEST, MOST
from sottovoce.auditing.speech_audit import FEWEST_SECRETS, MOST_SECRETS, SpeechAudit, audit_speech
from sottovoce.config import Recipe, as_yaml
from sottovoce.errors import InputError
from sottovoce.files import write_json
from sottovoce.seeds import derive
from sottovoce.training.engines import build_federation_engine, guess_fastest_engine
from sottovoce.training.run_context import RunContext
from sottovoce.training.simulation import assemble_with_parent

AUDIT_SUFFIX = ".audit.json"


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """`rounds`: fewer than the recipe's, or all of them. `seed` decides canaries, and which of them are in."""

    canaries: int = 1000
    secrets: int = 40
    rounds: int | None = None
    observer: Observer = Observer.RELEASES
    seed: int = 1

    def __post_init__(self) -> None:
        if self.rounds is not None and self.rounds < 1:
            raise InputError(f"rounds={self.rounds}: expected at least 1")
        for name, fewest, most in (("canaries", FEWEST, MOST), ("secrets", FEWEST_SECRETS, MOST_SECRETS)):
            if not fewest <= (count := getattr(self, name)) <= most:
                raise InputError(f"{name}={count}: expected {fewest} to {most:,}")


def audit_recipe(
    recipe: Recipe,
    settings: AuditSettings,
    *,
    context: RunContext,
    on_round: Callable[[int, int], None] = lambda _done, _rounds: None,
) -> Audit:
    """Audit `recipe`. Its store and its seed model are made first where they are missing; nothing is released."""
    if recipe.federation is None:
        raise InputError(f"recipe {recipe.about!r}: it trains centrally; expected one with a section `federation`")
    federation = assemble_with_parent(recipe, context=context)
    rounds = min(settings.rounds or federation.settings.steps, federation.settings.steps)
    return audit_rounds(
        federation.plan,
        server=federation.server(),
        people=[(build_federation_engine(federation, guess_fastest_engine(federation)), len(federation.population))],
        rounds=rounds,
        canaries=settings.canaries,
        seed=derive(settings.seed, "audit of a recipe"),
        observer=settings.observer,
        has_turns=federation.settings.local.time_line is not None,
        after_step=federation.after_step(),
        model_bits=federation.settings.model_bits,
        on_round=lambda done: on_round(done, rounds),
    )


def attack_recipe(
    recipe: Recipe,
    settings: AuditSettings,
    *,
    context: RunContext,
    on_round: Callable[[int, int], None] = lambda _done, _rounds: None,
) -> SpeechAudit:
    """Train it once more, with people who have a secret, and attack the model."""
    rounds = min(settings.rounds or recipe.federated.steps, recipe.federated.steps)
    return audit_speech(
        recipe,
        secrets=settings.secrets,
        rounds=rounds,
        seed=derive(settings.seed, "audit of speech"),
        context=context,
        on_round=lambda done: on_round(done, rounds),
    )


# Beside the run.


def kept_at(folder: Path) -> Path:
    """Where the audit of the run in `folder` is kept: beside it, so that the run may still be to come."""
    return folder.with_name(folder.name + AUDIT_SUFFIX)


def config_digest(config: str) -> str:
    """What tells whether an audit is of the recipe that a run was made with, by the text of that."""
    return hashlib.blake2b(config.encode(), digest_size=16).hexdigest()


def keep_audit(folder: Path, recipe: Recipe, audit: Audit, speech: SpeechAudit | None = None) -> Mapping[str, Any]:
    """Write it down. Its rounds were made with the recipe's people, and nobody has accounted for them."""
    content = {
        "accounted": False,
        "recipe": recipe.about,
        "config_digest": config_digest(as_yaml(recipe)),
        "sottovoce": __version__,
        **audit.as_json(),
        **({} if speech is None else {"speech": speech.as_json()}),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_json(kept_at(folder), content)
    return content
