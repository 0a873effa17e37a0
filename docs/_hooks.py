"""Pages of the site that are made of other files of the repository, and their links.

The same texts are read in the repository and on the site. So links in them lead to
files of the repository, and here they become links to pages. What has no page, such as
a test, becomes plain text.
"""

import base64
import json
import os
import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File


root = pathlib.Path(__file__).parents[1]

PAGES = {
    "README.md": "index.md",
    "FORMAT.md": "format.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
for _path in sorted(root.glob("notebooks/*.ipynb")):
    PAGES[f"notebooks/{_path.name}"] = f"notebooks/{_path.stem}.md"
_SOURCES = {page: path for path, page in PAGES.items()}


def _notebook(path: pathlib.Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by their paths."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = ""
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}/{len(pictures)}.png"
                pictures[f"notebooks/{name}"] = base64.b64decode(data["image/png"])
                width = output["metadata"].get("image/png", {}).get("width")
                size = f'{{ width="{width}" }}' if width else ""
                parts.append(f"![What the code draws]({name}){size}")
            elif "text/html" in data:
                # Markdown ends a block of HTML at an empty line.
                html = re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]))
                parts.append(f"<div>{html}</div>")
            else:
                printed += "".join(output.get("text") or data["text/plain"] + ["\n"])
        if printed:
            parts.append(f"```{{.text .output}}\n{printed.rstrip()}\n```")
    return "\n\n".join(parts), pictures


def on_files(files: Any, config: Any) -> Any:
    for path, page in PAGES.items():
        if path.endswith(".ipynb"):
            body, pictures = _notebook(root / path)
            for name, data in pictures.items():
                files.append(File.generated(config, name, content=data))
        else:
            body = (root / path).read_text()
            if path == "README.md":
                body = f"---\nhide: [navigation]\n---\n{body}"
        files.append(File.generated(config, page, content=body))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri
    source = _SOURCES.get(here, f"docs/{here}")

    def moved(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        if "://" in link or link.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if path in PAGES or path.startswith("docs/"):
            to = PAGES.get(path, path.removeprefix("docs/"))
            return f"[{text}]({os.path.relpath(to, posixpath.dirname(here))}{anchor})"
        # Of a file without a page only the words stay; code is left as it is.
        return text if (root / path).exists() else match[0]

    if source == "README.md":  # Its picture is one by day and another by night.
        markdown = re.sub(r'(src|srcset)="docs/', r'\1="', markdown)
    # A text may go on in the next line, and not in the next paragraph.
    link = r"\[((?:[^\]\n]|\n(?!\n))*)\]\(([^)#\s]+)(#[^)\s]*)?\)"
    return re.sub(link, moved, markdown)
