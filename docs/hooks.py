"""mkdocs hook: pages that live in the root of the repository, and links that leave ``docs/``.

README.md, ARCHITECTURE.md, CONTRIBUTING.md and CHANGELOG.md are pages of the site under the names
below, from their one source. Links are written for the repository, so that they work there too; on
the way to the site a link to a page becomes that page, and any other file that is linked to (an
example, a result, a picture) is copied beside it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_SOURCES = {site: source for source, site in ROOT_PAGES.items()}
_LINK = re.compile(r"(\]\()([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    for source, site in ROOT_PAGES.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links that are relative to the repository into links that are relative to the site."""
    source = _SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def on_site(match: re.Match[str]) -> str:
        opening, target = match.groups()
        if re.match(r"[a-z]+:", target):
            return match.group()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        site = ROOT_PAGES.get(path, path.removeprefix("docs/"))
        if path == site and (ROOT / path).is_file() and files.get_file_from_path(site) is None:
            files.append(File.generated(config, site, abs_src_path=str(ROOT / path)))
        return opening + site

    return _LINK.sub(on_site, markdown)
