"""What a family says of a model that it wrote in another library's layout, for the card beside it."""

from dataclasses import dataclass

CARD = "README.md"


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A folder that `from_pretrained` of `library` loads.

    `what` is one line about it, `base` names the model it was fine-tuned from, `license` is that model's, None where
    its card does not say. `example` is a program that transcribes a recording with it, and `notes` are what its users
    should know. `is_whole`: it needs no other folder.
    """

    library: str
    what: str
    base: str
    license: str | None
    example: str
    notes: tuple[str, ...]
    is_whole: bool
    parameters: int
