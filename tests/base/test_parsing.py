"""JSON and YAML of any hand: plain data comes out as it went in, and everything else is one line."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.parsing import MOST_NODES, ParseError, parse_json, parse_yaml

# The library that writes YAML here does not quote all that must be (line ends beyond ASCII, 1e5).
words = st.text("abcxyz {}[]:,#é'\"\n", max_size=20)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words,
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(words, inside, max_size=4),
    max_leaves=20,
)


@given(values)
def test_plain_data_comes_back(value: object) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_yaml(yaml.safe_dump(value, allow_unicode=True)) == value


def laughs(levels: int) -> str:
    """A few lines of YAML that mean 9 to the power of `levels` words."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (laughs(8), f"more than {MOST_NODES:,} values"),
        (laughs(500), "values|nested too deeply"),
        ("a: &a [*a]", "an alias stands inside what it names"),
        ("a: &a {b: *a}", "an alias stands inside what it names"),
        ("[" * 100_000, "nested too deeply"),
        ("- " * 5_000 + "x", "nested too deeply"),
        ("7" * 5_000, "5,000 digits"),
        ("0x" + "f" * 5_000, "digits"),
        ("1:" * 2_000 + "1", "digits"),
        ('"\\0"', "a zero byte"),
        ('"\\ud800"', "half a character|invalid Unicode character"),
        ("\0", "not allowed"),
        ("!!int x", "int"),
        ("!!int ''", "index"),
        ("!!bool x", "x"),
        ("!!timestamp x", "tag"),
        ("!!python/name:os.system x", "tag"),
        ("{[a]: b}", "unhashable"),
        ("{", "flow"),
    ],
)
def test_yaml_that_cannot_be_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "7" * 5_000, "-" + "7" * 301, "{", "", b"\xff"])
def test_json_that_cannot_be_is_one_line(text: str | bytes) -> None:
    with pytest.raises(ParseError) as caught:
        parse_json(text)
    assert "\n" not in str(caught.value)


def test_aliases_within_reason_are_welcome_and_stand_apart() -> None:
    found = parse_yaml("a: &a {b: [1]}\nc: *a\nd: {<<: *a, e: 2}")
    assert found == {"a": {"b": [1]}, "c": {"b": [1]}, "d": {"b": [1], "e": 2}}
    found["a"]["b"].append(2)
    assert found["c"] == {"b": [1]}
    assert parse_yaml("about: 2001-12-31") == {"about": "2001-12-31"}
    assert parse_yaml("") is None
