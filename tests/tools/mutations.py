"""Small changes to the source of a module that its tests should notice."""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
SAID = {"logger", "warnings"}
"""Messages to users are not changed, including those of errors."""
ON_A_GPU = {"_StepGraphs"}
"""Not changed, like statements that name CUDA: `test_gpu.py` tests these."""


@dataclass(frozen=True)
class Mutant:
    """The bytes `[start:end]` of `file`, replaced by `text`."""

    file: str
    lines: tuple[int, int]
    """First and last line, one of which a test has to execute to notice the change."""
    start: int
    end: int
    before: str
    text: str

    @property
    def name(self) -> str:
        before, after = (" ".join(t.split()) for t in (self.before, self.text))
        return f"{self.file}:{self.lines[0]}+{self.start}: {before} -> {after}"

    def source(self, whole: bytes) -> bytes:
        return whole[: self.start] + self.text.encode() + whole[self.end :]


def mutants(root: Path, file: str) -> Iterator[Mutant]:
    """Yield all mutants of a module, in the order of its source."""
    whole = (root / file).read_bytes()
    begins = [0]
    for line in whole.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    for node, changed in _changes(ast.parse(whole)):
        start = begins[node.lineno - 1] + node.col_offset
        end = begins[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(changed)
        if isinstance(changed, ast.expr):
            text = f"({text})"
        lines, before = (node.lineno, node.end_lineno), whole[start:end].decode()
        yield Mutant(file, lines, start, end, before, text)


Change = tuple[ast.AST, ast.AST]
"""A node and its replacement."""


def _changes(node: ast.AST) -> Iterator[Change]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise):
            yield child, ast.Pass()
        if not _is_left_alone(child) and child not in _annotations(node):
            yield from _changed(child)
            yield from _changes(child)


def _annotations(node: ast.AST) -> list[ast.AST]:
    names = ("annotation", "returns")
    return [getattr(node, n, None) for n in names] + getattr(node, "decorator_list", [])


def _is_left_alone(node: ast.AST) -> bool:
    """Return whether the node is a message, or only used by type checkers or GPUs."""
    if isinstance(node, ast.ClassDef) and node.name in ON_A_GPU:
        return True
    if isinstance(node, ast.stmt) and not hasattr(node, "body"):
        if _names_cuda(node):
            return True
    if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Raise):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[0] in SAID


def _names_cuda(node: ast.AST) -> bool:
    return "cuda" in ast.unparse(node).lower()


def _changed(node: ast.AST) -> Iterator[Change]:
    new = copy.deepcopy(node)
    if isinstance(node, ast.BoolOp | ast.Compare) and _names_cuda(node):
        return
    match new:
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp() if type(new.op) in OPERATORS:
            new.op = OPERATORS[type(new.op)]()
            yield node, new
        case ast.Compare():
            new.ops[0] = OPERATORS[type(new.ops[0])]()
            yield node, new
        case ast.UnaryOp():
            yield node, new.operand
        case ast.Constant(value=bool()):
            yield node, ast.Constant(not new.value)
        case ast.Constant(value=int() | float()):
            yield node, ast.Constant(new.value + 1)
        case ast.If() | ast.While() | ast.IfExp() if "cuda" not in ast.unparse(
            new.test
        ):
            yield node.test, ast.UnaryOp(ast.Not(), new.test)
        case ast.comprehension(ifs=[first, *_]):
            yield node.ifs[0], ast.UnaryOp(ast.Not(), first)
        case ast.Return(value=ast.expr()) if ast.unparse(new.value) != "None":
            yield node, ast.Return(ast.Constant(None))
        case ast.Call(args=[first, second, *rest]) if not _symmetric(new):
            new.args = [second, first, *rest]
            yield node, new
        case ast.Continue():
            yield node, ast.Break()
    if _has_effect(node):
        yield node, ast.Pass()


def _symmetric(call: ast.Call) -> bool:
    return ast.unparse(call.func) in ("min", "max", "torch.minimum", "torch.maximum")


def _has_effect(node: ast.AST) -> bool:
    """Return whether the statement can be removed while the others stay valid."""
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.AugAssign)
