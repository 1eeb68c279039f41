"""JSON and bytes that nobody would send: strategies for hypothesis."""

import json
from typing import Any

from hypothesis import strategies as st

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**40]),
    st.floats(allow_nan=False, allow_infinity=False).filter(lambda number: not number.is_integer()),
    st.text(max_size=10),
    st.sampled_from(["", "\0", "é🙂", " ", "auto", "flex", "text", "user", "x" * 300]),
)
"""Without whole numbers that are written as decimals: JSON Schema takes those for integers, and nothing here does."""

JSON_VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
JSON_BYTES = JSON_VALUES.map(lambda value: json.dumps(value).encode())


@st.composite
def changed(draw: st.DrawFn, raw: bytes) -> bytes:
    """Bytes that differ from these in some places."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(raw)))
        end = draw(st.integers(start, min(len(raw), start + 8)))
        raw = raw[:start] + draw(st.binary(max_size=8)) + raw[end:]
    return raw[: draw(st.integers(0, len(raw)))] if draw(st.integers(0, 3)) == 0 else raw


@st.composite
def altered(draw: st.DrawFn, value: Any, names: st.SearchStrategy[str]) -> Any:
    """JSON that differs from a value in some part of it: replaced, removed, or a member added with one of the names."""
    match value:
        case dict() if value and draw(st.booleans()):
            name = draw(st.sampled_from(sorted(value)))
            return value | {name: draw(altered(value[name], names))}
        case list() if value and draw(st.booleans()):
            place = draw(st.integers(0, len(value) - 1))
            return [*value[:place], draw(altered(value[place], names)), *value[place + 1 :]]
        case dict():
            change = draw(st.integers(0, 3))
            if change == 0 and value:
                name = draw(st.sampled_from(sorted(value)))
                return {other: part for other, part in value.items() if other != name}
            if change < 3:
                return value | {draw(names): draw(JSON_VALUES)}
        case list():
            change = draw(st.integers(0, 2))
            if change == 0:
                return [*value, draw(JSON_VALUES)]
            if change == 1:
                return value * draw(st.integers(0, 5))
    return draw(JSON_VALUES)
