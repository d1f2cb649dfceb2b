"""Edits the arguments of a call in a program's source code so that each argument keeps its line and its comments."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import libcst as cst

_COMMENT = re.compile(r"#.*")
_NEW_LINE = cst.TrailingWhitespace()
_STEP = "    "
COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


class _Comments(cst.CSTVisitor):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def visit_Comment(self, node: cst.Comment) -> None:
        self.texts.append(node.value)


def comments_in(*nodes: cst.CSTNode) -> list[str]:
    """Return the texts of all comments in some nodes of a program's syntax tree."""
    comments = _Comments()
    for node in nodes:
        node.visit(comments)
    return comments.texts


def lost_comments(before: Sequence[cst.CSTNode], after: Sequence[cst.CSTNode]) -> list[str]:
    """Return the comments in the original nodes `before` that are missing in the nodes `after` that replace them."""
    return list((Counter(comments_in(*before)) - Counter(comments_in(*after))).elements())


@dataclass(frozen=True)
class Argument:
    """An argument of a call, with the whitespace and comments that belong to the argument.

    Attributes:
        arg: The argument itself, without a comma after it.
        before: The whitespace before the argument. If the argument starts a line, this includes comment lines above the
            argument, and the argument's indentation.
        after: The whitespace and comment at the end of the argument's line. None if another argument or the closing
            parenthesis follows on the same line.
    """

    arg: cst.Arg
    before: cst.BaseParenthesizableWhitespace
    after: cst.TrailingWhitespace | None = None

    @property
    def comments(self) -> list[str]:
        """The comments on the lines above the argument, and the comment at the end of the argument's line."""
        return comments_in(self.before, *([self.after] if self.after is not None else []))

    @property
    def indent(self) -> str | None:
        """The indentation of the argument relative to its block, or None if the argument does not start a line."""
        return self.before.last_line.value if isinstance(self.before, cst.ParenthesizedWhitespace) else None

    def with_value(self, keyword: str, value: cst.BaseExpression) -> Argument:
        """Return a copy of the argument with another keyword and value, in the same place."""
        return replace(self, arg=self.arg.with_changes(keyword=cst.Name(keyword), value=value))

    def at_end_of(self, line: cst.TrailingWhitespace | None) -> Argument:
        """Return a copy of the argument in which `line` replaces the whitespace and comment at the end of its line."""
        return replace(self, after=line)

    def below(self, comments: Sequence[str], indent: str) -> Argument:
        """Return a copy of the argument with more comments on the lines above it.

        Args:
            comments: The comments to add, each on its own line.
            indent: The indentation of these lines, and of the argument if it did not start a line before.
        """
        if not comments:
            return self
        lines = [_line(text, indent) for text in comments]
        before = self.before
        if not isinstance(before, cst.ParenthesizedWhitespace):
            before = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(indent))
        return replace(self, before=before.with_changes(empty_lines=[*before.empty_lines, *lines]))


