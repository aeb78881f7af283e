"""Which modules the names in a method's source stand for: paths from the object itself, without running anything."""

import ast
from collections import defaultdict
from collections.abc import Iterator

# The names that lead from a module to another inside of it, none for the module itself; `ANY` for any of its children.
Path = tuple[str, ...]
ANY = "*"

# Whoever goes through these goes through the children; the last ones come with their names.
_OF_CHILDREN = {"children", "values"}
_OF_NAMED_CHILDREN = {"named_children", "items"}
# A local name that goes down step by step (`block = block.next`) would have ever longer paths.
_LONGEST_OF_LOCALS = 5


class SourcePaths:
    """The modules that expressions in one method may stand for.

    Local names are followed: `conv = self.conv`, `one, other = self.convs`, `for conv in self.convs`. What comes as an
    argument, or out of a call, is not known.
    """

    def __init__(self, tree: ast.AST) -> None:
        self._locals: dict[str, set[Path]] = defaultdict(set)
        own_name = first_argument(tree)
        self._locals[own_name].add(())
        bindings = [binding for node in ast.walk(tree) for binding in _bindings(node)]
        num_known = 0
        # One name may stand for what another does, wherever in the source that one gets its meaning.
        while num_known < (num_known := sum(map(len, self._locals.values()))):
            for target, value, is_inside in bindings:
                self._bind(target, value, is_inside)

    def of(self, node: ast.expr) -> set[Path]:
        """Paths of the modules that an expression may be; none if it is something else, or nobody knows."""
        match node:
            case ast.Name(id=name):
                return set(self._locals.get(name, ()))
            case ast.Attribute(value=inner, attr=name):
                return {(*path, name) for path in self.of(inner)}
            case ast.Subscript(value=inner, slice=ast.Slice()):
                return self.of(inner)
            case ast.Subscript(value=inner, slice=ast.Constant(value=int() | str() as place)):
                return {(*path, str(place)) for path in self.of(inner)}
            case ast.Subscript(value=inner):
                return {(*path, ANY) for path in self.of(inner)}
            case ast.IfExp(body=one, orelse=other):
                return self.of(one) | self.of(other)
            case ast.NamedExpr(value=value):
                return self.of(value)
        return set()

    def _bind(self, target: ast.expr, value: ast.expr, is_inside: bool) -> None:
        match target, value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                for each, its_value in zip(targets, values, strict=True):
                    self._bind(each, its_value, is_inside)
            case ast.Tuple(elts=targets), _:
                # Any of them: a list among the targets (`first, *others = self.convs`) shifts the places.
                part = ast.Subscript(value=value, slice=ast.Name(id="any"), ctx=ast.Load())
                for each in targets:
                    self._bind(each, part, is_inside)
            case ast.Name(id=name), _:
                found = {(*path, ANY) for path in self.of(value)} if is_inside else self.of(value)
                self._locals[name] |= {path for path in found if len(path) <= _LONGEST_OF_LOCALS}


def first_argument(tree: ast.AST) -> str:
    """What a method calls the object itself, usually self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (arguments := [*node.args.posonlyargs, *node.args.args]):
            return arguments[0].arg
    return "self"


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr, bool]]:
    """What a statement gives a name to: targets, values, and whether the targets are inside of the values."""
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value, False) for target in targets)
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            yield target, value, False
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield target, _gone_through(value), True


def _gone_through(value: ast.expr) -> ast.expr:
    """What a loop goes through, step by step the parts of it: of several things together a tuple of them."""
    nothing = ast.Constant(value=None)
    match value:
        case ast.Call(func=ast.Name(id="zip"), args=values):
            return ast.Tuple(elts=[_gone_through(each) for each in values], ctx=ast.Load())
        case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
            return ast.Tuple(elts=[nothing, _gone_through(inner)], ctx=ast.Load())
        case ast.Call(func=ast.Name(id="reversed" | "list" | "tuple"), args=[inner]):
            return _gone_through(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr=name), args=[]) if name in _OF_CHILDREN:
            return inner
        case ast.Call(func=ast.Attribute(value=inner, attr=name), args=[]) if name in _OF_NAMED_CHILDREN:
            return ast.Tuple(elts=[nothing, inner], ctx=ast.Load())
    return value
