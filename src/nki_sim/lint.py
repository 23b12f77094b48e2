"""Python that an NKI compiler would refuse, found by reading the kernel's source.

NKI 0.3 to 0.6 parse a subset of Python; NKI 0.7 traces all of it, so for 0.7 only names that no
longer exist and reads of mutable outside state are reported. Sources: the language guide, release
notes, migration guide, and what AWS's kernel library uses in hundreds of functions.
"""

import ast
import builtins
import inspect
import os
import textwrap
import types
from dataclasses import dataclass
from enum import Enum

from .arch import DEFAULT_VERSION

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep

# Names of earlier generations: since when they are gone, and what replaced them.
REMOVED = {
    "arange": ("0.3", "index with slices and nl.ds"),
    "mgrid": ("0.3", "index with slices and nl.ds"),
    "par_dim": ("0.3", "dimension 0 of a tile is the partition"),
    "spmd_dim": ("0.3", "launch with kernel[lnc]"),
    "nc": ("0.3", "launch with kernel[lnc]"),
    "load_transpose2d": ("0.3", "nisa.dma_transpose"),
    "simulate_kernel": ("0.3", "nki.simulate(kernel)(...)"),
    "precise_schedule": ("0.3", "nl.no_reorder() or kernel.with_schedule(...)"),
    "tensor_copy_dynamic_src": ("0.4", "nisa.tensor_copy with .ap(scalar_offset=...)"),
    "tensor_copy_dynamic_dst": ("0.4", "nisa.tensor_copy with .ap(scalar_offset=...)"),
    "dynamic_range": ("0.7", "nl.fori_loop"),
}
REMOVED_ARGUMENTS = {
    "mask": ("0.3", "clip the slice with min()"),
    "dst_rmw_op": ("0.3", "nisa.dma_compute"),
    "imm": ("0.3", "register_move(dst, src=...)"),
    "platform_target": ("0.3", "set NEURON_PLATFORM_TARGET_OVERRIDE"),
}
_KEEPS_IMM = {"nc_match_replace8"}  # this instruction still has an argument of that name

_NODES = {
    ast.ListComp: "list comprehension",
    ast.SetComp: "set comprehension",
    ast.DictComp: "dict comprehension",
    ast.GeneratorExp: "generator expression",
    ast.Lambda: "lambda",
    ast.Try: "try/except",
    ast.TryStar: "try/except",
    ast.Raise: "raise",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.Yield: "generator (yield)",
    ast.YieldFrom: "generator (yield from)",
    ast.Await: "await",
    ast.AsyncFunctionDef: "async function",
    ast.AsyncFor: "async for",
    ast.AsyncWith: "async with",
    ast.Set: "set literal",
    ast.Delete: "del",
    ast.Match: "match",
    ast.NamedExpr: "assignment expression (:=)",
    ast.Starred: "star expression",
}
_CALLS = {
    "enumerate",
    "zip",
    "sum",
    "any",
    "all",
    "abs",
    "sorted",
    "map",
    "filter",
    "reversed",
    "set",
    "eval",
    "exec",
    "open",
    "getattr",
    "setattr",
    "vars",
    "globals",
    "iter",
    "next",
}
_BUFFERS = {"sbuf", "psum", "hbm", "shared_hbm", "private_hbm"}


@dataclass(frozen=True)
class Finding:
    """One construct outside the documented subset, with its place in the kernel's file."""

    file: str
    line: int
    construct: str
    reason: str

    def __str__(self):
        return f"{self.file}:{self.line}: {self.construct}: {self.reason}"


