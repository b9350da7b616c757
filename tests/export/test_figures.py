"""What the guide says of exported models is what was measured and kept."""

import json
from pathlib import Path


def test_the_guide_has_the_kept_table() -> None:
    import export

    kept = json.loads(export.KEPT.read_text(encoding="utf-8"))
    page = export.PAGE.read_text(encoding="utf-8")
    assert export.table(kept) in page
    assert export.base_table(kept) in page
    for row in kept["rows"]:
        if row["target"] in ("ONNX", "sherpa") and "refused" not in row:
            assert row["texts_differ"] == 0, row
    assert Path(export.PAGE).name == "on-a-phone.md"
