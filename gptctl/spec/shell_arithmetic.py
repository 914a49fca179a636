"""The arithmetic of a shell, `$((2 * 4))`, without a shell. Pure."""

from __future__ import annotations

import ast
import re

MAX_NUMBER = 101  # characters: one more than calculate() accepts


def calculate(text: str) -> int | None:
    """Return the value of a text with integers and + - * / ( ) only; None for anything else."""
    if not re.fullmatch(r"[0-9+\-*/() ]{1,100}", text) or "**" in text:
        return None
    try:
        return _value(ast.parse(text.replace("/", "//").strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if not isinstance(node, ast.BinOp):
        raise ValueError
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    # A shell rounds towards zero.
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient
