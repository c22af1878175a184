# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""The pages of the documentation, as far as text alone tells."""

from pathlib import Path
import re

import pytest

import numpyro_pdmp

DOCS = Path(__file__).parents[1] / "docs"
if not DOCS.exists():
    pytest.skip("not in a checkout", allow_module_level=True)


def test_every_public_name_is_in_the_api():
    listed = set(
        re.findall(r"\.\. (?:auto\w+|data):: (\w+)", (DOCS / "api.md").read_text())
    )
    assert set(numpyro_pdmp.__all__) - {"__version__"} <= listed


def test_every_page_is_in_the_contents():
    index = (DOCS / "index.md").read_text().split()
    pages = {p.relative_to(DOCS).with_suffix("").as_posix() for p in DOCS.rglob("*.md")}
    pages = {p for p in pages if not p.startswith("_build")}
    assert pages - set(index) == {"index"}


def test_links_between_files():
    root = DOCS.parent
    for page in [root / "README.md", root / "CONTRIBUTING.md", *DOCS.rglob("*.md")]:
        if "_build" in page.parts:
            continue
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{target} in {page.name}"


def test_errors_name_pages_that_exist():
    sources = Path(numpyro_pdmp.__file__).parent.rglob("*.py")
    named = [re.findall(r'explained\("(\w+)"\)', p.read_text()) for p in sources]
    pages = set(sum(named, []))
    assert {"sticky", "haiku", "warmup", "subsampling"} <= pages
    assert all((DOCS / f"{page}.md").exists() for page in pages)
    with pytest.raises(ValueError, match="batching") as error:
        numpyro_pdmp.BPS(potential_fn=abs, batching="none")
    assert error.value.__notes__ == [
        "See the page docs/subsampling.md of the documentation."
    ]
