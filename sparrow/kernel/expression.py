"""The expression behind a filter: conditions on columns, joined by AND, OR and NOT.

Every expression evaluates to one boolean a row, without nulls: the logic has two values, a condition
on something absent is simply false, and NOT turns that into true. So AND and OR commute, may be
flattened and may drop repetitions, which is what the three joining functions at the end do.

``text`` is the canonical form. Two expressions with the same text select the same rows of every
batch. It is legal filter text, and parses to the same expression.

Conditions prepare their Arrow scalars when they are made: at evaluation only compute kernels run.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sparrow.kernel.batchview import INT64_MAX, INT64_MIN, BatchView

Number = int | float
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_COMPARE = {
    sign: pc.get_function(name).call
    for sign, name in {
        "=": "equal",
        "<": "less",
        "<=": "less_equal",
        ">": "greater",
        ">=": "greater_equal",
    }.items()
}
_and = pc.get_function("and").call
_or = pc.get_function("or").call
_and_not = pc.get_function("and_not").call
_invert = pc.get_function("invert").call
_is_valid = pc.get_function("is_valid").call
_coalesce = pc.get_function("coalesce").call
_FALSE = pa.scalar(False, pa.bool_())


class Field(ABC):
    """A column that a condition looks at; ``text`` names it."""

    __slots__ = ("text",)
    text: str

    @abstractmethod
    def strings(self, view: BatchView) -> Any:
        """The column's strings, null where there is none."""


class Attribute(Field):
    """One attribute of the message."""

    __slots__ = ("key",)

    def __init__(self, key: str) -> None:
        self.key = key
        self.text = f"attributes.{_key_text(key)}"

    def strings(self, view: BatchView) -> Any:
        return view.attribute(self.key)


class MessageKey(Field):
    """The message's key."""

    __slots__ = ()

    def __init__(self) -> None:
        self.text = "key"

    def strings(self, view: BatchView) -> Any:
        return view.key()


class Data(Field):
    """One field of a JSON payload."""

    __slots__ = ("path",)

    def __init__(self, path: tuple[str, ...]) -> None:
        self.path = path
        self.text = ".".join(["data", *map(_key_text, path)])

    def strings(self, view: BatchView) -> Any:
        return view.strings(self.path)


class Expression(ABC):
    """What can be true of a message."""

    __slots__ = ("height", "text")
    text: str
    height: int
    """How deep the expression nests; a condition has 1."""

    @abstractmethod
    def evaluate(self, view: BatchView) -> Any:
        """One boolean a row, none of them null."""

    @property
    def data_names(self) -> frozenset[str]:
        """The outermost names of the payload's fields that it looks at."""
        return frozenset()

    def __repr__(self) -> str:
        return self.text


class Condition(Expression):
    """An expression that holds no other."""

    __slots__ = ()

    def __init__(self, text: str) -> None:
        self.text = text
        self.height = 1

    @property
    def data_names(self) -> frozenset[str]:
        field = getattr(self, "field", None)
        return frozenset(field.path[:1]) if isinstance(field, Data) else frozenset()


class Comparison(Condition):
    """A condition written as a column, a sign and a literal."""

    __slots__ = ("differs_text", "sign")

    def __init__(self, left: str, sign: str, right: str) -> None:
        super().__init__(f"{left} {sign} {right}")
        self.sign = sign
        self.differs_text = f"{left} != {right}"


class Equals(Comparison):
    """A string equals a literal; the condition that can be indexed."""

    __slots__ = ("_scalar", "field", "value")

    def __init__(self, field: Field, value: str) -> None:
        super().__init__(field.text, "=", _quote(value))
        self.field = field
        self.value = value
        self._scalar = pa.scalar(value, pa.string())

    def evaluate(self, view: BatchView) -> Any:
        return _no_null(_COMPARE["="]([self.field.strings(view), self._scalar]))


class HasAttribute(Condition):
    """The message has the attribute."""

    __slots__ = ("key",)

    def __init__(self, key: str) -> None:
        super().__init__(f"attributes:{_key_text(key)}")
        self.key = key

    def evaluate(self, view: BatchView) -> Any:
        return _is_valid([view.attribute(self.key)])


class Prefix(Condition):
    """A string begins with a literal."""

    __slots__ = ("_options", "field", "prefix")

    def __init__(self, field: Field, prefix: str) -> None:
        super().__init__(f"hasPrefix({field.text}, {_quote(prefix)})")
        self.field = field
        self.prefix = prefix
        self._options = pc.MatchSubstringOptions(prefix)

    def evaluate(self, view: BatchView) -> Any:
        column = self.field.strings(view)
        return _no_null(pc.call_function("starts_with", [column], self._options))