@dataclass(frozen=True)
class Arguments:
    """All arguments of a call, with the whitespace and comments between them.

    Attributes:
        each: The arguments, in order.
        has_last_comma: True if a comma follows the last argument.
        start: The whitespace and comment after the opening parenthesis, at the end of its line. None if an argument
            follows on the same line.
        end: The whitespace before the closing parenthesis.
    """

    each: Sequence[Argument]
    has_last_comma: bool
    start: cst.TrailingWhitespace | None
    end: cst.BaseParenthesizableWhitespace

    @classmethod
    def of(cls, call: cst.Call) -> Arguments:
        """Return the arguments of a call, with the whitespace and comments between them."""
        gaps = [call.whitespace_before_args, *(_gap_after(arg) for arg in call.args)]
        each = [
            Argument(_bare(arg, is_last=arg is call.args[-1]), _above(before), _line_end(after))
            for arg, before, after in zip(call.args, gaps, gaps[1:], strict=False)
        ]
        has_last_comma = bool(call.args) and isinstance(call.args[-1].comma, cst.Comma)
        return cls(each, has_last_comma, _line_end(gaps[0]), _above(gaps[-1]))

    @property
    def indent(self) -> str:
        """The indentation of the first argument that starts a line. Four spaces if none does."""
        return next((each.indent for each in self.each if each.indent is not None), _STEP)

    def named(self, name: str) -> Argument | None:
        """Return the argument with this keyword, or None if the call has no such argument."""
        return next((each for each in self.each if name_of(each.arg) == name), None)

    def without(self, taken: Sequence[Argument]) -> Arguments:
        """Return a copy without some of the arguments and their comments.

        If a removed argument started a line, the next argument on the same line starts it instead.

        Args:
            taken: The arguments to remove.
        """
        left: list[Argument] = []
        line: cst.BaseParenthesizableWhitespace | None = None
        for each in self.each:
            if each in taken:
                line = line or (_without_lines(each.before) if each.indent is not None else None)
            else:
                left.append(replace(each, before=line) if line is not None and each.indent is None else each)
                line = None
        return replace(self, each=left)

    def replaced(self, old: Argument, new: Argument) -> Arguments:
        """Return a copy in which the argument `new` replaces the argument `old`."""
        return replace(self, each=[new if each is old else each for each in self.each])

    def in_call(self, call: cst.Call) -> cst.Call:
        """Return a copy of a call in which these arguments, with their layout, replace the call's own arguments."""
        start = self._gap(self.start, self.each[0].before, self.indent)
        return call.with_changes(args=list(self._joined()), whitespace_before_args=start)

    def _joined(self) -> Iterator[cst.Arg]:
        for one, other in zip(self.each, self.each[1:], strict=False):
            yield one.arg.with_changes(
                comma=cst.Comma(whitespace_after=self._gap(one.after, other.before, self.indent))
            )
        last = self.each[-1]
        end = self._gap(last.after, self.end, self.indent.removesuffix(_STEP))
        if self.has_last_comma:
            yield last.arg.with_changes(comma=cst.Comma(whitespace_after=end))
        else:
            yield last.arg.with_changes(whitespace_after_arg=end)

    @staticmethod
    def _gap(
        after: cst.TrailingWhitespace | None, before: cst.BaseParenthesizableWhitespace, indent: str
    ) -> cst.BaseParenthesizableWhitespace:
        if isinstance(before, cst.ParenthesizedWhitespace):
            return before.with_changes(first_line=after or _NEW_LINE)
        if after is None or after.comment is None:
            return before
        return cst.ParenthesizedWhitespace(after, indent=True, last_line=cst.SimpleWhitespace(indent))


def call_of(function: cst.BaseExpression, arguments: Sequence[Argument], indent: str) -> cst.Call:
    """Return a new call with arguments that are taken from another call.

    The new call is on one line, unless it must contain comments. Comments above the first argument are left out, and so
    are all comments of a single argument. The caller keeps these outside the new call.

    Args:
        function: The function to call.
        arguments: The arguments to pass.
        indent: The indentation of the new call.
    """
    first, *others = arguments
    has_comments = first.after is not None and first.after.comment is not None
    if not others or not (has_comments or any(each.comments for each in others)):
        plain = [each.arg.with_changes(comma=COMMA) for each in arguments]
        return cst.Call(function, [*plain[:-1], plain[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)])
    inside = indent + _STEP
    line = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(inside))
    lines = [replace(first, before=line)]
    lines += [replace(each, before=line).below(comments_in(each.before), inside) for each in others]
    end = line.with_changes(last_line=cst.SimpleWhitespace(indent))
    return Arguments(lines, has_last_comma=True, start=None, end=end).in_call(cst.Call(function))


def name_of(arg: cst.Arg) -> str | None:
    """Return the keyword of an argument, or None for a positional or starred argument."""
    return arg.keyword.value if arg.keyword is not None else None


def _line(comment: str, indent: str) -> cst.EmptyLine:
    return cst.EmptyLine(indent=True, whitespace=cst.SimpleWhitespace(indent), comment=cst.Comment(comment))


def _gap_after(arg: cst.Arg) -> cst.BaseParenthesizableWhitespace:
    return arg.comma.whitespace_after if isinstance(arg.comma, cst.Comma) else arg.whitespace_after_arg


def _bare(arg: cst.Arg, is_last: bool) -> cst.Arg:
    has_comma = isinstance(arg.comma, cst.Comma)
    own = {} if has_comma or not is_last else {"whitespace_after_arg": cst.SimpleWhitespace("")}
    return arg.with_changes(comma=cst.MaybeSentinel.DEFAULT, **own)


def _above(gap: cst.BaseParenthesizableWhitespace) -> cst.BaseParenthesizableWhitespace:
    return gap.with_changes(first_line=_NEW_LINE) if isinstance(gap, cst.ParenthesizedWhitespace) else gap


def _without_lines(gap: cst.BaseParenthesizableWhitespace) -> cst.BaseParenthesizableWhitespace:
    return gap.with_changes(empty_lines=[]) if isinstance(gap, cst.ParenthesizedWhitespace) else gap


def _line_end(gap: cst.BaseParenthesizableWhitespace) -> cst.TrailingWhitespace | None:
    return gap.first_line if isinstance(gap, cst.ParenthesizedWhitespace) else None
