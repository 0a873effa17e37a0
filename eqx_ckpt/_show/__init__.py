"""Trees, tables and facts for people: as text, and as HTML in notebooks.

`_branches`, `_tables` and `_facts` have them; `_terminal`, `_html` and the page of
`_view` draw them. It imports the kernel. Begin with `_shown`.
"""

from .._kernel import _rooms


@_rooms.text.provide
def _():
    from ._shown import text

    return text


@_rooms.html.provide
def _():
    from ._shown import html

    return html


@_rooms.treescope.provide
def _():
    from ._shown import treescope

    return treescope
