"""mkdocs hooks: adds the README, CONTRIBUTING, the changelog and the benchmarks' pages to the site.

In the repository pages link to each other by relative paths, which are turned into the site's own. A link to
a file that is not a page of the site, such as source code, becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    **{
        str(page.relative_to(ROOT)): str(page.relative_to(ROOT))
        for pattern in ("benchmarks/README.md", "benchmarks/results/*.md", "benchmarks/results/*.svg")
        for page in sorted(ROOT.glob(pattern))
    },
}
"""Pages (and their pictures) from outside docs/: path in the repository -> path in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/."""
    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the repository's relative links into the site's."""
    if page.file.src_uri == "readme.md":
        # Its table of results takes the width of the page.
        page.meta["hide"] = ["toc"]
    sources = {name: source for source, name in OUTSIDE.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewritten(match: re.Match[str]) -> str:
        bang, text, link = match.groups()
        path, _, anchor = link.partition("#")
        if "://" in link or not path:
            return match.group()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target == "docs":
            target = "docs/index.md"
        name = OUTSIDE.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(name) is None:
            return text
        relative = posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or ".")
        return f"{bang}[{text}]({relative}{'#' + anchor if anchor else ''})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", rewritten, markdown)