def lint(kernel, version=DEFAULT_VERSION):
    """Findings for a kernel and every plain function that it reaches, in source order.

    kernel    a function or a jitted kernel
    version   NKI version whose compiler is asked; before 0.7 it parses a subset of Python
    Returns a list of Finding, empty when nothing is outside the documented subset. A function
    whose source cannot be read, such as a lambda, is a finding too: nothing is known about it.
    """
    entry = inspect.unwrap(getattr(kernel, "fn", kernel))
    findings, queue, seen = [], [entry], set()
    while queue:
        fn = queue.pop(0)
        if fn in seen:
            continue
        seen.add(fn)
        tree = _source(fn)
        if tree is None:
            code = fn.__code__
            findings.append(
                Finding(
                    code.co_filename,
                    code.co_firstlineno,
                    f"source not available of {fn.__name__}",
                    "lint reads the source of a `def` in a file or notebook cell",
                )
            )
            continue
        visitor = _Visitor(fn, tree, version, entry=fn is entry)
        visitor.visit(tree)
        findings += visitor.findings
        queue += visitor.called
    return sorted(set(findings), key=lambda f: (f.file, f.line, f.construct))


def _source(fn):
    try:
        lines, start = inspect.getsourcelines(fn)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    found = tree.body and isinstance(tree.body[0], ast.FunctionDef)
    if not found or tree.body[0].name != fn.__name__:
        return None  # a lambda, or code whose file is not its source
    return ast.increment_lineno(tree, start - 1).body[0]


