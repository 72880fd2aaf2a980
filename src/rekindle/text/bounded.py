"""Third-party Jinja templates: sandboxed, and bounded in work and output.

Owns the environment whose compiled templates charge every iteration, call, filter, operator and piece of text to the
meter of their rendering (see text/metering), and how a template is compiled and rendered. A template that would loop
forever, keep doubling a text or recurse fails with Exceeded within seconds, whatever its input; one that cannot be
compiled fails with TemplateSyntaxError, whichever error Python raised.

Always true: a rendering ends, and never creates more characters than its allowance of work has units.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
from markupsafe import EscapeFormatter, Markup

from rekindle.text.bounded_code import BoundedCode
from rekindle.text.metered_filters import added, metered
from rekindle.text.metering import (
    CALL,
    ELEMENT,
    ENTRY,
    LINEAR,
    SLOW,
    Exceeded,
    Meter,
    compared,
    compute,
    flat,
    method,
    padding,
)

_Read = TypeVar("_Read", jinja2.nodes.Template, types.CodeType)

_SMALL = 1 << 64
MOST_SOURCE = 1 << 19  # characters of a template; the longest in use have some ten thousand
MOST_WRITTEN = 64 << 20
MOST_WORK = 1 << 27
# The errors a template may fail with, apart from Jinja's own.
FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
_COMPARING_TESTS = (
    "in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le",
)  # fmt: skip


class TooLong(Exceeded):
    """The text became longer than allowed."""


class BoundedContext(jinja2.runtime.Context):
    """The variables of one rendering, and its meter; compiled templates call these methods by name."""

    meter: Meter
    charge: Callable[[int], None]

    def start(self, meter: Meter) -> None:
        """Charge everything to this meter from now on."""
        self.meter = meter
        self.charge = meter.charge

    def derived(self, locals: dict[str, Any] | None = None) -> BoundedContext:
        """The context with further variables."""
        context = super().derived(locals)
        assert isinstance(context, BoundedContext)
        context.start(self.meter)
        return context

    def write(self, value: Any) -> str:
        """Return the text of a value, charging what is not charged elsewhere."""
        if type(value) is not str and (self.meter.nests or isinstance(value, jinja2.utils.Namespace)):
            self.meter.charge(self.meter.sized(value))
        text = str(value)
        self.meter.charge(len(text))
        return text

    def pieces(self, *values: Any) -> list[str]:
        """The operands of `~`."""
        for value in values:
            if isinstance(value, str):
                self.meter.charge(len(value))
        return [value if isinstance(value, str) else self.write(value) for value in values]

    def add(self, *values: Any) -> Any:
        """The value of `a + b + c`."""
        length = 0
        for value in values:
            if type(value) is not str:
                return functools.reduce(
                    lambda left, right: compute(self.meter, "+", (left, right), operator.add), values
                )
            length += len(value)
        self.meter.charge(length)
        return "".join(values)

    def has(self, left: Any, right: Any) -> bool:
        """Whether the right value holds the left one."""
        self.meter.charge(len(right) if type(right) is str else compared(self.meter, left, "in", right))
        return left in right

    def compare(self, left: Any, *others: tuple[str, Callable[[], Any]]) -> Any:
        """The value of `a < b < c`; what comes after a false one is not evaluated."""
        result: Any = True
        for name, later in others:
            right = later()
            if type(left) is not int or type(right) is not int:
                self.meter.charge(compared(self.meter, left, name, right))
            result = _COMPARISONS[name](left, right)
            if not result:
                break
            left = right
        return result

    def hold(self, value: Any) -> Any:
        """Return a list or mapping that the template has built; it may hold a value twice."""
        self.meter.nests = True
        return value

    def key(self, value: Any) -> Any:
        """Return a value used as a key, charged: tuples are hashed recursively."""
        if type(value) is tuple:
            self.meter.charge(self.meter.sized(value))
        return value

    def cut(self, value: Any, part: slice) -> Any:
        """A slice of a value."""
        if isinstance(value, str | bytes | list | tuple):
            taken = len(range(*part.indices(len(value))))
            self.meter.charge(taken if isinstance(value, str | bytes) else ELEMENT * (1 + taken))
        return value[part]


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An immutable sandbox whose templates can only be rendered by `render`, within an allowance."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    context_class = BoundedContext
    code_generator_class = BoundedCode

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, **options)
        del self.globals["lipsum"]  # random text of any requested length
        for name, work in list(self.filters.items()):
            self.filters[name] = metered(name, work)
        self.filters["sum"] = added
        for name in _COMPARING_TESTS:
            self.tests[name] = _metered_test(self.tests[name])

    def parse(self, source: str, name: str | None = None, filename: str | None = None) -> jinja2.nodes.Template:
        """The syntax tree of a template. Raises TemplateSyntaxError, whatever is wrong with it."""
        return _read(source, lambda: super(BoundedEnvironment, self).parse(source, name, filename))

    def compiled(self, source: str) -> jinja2.Template:
        """The template, ready to be rendered. Raises TemplateSyntaxError, whatever is wrong with it."""
        return self.loaded(self.code(source))

    def code(self, source: str) -> types.CodeType:
        """What a template is compiled to, for any environment with the same options; raises as `compiled`."""
        return _read(source, lambda: self.compile(source))

    def loaded(self, code: types.CodeType) -> jinja2.Template:
        """The template that was compiled to this code, ready to be rendered here."""
        return self.template_class.from_code(self, code, self.make_globals(None))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """The value of `left operator right`."""
        whole = type(left) is int and type(right) is int and operator != "**"
        if whole and -_SMALL < left < _SMALL and -_SMALL < right < _SMALL:
            return self.binop_table[operator](left, right)
        assert isinstance(context, BoundedContext)
        return compute(context.meter, operator, (left, right), self.binop_table[operator])

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call; methods of built-in values are charged before they run."""
        assert isinstance(__context, BoundedContext)
        meter = __context.meter
        kind = type(__obj)
        meter.charge(4 * ENTRY if kind is jinja2.runtime.LoopContext else CALL)
        if kind is types.BuiltinMethodType:
            if type(__obj.__self__) is str and __obj.__name__ in LINEAR:
                meter.charge(len(__obj.__self__))
                own = _own(kwargs) if kwargs else kwargs
                return __obj(*args, **own)
            args = _charged(meter, __obj, args, kwargs)
        elif kind is types.MethodType:
            args = _charged(meter, __obj, args, kwargs)
        elif kind is jinja2.runtime.Macro:
            meter.nests |= __obj.catch_varargs or __obj.catch_kwargs
        elif kind is type:
            meter.nests |= not issubclass(__obj, jinja2.utils.Namespace)
            meter.charge(SLOW * sum(map(flat, args)))
        elif kind is types.FunctionType and isinstance(getattr(__obj, "__wrapped__", None), types.BuiltinMethodType):
            return _formatted(__self, meter, __obj, args, _own(kwargs))
        return super().call(__context, __obj, *args, **kwargs)


