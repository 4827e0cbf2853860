"""A filter: which messages of its topics a subscription reads.

The language, upper-case words and strings in double quotes::

    attributes.env = "prod"          attributes.env != "prod"     attributes."odd key" = "x"
    attributes:env                   hasAttribute("env")
    hasPrefix(attributes.env, "pr")  attributes.env: "pr"
    data.order.amount > 100          data.country = "de"          data.paid = true
    data.country IN ("de", "fr")     attributes.env NOT IN ("test", "dev")
    key = "o-1"                      hasPrefix(key, "o-")         priority >= 5
    AND   OR   NOT (or -)   ( )      NOT binds tightest, then AND, then OR

It holds Google Pub/Sub's filter language and adds payload fields, key and priority. Google refuses
``a AND b OR c`` without parentheses; here AND binds tighter, as everywhere else.

Decisions:

- A condition on something absent is false. ``!=`` is the opposite of ``=``, so it is true when the
  attribute or the key is absent. Google documents it so, and its own test broker does so.
- A payload that is not JSON makes every condition on ``data`` false, ``!=`` too. ``NOT`` of such a
  condition is true: the logic has two values.
- In a JSON payload a missing field is null: ``data.x = null`` holds, ``data.x != null`` means that
  there is something. A value of another type differs: ``"5"`` is not 5, and is neither above nor
  below it. Numbers compare by value, 5 as 5.0, exactly up to 64 bits; one too large for a double is
  infinite.
- ``IN`` is an OR of equalities, ``NOT IN`` an AND of their ``!=``.
- Strings compare by code point and with case. A missing priority is 0.

``parse_filter`` compiles the text once and brings it to canonical form (flattened, sorted, without
repetitions). Filters of equal canonical form are one and the same object, so ``is`` compares them
and a set of filters holds each once. Evaluation runs on columns: see expression.py and batchview.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar
from weakref import WeakValueDictionary

from sparrow.kernel.batchview import INT64_MAX, INT64_MIN, BatchView, positions
from sparrow.kernel.expression import (
    Attribute,
    Comparison,
    Data,
    DataDiffers,
    DataIs,
    DataNumber,
    Equals,
    Expression,
    Field,
    HasAttribute,
    MessageKey,
    Number,
    OneOf,
    Prefix,
    Priority,
    StringOrder,
    conjunction,
    disjunction,
    negation,
)
from sparrow.model.errors import InvalidFilter

FILTER_LENGTH_MAX = 4096
"""Characters of a filter, as written and in canonical form; bounds the cost of one evaluation."""

FILTER_DEPTH_MAX = 32
"""Parentheses and NOTs inside each other."""

_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SIGN = re.compile(r"!=|<=|>=|[=<>:]")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![A-Za-z0-9_.])")
_PLAIN = re.compile(r'[^"\\]*')
_ESCAPE = re.compile(r'\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[0-3][0-7]{2}|["\\/abfnrtv])')
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_CONSTANTS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_CONDITION = 'a condition such as attributes.k = "v", data.k > 1, key = "v" or priority >= 5'

Literal = str | int | float | bool | None
T = TypeVar("T")


class Filter:
    """A compiled filter; made by ``parse_filter`` alone, one object a canonical form."""

    __slots__ = ("__weakref__", "data_names", "expression")

    def __init__(self, expression: Expression) -> None:
        self.expression = expression
        self.data_names = expression.data_names
        """The fields of payloads that must be parsed for it, by their outermost name."""

    def mask(self, batch: Any) -> Any:
        """One boolean a row of the record batch, or of the BatchView that several filters share."""
        if isinstance(batch, BatchView):
            return self.expression.evaluate(batch)
        view = BatchView(batch)
        view.expect(self.data_names)
        return self.expression.evaluate(view)

    def __str__(self) -> str:
        return self.expression.text

    def __repr__(self) -> str:
        return f"Filter({self.expression.text!r})"


_filters: WeakValueDictionary[str, Filter] = WeakValueDictionary()


def parse_filter(text: object) -> Filter | None:
    """The filter that ``text`` describes; None for a blank one, which lets everything pass."""
    if text is None:
        return None
    if not isinstance(text, str):
        raise InvalidFilter(f"a filter is a string, not {type(text).__name__}")
    if not text.strip():
        return None
    _check_text(text)
    expression = _Parser(text).parse()
    _check_size(expression)
    found = _filters.get(expression.text)
    if found is None:
        found = _filters[expression.text] = Filter(expression)
    return found


def _check_text(text: str) -> None:
    if len(text) > FILTER_LENGTH_MAX:
        raise InvalidFilter(
            f"the filter has {len(text)} characters; {FILTER_LENGTH_MAX} are allowed",
            position=FILTER_LENGTH_MAX,
        )
    unpaired = _SURROGATE.search(text)
    if unpaired:
        position = unpaired.start()
        raise InvalidFilter(f"half a character at position {position}", position=position)


def _check_size(expression: Expression) -> None:
    if len(expression.text) > FILTER_LENGTH_MAX:
        raise InvalidFilter(
            f"the filter has {len(expression.text)} characters when written out in full; "
            f"{FILTER_LENGTH_MAX} are allowed",
            position=FILTER_LENGTH_MAX,
        )
    if expression.height > FILTER_DEPTH_MAX:
        raise InvalidFilter(
            f"the filter nests {expression.height} levels deep; {FILTER_DEPTH_MAX} are allowed",
            position=0,
        )


class _Parser:
    """Recursive descent over the text itself; ``_at`` is the position of the next character."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def parse(self) -> Expression:
        expression = self._any()
        if self._at < len(self._text):
            self._expect("AND, OR or the end")
        return expression

    # The levels of binding, loosest first.

    def _any(self) -> Expression:
        parts = [self._all()]
        while self._take_word("OR"):
            parts.append(self._all())
        return disjunction(parts)

    def _all(self) -> Expression:
        parts = [self._one()]
        while self._take_word("AND"):
            parts.append(self._one())
        return conjunction(parts)

    def _one(self) -> Expression:
        if self._take_word("NOT") or self._take("-"):
            return negation(self._nested(self._one))
        if self._take("("):
            expression = self._nested(self._any)
            self._need(")", "AND, OR or )")
            return expression
        return self._condition()

    def _nested(self, parse: Callable[[], Expression]) -> Expression:
        self._depth += 1
        if self._depth > FILTER_DEPTH_MAX:
            self._refuse(f"the filter nests more than {FILTER_DEPTH_MAX} levels deep", self._at)
        expression = parse()
        self._depth -= 1
        self._skip()
        return expression

    # Conditions.

    def _condition(self) -> Expression:
        self._skip()
        start = self._at
        word = self._match(_WORD)
        match word:
            case "attributes":
                return self._attributes()
            case "hasAttribute":
                self._need("(", "(")
                key = self._string("an attribute key in double quotes")
                self._need(")", ")")
                return HasAttribute(key)
            case "hasPrefix":
                return self._has_prefix()
            case "data":
                return self._data_condition(self._data())
            case "key":
                return self._string_condition(MessageKey())
            case "priority":
                return self._priority()
        self._at = start
        self._expect(_CONDITION)

    def _attributes(self) -> Expression:
        if self._take(":"):
            self._skip()
            return HasAttribute(self._key())
        return self._string_condition(self._attribute(". or : and an attribute key"))

    def _attribute(self, expected: str) -> Attribute:
        if not self._text.startswith(".", self._at):
            self._expect(expected)
        self._at += 1
        return Attribute(self._key())

    def _data(self) -> Data:
        path: list[str] = []
        while self._text.startswith(".", self._at):
            self._at += 1
            path.append(self._key())
        if not path:
            self._expect(". and a field of the payload")
        return Data(tuple(path))

    def _has_prefix(self) -> Expression:
        self._need("(", "(")
        field = self._field()
        self._need(",", ", and a prefix in double quotes")
        prefix = self._string("a prefix in double quotes")
        self._need(")", ")")
        return _prefix(field, prefix)

    def _field(self) -> Field:
        self._skip()
        start = self._at
        match self._match(_WORD):
            case "attributes":
                return self._attribute(". and an attribute key")
            case "data":
                return self._data()
            case "key":
                return MessageKey()
        self._at = start
        self._expect("attributes.k, data.k or key")

    def _string_condition(self, field: Field) -> Expression:
        sign = self._sign("=", "!=", ":", "IN")
        if sign in ("IN", "NOT IN"):
            literals = self._list(lambda: self._string("a string in double quotes"))
            found = _one_of(field, [Equals(field, literal) for literal in literals])
            return found if sign == "IN" else negation(found)
        value = self._string("a string in double quotes")
        if sign == ":":
            return _prefix(field, value)
        equality = Equals(field, value)
        return equality if sign == "=" else negation(equality)

    def _priority(self) -> Expression:
        sign = self._sign("=", "!=", "<", "<=", ">", ">=", "IN")
        if sign in ("IN", "NOT IN"):
            found = disjunction(Priority("=", number) for number in self._list(self._whole))
            return found if sign == "IN" else negation(found)
        number = self._whole()
        if sign == "!=":
            return negation(Priority("=", number))
        return Priority(sign, number)

    def _data_condition(self, field: Data) -> Expression:
        sign = self._sign("=", "!=", "<", "<=", ">", ">=", ":", "IN")
        if sign in ("IN", "NOT IN"):
            among = _one_of(field, [_data_equality(field, each) for each in self._list(self._literal)])
            return among if sign == "IN" else DataDiffers(among)
        if sign == ":":
            return _prefix(field, self._string("a string in double quotes"))
        self._skip()
        start = self._at
        literal = self._literal()
        if sign in ("=", "!="):
            equality = _data_equality(field, literal)
            return equality if sign == "=" else DataDiffers(equality)
        if literal is None or isinstance(literal, bool):
            self._at = start
            self._expect(f"a number or a string after {sign}")
        if isinstance(literal, str):
            return StringOrder(field, sign, literal)
        return DataNumber(field, sign, literal)

    # Pieces.

    def _list(self, parse: Callable[[], T]) -> list[T]:
        """Literals in parentheses, separated by commas."""
        self._need("(", "( and literals")
        found = [self._listed(parse)]
        while self._take(","):
            found.append(self._listed(parse))
        self._need(")", ", or )")
        return found

    def _listed(self, parse: Callable[[], T]) -> T:
        self._skip()
        return parse()

    def _sign(self, *allowed: str) -> str:
        self._skip()
        start = self._at
        if self._take_word("IN"):
            return "IN"
        if self._take_word("NOT"):
            if not self._take_word("IN"):
                self._expect("IN")
            return "NOT IN"
        sign = self._match(_SIGN)
        if sign not in allowed:
            self._at = start
            self._expect(f"{', '.join(allowed[:-1])} or {allowed[-1]}")
        assert sign is not None
        return sign

    def _literal(self) -> Literal:
        if self._text.startswith('"', self._at):
            return self._string("a string")
        number = self._number()
        if number is not None:
            return number
        start = self._at
        word = self._match(_WORD)
        if word not in _CONSTANTS:
            self._at = start
            self._expect("a number, a string in double quotes, true, false or null")
        return _CONSTANTS[word]

    def _whole(self) -> Number:
        self._skip()
        number = self._number()
        if number is None:
            self._expect("a number")
        return number

    def _number(self) -> Number | None:
        start = self._at
        digits = self._match(_NUMBER)
        if digits is None:
            return None
        value: Number = float(digits)
        if math.isinf(value):
            self._refuse(f"the number at position {start} is out of range", start)
        exact = int(digits) if digits.lstrip("-").isdigit() else value
        if exact == int(exact) and INT64_MIN <= exact <= INT64_MAX:
            return int(exact)
        return value

    def _key(self) -> str:
        if self._text.startswith('"', self._at):
            return self._string("a key")
        key = self._match(_KEY)
        if key is None:
            self._expect("a key of letters, digits, _ and -, or any other in double quotes")
        return key

    def _string(self, expected: str) -> str:
        self._skip()
        start = self._at
        if not self._text.startswith('"', start):
            self._expect(expected)
        self._at += 1
        parts: list[str] = []
        while True:
            parts.append(self._match(_PLAIN) or "")
            if self._at >= len(self._text):
                self._expect(f'a closing " for the string that begins at position {start}')
            if self._text[self._at] == '"':
                break
            parts.append(self._escape())
        self._at += 1
        return self._joined(parts, start)

    def _escape(self) -> str:
        start = self._at
        escape = self._match(_ESCAPE)
        if escape is None:
            self._refuse(
                f"unknown escape at position {start}: expected one of "
                r"\" \\ \n \t \uXXXX \xHH or three octal digits",
                start,
            )
        if escape[1] in "ux":
            return chr(int(escape[2:], 16))
        return chr(int(escape[1:], 8)) if escape[1].isdigit() else _ESCAPED.get(escape[1], escape[1])

    def _joined(self, parts: list[str], start: int) -> str:
        joined = "".join(parts)
        if _SURROGATE.search(joined):
            try:
                return joined.encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeDecodeError:
                self._refuse(f"the string at position {start} holds half a character", start)
        return joined

    def _match(self, expression: re.Pattern[str]) -> str | None:
        found = expression.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return found.group()

    def _skip(self) -> None:
        self._match(_SPACE)

    def _take(self, token: str) -> bool:
        self._skip()
        if not self._text.startswith(token, self._at):
            return False
        self._at += len(token)
        return True

    def _take_word(self, word: str) -> bool:
        self._skip()
        found = _WORD.match(self._text, self._at)
        if found is None or found.group() != word:
            return False
        self._at = found.end()
        return True

    def _need(self, token: str, expected: str) -> None:
        if not self._take(token):
            self._expect(expected)

    def _expect(self, expected: str) -> NoReturn:
        self._skip()
        rest = self._text[self._at :]
        word = _WORD.match(rest)
        found = word.group() if word else rest[:1]
        shown = f"found {found!r}" if found else "the filter ended"
        self._refuse(f"expected {expected} at position {self._at}, {shown}", self._at)

    def _refuse(self, message: str, position: int) -> NoReturn:
        raise InvalidFilter(message, position=position)


def _prefix(field: Field, prefix: str) -> Expression:
    # Everything that is there begins with nothing.
    if not prefix and isinstance(field, Attribute):
        return HasAttribute(field.key)
    return Prefix(field, prefix)


def _one_of(field: Field, equalities: list[Comparison] | list[Equals]) -> Comparison:
    found = OneOf(field, equalities)
    return equalities[0] if len({equality.text for equality in equalities}) == 1 else found


def _data_equality(field: Data, literal: Literal) -> Comparison:
    if literal is None or isinstance(literal, bool):
        return DataIs(field, literal)
    if isinstance(literal, str):
        return Equals(field, literal)
    return DataNumber(field, "=", literal)


__all__ = [
    "FILTER_DEPTH_MAX",
    "FILTER_LENGTH_MAX",
    "BatchView",
    "Filter",
    "parse_filter",
    "positions",
]