class _Visitor(ast.NodeVisitor):
    def __init__(self, fn, tree, version, entry):
        self.fn, self.tree, self.version, self.entry = fn, tree, version, entry
        self.file = fn.__code__.co_filename
        self.parsed = version < "0.7"
        self.findings, self.called = [], []
        self.scopes = []  # names that each enclosing function binds, innermost last
        self.stateful = set()  # names of outside state that were reported
        self.tensors, self.dicts = set(), set()  # names that hold one, as far as can be read
        if entry:
            self.tensors |= {a.arg for a in ast.walk(tree.args) if isinstance(a, ast.arg)}

    def report(self, node, construct, reason):
        self.findings.append(Finding(self.file, node.lineno, construct, reason))

    def outside(self, name):
        """What a free name means to the function: a closure cell, a global or a builtin."""
        if any(name in scope for scope in self.scopes):
            return None
        code = self.fn.__code__
        if name in code.co_freevars and self.fn.__closure__:
            cell = self.fn.__closure__[code.co_freevars.index(name)]
            try:
                return cell.cell_contents
            except ValueError:
                return None
        return self.fn.__globals__.get(name, getattr(builtins, name, None))

    def meaning(self, node):
        """The value of `name` or `name.attribute...` outside the function, None if it has none."""
        if isinstance(node, ast.Name):
            return self.outside(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.meaning(node.value)
            return None if owner is None else getattr(owner, node.attr, None)
        return None

    # ------------------------------------------------------------------ nodes
    def visit(self, node):
        name = _NODES.get(type(node))
        if name and self.parsed:
            self.report(node, name, "not in the subset of Python that NKI before 0.7 compiles")
        scope = _bound(node)
        if scope is None:
            super().visit(node)
            return
        if isinstance(node, ast.FunctionDef):
            self._check_definition(node)
            # What these say is evaluated outside; annotations are not part of the compiled body.
            for default in [*node.args.defaults, *node.args.kw_defaults]:
                if default is not None:
                    self.visit(default)
        self.scopes.append(scope)
        if isinstance(node, ast.FunctionDef):
            for statement in node.body:
                self.visit(statement)
        else:
            super().visit(node)
        self.scopes.pop()

    def _check_definition(self, node):
        if node is not self.tree:
            for decorator in node.decorator_list:
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                value = self.meaning(called)
                if getattr(value, "__name__", "") == "jit" and _of_nki(value):
                    self._report_jitted(decorator, node.name)
            return
        if self.parsed and self.entry:
            if node.args.kwonlyargs:
                self.report(
                    node,
                    "keyword-only argument",
                    "not allowed in a kernel's signature before NKI 0.7",
                )
            if node.args.vararg or node.args.kwarg:
                self.report(node, "*args or **kwargs", "a kernel's arguments are named")

    def _report_jitted(self, node, name):
        self.report(
            node,
            f"call of @nki.jit {name}",
            "only the entry is decorated; helpers are plain functions",
        )

    def visit_AnnAssign(self, node):
        if node.value:
            self.visit(node.value)
        self.visit(node.target)

    def visit_ClassDef(self, node):
        names = [
            b.attr if isinstance(b, ast.Attribute) else getattr(b, "id", "") for b in node.bases
        ]
        if self.parsed and names != ["NKIObject"]:
            self.report(node, "class", "the only base allowed before NKI 0.7 is NKIObject")
        self.generic_visit(node)

    def visit_Compare(self, node):
        if self.parsed and any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            self.report(
                node, "is / is not", "refused by the NKI 0.3 notes; write == None or != None"
            )
        self.generic_visit(node)

    def visit_With(self, node):
        for item in node.items:
            if self.parsed and _callee(item.context_expr) != "no_reorder":
                self.report(node, "with", "the only context before NKI 0.7 is nl.no_reorder()")
        self.generic_visit(node)

    def visit_Dict(self, node):
        for key in node.keys:
            constant = isinstance(key, ast.Constant)
            if self.parsed and (key is None or (constant and not isinstance(key.value, str))):
                self.report(node, "dict key", "only string keys before NKI 0.7")
        self.generic_visit(node)

    def visit_Subscript(self, node):
        if isinstance(node.ctx, ast.Store):
            self._check_item_assignment(node)
        for part in ast.walk(node.slice):
            division = isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div)
            number = isinstance(part, ast.Constant) and isinstance(part.value, float)
            if division or number:
                self.report(part, "float index", "indices are integers; divide with //")
        self.generic_visit(node)

    def visit_Assign(self, node):
        for target in node.targets:
            if isinstance(target, ast.Name):
                if isinstance(node.value, ast.Call) and self._is_nki(node.value):
                    self.tensors.add(target.id)
                elif isinstance(node.value, ast.Dict):
                    self.dicts.add(target.id)
        self.generic_visit(node)

    def _check_item_assignment(self, node):
        """`t[...] = y` writes no tensor; `tiles[0] = t` of a list is fine."""
        key, name = node.slice, getattr(node.value, "id", "")
        constant = key.value if isinstance(key, ast.Constant) else None
        if name in self.dicts:
            if self.parsed and isinstance(key, ast.Constant) and not isinstance(constant, str):
                self.report(node, "dict key", "only string keys before NKI 0.7")
            return
        ranges = isinstance(key, (ast.Slice, ast.Tuple)) or constant is Ellipsis
        if ranges or (name in self.tensors and not isinstance(constant, str)):
            self.report(
                node,
                "assignment to tensor elements",
                "write with an instruction such as nisa.tensor_copy",
            )

    def visit_While(self, node):
        if not self.parsed and isinstance(node.test, ast.Name):
            self.report(node, "while register", "removed in NKI 0.7; use nl.while_loop")
        self.generic_visit(node)

    def visit_Attribute(self, node):
        self._check_removed(node, node.attr)
        value = self.meaning(node)
        if isinstance(self.meaning(node.value), types.ModuleType):
            self._follow(value, node)
        if not _of_nki(self.meaning(node.value)):
            self._check_state(node, ast.unparse(node), value)
        self.generic_visit(node)

    def visit_Name(self, node):
        if node.id == "neuronxcc":
            self.report(node, "neuronxcc.nki", "removed in NKI 0.4; import nki")
        value = self.outside(node.id)
        self._follow(value, node)
        self._check_state(node, node.id, value)

    def visit_Call(self, node):
        callee = _callee(node)
        if isinstance(node.func, ast.Name):
            value = self.outside(node.func.id)
            if (
                self.parsed
                and node.func.id in _CALLS
                and value is getattr(builtins, node.func.id, object())
            ):
                self.report(
                    node,
                    f"{node.func.id}()",
                    "no AWS kernel calls it; assume unsafe before NKI 0.7",
                )
        for keyword in node.keywords:
            if keyword.arg in REMOVED_ARGUMENTS and callee not in _KEEPS_IMM and self._is_nki(node):
                since, instead = REMOVED_ARGUMENTS[keyword.arg]
                self.report(node, f"{keyword.arg}=", f"removed in NKI {since}; {instead}")
        given = [k.value for k in node.keywords if k.arg == "buffer"]
        given += node.args[1:] if self._is_nki(node) else []
        for literal in [g.value for g in given if isinstance(g, ast.Constant)]:
            if isinstance(literal, str) and literal in _BUFFERS:
                self.report(node, "buffer as a string", f"write nl.{literal}")
        self.generic_visit(node)

    # ------------------------------------------------------------------ what names mean
    def _is_nki(self, node):
        root = node.func
        while isinstance(root, ast.Attribute):
            root = root.value
        return _of_nki(self.meaning(root))

    def _check_removed(self, node, name):
        if name not in REMOVED or not isinstance(node.value, ast.Name):
            return
        value = self.outside(node.value.id)
        module = getattr(value, "__name__", "") if isinstance(value, types.ModuleType) else ""
        since, instead = REMOVED[name]
        if module.startswith(("nki", "neuronxcc")) and self.version >= since:
            self.report(node, f"{node.value.id}.{name}", f"removed in NKI {since}; {instead}")

    def _follow(self, value, node):
        """Lint helpers that the kernel reaches; refuse jitted ones."""
        if type(value).__name__ == "Kernel" and hasattr(value, "fn"):
            self._report_jitted(node, value.fn.__name__)
        elif isinstance(value, types.FunctionType) and not _foreign(value):
            self.called.append(inspect.unwrap(value))

    def _check_state(self, node, name, value):
        """Reads of mutable globals, closures and attributes: a compiled kernel may keep the old."""
        if not _mutable(value) or not isinstance(node.ctx, ast.Load) or name in self.stateful:
            return
        self.stateful.add(name)
        self.report(
            node,
            f"outside state '{name}'",
            f"a mutable {type(value).__name__}: kernels must be pure, because a compiled one may "
            "keep an old value; pass it or make it a tuple",
        )


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _bound(node):
    """The names that a function, lambda or comprehension binds itself; None for other nodes."""
    if isinstance(node, _COMPREHENSIONS):
        names, parts = set(), [g.target for g in node.generators]
    elif isinstance(node, (ast.FunctionDef, ast.Lambda)):
        names = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        parts = list(node.body) if isinstance(node, ast.FunctionDef) else []
    else:
        return None
    while parts:
        part = parts.pop()
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names.add(part.id)
        elif isinstance(part, (ast.Import, ast.ImportFrom)):
            names |= {(a.asname or a.name).split(".")[0] for a in part.names}
        elif isinstance(part, (ast.FunctionDef, ast.ClassDef)):
            names.add(part.name)
        # What these bind is seen in themselves only.
        if not isinstance(part, (ast.FunctionDef, ast.ClassDef, ast.Lambda, *_COMPREHENSIONS)):
            parts += ast.iter_child_nodes(part)
    return names


def _of_nki(value):
    """True for NKI's modules and for what they define."""
    if not isinstance(value, types.ModuleType):
        value = getattr(value, "__module__", None) or type(value).__module__
        return str(value).split(".")[0] in ("nki", "nki_sim", "neuronxcc")
    return value.__name__.split(".")[0] in ("nki", "nki_sim", "neuronxcc")


def _mutable(value):
    """True for containers, arrays, and instances of classes whose attributes can be set."""
    if isinstance(value, (list, dict, set, bytearray)):
        return True
    kind = type(value)
    if any(
        c.__name__ in ("ndarray", "Tensor") and c.__module__.split(".")[0] in ("numpy", "torch")
        for c in kind.__mro__
    ):
        return True
    if isinstance(value, (type, types.ModuleType, Enum, tuple, str)) or callable(value):
        return False
    frozen = getattr(getattr(value, "__dataclass_params__", None), "frozen", False)
    return hasattr(value, "__dict__") and not frozen and not _of_nki(value)


def _callee(node):
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _foreign(fn):
    """True for functions of this simulator, of Python's library and of installed packages."""
    file = fn.__code__.co_filename
    return file.startswith((_PACKAGE, _LIBRARY)) or "site-packages" in file
