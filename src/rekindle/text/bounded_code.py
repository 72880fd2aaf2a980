"""Compile Jinja's syntax trees to Python, with a charge wherever a template could do more than a step's work.

Knows what is charged where, not how much is left: that is in the context of each rendering (see text/bounded).
Operations of negligible cost stay as Jinja compiles them: comparisons with constants, attributes, single elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import Node

from rekindle.text.metering import ENTRY, STEP


class BoundedCode(CodeGenerator):
    """Jinja's code generator; bodies of loops, macros and blocks begin with a charge for what they may do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bodies: dict[int, int] = {}  # what is charged on entry, in addition to their nodes
        self._wrapped: dict[int, str] = {}  # expressions that are wrapped in a call

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        self._bodies |= {id(block.body): ENTRY for block in node.find_all(nodes.Block)}
        super().visit_Template(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        self._bodies[id(node.body)] = STEP
        if node.test is not None:
            # The condition sees every element, the body only those that pass.
            self._wrapped[id(node.test)] = f"(context.charge({STEP + _count(node.test)}) or "
        super().visit_For(node, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> Any:
        self._bodies[id(node.body)] = ENTRY
        return super().macro_body(node, frame)

    def blockvisit(self, nodes: Iterable[Node], frame: Frame) -> None:
        if id(nodes) in self._bodies:
            self.writeline(f"context.charge({self._bodies[id(nodes)] + sum(map(_count, nodes))})")
        super().blockvisit(nodes, frame)

    def visit(self, node: Node, *args: Any, **options: Any) -> Any:
        opening = self._wrapped.pop(id(node), None)
        if opening is None:
            return super().visit(node, *args, **options)
        self.write(opening)
        super().visit(node, *args, **options)
        return self.write(")")

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        fixed = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        if frame.buffer is not None and fixed:
            self.writeline(f"context.charge({fixed})")
        super().visit_Output(node, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        operands: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            operands.append(left.right)
            left = left.left
        self._call("context.add(", [left, *reversed(operands)], frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        expressions = [node.expr, *(operand.expr for operand in node.ops)]
        if all(_is_cheap(left, operand) for left, operand in zip(expressions, node.ops, strict=False)):
            super().visit_Compare(node, frame)
        elif len(node.ops) == 1 and node.ops[0].op in ("in", "notin"):
            self.write("(not " if node.ops[0].op == "notin" else "(")
            self._call("context.has(", expressions, frame)
            self.write(")")
        else:
            self.write("context.compare(")
            self.visit(node.expr, frame)
            for operand in node.ops:
                self.write(f", ({operand.op!r}, lambda: ")
                self.visit(operand.expr, frame)
                self.write(")")
            self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            self._key(node.arg)
            super().visit_Getitem(node, frame)
            return
        self.write("context.cut(")
        self.visit(node.node, frame)
        self.write(", slice(")
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.visit(bound or nodes.Const(None), frame)
            self.write(", ")
        self.write("))")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        for item in node.items:
            self._key(item.key)
        self._literal(node, super().visit_Dict, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._literal(node, super().visit_List, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._literal(node, super().visit_Tuple, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if frame.eval_ctx.volatile:
            self.write("(markup_join if context.eval_ctx.volatile else str_join)")
        else:
            self.write("markup_join" if frame.eval_ctx.autoescape else "str_join")
        self.write("(")
        self._call("context.pieces(", node.nodes, frame)
        self.write(")")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        """Wrap what is written; text at the outermost level is charged when it is output, so not here."""
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("context.write(" if frame.buffer is not None else "(text if type(text := ")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_post(node, frame, finalize)
        else:
            self.write(")" if frame.buffer is not None else ") is str else context.write(text))")

    def _call(self, opening: str, arguments: Iterable[Node], frame: Frame) -> None:
        self.write(opening)
        for argument in arguments:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")

    def _key(self, node: nodes.Expr) -> None:
        """Charge a key that may be a tuple, which is hashed recursively."""
        if isinstance(node, nodes.Name | nodes.Getattr | nodes.Getitem | nodes.Call | nodes.Filter | nodes.Tuple):
            self._wrapped[id(node)] = "context.key("

    def _literal(self, node: nodes.Literal, visit: Callable[[Any, Frame], None], frame: Frame) -> None:
        """Mark a literal: only a value built by the template can hold one object more than once."""
        if all(isinstance(child, nodes.Const) for child in node.iter_child_nodes()):
            visit(node, frame)
            return
        self.write("context.hold(")
        visit(node, frame)
        self.write(")")


def _count(node: Node) -> int:
    return 1 + sum(map(_count, node.iter_child_nodes()))


def _is_cheap(left: nodes.Expr, operand: nodes.Operand) -> bool:
    """Whether the cost of a comparison is bounded by the length of its constant."""
    right = operand.expr
    if operand.op not in ("in", "notin"):
        return isinstance(left, nodes.Const) or isinstance(right, nodes.Const)
    if isinstance(right, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in right.items)
    return isinstance(right, nodes.Const)
