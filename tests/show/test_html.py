"""What notebooks show: HTML that stands by itself. What was stored is no markup."""

import functools as ft
import html.parser
import itertools
import json
import re
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqx_ckpt as ec


MOST = 200_000
HOSTILE = (
    "<script>pwned=1</script>\"'><img src=x onerror='pwned=1'>&amp;</section>\x1b[31m"
)
_TAGS = {"div", "style", "p", "b", "i", "u", "s", "section", "details", "summary"}
_TAGS |= {"button", "pre", "table", "tr", "th", "td"}
_ATTRIBUTES = {"class", "data-k", "onclick", "style", "open", "aria-label"}


def _opened(tree):
    path = f"memory://html/{next(_numbers)}"
    ec.tree_serialise_leaves(path, tree)
    return ec.open(path)


_numbers = itertools.count()


@ft.cache
def _script():
    """What a click does, on any page: nothing of it is of a checkpoint."""
    text = _opened({"a": 1})._repr_html_()
    (code,) = re.findall('onclick="([^"]*)"', text)
    return html.unescape(code)


class _Page(html.parser.HTMLParser):
    """Checks that elements are closed, and are those that are made here."""

    def __init__(self, text):
        super().__init__()
        self.open, self.keys, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag in _TAGS and {name for name, _ in attrs} <= _ATTRIBUTES, (tag, attrs)
        for name, value in attrs:
            assert name != "onclick" or value == _script()
            assert name != "style" or re.fullmatch(r"--s:\d+", value)
            if name == "data-k":
                self.keys.append(value)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


def _page(x):
    text = x._repr_html_()
    assert text.isascii() and len(text) < MOST
    assert not re.search(r"https?:|url\(|@import|<script|<link", text)
    return _Page(text)


@pytest.fixture
def ckpt(tmp_path):
    layers = [eqx.nn.Linear(4, 4, key=key) for key in jr.split(jr.key(0), 12)]
    ec.tree_serialise_leaves(
        tmp_path / "run", {"layers": layers, "step": 3}, metadata={"width": 4}
    )
    return ec.open(tmp_path / "run")


def test_a_tree_that_folds(ckpt):
    page = _page(ckpt)
    for text in ("layers", "{0..11}", "12 x 2 leaves", "f32[4,4]", "= 4", '"width": 4'):
        assert text in page.text
    assert page.keys == ["layers", "0", "weight", "bias", *_fields(page), "step"]
    assert "{0..11}" not in _page(ckpt.tree.layers[3]).text


def _fields(page):
    return [
        key for key in page.keys if key in ("in_features", "out_features", "use_bias")
    ]


def test_every_class(ckpt, tmp_path):
    model = ckpt.tree
    assert "not read" in _page(model.layers[0].weight).text
    held = jax.tree.map(lambda x: np.ones(3, np.float16), model.layers[1])
    assert "f16[3]" in _page(held).text
    like = {"layers": [eqx.nn.Linear(4, 4, key=jr.key(1)) for _ in range(12)]}
    _, report = ec.graft(
        like, ckpt, [(lambda m: m, lambda c: c)], drop=lambda c: c.step
    )
    assert "loaded" in _page(report).text and "step" in _page(report).text
    diff = ec.diff(ckpt, like, values=True)
    assert "1 removed" in _page(diff).text and "largest" in _page(diff).text
    with ec.CheckpointManager(tmp_path / "steps") as manager:
        manager.save(5, {"x": jnp.ones(2)}, {"loss": 0.5})
        manager.wait()
        manager.pin(5)
        page = _page(manager)
        for text in ("step", "loss", "0.5", "pinned", "8 B"):
            assert text in page.text
    handle = ec.async_tree_serialise_leaves(tmp_path / "async", {"x": jnp.ones(2)})
    handle.result()
    assert "saved, 8 B of 8 B" in _page(handle).text


