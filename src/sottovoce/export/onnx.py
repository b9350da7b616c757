"""`--to onnx`: a model as ONNX graphs, from samples to log-probabilities, and `onnx.json`, which says how to call them.

Files say nothing of who exported them: torch writes the exporter's source lines and paths into every node, which are
removed. The same model gives the same bytes.
"""

import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sottovoce.base.errors import InputError
from sottovoce.base.files import write_atomically, write_folder_atomically, write_json
from sottovoce.base.importing import import_extra
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models.onnx_graphs import Axes, Export, Graph, translations
from sottovoce.models.recogniser import Recogniser

DESCRIPTION = "onnx.json"
OPSET = 18
MOST_BYTES = 2**31 - 1  # of one file of protocol buffers
QUANTISED = ("MatMul", "LSTM", "Gather")
_MOST = 2**31 - 2  # of an axis
_CONSTANT = "lifted_tensor"  # what torch calls tensors that are no weights: windows, waves, mel filters


def export_onnx(recogniser: Recogniser, folder: Path, *, int8: bool = False) -> dict[str, Any]:
    """Write `recogniser` as ONNX graphs into a new `folder`; what was written, for a summary."""
    model = require_export(recogniser).onnx(recogniser.parameters, recogniser.settings)
    with write_folder_atomically(folder) as written:
        files = {graph.name: write_graph(graph, written, int8=int8).name for graph in model.graphs}
        write_json(
            written / DESCRIPTION,
            {
                "format": 1,
                "family": recogniser.family.name,
                "language": recogniser.language,
                "sample_rate": SAMPLE_RATE,
                "precision": "int8" if int8 else "float32",
                "decoding": dict(model.decoding),
                "graphs": {graph.name: describe_graph(graph, files[graph.name]) for graph in model.graphs},
                "tokens": recogniser.tokens.pieces(),
            },
        )
        return summarise(written, folder, parameters=count_weights(model.graphs))


def require_export(recogniser: Recogniser) -> Export:
    """How `recogniser` leaves for other runtimes; refuses one that does not."""
    import_extra("onnxscript", extra="export", called="--to onnx or sherpa")
    family = recogniser.family
    if family.export is not None:
        return family.export
    if family.recognition is None:
        raise InputError(f"models of family={family.name} write no text: there is nothing to export but their encoder")
    raise InputError(f"family={family.name} does not say how its models are exported (Family.export)")


def describe_graph(graph: Graph, file: str) -> dict[str, Any]:
    """A graph for whoever calls it: its file, its inputs and outputs with their axes."""
    axes = {
        "inputs": {name: list(own) for name, own in graph.inputs.items()},
        "outputs": {name: list(own) for name, own in graph.outputs.items()},
    }
    limits = {"least": dict(graph.least), "most": dict(graph.most)}
    return {"file": file, **axes, **{name: own for name, own in limits.items() if own}}


def count_weights(graphs: Iterable[Graph]) -> int:
    return sum(buffer.numel() for graph in graphs for buffer in graph.module.buffers())


def summarise(written: Path, folder: Path, *, parameters: int) -> dict[str, Any]:
    files = {file.name: file.stat().st_size for file in sorted(written.iterdir())}
    return {
        "folder": str(folder),
        "whole": True,
        "parameters": parameters,
        "bytes": sum(files.values()),
        "files": files,
    }


# A graph's file.


def write_graph(graph: Graph, folder: Path, *, int8: bool, metadata: Mapping[str, str] | None = None) -> Path:
    """Write NAME.onnx, or NAME.int8.onnx with matrices in eight bits, into `folder`."""
    if (size := 4 * count_weights([graph])) > MOST_BYTES:
        raise InputError(f"{graph.name}: {size / 1e9:.1f} GB of weights, expected at most 2, which one file can hold")
    model = clean_model(trace_graph(graph, fold=int8), graph, metadata={})
    model = clean_model(quantise(model) if int8 else model, graph, metadata=metadata or {})
    file = folder / f"{graph.name}{'.int8' if int8 else ''}.onnx"
    with write_atomically(file) as writing:
        writing.writelines(_serialise(model))
    return file


