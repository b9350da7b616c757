"""Templates are Jinja's: a mistake in one is one line that says where."""

import traceback
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError, TemplateSyntaxError

from sottovoce.base.errors import InputError


def fill(template: Path, words: Mapping[str, object]) -> str:
    """What Jinja makes of `template` with `words`, values or functions; a statement takes its line with it."""
    jinja = Environment(
        loader=FileSystemLoader(template.parent),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    try:
        return jinja.get_template(template.name, globals=dict(words)).render()
    except (InputError, TemplateError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).name == template.name]
        line = error.lineno if isinstance(error, TemplateSyntaxError) else lines[-1]
        raise InputError(f"{template.name}:{line}: {error}") from error
