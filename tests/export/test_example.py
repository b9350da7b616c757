"""The filled `privacy.json` on the page is what comes out."""

import json

from docs.write_privacy_example import example, shown
from tests.export.test_privacy_file import SCHEMA, problems

from sottovoce.export.verify import find_difference


def test_the_page_shows_what_is_written() -> None:
    """Numbers to one in 100,000, words exactly; `make docs` writes it anew."""
    made = json.loads(json.dumps(example()))
    assert find_difference(shown(), made) is None
    assert list(problems({name: made[name] for name in SCHEMA}, SCHEMA)) == []
