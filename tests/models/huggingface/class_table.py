"""The guide's table of model classes, made from the code: each cell is tried, or says the refusal's words.

PYTHONPATH=. python -m tests.models.huggingface.class_table    prints it
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tests.models.huggingface.tiny_models import write_tiny_model

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.evaluation.streaming import transcribe_stream
from sottovoce.models.huggingface.family import FAMILY, choose_part, is_lora_target, stack_obstacle
from sottovoce.models.huggingface.gates import check_can_be_trained
from sottovoce.models.huggingface.settings import Options, Settings
from sottovoce.models.recogniser import Recogniser
from sottovoce.models.trainable import Trainable, split_parameters

CLASSES: Mapping[str, str] = {
    "wav2vec2": "wav2vec2 *base*",
    "xls-r": "XLS-R, MMS",
    "hubert": "HuBERT",
    "wavlm": "WavLM",
    "wav2vec2-bert": "Wav2Vec2-BERT",
    "parakeet_ctc": "Parakeet-CTC",
    "whisper": "Whisper",
    "moonshine": "Moonshine",
}
PARTS: Mapping[str, str] = {"LoRA": "lora(r=2)", "full": "all", "head": "head", "norms": "norms"}
YES = "yes"


def list_columns() -> list[str]:
    return [*PARTS, "new head", "LoRA stacked", "full stacked", "stream"]


def try_class(kind: str, folder: Path) -> dict[str, str]:
    """What each column of the table says of a class, whose tiny model lies in `folder`."""
    cells = {name: _tried(lambda train=train: _train(folder, train=train)) for name, train in PARTS.items()}
    cells["new head"] = _tried(lambda: _train(folder, train="lora(r=2)", head="ctc"))
    for name in ("LoRA", "full"):
        why = stack_obstacle(settings_of(folder, train=PARTS[name]))
        cells[f"{name} stacked"] = YES if why is None else why
    cells["stream"] = _tried(lambda: _stream(folder))
    return cells


def make_table(folders: Callable[[str], Path]) -> str:
    """In Markdown: refusals have numbers, and their words stand below."""
    words: dict[str, int] = {}
    columns = list_columns()
    lines = [f"| class | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for kind, name in CLASSES.items():
        found = try_class(kind, folders(kind))
        cells = [own if own == YES else f"no ({words.setdefault(own, len(words) + 1)})" for own in found.values()]
        assert list(found) == columns
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {own}" for own, number in words.items())]) + "\n"


def settings_of(folder: Path, *, train: str, head: str | None = None) -> Settings:
    made: Settings = Options(source=str(folder), train=train, head=head).settings(tokens=9)  # type: ignore[arg-type]
    return made


def part_of(settings: Settings) -> Trainable:
    start = FAMILY.init(settings, generator=torch_stream(1, "init"))
    return split_parameters(
        choose_part(settings), start, is_lora_target=is_lora_target, generator=torch_stream(1, "low rank")
    )


def _train(folder: Path, *, train: str, head: str | None = None) -> None:
    settings = settings_of(folder, train=train, head=head)
    check_can_be_trained(FAMILY, settings, part_of(settings))


def _stream(folder: Path) -> None:
    settings = settings_of(folder, train="all")
    recogniser = Recogniser(FAMILY, settings, CharacterTokens("ab"), {}, "en")
    next(transcribe_stream(recogniser, iter(()), device=torch.device("cpu")))


def _tried(what: Callable[[], None]) -> str:
    try:
        what()
    except InputError as refusal:
        return str(refusal)
    return YES


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        print(make_table(lambda kind: write_tiny_model(kind, Path(place) / kind)))


if __name__ == "__main__":
    main()
