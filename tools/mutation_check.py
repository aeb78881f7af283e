"""Break random lines, one at a time, and see whether a test fails.

    python tools/mutation_check.py --places 60 --seed 0

Draws places in core, nn, sparsify, convert, channels and export with a seeded generator, changes one operator,
comparison or constant there in a copy of the checkout, and runs the tests: first those of the same module, then those
of its folder, then the others that cover the library. Prints every place and the test that fails there.
"""

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parent.parent
SURVIVED, TIMED_OUT = "survived", "timed out"
FOLDERS = ("core", "nn", "sparsify", "convert", "channels", "export")
SWAPPED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def places(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes inside functions that can be changed; texts of errors and annotations are left out."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                yield from _changeable(statement)


def _changeable(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise | ast.FunctionDef | ast.ClassDef | ast.JoinedStr | ast.Assert):
        return
    if isinstance(node, ast.AnnAssign):
        children = [node.value] if node.value else []
    else:
        children = list(ast.iter_child_nodes(node))
    is_operator = isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED
    is_comparison = isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float)
    is_negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    if is_operator or is_comparison or is_constant or is_negation:
        yield node
    for child in children:
        yield from _changeable(child)


def changed(source: str, number: int) -> tuple[str, int, str]:
    """The source with its place of that number changed, the line, and what was done."""
    tree = ast.parse(source)
    node = list(places(tree))[number]
    before = ast.unparse(node)
    line = node.lineno
    new = _mutant(copy.deepcopy(node))
    segment = ast.get_source_segment(source, node)
    assert segment is not None
    lines = source.splitlines(keepends=True)
    start = sum(len(text.encode()) for text in lines[: line - 1]) + node.col_offset
    data = source.encode()
    after = ast.unparse(new)
    mutated = data[:start] + f"({after})".encode() + data[start + len(segment.encode()) :]
    return mutated.decode(), line, f"{before}  ->  {after}"


def _mutant(node: ast.AST) -> ast.AST:
    if isinstance(node, ast.BinOp | ast.BoolOp):
        node.op = SWAPPED[type(node.op)]()
        return node
    if isinstance(node, ast.Compare):
        node.ops[0] = SWAPPED[type(node.ops[0])]()
        return node
    if isinstance(node, ast.UnaryOp):
        return node.operand
    assert isinstance(node, ast.Constant)
    return ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)


def verdict(tree: Path, source: Path, seconds: int) -> str:
    """The first test that fails in a tree, SURVIVED if all pass, or TIMED_OUT, which may be an endless loop.

    The tests named after the module run first, then those of its folder, then the others.
    """
    folder, stem = source.parent.name, source.stem
    own = [str(path.relative_to(tree)) for path in sorted((tree / "tests" / folder).glob(f"test_*{stem}*.py"))]
    others = [name for name in (*FOLDERS, "cost", "golden") if name != folder]
    rest = [f"tests/{name}" for name in others] + ["tests/test_extensions.py", "tests/test_architectures.py"]
    options = ["-q", "-x", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
    settings = {"PYTHONPATH": f"{tree}/src", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for tests in (own, [f"tests/{folder}", f"src/strucspars/{folder}"], rest):
        there = [test for test in tests if (tree / test).exists()]
        if not there:
            continue
        command = [sys.executable, "-m", "pytest", *options, *there]
        try:
            outcome = subprocess.run(
                command, cwd=tree, env=os.environ | settings, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        if outcome.returncode:
            failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", outcome.stdout, re.MULTILINE)
            return failures[0] if failures else f"pytest, status {outcome.returncode}"
    return SURVIVED


def main() -> None:
    """Draw, break, test, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=int, default=900, help="time for each of the three groups of tests")
    options = parser.parse_args()
    files = sorted(file for name in FOLDERS for file in (ROOT / "src" / "strucspars" / name).rglob("*.py"))
    everywhere = [(file, number) for file in files for number in range(len(list(places(ast.parse(file.read_text())))))]
    drawn = random.Random(options.seed).sample(everywhere, options.places)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        trees: Queue[Path] = Queue()
        for job in range(options.jobs):
            tree = Path(scratch) / str(job)
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "demo-output"))
            trees.put(tree)

        if (before := verdict(tree, ROOT / "src/strucspars/core/plan.py", options.seconds)) != SURVIVED:
            sys.exit(f"before anything is broken: {before}")

        def check(place: tuple[Path, int]) -> str:
            file, number = place
            source = file.read_text()
            mutated, line, what = changed(source, number)
            tree = trees.get()
            target = tree / file.relative_to(ROOT)
            try:
                target.write_text(mutated)
                found = verdict(tree, target, options.seconds)
            finally:
                target.write_text(source)
                trees.put(tree)
            print(f"{file.relative_to(ROOT)}:{line}: {what}\n    {found}", flush=True)
            return found

        found = list(pool.map(check, drawn))
    survived, timed_out = found.count(SURVIVED), found.count(TIMED_OUT)
    killed = len(drawn) - survived - timed_out
    print(f"seed {options.seed}: of {len(drawn)} {killed} killed, {survived} survived, {timed_out} timed out")


if __name__ == "__main__":
    main()