def render(
    template: jinja2.Template, values: Mapping[str, Any], *, most: int = MOST_WRITTEN, work: int = MOST_WORK
) -> str:
    """Render the template with these values.

    Raises TooLong if the text would have more than `most` characters, Exceeded if it takes more than `work` units, and
    the other errors of the template: Jinja's and `FAILURES`.
    """
    context = template.new_context(dict(values))
    assert isinstance(context, BoundedContext)
    context.start(Meter(work))
    written: list[str] = []
    length = 0
    for piece in template.root_render_func(context):
        length += len(piece)
        if length > most:
            raise TooLong(f"it writes more than {most} characters")
        written.append(piece)
    return "".join(written)


def _read(source: str, work: Callable[[], _Read]) -> _Read:
    if len(source) > MOST_SOURCE:
        raise jinja2.TemplateSyntaxError(f"it has more than {MOST_SOURCE} characters", 1)
    try:
        return work()
    except jinja2.TemplateSyntaxError:
        raise
    # Nesting too deep, numbers of too many digits, more nested loops than Python compiles.
    except (SyntaxError, AssertionError, *FAILURES) as error:
        message = f"it cannot be compiled: {type(error).__name__}: {error}"
        raise jinja2.TemplateSyntaxError(message, 1) from error


@jinja2.pass_context
def _written(context: Any, value: Any) -> Any:
    """Charge a value that is about to be written."""
    return value if isinstance(value, str) and not context.charge(len(value)) else context.write(value)


def _metered_test(work: Any) -> Callable[..., Any]:
    @jinja2.pass_context
    def test(context: Any, left: Any, right: Any) -> Any:
        context.charge(CALL + compared(context.meter, left, "in" if work.__name__ == "test_in" else "eq", right))
        return work(left, right)

    return test


def _own(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments written in the template: Jinja adds the variables of loops and blocks."""
    return {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}


def _charged(meter: Meter, bound: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Charge the arguments of a bound method; return them with iterators as lists."""
    owner = bound.__self__
    args = tuple([list(meter.all_of(value)) if isinstance(value, Iterator) else value for value in args])
    given = [*args, *_own(kwargs).values()] if kwargs else list(args)
    for value in given:
        if type(value) is tuple:
            meter.charge(meter.sized(value))
    if isinstance(owner, type):
        meter.nests = True
        meter.charge(SLOW * sum(map(flat, given)))
    elif isinstance(owner, str | bytes | int | float | list | tuple | dict | set | frozenset):
        meter.charge(method(meter, bound.__name__, owner, given))
    elif isinstance(owner, jinja2.runtime.LoopContext):
        meter.charge(sum(map(meter.sized, given)))
    return args


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    def __init__(self, env: BoundedEnvironment, meter: Meter, **options: Any) -> None:
        super().__init__(env, **options)
        self._meter = meter

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        value, first = super().get_field(field_name, args, kwargs)
        self._meter.charge(CALL + self._meter.sized(value))
        return value, first

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._meter.charge(padding(format_spec))
        return super().format_field(value, format_spec)


class _EscapingFormatter(_Formatter, EscapeFormatter):
    pass


def _formatted(
    environment: BoundedEnvironment, meter: Meter, wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Return `text.format(...)`: Jinja's sandbox passes a wrapper of the text's method."""
    text = wrapper.__wrapped__.__self__
    if wrapper.__name__ == "format_map":
        if kwargs or len(args) != 1:
            raise TypeError("format_map() takes one argument and no keywords")
        (kwargs,) = args
        args = ()
    meter.charge(len(text))
    if isinstance(text, Markup):
        escaping = _EscapingFormatter(environment, meter, escape=text.escape)
        return type(text)(escaping.vformat(text, args, kwargs))
    return _Formatter(environment, meter).vformat(text, args, kwargs)
