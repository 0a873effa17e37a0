"""Trees, tables and reports as HTML, for notebooks.

What is made stands by itself: no script, style or picture is fetched. Whatever was
stored is escaped. What was made of a tree has at most so many characters; of a table,
those of all rows that it is given, which are few.
"""

import html
from collections.abc import Collection, Iterable

from .._kernel._format import _text
from .._kernel._tree import _folding
from . import _branches
from ._branches import Branch
from ._lines import TreeLine
from ._tables import Table


# Of one tree, in characters, all of which are ASCII; and of a name in it.
_MOST, _MOST_OF_NAME = 160_000, 120
# Of the children of one node, so that its siblings have some as well.
_MOST_CHILDREN = 1000
# Up to so many rows are shown when it is opened.
_FEW = 30

# Colours are those of the page, of Jupyter's theme where there is one.
_STYLE = """
.eqxckpt{--a:#1976d2;--q:#66707a;font:13px/1.65 system-ui,sans-serif;max-width:64em;
color:var(--jp-content-font-color1,var(--vscode-editor-foreground,inherit))}
@media(prefers-color-scheme:dark){.eqxckpt{--a:#64b5f6;--q:#9aa4ae}}
[data-jp-theme-light=true] .eqxckpt{--a:#1976d2;--q:#66707a}
[data-jp-theme-light=false] .eqxckpt{--a:#64b5f6;--q:#9aa4ae}
.eqxckpt p,.eqxckpt summary{display:flex;gap:.8em;margin:0;padding:0 .3em;
border-radius:3px}
.eqxckpt section p:hover,.eqxckpt summary:hover{background:#8882}
.eqxckpt details{margin:0}
.eqxckpt details details,.eqxckpt details p{margin-left:1.1em}
.eqxckpt summary{cursor:pointer;list-style:none}
.eqxckpt summary::-webkit-details-marker{display:none}
.eqxckpt summary::before{content:"\\25b8";width:.7em;color:var(--q)}
.eqxckpt details[open]>summary::before{content:"\\25be"}
.eqxckpt section p::before{content:"";width:.7em}
.eqxckpt b,.eqxckpt i,.eqxckpt pre{font:12px/1.8 ui-monospace,monospace;
overflow-wrap:anywhere}
.eqxckpt b{font-weight:400}
.eqxckpt section b{min-width:11em}
.eqxckpt>p b,.eqxckpt summary b{font-weight:700}
.eqxckpt i{flex:1;color:var(--q)}
.eqxckpt u{flex:none;width:12em;text-align:right;text-decoration:none;
font-variant-numeric:tabular-nums;background:linear-gradient(var(--a),var(--a))
left center/calc(var(--s,0)*.06em) 6px no-repeat}
.eqxckpt button{flex:none;width:4em;border:0;padding:0;background:none;opacity:0;
font:inherit;color:var(--a);cursor:pointer}
.eqxckpt p:hover>button,.eqxckpt summary:hover>button,.eqxckpt button:focus,
.eqxckpt button.ok{opacity:1}
.eqxckpt button::before{content:"copy"}
.eqxckpt button.ok::before{content:"copied"}
.eqxckpt s{flex:none;width:4em}
.eqxckpt table{display:block;overflow-x:auto;border-collapse:collapse;margin:0}
.eqxckpt td,.eqxckpt th{padding:0 1.2em 0 .3em;border:0;text-align:right;
white-space:nowrap;font-size:13px;font-variant-numeric:tabular-nums}
.eqxckpt th,.eqxckpt .q{color:var(--q);font-weight:400}
.eqxckpt pre{margin:0 0 0 2em;white-space:pre-wrap;color:inherit;background:none}
@media(max-width:560px){.eqxckpt p,.eqxckpt summary{flex-wrap:wrap;gap:0 .8em}
.eqxckpt section b{min-width:0}
.eqxckpt .q{display:none}.eqxckpt u{width:6em;background:none}
.eqxckpt i{min-width:5em}.eqxckpt button,.eqxckpt s{display:none}
.eqxckpt details details,.eqxckpt details p{margin-left:.5em}}
""".replace("\n", "")

# Copies the dotted name of the row whose button was pressed: all parts above it.
_COPY = (
    "let b=event.target.closest('button');if(b){event.preventDefault();let n=[];"
    "for(let e=b.parentElement;e&&this.contains(e);e=e.parentElement)"
    "if(e.dataset.k)n.unshift(e.dataset.k);n=n.join('.');"
    "let f=()=>{b.className='ok';setTimeout(()=>b.className='',900)};"
    "let t=()=>{let a=document.createElement('textarea');a.value=n;"
    "document.body.append(a);a.select();document.execCommand('copy');a.remove();f()};"
    "navigator.clipboard?navigator.clipboard.writeText(n).then(f,t):t()}"
)


def _safe(text: str, most: int = 300) -> str:
    """Any text, as ASCII in which nothing is markup."""
    text = html.escape(_text.bounded(text, most))
    return text.encode("ascii", "xmlcharrefreplace").decode()


