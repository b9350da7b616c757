"""`--to sherpa`: a folder that sherpa-onnx, the runtime for phones and small computers, loads as it is.

`tokens.txt` names the outputs; `sherpa.json` says which of its constructors takes which file:

    recognizer = sherpa_onnx.OfflineRecognizer.from_fire_red_asr_ctc(model="…/model.onnx", tokens="…/tokens.txt")
"""

from pathlib import Path
from typing import Any

from sottovoce.base.files import encode_utf8, write_atomically, write_folder_atomically, write_json
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.export.onnx import count_weights, require_export, summarise, write_graph
from sottovoce.models.recogniser import Recogniser

DESCRIPTION, TOKENS = "sherpa.json", "tokens.txt"


def export_sherpa(recogniser: Recogniser, folder: Path, *, int8: bool = False) -> dict[str, Any]:
    """Write `recogniser` for sherpa-onnx into a new `folder`; what was written, for a summary."""
    export, pieces = require_export(recogniser), recogniser.tokens.pieces()
    model = export.sherpa(recogniser.parameters, recogniser.settings, pieces)
    with write_folder_atomically(folder) as written:
        files = {
            argument: write_graph(graph, written, int8=int8, metadata=model.metadata).name
            for argument, graph in model.graphs.items()
        }
        with write_atomically(written / TOKENS) as file:
            lines = (f"{symbol} {number}\n" for number, symbol in model.symbols.items())
            file.write(encode_utf8("".join(lines)))
        write_json(
            written / DESCRIPTION,
            {
                "format": 1,
                "recogniser": model.recogniser,
                "arguments": {**files, "tokens": TOKENS},
                "language": recogniser.language,
                "sample_rate": SAMPLE_RATE,
                "precision": "int8" if int8 else "float32",
                **({"tail_samples": model.tail_samples} if model.tail_samples else {}),
            },
        )
        return summarise(written, folder, parameters=count_weights(model.graphs.values()))