def test_shardings_are_shown():
    mesh = jax.make_mesh((1,), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    array = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, spec))
    node = jax.tree.map(lambda x: array, ec.nest({"a": 1, "b": 2}))
    ec.tree_serialise_leaves("memory://sharded", node)
    assert "'x'" in _page(ec.open("memory://sharded").splice(node)["a"]).text


def _empty(*shape):
    return np.zeros((*shape, 0), np.float32)


class _Field(eqx.Module):
    w: np.ndarray
    y: str = eqx.field(static=True)


_ALL = range(10_000)
_MANY = {
    "wide": lambda: {"x": {f"w{i}": _empty(i % 97) for i in _ALL}},
    "deep": lambda: {"x": [{f"w{i % 10}": _empty(i)} for i in _ALL]},
    "alike": lambda: {"x": [_empty(256) for _ in _ALL]},
    "long": lambda: {"x": {f"{'&<' * 99}{i}": _empty(i) for i in _ALL}},
    "fields": lambda: {f"x{i}": _Field(_empty(), "<" * 99) for i in range(2000)},
}


@pytest.mark.parametrize("name", _MANY)
def test_ten_thousand_leaves(name):
    page = _page(_opened(_MANY[name]()))
    assert name != "alike" or page.keys == ["x", "0"] and "10,000 x" in page.text
    assert name == "alike" or " more leaves" in page.text


def test_a_checkpoint_of_ten_thousand_leaves():
    tree = {f"w{i}": np.zeros(i % 97 + 1, np.float32) for i in range(10_000)}
    page = _page(_opened(tree))
    assert len(page.keys) > 900 and "more leaves" in page.text


def test_names_and_values_are_text(tmp_path):
    tree = {HOSTILE: jnp.ones(2), "a": {HOSTILE: {"b" * 20_000: 1}}}
    ec.tree_serialise_leaves("memory://hostile", tree, metadata={HOSTILE: [HOSTILE]})
    ckpt = ec.open("memory://hostile")
    assert "pwned" in _page(ckpt).text and "pwned" in _page(ckpt.tree).text
    _page(ckpt.tree[HOSTILE])
    _page(ec.diff(ckpt, {HOSTILE: jnp.zeros(2)}))
    ec.tree_serialise_leaves(tmp_path / "é\n<", {"a": 1})
    assert "/&#233;\\n&lt;" in ec.open(tmp_path / "é\n<")._repr_html_()


def test_stored_names_do_not_stand_for_methods():
    """IPython asks an object, and not its class, for what it may call."""
    names = ["_repr_html_", "_repr_mimebundle_", "_ipython_display_"]
    names.append("_ipython_canary_method_should_not_exist_")
    ec.tree_serialise_leaves("memory://names", {name: jnp.ones(1) for name in names})
    tree = ec.open("memory://names").tree
    assert "_ipython_display_" in _page(tree).text
    formatters = pytest.importorskip("IPython.core.formatters")
    data, _ = formatters.DisplayFormatter().format(tree)
    assert data["text/html"] == tree._repr_html_() and "Node" in data["text/plain"]
    for name in names:
        assert tree[name].read() == 1
    with pytest.raises(AttributeError, match="reached by"):
        tree._ipython_display_


def test_nothing_is_read(ckpt):
    """The files are gone, and all is shown as before."""
    tree = ckpt.tree
    shutil.rmtree(ckpt.path)
    assert "f32[4,4]" in _page(ckpt).text and "f32[4,4]" in _page(tree).text
    assert "f32[4]" in _page(tree.layers[2].bias).text


def test_a_manager_asks_no_store(s3):
    manager = ec.CheckpointManager("s3://bucket/html")
    s3.requests.clear()
    assert ".steps()" in _page(manager).text
    assert not s3.requests


# treescope looks at all names of NumPy.
@pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")
def test_treescope(ckpt):
    treescope = pytest.importorskip("treescope")
    text = treescope.render_to_text(ckpt)
    assert "Checkpoint" in text and "LazyArray(layers.0.weight: f32[4,4])" in text
    text = treescope.render_to_text(ckpt.tree.layers[0])
    assert "Node" in text and "in_features" in text


