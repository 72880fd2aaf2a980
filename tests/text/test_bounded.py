"""Templates of others end soon and stay small, whatever they ask for; honest ones render as ever."""

from __future__ import annotations

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

from rekindle.errors import BadRequest, ModelRefused, PromptTooLong
from rekindle.text import bounded
from rekindle.text.template import ChatTemplate
from rekindle_sessions.scenes import templating
from tests.text import families

NS = "{% set ns = namespace(x='ab', y='ab') %}"
LONG = "{% set a = 'a' * 1000000 %}"
DAG = (
    "{% set ns = namespace(x=(1,), y=(1,)) %}{% for i in range(99) %}"
    "{% set ns.x = (ns.x, ns.x) %}{% set ns.y = (ns.y, ns.y) %}{% endfor %}"
)
MACRO = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"


def loops(body: str, condition: str = "") -> str:
    return f"{{% for i in range(99999) %}}{{% for j in range(99999){condition} %}}{body}{{% endfor %}}{{% endfor %}}"


def often(body: str, times: int = 99) -> str:
    return f"{NS}{{% for i in range({times}) %}}{body}{{% endfor %}}"


# What would take hours or more memory than there is.
ENDLESS = {
    "loops": loops(""),
    "loops that filter": loops("", " if false"),
    "loops over filters": "{% for i in range(99999) %}{{ range(99999) | select('none') | first }}{% endfor %}",
    "loops of much text": loops("x" * 5_000),
    "loops of many statements": loops("{% if i %}{% endif %}" * 2_000),
    "recursive loop": "{% for x in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
    "recursive macro": MACRO + "{{ m(60) }}",
    "text times number": "{{ 'a' * 4000000000 }}",
    "list times number": "{{ (4000000000 * [1]) | length }}",
    "doubled with +": often("{% set ns.x = ns.x + ns.x %}"),
    "doubled with ~": often("{% set ns.x = ns.x ~ ns.x %}"),
    "doubled in a block": often("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "doubled by join": often("{% set ns.x = [ns.x, ns.x] | join %}"),
    "doubled and escaped": "{% autoescape true %}"
    + often("{% set ns.x = ns.x ~ '<' ~ ns.x %}")
    + "{% endautoescape %}",
    "written often in a macro": LONG + "{% macro m() %}" + "{{ a }}" * 5_000 + "{% endmacro %}{{ m() | length }}",
    "nested lists written": DAG + "{{ ns.x }}",
    "nested lists as JSON": DAG + "{{ ns.x | tojson }}",
    "nested lists compared": DAG + "{{ ns.x == ns.y }}",
    "nested lists tested": DAG + "{{ ns.x is eq(ns.y) }}",
    "nested lists as a key": DAG + "{{ {ns.x: 1} }}",
    "searched": LONG + "{% for i in range(99999) %}{% if 'b' in a %}{% endif %}{% endfor %}",
    "compared": LONG + "{% set b = a + 'b' %}{% for i in range(99999) %}{% if a == b[:-1] %}{% endif %}{% endfor %}",
    "sliced": LONG + "{% for i in range(99999) %}{% set b = a[1:] %}{% endfor %}",
    "center": "{{ 'a' | center(4000000000) }}",
    "ljust": "{{ 'a'.ljust(4000000000) }}",
    "zfill": "{{ '1'.zfill(4000000000) }}",
    "expandtabs": "{{ '\\t'.expandtabs(2000000000) }}",
    "indent": "{{ 'a\\nb' | indent(4000000000) }}",
    "format filter": "{{ '%4000000000d' | format(1) }}",
    "percent": "{{ '%4000000000d' % 1 }}",
    "percent with a star": "{{ '%*d' % (4000000000, 1) }}",
    "format": "{{ '{:4000000000}'.format(1) }}",
    "format of a format": "{{ '{:{}}'.format(1, 4000000000) }}",
    "format often": LONG + "{{ ('{0}' * 99999).format(a) }}",
    "batch": "{{ [1] | batch(4000000000, 'x') | list | length }}",
    "slice": "{{ [1] | slice(4000000000) | list | length }}",
    "replace": LONG + "{{ a | replace('a', a) | length }}",
    "replace method": LONG + "{{ a.replace('', a) | length }}",
    "join": LONG + "{{ range(99999) | join(a) | length }}",
    "join method": LONG + "{{ a.join(range(99999) | map('string')) | length }}",
    "translate": LONG + "{{ a.translate({97: a}) | length }}",
    "split": "{{ (('a ' * 1000000).split() * 1000) | length }}",
    "sum of lists": "{{ ([[1] * 1000] * 99999) | sum(start=[]) | length }}",
    "to_bytes": "{{ (1).to_bytes(4000000000, 'big') }}",
    "indented JSON": "{{ [[[1]]] | tojson(indent=4000000000) }}",
    "wrapped": "{{ ('a ' * 1000000) | wordwrap(1, wrapstring='x' * 1000000) }}",
    "map": "{{ range(99999) | map('center', 100000) | list | length }}",
    "fromkeys": "{% for i in range(99999) %}{% set d = {}.fromkeys(range(99999)) %}{% endfor %}",
}
# What Python itself or a limit on numbers refuses.
FAILING = {
    "power": "{{ 9 ** (9 ** 9) }}",
    "product": often("{% set ns.x = 9 %}")
    + "{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{{ ns.x }}{% endfor %}",
    "squares": NS + "{% set ns.x = 9 %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "long division": "{{ ('f' * 1000000) | int(base=16) // 3 }}",
    "precision": "{{ 5 | round(-100000000) }}",
    "macro without end": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "block without end": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "words of nothing": "{{ lipsum(n=1000000) }}",
}
UNREADABLE = {
    "nested too deep": "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
    "a number of too many digits": "{{ " + "1" * 5_000 + " }}",
    "too many loops in each other": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "too many conditions in each other": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "too many operands": "{{ " + "+".join(["1"] * 10_000) + " }}",
    "an argument twice": "{% macro m(a, a) %}{% endmacro %}",
    "too long": "{{ a }}" * 100_000,
}
MESSAGES = [{"role": "user", "content": "Hello."}]
LITTLE = 1 << 21  # the usual allowance of work is enough for a minute of tests


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_what_would_not_end_or_fit_is_stopped(source: str) -> None:
    template = ChatTemplate({"default": source}, {}, most_work=LITTLE)
    with pytest.raises(PromptTooLong, match=r"more work than|writes more than"):
        template.render(MESSAGES)


@pytest.mark.parametrize("source", FAILING.values(), ids=FAILING)
def test_what_python_refuses_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequest):
        ChatTemplate({"default": source}, {}, most_work=LITTLE).render(MESSAGES)


@pytest.mark.parametrize("source", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_compiled_is_refused(source: str) -> None:
    with pytest.raises(ModelRefused, match=r"the chat template cannot be parsed, line|at most 524,288 are read"):
        ChatTemplate({"default": source}, {})
    assert templating.check(source, templating.Allowed(("a",)))
    with pytest.raises(BadRequest, match="the template fails"):
        templating.render(source, {"a": 1})


def test_the_usual_allowance_ends_too() -> None:
    with pytest.raises(PromptTooLong, match="more work"):
        ChatTemplate({"default": loops("")}, {}).render(MESSAGES)
    with pytest.raises(BadRequest, match="the template fails: it takes more work than a template may do"):
        templating.render(loops(""), {})


def test_text_is_counted_while_it_is_written() -> None:
    template = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}, {})
    messages = [{"content": "x" * 100}] * 10
    assert template.render(messages, most_chars=1_000) == "x" * 1_000
    with pytest.raises(PromptTooLong, match="it writes more than 999 characters"):
        template.render(messages, most_chars=999)
    with pytest.raises(PromptTooLong, match=f"more than {bounded.MOST_WRITTEN} characters"):
        ChatTemplate(
            {"default": "x" * 9_999 + "{% for i in range(99999) %}" + "x" * 9_999 + "{% endfor %}"}, {}
        ).render([])


# Each beside what Jinja gives for it without bounds.
HONEST = (
    "{{ 1 < 2 < 3 }}{{ 3 > 2 > 5 > nothing.at.all }}{{ 'a' in 'abc' in ['abc'] }}{{ 1 == 1.0 }}{{ 2 not in [1, 2] }}",
    "{% for x in [3, 1, 2] if x > 1 %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ x }}{% else %}no{% endfor %}",
    "{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
    "{% for x in [2, 1, 4] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% break %}{% endfor %}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{% endmacro %}{{ m(1, 3, 4) }}{{ m(b=1) }}",
    "{% macro m(a) %}{{ a }}{{ caller() }}{% endmacro %}{% call m(5) %}called{% endcall %}",
    "{% set x %}<{{ 1 }}>{% endset %}{{ x | length }}{% filter upper %}abc{{ x }}{% endfilter %}",
    "{% block a scoped %}{{ 'in' }}{% endblock %}{{ self.a() }}",
    "{{ [1, 2, 3, 4, 5] | batch(2, 0) | list }}{{ [1, 2, 3] | slice(2) | map('join', '-') | list }}",
    "{{ messages | selectattr('n', 'gt', 1) | map(attribute='n') | sum }}{{ [[1], [2]] | sum(start=[]) }}",
    "{{ messages | rejectattr('t') | map(attribute='n') | unique | sort(reverse=True) | join(', ') }}",
    "{{ messages | groupby('t') | map('first') | list }}",
    "{{ {'b': 1, 'a': 2} | dictsort }}{{ 'b a' | title | center(9) }}",
    "{{ '%s-%05.2f' | format('a', 1.5) }}{{ '%(a)s' % {'a': 1} }}{{ '{0:>5}|{a[b]!r}'.format(1, a={'b': 'c'}) }}",
    "{{ 'a,b'.split(',') | join(d='+') }}{{ 'a\nb' | indent(2, first=True) }}{{ 'aXb'.replace('X', '--', 1) }}",
    "{{ '{x}'.format_map({'x': 2}) }}",
    "{{ ','.join(['a'] * 3) }}{{ ''.join('abc' | map('upper')) }}{{ 'ab'.partition('b') }}",
    "{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ -7 / 2 }}{{ 'ab' * 2 }}{{ [1] * 2 }}",
    "{{ 3 * 'x' }}{{ 1.5 * 2 }}{{ 2 ** -1 }}",
    "{{ messages[-1].n }}{{ messages[0:1] }}{{ messages[::-1][0]['t'] }}{{ 'abcdef'[1:-1:2] }}{{ {(1, 2): 3}[1, 2] }}",
    "{{ nothing }}{{ nothing is defined }}{{ nothing | default('d') }}{{ none ~ 1 ~ [1] }}{{ nothing | length }}",
    "{{ '<b>' | e }}{{ '<b>' | safe ~ '<' }}",
    "{% autoescape true %}{{ '<' ~ '&' }}{{ '<b>' | safe + '<' }}{% endautoescape %}",
    "{{ 1 if nothing else 2 }}{{ 'b' is in(['a', 'b']) }}{{ 3 is eq 3 }}{{ 4 is divisibleby 2 }}{{ 'A' is upper }}",
    "{{ 5 | round(-1) }}{{ 1.256 | round(2, 'ceil') }}{{ 'a b c' | wordcount }}{{ 'some words' | wordwrap(4) }}",
    "{{ cycler('a', 'b').next() }}{% set j = joiner(',') %}{{ j() }}{{ j() }}",
    "{{ dict(a=1, **{'b': 2}) }}{{ range(3) | list }}",
    "{{ none | map('upper') | list }}{{ '' | select | list }}",
    "{{ messages[0].items() | list }}{{ messages[0] | items | list }}",
)  # fmt: skip
VALUES = [{"n": 1, "t": "a"}, {"n": 2, "t": ""}, {"n": 2, "t": "b"}]


@pytest.mark.parametrize("source", HONEST)
def test_honest_templates_render_as_without_bounds(source: str) -> None:
    unbounded = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])
    environment = bounded.BoundedEnvironment(extensions=[jinja2.ext.loopcontrols])
    expected = unbounded.from_string(source).render(messages=VALUES)
    assert bounded.render(environment.compiled(source), {"messages": VALUES}) == expected


def test_a_long_conversation_is_within_the_allowance() -> None:
    messages = [{"role": "user" if at % 2 else "assistant", "content": "word " * 20} for at in range(20_000)]
    text = ChatTemplate({"default": families.HERMES}, {}).render(messages)
    assert text.count("<|im_start|>") == 20_001