class StringOrder(Comparison):
    """A string of the payload lies before or after a literal, by code points."""

    __slots__ = ("_scalar", "field")

    def __init__(self, field: Data, sign: str, value: str) -> None:
        super().__init__(field.text, sign, _quote(value))
        self.field = field
        self._scalar = pa.scalar(value, pa.string())

    def evaluate(self, view: BatchView) -> Any:
        return _no_null(_COMPARE[self.sign]([self.field.strings(view), self._scalar]))


class Bound:
    """A comparison with a number, made exact for one column type, or known without looking."""

    __slots__ = ("_scalar", "_sign", "always")

    def __init__(self, sign: str, value: Number | bool, kind: Any) -> None:
        self.always = value if isinstance(value, bool) else None
        self._sign = sign
        self._scalar = None if self.always is not None else pa.scalar(value, kind)

    def holds(self, column: Any) -> Any:
        """One boolean a row, false where the column is null."""
        if self.always is None:
            return _no_null(_COMPARE[self._sign]([column, self._scalar]))
        is_number = _is_valid([column])
        return is_number if self.always else _and_not([is_number, is_number])


class DataNumber(Comparison):
    """A number of the payload compares so with a literal."""

    __slots__ = ("_float_bound", "_integer_bound", "field", "value")

    def __init__(self, field: Data, sign: str, value: Number) -> None:
        super().__init__(field.text, sign, repr(value))
        self.field = field
        self.value = value
        self._integer_bound = integer_bound(sign, value)
        self._float_bound = float_bound(sign, value)

    def evaluate(self, view: BatchView) -> Any:
        mask = self._integer_bound.holds(view.integers(self.field.path))
        floats = view.floats(self.field.path)
        if floats.null_count == len(floats):
            return mask
        return _or([mask, self._float_bound.holds(floats)])


class Priority(Comparison):
    """The message's priority compares so with a literal."""

    __slots__ = ("_bound",)

    def __init__(self, sign: str, value: Number) -> None:
        super().__init__("priority", sign, repr(value))
        self._bound = integer_bound(sign, value)

    def evaluate(self, view: BatchView) -> Any:
        return self._bound.holds(view.priority())


class DataIs(Comparison):
    """A field of the payload is true, false, or null; missing is null."""

    __slots__ = ("field", "value")

    def __init__(self, field: Data, value: bool | None) -> None:
        super().__init__(field.text, "=", json.dumps(value))
        self.field = field
        self.value = value

    def evaluate(self, view: BatchView) -> Any:
        if self.value is None:
            return _and([view.is_json(), view.is_null(self.field.path)])
        mask = _no_null(view.booleans(self.field.path))
        if self.value:
            return mask
        return _and_not([_is_valid([view.booleans(self.field.path)]), mask])


class OneOf(Comparison):
    """A column equals one of several literals, each once, in the order of their texts."""

    __slots__ = ("_floats", "_integers", "_others", "_strings", "field", "values")

    def __init__(self, field: Field, equalities: Iterable[Comparison]) -> None:
        by_text = {equality.text: equality for equality in equalities}
        parts = [by_text[text] for text in sorted(by_text)]
        left = f"{field.text} = "
        literals = ", ".join(part.text.removeprefix(left) for part in parts)
        super().__init__(field.text, "IN", f"({literals})")
        self.differs_text = f"{field.text} NOT IN ({literals})"
        self.field = field
        self.values = tuple(part for part in parts if isinstance(part, Equals))
        """The equalities with strings, which can be indexed."""
        numbers = [part.value for part in parts if isinstance(part, DataNumber)]
        self._others = [part for part in parts if not isinstance(part, Equals | DataNumber)]
        self._strings = _set([part.value for part in self.values], pa.string())
        self._integers = _set([int(v) for v in numbers if v == int(v) and _fits(v)], pa.int64())
        doubles = [float(v) for v in numbers if float(v) == v]
        self._floats = _set(doubles + [-0.0] * (0.0 in doubles), pa.float64())

    @property
    def is_indexable(self) -> bool:
        """Whether it holds exactly where one of ``values`` does."""
        return not (self._others or self._integers or self._floats)

    def evaluate(self, view: BatchView) -> Any:
        masks = [part.evaluate(view) for part in self._others]
        if self._strings is not None:
            masks.append(pc.call_function("is_in", [self.field.strings(view)], self._strings))
        if self._integers is not None or self._floats is not None:
            assert isinstance(self.field, Data)
            path = self.field.path
            if self._integers is not None:
                masks.append(pc.call_function("is_in", [view.integers(path)], self._integers))
            if self._floats is not None and view.floats(path).null_count < view.rows:
                masks.append(pc.call_function("is_in", [view.floats(path)], self._floats))
        if not masks:
            return pa.repeat(_FALSE, view.rows)
        mask = masks[0]
        for other in masks[1:]:
            mask = _or([mask, other])
        return mask