# ---- In a browser.


def _run(browser, tmp_path, body, script, dark=False):
    """What a script finds in a page, as JSON."""
    head = "<!doctype html><meta charset=utf-8>"
    head += '<meta name=color-scheme content="light dark">'
    done = "document.body.innerHTML=''; document.title=JSON.stringify(out)"
    page = f"{head}<script>var pwned=0</script>{body}"
    page += f"<script>(async()=>{{{script};{done}}})()</script>"
    (tmp_path / "page.html").write_text(page)
    browser.open((tmp_path / "page.html").as_uri(), dark=dark)
    return json.loads(browser.until("return document.title"))


_LOOK = """
    let out = {};
    let rows = [...document.querySelectorAll('section details')];
    out.opened = rows.filter(x => x.open).length;
    let node = document.querySelector('[data-k=layers]');
    node.open = true;
    let height = node.offsetHeight;
    node.querySelector('summary').click();
    out.folds = node.offsetHeight < height && !node.open;
    node.querySelector('summary').click();
    out.unfolds = node.open;
    let texts = [];
    let clipboard = {writeText: async x => {texts.push(x)}};
    Object.defineProperty(navigator, 'clipboard', {value: clipboard});
    let weight = document.querySelector('[data-k=weight]>button');
    weight.click();
    await 0;
    out.copied = texts[0];
    out.told = weight.className;
    node.querySelector('summary>button').click();
    out.node = texts[1];
    out.stays = node.open;
    out.color = getComputedStyle(document.querySelector('b')).color;
    let card = document.querySelector('.eqxckpt');
    out.accent = getComputedStyle(card).getPropertyValue('--a');
"""


def test_it_opens_folds_copies_and_is_light_and_dark(ckpt, browser, tmp_path):
    light = _run(browser, tmp_path, ckpt._repr_html_(), _LOOK)
    assert light["folds"] and light["unfolds"] and light["stays"]
    assert light["copied"] == "layers.0.weight" and light["told"] == "ok"
    assert light["node"] == "layers" and light["color"] == "rgb(0, 0, 0)"
    node = ckpt.tree.layers[7]._repr_html_()
    script = "let out = {};" + _LOOK[_LOOK.index("let texts") : _LOOK.index("out.told")]
    assert _run(browser, tmp_path, node, script)["copied"] == "layers.7.weight"
    dark = _run(browser, tmp_path, ckpt._repr_html_(), _LOOK, dark=True)
    assert dark["color"] == "rgb(255, 255, 255)" and dark["accent"] != light["accent"]
    themed = f"<body data-jp-theme-light=false>{ckpt._repr_html_()}"
    assert _run(browser, tmp_path, themed, _LOOK)["accent"] == dark["accent"]


def test_nothing_stored_is_run_in_a_browser(browser, tmp_path):
    ec.tree_serialise_leaves(
        "memory://hostile2",
        {HOSTILE: {HOSTILE: 1.0}, "w": jnp.ones(2)},
        metadata={"m": HOSTILE},
    )
    ckpt = ec.open("memory://hostile2")
    body = ckpt._repr_html_() + ckpt.tree._repr_html_()
    script = """
        let out = {};
        document.querySelectorAll('details').forEach(x => {x.open = true});
        let buttons = [...document.querySelectorAll('section button')];
        buttons.slice(0, 20).forEach(x => {x.click()});
        await new Promise(f => setTimeout(f, 300));
        out.pwned = pwned;
        out.images = document.images.length;
        out.cards = document.querySelectorAll('.eqxckpt').length;
        out.resources = performance.getEntriesByType('resource').length;
    """
    found = _run(browser, tmp_path, body, script)
    assert found == {"pwned": 0, "images": 0, "cards": 2, "resources": 0}
