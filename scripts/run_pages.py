# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Run every python code block of pages, in order and in one namespace a page.

python scripts/run_pages.py README.md docs/own_sampler.md
"""

from pathlib import Path
import re
import sys


def run(page: Path) -> int:
    text = page.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S))
    if not blocks:
        sys.exit(f"no python code block in {page}")
    namespace = {"__name__": "__main__"}
    for block in blocks:
        # Pad with empty lines so that tracebacks give the page's line numbers.
        padding = "\n" * text.count("\n", 0, block.start(1))
        exec(compile(padding + block[1], str(page), "exec"), namespace)
    return len(blocks)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: ran {run(Path(name))} python code block(s)")