def _set(values: list[Any], kind: Any) -> Any:
    return pc.SetLookupOptions(value_set=pa.array(values, kind)) if values else None


def _fits(value: Number) -> bool:
    return INT64_MIN <= value <= INT64_MAX


class DataDiffers(Condition):
    """The payload is JSON and an equality on one of its fields does not hold."""

    __slots__ = ("equality",)

    def __init__(self, equality: Comparison) -> None:
        super().__init__(equality.differs_text)
        self.equality = equality

    @property
    def data_names(self) -> frozenset[str]:
        return self.equality.data_names

    def evaluate(self, view: BatchView) -> Any:
        return _and_not([view.is_json(), self.equality.evaluate(view)])


class Not(Expression):
    """The other one does not hold."""

    __slots__ = ("inner",)

    def __init__(self, inner: Expression) -> None:
        self.inner = inner
        self.height = inner.height + 1
        self.text = _negated(inner)

    @property
    def data_names(self) -> frozenset[str]:
        return self.inner.data_names

    def evaluate(self, view: BatchView) -> Any:
        return _invert([self.inner.evaluate(view)])


class Join(Expression):
    """Several expressions under one operator, each once, in the order of their texts."""

    __slots__ = ("parts",)
    word: str

    def __init__(self, parts: tuple[Expression, ...]) -> None:
        assert len(parts) > 1
        self.parts = parts
        self.height = max(part.height for part in parts) + 1
        self.text = f" {self.word} ".join(map(_inside, parts))

    @property
    def data_names(self) -> frozenset[str]:
        return frozenset().union(*(part.data_names for part in self.parts))


class And(Join):
    """All of them hold."""

    __slots__ = ()
    word = "AND"

    def evaluate(self, view: BatchView) -> Any:
        mask = self.parts[0].evaluate(view)
        for part in self.parts[1:]:
            if not mask.true_count:
                break
            mask = _and([mask, part.evaluate(view)])
        return mask


class Or(Join):
    """At least one of them holds."""

    __slots__ = ()
    word = "OR"

    def evaluate(self, view: BatchView) -> Any:
        mask = self.parts[0].evaluate(view)
        for part in self.parts[1:]:
            if mask.true_count == len(mask):
                break
            mask = _or([mask, part.evaluate(view)])
        return mask


def conjunction(parts: Iterable[Expression]) -> Expression:
    """All of the parts, in canonical form."""
    return _join(And, parts)


def disjunction(parts: Iterable[Expression]) -> Expression:
    """Any of the parts, in canonical form."""
    return _join(Or, parts)


def negation(expression: Expression) -> Expression:
    """The opposite, in canonical form."""
    return expression.inner if isinstance(expression, Not) else Not(expression)


def _join(kind: type[Join], parts: Iterable[Expression]) -> Expression:
    flat: dict[str, Expression] = {}
    for part in parts:
        for leaf in part.parts if isinstance(part, kind) else (part,):
            flat[leaf.text] = leaf
    ordered = tuple(flat[text] for text in sorted(flat))
    return ordered[0] if len(ordered) == 1 else kind(ordered)


def integer_bound(sign: str, value: Number) -> Bound:
    """The comparison as it holds for 64-bit integers."""
    if isinstance(value, float):
        if sign == "=" and not value.is_integer():
            return Bound(sign, False, None)
        value = math.floor(value) if sign in ("<=", ">") else math.ceil(value)
    if INT64_MIN <= value <= INT64_MAX:
        return Bound(sign, value, pa.int64())
    return Bound(sign, sign != "=" and (sign in ("<", "<=")) == (value > 0), None)


def float_bound(sign: str, value: Number) -> Bound:
    """The comparison as it holds for doubles; a literal between two doubles takes the nearer side."""
    near = float(value)
    if near == value:
        return Bound(sign, near, pa.float64())
    if sign == "=":
        return Bound(sign, False, None)
    if sign in ("<", "<="):
        below = near if near < value else math.nextafter(near, -math.inf)
        return Bound("<=", below, pa.float64())
    above = near if near > value else math.nextafter(near, math.inf)
    return Bound(">=", above, pa.float64())


def _no_null(mask: Any) -> Any:
    return _coalesce([mask, _FALSE]) if mask.null_count else mask


def _negated(inner: Expression) -> str:
    # Of a payload's field, "differs" says more than "not equal": that there is JSON at all.
    if isinstance(inner, Equals | OneOf) and not isinstance(inner.field, Data):
        return inner.differs_text
    if isinstance(inner, Priority) and inner.sign == "=":
        return inner.differs_text
    return f"NOT {_inside(inner)}"


def _inside(expression: Expression) -> str:
    return f"({expression.text})" if isinstance(expression, Join) else expression.text


def _key_text(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _quote(key)


def _quote(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
