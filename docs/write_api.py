"""Write docs/api.md, the reference of what `sottovoce` exports, from signatures and docstrings: `make docs`.

Both are taken from the sources, and not from what Python makes of them, so that every version of it writes the same.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import sottovoce

PAGE = Path(__file__).parent / "api.md"
SECTIONS = {
    "Speech and people": ("Store", "Population", "PopulationSettings", "build_population"),
    "Recipes": ("Recipe", "load_recipe", "recipe_names"),
    "Privacy": ("plan_run", "PlannedRun", "PrivacySettings", "Plan"),
    "Rounds": ("Simulation", "SimulatedRound"),
    "Recognisers": ("Recogniser", "load_recogniser", "export_recogniser"),
    "What they hear": ("evaluate", "Evaluation", "transcribe", "Transcript"),
    "Mistakes": ("InputError",),
}
# Of most classes all that has a docstring; a plan has many parts that only a run turns.
MEMBERS = {
    "Plan": {
        *("guarantee", "event", "warnings", "sampling_rate", "cohort_size", "denominator", "clip_bound", "sigma_dp"),
        *("noise_std_sum", "noise_std_mean", "sample", "new_total", "clip", "accumulate", "describe"),
    }
}
HEAD = """\
# The Python API

What `import sottovoce` gives, and all of it: these names, and of classes what is listed here, keep their meaning
([decision](decisions/029-public-api.md)). [From Python](guides/from-python.md) shows them at work. Everything else in
the package may change from one version to the next.

This page is written by `make docs` from the docstrings. Letters behind an underscore are a tensor's axes: P is the
length of a model's parameters as one vector.
"""
Definition = ast.ClassDef | ast.FunctionDef


def page() -> str:
    parts = [HEAD]
    for title, names in SECTIONS.items():
        parts += [f"## {title}\n", *map(_entry, names)]
    return "\n".join(parts)


def _entry(name: str) -> str:
    found = getattr(sottovoce, name)
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(found))).body
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    node.name = name
    shown = _function(node) if isinstance(node, ast.FunctionDef) else _class(node, _inherited(found))
    members = list(_members(node)) if isinstance(node, ast.ClassDef) else []
    parts = [f"### `{name}`", f"```python\n{shown}\n```", _text(_doc(node)), "\n".join(members)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _doc(node: Definition) -> str:
    return ast.get_docstring(node) or ""


def _function(node: ast.FunctionDef) -> str:
    """Its signature, in one line or with an argument in each."""
    arguments = _arguments(node.args)
    returned = "" if node.returns is None else f" -> {_type(node.returns)}"
    line = f"{node.name}({', '.join(arguments)}){returned}"
    if len(line) <= 110:
        return line
    folded = "".join(f"    {argument},\n" for argument in arguments)
    return f"{node.name}(\n{folded}){returned}"


def _arguments(given: ast.arguments) -> list[str]:
    others = [given.posonlyargs, given.vararg, given.kwarg]
    assert not any(others), "no public name has such arguments yet"
    defaults = [None] * (len(given.args) - len(given.defaults)) + [*given.defaults]
    plain = [_argument(one, default) for one, default in zip(given.args, defaults, strict=True)]
    named = [_argument(one, default) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [one for one in plain if one not in ("self", "cls")] + (["*", *named] if named else [])


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    kind = "" if one.annotation is None else f": {_type(one.annotation)}"
    return f"{one.arg}{kind}" + ("" if default is None else f" = {_source(default)}")


def _type(node: ast.expr) -> str:
    return _source(node).strip('"')


def _source(node: ast.AST) -> str:
    """As it stands there, but for line breaks; Python itself prefers single quotes."""
    written = ast.unparse(node)
    return written if '"' in written else written.replace("'", '"')


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [one for one in node.body if isinstance(one, ast.AnnAssign)]


def _inherited(found: type) -> list[ast.AnnAssign]:
    """The fields that a dataclass has from those below it."""
    below = [base for base in reversed(found.__mro__[1:]) if dataclasses.is_dataclass(base)]
    nodes = [ast.parse(textwrap.dedent(inspect.getsource(base))).body[0] for base in below]
    return [one for node in nodes if isinstance(node, ast.ClassDef) for one in _fields(node)]


def _class(node: ast.ClassDef, inherited: list[ast.AnnAssign]) -> str:
    """A dataclass or section by its fields, any other class by what makes one."""
    fields = _fields(node)
    if fields:
        fields = [*fields, *inherited]
        return "\n".join([f"class {node.name}:", *(f"    {_source(one)}" for one in fields)])
    makers = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    for maker in makers:
        maker.name, maker.returns = node.name, None
        return f"class {_function(maker)}"
    return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})" if node.bases else f"class {node.name}"


def _members(node: ast.ClassDef) -> Iterator[str]:
    """One line for each public method and property that says what it is."""
    for one in node.body:
        if not isinstance(one, ast.FunctionDef) or one.name.startswith("_") or not _doc(one):
            continue
        if one.name not in MEMBERS.get(node.name, {one.name}):
            continue
        first = _doc(one).partition("\n\n")[0].replace("\n", " ")
        decorators = {ast.unparse(decorator) for decorator in one.decorator_list}
        if decorators & {"property", "cached_property"}:
            assert one.returns is not None
            yield f"- `.{one.name}: {_type(one.returns)}`: {first}"
        else:
            one.name = f".{one.name}"
            yield f"- `{' '.join(_function(one).split())}`: {first}"


def _text(doc: str) -> str:
    """A docstring as Markdown: its examples as code."""
    paragraphs = []
    for paragraph in doc.split("\n\n"):
        if paragraph.lstrip().startswith(">>>"):
            plain = re.sub(r"\s*# doctest: \+SKIP", "", textwrap.dedent(paragraph))
            paragraphs.append(f"```pycon\n{plain}\n```")
        else:
            paragraphs.append(textwrap.dedent(paragraph).strip())
    return "\n\n".join(paragraphs)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
