"""Trees, tables and facts for people: as text, and as HTML in notebooks.

`_model` has them; `_terminal`, `_html` and the page of `_view` draw them. It imports
the kernel. Begin with `_shown`.
"""

from .. import _extensions
from . import _shown


_extensions.add("text", _shown.text)
_extensions.add("html", _shown.html)
_extensions.add("treescope", _shown.treescope)