def card(title: str, quiet: str, *parts: str, prefix: str = "") -> str:
    """The output for a notebook: a title, a text beside it, and parts below."""
    key = f' data-k="{_safe(prefix)}"' if 0 < len(prefix) <= _MOST_OF_NAME else ""
    head = f"<p><b>{_safe(title)}</b><i>{_safe(quiet)}</i></p>"
    return (
        f'<div class=eqxckpt{key} onclick="{_COPY}"><style>{_STYLE}</style>{head}'
        f"<section>{''.join(parts)}</section></div>"
    )


def tree(lines: Iterable[TreeLine]) -> str:
    """Rows of dotted names as a tree whose nodes open and close."""
    below = _branches.branches(lines)
    nbytes = _branches.total(below)
    top = Branch("", "", nbytes, sum(x.leaves for x in below), below)
    shown = _admit(top)
    return _children(top, shown, _opened(top, shown), nbytes or 1)


def _admit(top: Branch) -> dict[int, int]:
    """The number of children that are shown of each branch: near the top first."""
    room = _MOST
    shown: dict[int, int] = {}
    queue = [top]
    for branch in queue:
        count = 0
        for child in branch.below[:_MOST_CHILDREN]:
            room -= len(_head(child, 1) + _key(child.part)) + 60
            if room < 0:
                break
            count += 1
        shown[id(branch)] = count
        queue += branch.below[:count]
    return shown


def _opened(top: Branch, shown: dict[int, int]) -> set[int]:
    """The branches that are open at first: those near the top, with few rows."""
    room = _FEW - shown[id(top)]
    opened: set[int] = set()
    queue = list(top.below[: shown[id(top)]])
    for branch in queue:
        count = shown.get(id(branch), 0)
        if 0 < count <= room:
            room -= count
            opened.add(id(branch))
            queue += branch.below[:count]
    return opened


def _children(top: Branch, shown: dict[int, int], opened: set[int], whole: int) -> str:
    count = shown.get(id(top), 0)
    out = []
    for child in top.below[:count]:
        head = _head(child, whole)
        key = _key(child.part)
        if not child.below:
            out.append(f"<p{key}>{head}</p>")
            continue
        inner = _children(child, shown, opened, whole)
        key += " open" * (id(child) in opened)
        out.append(f"<details{key}><summary>{head}</summary>{inner}</details>")
    rest = top.below[count:]
    if rest:
        leaves = sum(x.leaves for x in rest)
        size = _text.size(_branches.total(rest) or 0)
        out.append(f"<p><i>&hellip; {leaves:,} more leaves, {size}</i></p>")
    return "".join(out)


def _key(part: str) -> str:
    return f' data-k="{_safe(part)}"' if len(part) <= _MOST_OF_NAME else ""


def _head(branch: Branch, whole: int) -> str:
    """The cells of a row: name, text, size and its share of the whole, a button."""
    name = branch.title if branch.times > 1 else _safe(branch.part, _MOST_OF_NAME)
    row = f"<b>{name}</b><i>{_safe(branch.what, 120)}</i>"
    if branch.nbytes is None:
        return row
    share = round(100 * branch.nbytes / whole)
    style = f' style="--s:{share}"' if share else ""
    row += f"<u{style}>{_text.size(branch.nbytes)}</u>"
    return row + (
        "<button aria-label=copy></button>" if _key(branch.part) else "<s></s>"
    )


def row(line: TreeLine) -> str:
    """One leaf, by its whole name."""
    head = _head(Branch(*line, 1), line.nbytes or 1)
    return f"<p{_key(line.name)}>{head}</p>"


def table(table: Table) -> str:
    """Rows below their titles. What is too wide for a screen is moved sideways."""
    cell = lambda tag, text, style: (
        f"<{tag}{' class=q' * (style == 'quiet')}>{_safe(text)}</{tag}>"
    )
    titles = "".join(cell("th", x.title, x.style) for x in table.columns)
    out = [f"<table><tr>{titles}</tr>"] if table.rows else []
    for cells in table.rows:
        out.append(f"<tr>{''.join(cell('td', *x) for x in cells)}</tr>")
    return "".join([*out, "</table>" * bool(out)])


def section(title: str, rows: Collection[tuple[str, str]], folds: bool = False) -> str:
    """Rows of a name and a text below a title, if there are any. Those that are alike
    are one; it is closed if it `folds`, or has many."""
    if not rows:
        return ""
    shown = _folding.fold_rows(rows)
    lines = [f"<p><b>{_safe(a)}</b><i>{_safe(b)}</i></p>" for a, b in shown[:100]]
    if len(shown) > 100:
        lines.append(f"<p><i>&hellip; {len(shown) - 100:,} more</i></p>")
    opened = " open" * (len(shown) <= _FEW and not folds)
    head = f"<summary><b>{_safe(title)}</b><i>{len(rows):,}</i></summary>"
    return f"<details{opened}>{head}{''.join(lines)}</details>"


def text(title: str, body: str, most: int = 8000) -> str:
    """A text of many lines, below a title that opens it, if there is one."""
    if not body:
        return ""
    lines = [html.escape(_text.escape(line)) for line in body[:most].split("\n")]
    body = "\n".join(lines) + ("..." if len(body) > most else "")
    body = body.encode("ascii", "xmlcharrefreplace").decode()
    head = f"<summary><b>{_safe(title)}</b></summary>"
    return f"<details>{head}<pre>{body}</pre></details>"
