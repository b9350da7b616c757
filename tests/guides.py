"""The pages of docs/guides, taken apart."""

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language ("" for output) and what is in it."""

    language: str
    content: str

    @property
    def file(self) -> str:
        """The name in the first line's comment, under which it is saved."""
        name = self.content.partition("\n")[0].removeprefix("# ")
        assert re.fullmatch(r"[\w-]+\.(py|yaml)", name), f"expected the block to begin with its file's name: {name!r}"
        return name


def blocks(guide: Path, *languages: str) -> list[Block]:
    found = [Block(language, content) for language, content in FENCE.findall(guide.read_text(encoding="utf-8"))]
    return [block for block in found if not languages or block.language in languages]
