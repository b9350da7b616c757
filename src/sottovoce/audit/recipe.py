"""From a recipe to its audit: its people, its model and its rounds, with canaries among them; kept beside the run."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sottovoce import __version__
from sottovoce.audit.canaries import FEWEST, MOST
from sottovoce.audit.canary_audit import Audit, Observer, audit_rounds
from sottovoce.audit.rounds import federation_rounds
from sottovoce.audit.speech_audit import FEWEST_SECRETS, MOST_SECRETS, SpeechAudit, audit_speech
from sottovoce.base.errors import InputError
from sottovoce.base.files import write_json
from sottovoce.base.seeds import derive
from sottovoce.config import Recipe, as_yaml
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


OnRound = Callable[[int, int], None]


def audit_recipe(
    recipe: Recipe,
    settings: AuditSettings,
    *,
    context: RunContext,
    on_round: OnRound = lambda _done, _rounds: None,
) -> Audit:
    """Audit `recipe`. Its store and its parent model are made first where they are missing; nothing is released."""
    if recipe.federation is None:
        raise InputError(f"recipe {recipe.about!r}: it trains centrally; expected one with a section `federation`")
    federation = assemble_with_parent(recipe, context=context)
    return audit_rounds(
        federation.plan,
        federation_rounds(federation, settings.rounds, on_round),
        [(build_federation_engine(federation, guess_fastest_engine(federation)), len(federation.population))],
        canaries=settings.canaries,
        seed=derive(settings.seed, "audit of a recipe"),
        observer=settings.observer,
    )


def attack_recipe(
    recipe: Recipe,
    settings: AuditSettings,
    *,
    context: RunContext,
    on_round: OnRound = lambda _done, _rounds: None,
) -> SpeechAudit:
    """Train it once more, with people who have a secret, and attack the model."""
    seed = derive(settings.seed, "audit of speech")
    return audit_speech(
        recipe, secrets=settings.secrets, rounds=settings.rounds, seed=seed, context=context, on_round=on_round
    )


def audit_path(folder: Path) -> Path:
    """Where the audit of the run in `folder` is kept: beside it, so that the run may still be to come."""
    return folder.with_name(folder.name + AUDIT_SUFFIX)


def config_digest(config: str) -> str:
    """The digest of a recipe's text: whether an audit and a run are of the same recipe."""
    return hashlib.blake2b(config.encode(), digest_size=16).hexdigest()


def save_audit(folder: Path, recipe: Recipe, audit: Audit, speech: SpeechAudit | None = None) -> Mapping[str, Any]:
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
    write_json(audit_path(folder), content)
    return content
