"""Trees, tables and facts for people: as text, and as HTML in notebooks.

`_model` has them; `_terminal`, `_html` and the page of `_view` draw them. It imports
the kernel. Begin with `_shown`.
"""

from .. import _extensions


# What the command line shows of an index needs no JAX, which this imports.
for _name in ("text", "html", "treescope"):
    _extensions.add(_name, _extensions.later(__name__, "_shown", _name))
