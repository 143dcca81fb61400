"""Hooks of the site's build: the README is its first page, and links lead to pages and files.

Pages link to each other and to the files of the repository by relative paths, as on any disk. In
the site the README is `index.md`; a linked file is copied; a linked folder becomes plain text.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
ADDED = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
IMAGE = re.compile(r'((?:src|srcset)=")docs/')  # in HTML, of the README
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")
EXTERNAL = re.compile(r'(?:src="|<link rel="(?!canonical)[^>]* href=")(?:https?:)?//[^"]*')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace each page by one whose links hold in the site, and add the files they lead to."""
    pages = {f"docs/{file.src_uri}": file for file in files.documentation_pages()}
    for file in pages.values():
        files.remove(file)
    linked: set[str] = set()
    for path in [*ADDED, *pages]:
        text = (ROOT / path).read_text(encoding="utf-8")
        uri = ADDED.get(path, posixpath.basename(path))
        files.append(
            File.generated(config, uri, content=with_links_of_the_site(text, path, linked))
        )
    for path in sorted(linked):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def with_links_of_the_site(text: str, page: str, linked: set[str]) -> str:
    """Return the text with its links rewritten; add files outside docs/ to `linked`."""

    def rewrite(link: re.Match[str]) -> str:
        title, target, anchor = link.group(1), link.group(2), link.group(3) or ""
        if "://" in target:
            return link.group()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        if (ROOT / path).is_dir():
            return title
        if path not in ADDED and not path.startswith("docs/"):
            linked.add(path)
        return f"[{title}]({ADDED.get(path, path.removeprefix('docs/'))}{anchor})"

    return LINK.sub(rewrite, IMAGE.sub(r"\1", text) if page in ADDED else text)


def on_post_page(output: str, **_: object) -> str:
    """Refuse a page that loads anything from another host."""
    if found := EXTERNAL.search(output):
        raise PluginError(f"a page loads {found.group()} from another host")
    return output