def _serialise(model: Any) -> Iterator[bytes]:
    """The file of `model`, tensor by tensor: serialised as a whole, it would take three times its memory."""
    graph, tensors = model.graph, list(model.graph.initializer)
    del graph.initializer[:]
    before = _message_start(graph, "initializer")
    inside = graph.SerializeToString(deterministic=True)
    starts = [before + _varint(tensor.ByteSize()) for tensor in tensors]
    size = len(inside) + sum(len(start) + tensor.ByteSize() for start, tensor in zip(starts, tensors, strict=True))
    outside = type(model)()
    outside.CopyFrom(model)
    outside.ClearField("graph")
    yield outside.SerializeToString(deterministic=True)
    yield _message_start(model, "graph") + _varint(size) + inside
    for start, tensor in zip(starts, tensors, strict=True):
        yield start
        yield tensor.SerializeToString(deterministic=True)


def _message_start(message: Any, name: str) -> bytes:
    return _varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | 2)


def _varint(number: int) -> bytes:
    """A number in groups of seven bits, the lowest first, as protocol buffers have it.

    >>> _varint(300).hex()
    'ac02'
    """
    found = []
    while number >= 128:
        found.append(number % 128 + 128)
        number //= 128
    return bytes([*found, number])


def trace_graph(graph: Graph, *, fold: bool = False) -> Any:
    """`graph` as an `onnx.ModelProto` in float32; `fold`: with all that depends on weights alone computed."""
    from onnxscript import optimizer

    with torch.no_grad(), quiet_exporter():
        graph.module.eval()(*graph.examples)  # once outside of tracing: windows and filters are made, and kept
        program = torch.onnx.export(
            graph.module,
            graph.examples,
            dynamo=True,
            dynamic_shapes=(_dynamic_shapes(graph),),
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            opset_version=OPSET,
            custom_translation_table=translations(),
            external_data=False,
            verbose=False,
        )
        assert program is not None
        if fold:  # transposed and reordered weights, which are above its usual limits
            optimizer.optimize(program.model, input_size_limit=MOST_BYTES, output_size_limit=MOST_BYTES)
        return program.model_proto


def _dynamic_shapes(graph: Graph) -> tuple[dict[int, Any], ...]:
    names = {axis for axes in graph.inputs.values() for axis in axes if isinstance(axis, str)}
    sizes = {
        name: torch.export.Dim(name, min=graph.least.get(name, 1), max=graph.most.get(name, _MOST))
        for name in sorted(names)
    }
    return tuple(
        {place: sizes[axis] for place, axis in enumerate(axes) if isinstance(axis, str)}
        for axes in graph.inputs.values()
    )


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Within, torch, onnxscript and onnxruntime keep to themselves what is deprecated in them, and what they skip."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "root", "")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def quantise(model: Any) -> Any:
    """`model` with matrices of eight bits, activations quantised as they come; features stay as they are.

    Seven bits of each are used: processors without VNNI add products of eight bits in sixteen, which overflow.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for node in model.graph.node:
        node.name = node.name or f"{node.op_type}_{node.output[0]}"
    kept = [node.name for node in model.graph.node if any(name.startswith(_CONSTANT) for name in node.input)]
    with TemporaryDirectory() as temporary, quiet_exporter():
        file = Path(temporary) / "model.onnx"
        quantize_dynamic(
            model,
            file,
            op_types_to_quantize=list(QUANTISED),
            nodes_to_exclude=kept,
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
        )
        return onnx.load(file)


def clean_model(model: Any, graph: Graph, *, metadata: Mapping[str, str]) -> Any:
    """Leave in `model` what computes, the names of `graph`, and `metadata`."""
    model.producer_name, model.producer_version, model.doc_string, model.domain = "sottovoce", "", "", ""
    del model.metadata_props[:]
    for name in sorted(metadata):
        model.metadata_props.add(key=name, value=metadata[name])
    _clean_graph(model.graph)
    model.graph.name = graph.name
    for values, axes in ((model.graph.input, graph.inputs), (model.graph.output, graph.outputs)):
        assert [value.name for value in values] == list(axes), ([value.name for value in values], list(axes))
        for value, own in zip(values, axes.values(), strict=True):
            _set_axes(value, own)
    return model


def _set_axes(value: Any, axes: Axes) -> None:
    # As the family says: torch names axes after expressions, and takes some of LSTMs' for constants.
    shape = value.type.tensor_type.shape
    del shape.dim[:]
    for axis in axes:
        shape.dim.add(**({"dim_param": axis} if isinstance(axis, str) else {"dim_value": axis}))


def _clean_graph(graph: Any) -> None:
    graph.doc_string = ""
    del graph.metadata_props[:], graph.value_info[:]
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.doc_string = ""
        del value.metadata_props[:]
    for node in graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
        for attribute in node.attribute:
            attribute.doc_string = ""
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                _clean_graph(inner)
