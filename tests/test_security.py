# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""What the package never calls."""

import ast
from pathlib import Path

import numpyro_pdmp

FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "pickle",
    "requests",
    "shelve",
    "subprocess",
    "urllib",
    "yaml",
}


def violations(tree):
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        yield from (m for m in modules if m.split(".")[0] in FORBIDDEN_MODULES)
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id in FORBIDDEN_NAMES:
            yield function.id
        if isinstance(function, ast.Attribute):
            if function.attr in ("system", "popen"):
                yield function.attr
            options = {k.arg: k.value for k in node.keywords}
            safe = isinstance(options.get("allow_pickle"), ast.Constant)
            safe = safe and options["allow_pickle"].value is False
            if ast.unparse(function) in ("np.load", "numpy.load") and not safe:
                yield "np.load with pickles"


def test_no_dangerous_calls():
    files = sorted(Path(numpyro_pdmp.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    found = {f.name: list(violations(ast.parse(f.read_text()))) for f in files}
    assert not {name: calls for name, calls in found.items() if calls}


def test_violations_are_seen():
    code = "import pickle; eval(x); os.system(y); np.load(p); np.load(p, **{})"
    assert len(list(violations(ast.parse(code)))) == 5
