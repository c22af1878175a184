# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Run every python code block of README.md, in order and in one namespace."""

from pathlib import Path
import re
import sys

README = Path(__file__).resolve().parent.parent / "README.md"


def main() -> None:
    text = README.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S))
    if not blocks:
        sys.exit(f"no python code block in {README.name}")
    namespace = {"__name__": "__main__"}
    for block in blocks:
        # Pad with empty lines so that tracebacks give README.md's line numbers.
        padding = "\n" * text.count("\n", 0, block.start(1))
        exec(compile(padding + block[1], str(README), "exec"), namespace)
    print(f"{README.name}: ran {len(blocks)} python code block(s)")


if __name__ == "__main__":
    main()
