"""A page as one file: with all that it asks for in it, so that it can be sent."""

import base64
import hashlib
import json
import math
import urllib.parse
from typing import Any

from . import _server
from ._site import Site, spread


# What a file is to have at most, and what it has of one leaf beside its picture.
_MOST, _OF_LEAF = 1_800_000, 900
# The sides of pictures, and the points of other curves.
_LEAST_SIDE, _MOST_SIDE, _POINTS = 12, 128, 24
# Of a run: norms of so many bytes, and so many norms.
_NORM_BYTES, _NORMS = 2**30, 20_000


def page(site: Site) -> str:
    """The page of a site, with what it says of each leaf."""
    answers = _answers(site)
    text = json.dumps(answers, allow_nan=False, separators=(",", ":"))
    # In a script, which this is for a parser of HTML, nothing else ends it.
    text = text.replace("<", "\\u003c")
    script, style = (_server.shipped(f"view.{x}").decode() for x in ("js", "css"))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    parts = {
        '<meta charset="utf-8">': '<meta charset="utf-8">\n<meta http-equiv='
        f'"Content-Security-Policy" content="{policy}">',
        '<link rel="stylesheet" href="view.css">': f"<style>{style}</style>",
        '<script defer src="view.js"></script>': "",
        "</body>": f'<script type="application/json" id="answers">{text}</script>'
        f"<script>{script}</script></body>",
    }
    out = _server.shipped("view.html").decode()
    for was, now in parts.items():
        assert was in out
        out = out.replace(was, now)
    return out


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _answers(site: Site) -> dict[str, Any]:
    top = dict(site.answer("page", {}))
    if "error" in top:
        raise ValueError(top["error"])
    out = {"page?": top}
    # Of two, leaves that are the same are not drawn.
    rows = [(n, row) for n, row in enumerate(top["rows"]) if row[-1] != "same"]
    room = (_MOST - len(json.dumps(top))) / max(1, len(rows)) - _OF_LEAF
    side = min(_MOST_SIDE, int(math.sqrt(max(0.0, room) * 0.75)))
    for n, row in rows:
        found = site.answer("leaf", {"n": str(n)})
        out[_key("leaf", n=n)] = found
        if found.get("histogram") and side >= _LEAST_SIDE:
            sizes = {"n": str(n), "side": str(side), "points": str(_POINTS)}
            out[_key("picture", n=n)] = site.answer("picture", sizes)
            out[_key("spectrum", n=n)] = site.answer("spectrum", sizes)
        if row[-1] in ("changed", "unknown"):
            out[_key("change", n=n)] = site.answer("change", {"n": str(n)})
    if top["kind"] == "run":
        top["norm_steps"] = _fewer(top)
        for name, *_ in top["rows"]:
            for step in top["norm_steps"]:
                asked = {"name": name, "step": str(step)}
                out[_key("norm", **asked)] = site.answer("norm", asked)
    return out


def _key(what: str, **query: Any) -> str:
    return f"{what}?{urllib.parse.urlencode(query)}"


def _fewer(top: dict[str, Any]) -> list[int]:
    """The steps whose norms there is time and room for, spread over the run."""
    steps, rows = top["norm_steps"], top["rows"]
    nbytes = sum(row[2] for row in rows)
    most = min(_NORM_BYTES // max(1, nbytes), _NORMS // max(1, len(rows)))
    return spread(steps, max(2, most))
