"""JSON and YAML from anybody's hand: plain data comes out, or `ParseError` with one line that says why not.

Both are bounded before anything is built of them: a few bytes can otherwise mean a gigabyte ("billion laughs"), more
levels than the interpreter's stack has, or a number that nothing can hold.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

Record = Mapping[str, Any]  # a JSON object

LONGEST_NUMBER = 300  # digits: what is shorter fits into a float
MOST_NODES = 1_000_000  # values in a YAML text, those that an alias repeats counted each time
DEEPEST = 100  # levels of a YAML text; twenty times what a recipe has

_LONGEST_QUOTE = 80
_TOO_DEEP = "nested too deeply"


class ParseError(ValueError):
    """A text that is no JSON or YAML, or too much of it."""


def parse_json(text: str | bytes, *, is_unique: bool = False) -> Any:
    """What `text` says. With `is_unique` a key that stands twice is refused: which one counts depends on the reader.

    >>> parse_json('{"step": 7}')
    {'step': 7}
    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    sottovoce.base.parsing.ParseError: nested too deeply
    """
    try:
        return (_UNIQUE if is_unique else _JSON).decode(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise ParseError(_TOO_DEEP) from None
    except ValueError as error:
        raise ParseError(str(error)) from None


def parse_yaml(text: str) -> Any:
    """What `text` says; 1e-6 is a number, as everybody means it, and an alias may not stand inside what it names.

    >>> parse_yaml("{rate: 1e-6, names: [a, b]}")
    {'rate': 1e-06, 'names': ['a', 'b']}
    """
    try:
        _check_depth(text)
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return _apart(loader.construct_document(node))
    except RecursionError:
        raise ParseError(_TOO_DEEP) from None
    except (yaml.YAMLError, ValueError, LookupError) as error:  # the last two from `!!int x` and `!!bool x`
        raise ParseError(" ".join(str(error).split())) from None


def quote(value: object) -> str:
    """`value` as an error may quote it: on one line that can be read.

    >>> quote("a" * 200) == "'" + "a" * 78 + "…"
    True
    """
    return shorten(repr(value))


def shorten(text: str) -> str:
    """The beginning of a text that is too long for one line."""
    return text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - 1] + "…"


def _check_depth(text: str) -> None:
    """Refuse what is nested too deeply, before nodes are made one inside the other, on the stack of C."""
    depth = 0
    for event in yaml.parse(text, Loader=_FAST):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ParseError(_TOO_DEEP)


def _check_size(root: yaml.Node) -> None:
    """Refuse what would become too much, or endless: an alias counts as much as what it repeats."""
    known: dict[int, int | None] = {}  # the size of each node; None while it is being counted

    def size(node: yaml.Node, depth: int) -> int:
        if depth > DEEPEST:
            raise ParseError(_TOO_DEEP)
        if id(node) not in known:
            known[id(node)] = None
            known[id(node)] = 1 + sum(size(child, depth + 1) for child in _children(node))
        found = known[id(node)]
        if found is None:
            raise ParseError("an alias stands inside what it names")
        if found > MOST_NODES:
            raise ParseError(f"more than {MOST_NODES:,} values, those that aliases repeat counted each time")
        return found

    size(root, 0)


def _apart(value: Any) -> Any:
    """A copy in which nothing stands twice: what is later set at one place must not change where an alias stood."""
    if isinstance(value, dict):
        return {key: _apart(inside) for key, inside in value.items()}
    return [_apart(inside) for inside in value] if isinstance(value, list) else value


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _whole_number(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ParseError(f"a number of {len(digits):,} digits, expected at most {LONGEST_NUMBER}")
    return int(digits)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ParseError(f"{quote(next(key for key in found if [name for name, _ in pairs].count(key) > 1))} twice")
    return found


_JSON = json.JSONDecoder(parse_int=_whole_number)
_UNIQUE = json.JSONDecoder(parse_int=_whole_number, object_pairs_hook=_once)


_FAST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # C's is ten times as fast, where PyYAML was built with it


class _Loader(_FAST):  # type: ignore[misc]
    """Plain data only: numbers, words, lists and mappings."""


def _number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    if len(node.value) > LONGEST_NUMBER:
        raise ParseError(f"a number of {len(node.value):,} digits, expected at most {LONGEST_NUMBER}")
    return loader.construct_yaml_int(node)


def _words(loader: _Loader, node: yaml.ScalarNode) -> str:
    """Words may become names of files and lines on a screen: neither can hold a zero byte or half a character."""
    words = str(loader.construct_scalar(node))
    if "\0" in words or any("\ud800" <= letter <= "\udfff" for letter in words):
        raise ParseError(f"a word with a zero byte or half a character in it{node.start_mark}")
    return words


_TAG = "tag:yaml.org,2002:"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_TAG}timestamp"]  # a date stays as written
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_constructors = {
    f"{_TAG}{kind}": yaml.SafeLoader.yaml_constructors[f"{_TAG}{kind}"]
    for kind in ("null", "bool", "float", "seq", "map")
} | {None: yaml.SafeLoader.yaml_constructors[None]}
_Loader.add_constructor(f"{_TAG}int", _number)
_Loader.add_constructor(f"{_TAG}str", _words)
_Loader.add_implicit_resolver(f"{_TAG}float", re.compile(r"[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))
