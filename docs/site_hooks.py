"""What the site needs beside the pages: descriptions, references from the public names, tables of files, links to files."""

import ast
import html
import importlib
import posixpath
import re
import sys
import textwrap
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
from public_names import GROUPS, reference

FILES = re.compile(r"<!-- files of ([\w/]+) -->\n")
LINK = re.compile(r"(!?)\[([^]]*)\]\(([\w./-]+)(#[\w-]*)?\)")
ROOT = Path(__file__).resolve().parent.parent
MOVED = {"benchmarks/results": "results", "examples": "examples"}
"""Folders beside docs/ whose pages and pictures are part of the site, and their names there."""
PAGES = (".md", ".png")
SCRIPTS = (".py", ".ipynb", ".yaml", ".sbatch")
"""Suffixes of files beside pages that are part of the site as they are; and `Dockerfile`."""


BOOST = {"decisions/": 0.3, "results/": 0.3, "protocol.md": 0.5, "pytorch-features.md": 0.5, "keras-features.md": 0.5}
"""How the search ranks pages by how their path begins; those among the guides rank first."""
SECTION = "Guides"


def on_config(config: Any) -> Any:
    """Take the repository from setup.py, and the version from the package: they stand nowhere else."""
    config.repo_url = re.search(r'^REPOSITORY = "(.+?)"', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)[1]
    owner, name = config.repo_url.split("/")[-2:]
    config.repo_name, config.site_url = f"{owner}/{name}", f"https://{owner}.github.io/{name}/"
    config.extra["version_name"] = f"version {importlib.import_module('hvdlite').__version__}"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add pages, pictures and scripts that do not lie in docs/."""
    for folder, name in MOVED.items():
        for path in sorted((ROOT / folder).iterdir()):
            if path.suffix in PAGES or is_script(f"{folder}/{path.name}"):
                files.append(File.generated(config, f"{name}/{path.name}", abs_src_path=str(path)))
    return files


def is_script(path: str) -> bool:
    """Return whether a file of the repository is an example, which the site has as it is."""
    folder, _, name = path.rpartition("/")
    return folder == "examples" and (name.endswith(SCRIPTS) or name == "Dockerfile")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Expand references, and let links lead to where files are on the site; other files are named by their path.

    What search engines and the search of the site read follows from the page, where its front matter does not say it.
    """
    page.meta.setdefault("description", description(markdown))
    boost = next((boost for path, boost in BOOST.items() if page.file.src_uri.startswith(path)), 1)
    if page.parent is not None and page.parent.title == SECTION:
        boost = 3
    page.meta.setdefault("search", {"boost": boost})
    markdown = markdown.replace("<!-- decisions -->", decisions())
    markdown = GROUPS.sub(reference, markdown)
    markdown = FILES.sub(lambda match: files_table(match[1]), markdown)
    here = PurePosixPath("docs") / page.file.src_uri
    for folder, name in MOVED.items():
        if page.file.src_uri.startswith(f"{name}/"):
            here = PurePosixPath(folder) / here.name

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(here.parent / match[3])
        for folder, name in MOVED.items():
            if target.endswith(PAGES) or is_script(target):
                target = re.sub(f"^{folder}/", f"docs/{name}/", target)
        if target == "docs/decisions":
            target += "/README.md"
        if not target.startswith("docs/"):
            return match[2] if match[2].strip("`") == posixpath.basename(target) else f"{match[2]} (`{target}`)"
        way = posixpath.relpath(target, PurePosixPath("docs", page.file.src_uri).parent)
        return f"{match[1]}[{match[2]}]({way}{match[4] or ''})"

    return LINK.sub(link, markdown)


def description(markdown: str) -> str:
    """Return the begin of a page's first paragraph, without markup: a line of what search engines show."""
    paragraph = next((text for text in markdown.split("\n\n") if not text.startswith(("#", "|", "<", "!", "```"))), "")
    plain = re.sub(r"[*`\[\]]", "", re.sub(r"\]\([^)]*\)", "", paragraph)).removeprefix("Context. ")
    return html.escape(textwrap.shorten(plain, 160, placeholder=" ..."))


def decisions() -> str:
    """Return a list of all decisions, in Markdown."""
    titles = {path.name: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
              for path in sorted((ROOT / "docs/decisions").glob("0*.md"))}
    return "\n".join(f"- [{title}]({name})" for name, title in titles.items())


def files_table(folder: str) -> str:
    """Return a table of the modules of a folder, with the first sentence of each one's docstring, in Markdown.

    That of `hvdlite` has only the modules that are in no package.
    """
    rows = [f"## `{folder}`", "", "| file | content |", "|---|---|"]
    for path in sorted((ROOT / folder).glob("*.py" if folder == "hvdlite" else "**/*.py")):
        if not path.stem.startswith("_"):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            sentence = re.sub(r" \(docs/protocol\.md[^)]*\)", "", " ".join(text.partition("\n\n")[0].split()))
            content = re.split(r"(?<=[.;]) (?=[A-Z])", sentence)[0].rstrip(".")
            rows.append(f"| `{path.relative_to(ROOT / folder)}` | {content} |")
    return "\n".join(rows) + "\n\n"
