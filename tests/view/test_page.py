"""The page in a real Chromium."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt as ec


HOSTILE = [
    "<img src=x onerror=document.title='pwned'>",
    "</script><script>document.title='pwned'</script>",
    "javascript:document.title='pwned'",
    "a\u202eb\x1b[31m",
    "__proto__",
    "constructor",
    'x" onmouseover="document.title=1',
    "${7*7}{{7*7}}",
    "w" * 3000,
]
READY = "return document.querySelectorAll('.row').length > 0"
DRAWN = (
    "return document.querySelectorAll('.slots figure svg, .slots figure canvas').length"
)


def _tree():
    rng = np.random.default_rng(0)
    layers = [
        {
            "weight": jnp.asarray(rng.normal(size=(64, 48)), jnp.float32),
            "bias": jnp.ones(48),
        }
        for _ in range(3)
    ]
    return {"model": {"layers": layers}, "step": 7, "name": "a <b>name</b>"}


def test_a_leaf_is_looked_at_by_keyboard(serve, browser, save):
    from selenium.webdriver.common.keys import Keys

    server = serve(save("ckpt", _tree(), metadata={"note": "<i>x</i>"}))
    browser.open(server.url)
    browser.until(READY)
    assert "<i>x</i>" in browser.text() and "in memory" in browser.text()
    browser.press("/")
    browser.press("layers.1 weight")
    browser.until(
        "return document.querySelector('.found').innerText === '1 of 7 leaves'"
    )
    browser.press(Keys.ENTER, Keys.ENTER)
    browser.until(f"{DRAWN} >= 3")
    assert (
        browser.run("return document.querySelector('h2').innerText")
        == "model.layers.1.weight"
    )
    assert {"Histogram", "Picture", "Singular values"} <= set(
        browser.text().split("\n")
    )
    # The slice, and the cross of a chart.
    browser.run("document.querySelector('.slice input').focus()")
    browser.press(Keys.CONTROL, "a")
    browser.run("document.querySelector('.slice input').value = ''")
    browser.press("3", Keys.ENTER)
    browser.until("return document.querySelector('.holder svg') !== null")
    browser.run("document.querySelector('.plot').focus()")
    browser.press(Keys.ARROW_RIGHT)
    assert " to " in browser.run("return document.querySelector('output').innerText")
    browser.press(Keys.ESCAPE)
    browser.until("return document.querySelector('h2') === null")


def test_the_tree_by_keyboard(serve, browser, save):
    from selenium.webdriver.common.keys import Keys

    server = serve(save("ckpt", _tree()))
    browser.open(server.url)
    browser.until(READY)
    browser.run("document.querySelector('.list').focus()")
    rows = "return document.querySelectorAll('.row').length"
    before = browser.run(rows)
    cursor = "return document.querySelector('.row.cursor .part').innerText"
    browser.press(Keys.ARROW_LEFT)
    assert browser.run(rows) < before
    browser.press(Keys.ARROW_RIGHT)
    assert browser.run(rows) == before
    browser.press(Keys.ARROW_RIGHT)
    assert browser.run(cursor) == "layers"
    browser.press(Keys.END)
    assert browser.run(cursor) == "step"
    browser.press(Keys.ENTER)
    browser.until("return document.querySelector('pre')?.innerText === '7'")


@pytest.mark.parametrize("width", [1440, 768, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_sizes_and_colours(serve, browser, save, width, dark):
    server = serve(save("ckpt", _tree()))
    wide = "return document.documentElement.scrollWidth"
    browser.open(server.url, width, dark=dark)
    browser.until(READY)
    assert browser.run(wide) <= width
    browser.open(server.url + "#n=1", width, dark=dark)
    browser.until(f"{DRAWN} >= 3")
    assert browser.run(wide) <= width
    inside = """
        const wide = document.querySelector('.detail').getBoundingClientRect().right;
        return [...document.querySelectorAll('.detail *')].every(
            (x) => x.getBoundingClientRect().right <= wide + 1);"""
    assert browser.run(inside)
    # The text stands out from what is behind it, as WCAG asks.
    colours = browser.run("""
        const style = (x) => getComputedStyle(document.querySelector(x));
        return [style('body').backgroundColor, style('h2').color, style('dt').color]""")
    page, ink, quiet = (_luminance(x) for x in colours)
    assert (page < 0.1) == dark
    for text in (ink, quiet):
        assert (max(text, page) + 0.05) / (min(text, page) + 0.05) >= 4.5


def _luminance(colour):
    numbers = [int(x) / 255 for x in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [
        x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in numbers
    ]
    return sum(x * y for x, y in zip(linear, (0.2126, 0.7152, 0.0722)))


def test_what_is_hostile_is_text(serve, browser, save):
    tree = {name: {"x": jnp.ones((2, 2)), "text": name} for name in HOSTILE}
    metadata = {name: name for name in HOSTILE if name.isprintable()}
    server = serve(save("hostile", tree, metadata=metadata))
    browser.open(server.url)
    browser.until(READY)
    count = len(ec.open(server.site._subject.path))
    for n in range(count):
        browser.run(f"location.hash = 'n={n}'")
        browser.until("return document.querySelector('pre, canvas') !== null")
        assert browser.run("return document.title") == "hostile · eqx_ckpt"
        assert (
            browser.run("return document.querySelectorAll('img, iframe').length") == 0
        )
        assert browser.run("return document.scripts.length") == 1
    # What a script would make of it.
    browser.expected = "TrustedHTML"
    blocked = browser.run("""
        try { document.body.innerHTML = '<b>x</b>'; } catch { return true }""")
    assert blocked


def test_a_page_from_elsewhere_reads_nothing(serve, browser, save, get):
    server = serve(save("ckpt", _tree()))
    other = serve(save("other", _tree()))
    browser.open(other.url)
    browser.until(READY)
    browser.expected = "Content Security Policy"
    found = browser.run(
        "return fetch(arguments[0]).then(() => 'read', () => 'refused')",
        server.url + "page",
    )
    assert found == "refused"


def test_ten_thousand_leaves_scroll(serve, browser, save):
    tree = {f"layer{i}": {"w": np.zeros(2), "b": np.zeros(1)} for i in range(5000)}
    server = serve(save("many", tree))
    browser.open(server.url)
    browser.until(READY)
    assert browser.run("return document.querySelectorAll('*').length") < 700
    browser.run("document.querySelector('.list').scrollTop = 1e9")
    browser.until("return document.body.innerText.includes('layer999')")
    # A search, in a fraction of a second: the shortest, as the processor is shared.
    took = browser.run("""
        const box = document.querySelector('[type=search]'), took = [];
        const look = (words) => {
            box.value = words;
            box.dispatchEvent(new Event('input'));
        };
        for (let i = 0; i < 5; i++) {
            look('');
            const start = performance.now();
            look('layer49 w');
            took.push(performance.now() - start);
        }
        return took""")
    assert min(took) < 1000
    assert browser.run("return document.querySelector('.found').innerText").startswith(
        "111 of"
    )


def test_two_checkpoints(serve, browser, save):
    from selenium.webdriver.common.keys import Keys

    x, y = jnp.arange(64.0).reshape(8, 8), jnp.ones((9, 9))
    a = {"little": x, "large": y, "same": x, "gone": x}
    b = {"little": x * 3, "large": y * 1.01, "same": x, "new": x}
    names = "[...document.querySelectorAll('.bars a')].map((x) => x.innerText)"
    server = serve(save("a", a), save("b", b))
    browser.open(server.url)
    browser.until(READY)
    text = browser.text()
    assert "Only in the first" in text and "Measure 2 leaves" in text
    # Which have changed is there at once, and nothing was read to know it.
    assert browser.run(f"return {names}") == ["large", "little"]
    assert not server.site._slots
    browser.run("document.querySelector('.detail button').focus()")
    browser.press(Keys.ENTER)
    browser.until(f"return {names}.join() === 'little,large'")
    browser.run("document.querySelector('.bars a').focus()")
    browser.press(Keys.ENTER)
    browser.until(f"{DRAWN} >= 3")
    assert {"Histogram", "Difference"} <= set(browser.text().split("\n"))


def test_a_run(serve, browser, tmp_path):
    from selenium.webdriver.common.keys import Keys

    with ec.CheckpointManager(tmp_path / "run") as manager:
        for step in range(1, 6):
            tree = {"w": jnp.full((4, 4), float(step)), "b": jnp.arange(3.0)}
            manager.save(step, tree, {"loss": 1 / step})
    server = serve(tmp_path / "run")
    browser.open(server.url)
    browser.until("return document.querySelectorAll('tbody tr').length === 5")
    browser.run("location.hash = 'n=1'")
    browser.until("return document.body.innerText.includes('5 of 5 steps')")
    # One of the steps, and back; two of them.
    browser.run("location.hash = ''")
    browser.until("return document.querySelector('tbody a') !== null")
    browser.run("document.querySelector('tbody a').click()")
    browser.until("return document.querySelector('h1 a') !== null")
    browser.run("document.querySelector('h1 a').click()")
    browser.until("return document.querySelectorAll('tbody input').length === 5")
    ticks = "[...document.querySelectorAll('tbody input')].slice(0, 2)"
    browser.run(f"for (const x of {ticks}) x.click()")
    browser.run("document.querySelector('figcaption button').focus()")
    browser.press(Keys.ENTER)
    browser.until("return document.body.innerText.includes('Measure 1 leaf')")
    # Back by keyboard alone: from a leaf, from a search, from the two.
    browser.press(Keys.ARROW_DOWN, Keys.ENTER)
    browser.until("return document.querySelector('h2')?.innerText === 'w'")
    browser.press("/", "w", Keys.ENTER)
    found = "return document.querySelector('.found').innerText"
    assert browser.run(found) == "1 of 2 leaves"
    browser.press(Keys.ESCAPE)
    browser.until("return document.querySelector('h2') === null")
    browser.press(Keys.ESCAPE)
    browser.until("return document.querySelector('.found').innerText === ''")
    browser.press(Keys.ESCAPE)
    browser.until("return document.querySelectorAll('tbody tr').length === 5")


def test_a_notebook_on_a_telephone(browser, save, tmp_path):
    """No row of the tree has more than two lines."""
    html = ec.open(save("ckpt", _tree()))._repr_html_()
    page = tmp_path / "notebook.html"
    page.write_text(f'<!doctype html><meta name="viewport" content="width=390">{html}')
    browser.open(page.as_uri(), 390)
    heights = browser.run(
        "return [...document.querySelectorAll('p[data-k], details[data-k] > summary')]"
        ".map((x) => x.getBoundingClientRect().height)"
    )
    assert len(heights) >= 7 and max(heights) <= 50
    assert browser.run("return document.documentElement.scrollWidth") <= 390


def test_a_run_that_goes_on(serve, browser, tmp_path):
    """The page looks again; what somebody looks at stays, and so do the settings."""
    steps = "return document.querySelectorAll('tbody tr').length"
    saved = "return document.querySelector('header .quiet').innerText"
    with ec.CheckpointManager(tmp_path / "run", keep=2) as manager:
        for step in (1, 2):
            manager.save(step, {"w": jnp.full((4, 4), float(step))}, {"loss": step})
        manager.wait()
        server = serve(tmp_path / "run")
        browser.open(server.url)
        browser.until(f"{steps} === 2")
        browser.run("document.querySelector('.tools input').click()")
        browser.run("document.querySelector('[data-key=\"2\"]').focus()")
        browser.run("document.activeElement.click()")
        manager.save(3, {"w": jnp.full((4, 4), 3.0), "b": jnp.ones(3)}, {"loss": 3})
        manager.wait()
        browser.until(f"{saved}.startsWith('2 steps of 3')")
        assert browser.run("return document.activeElement.dataset.key") == "2"
        assert browser.run("return document.activeElement.checked")
        assert browser.run("return document.querySelector('.tools input').checked")
        assert browser.run("return document.querySelectorAll('.dot').length") == 3
        browser.run("location.hash = 'n=1'")
        browser.until("return document.body.innerText.includes('Of step 3')")
        browser.until(f"{DRAWN} >= 2")
        manager.save(4, {"w": jnp.full((4, 4), 4.0)}, {"loss": 4})
        manager.wait()
        browser.until(f"{saved}.startsWith('2 steps of 4')")
        assert "Of step 3" in browser.text()
        browser.run("location.hash = ''")
        browser.until("return document.querySelectorAll('.dot').length === 4")


def test_curves_at_three_widths(serve, browser, tmp_path):
    """They come before the tree, and an axis has at least three numbers, on either
    scale."""
    with ec.CheckpointManager(tmp_path / "run", keep=1) as manager:
        for step in range(520, 1010, 35):
            metrics = {"loss": 10 ** (-step / 300), "accuracy": 0.9 + step / 1e5}
            manager.save(step, {"w": jnp.ones(2)}, metrics)
    numbers = """
        return [...document.querySelectorAll('.curves svg')].flatMap((x) =>
            ['end', 'middle'].map((side) =>
                x.querySelectorAll(`.tick[text-anchor=${side}]`).length))"""
    server = serve(tmp_path / "run")
    for width in (390, 800, 1400):
        browser.open(server.url, width, 900, dark=width == 800)
        browser.until("return document.querySelectorAll('.curves svg').length === 2")
        top = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
        assert browser.run(top, ".curves") < 200
        assert width > 600 or browser.run(top, "nav") > 600
        assert min(browser.run(numbers)) >= 3
        browser.run("document.querySelector('.tools input').click()")
        assert min(browser.run(numbers)) >= 3
        ticks = browser.run("return document.querySelector('.curves svg').textContent")
        assert "0.01" in ticks and "0.001" in ticks
        assert browser.run("return document.documentElement.scrollWidth") <= width


def test_smoothing(serve, browser, tmp_path):
    with ec.CheckpointManager(tmp_path / "run", keep=1) as manager:
        for step in range(40):
            manager.save(step, {"w": jnp.ones(2)}, {"loss": 1.0 + step % 2})
    browser.open(serve(tmp_path / "run").url)
    browser.until("return document.querySelector('.curves svg') !== null")
    swing = """
        const path = document.querySelector('.curves path.line:not(.raw)');
        const ys = path.getAttribute('d').split(/[ML]/).slice(-10);
        return Math.max(...ys.map((x) => x.split(',')[1])) -
            Math.min(...ys.map((x) => x.split(',')[1]))"""
    rough = browser.run(swing)
    browser.run("""
        const range = document.querySelector('[type=range]');
        range.value = range.max;
        range.dispatchEvent(new Event('input'))""")
    assert browser.run(swing) < rough / 5
    assert browser.run("return document.querySelectorAll('.raw').length") == 1


def test_many_runs(serve, browser, tmp_path):
    """One table that sorts, and their curves in one chart."""
    from selenium.webdriver.common.keys import Keys

    for number in range(9):
        with ec.CheckpointManager(tmp_path / f"sweep/{number}", keep=1) as manager:
            for step in (1, 2, 3):
                loss = (number * 7 % 9) / step + (step == 2)
                manager.save(step, {"w": jnp.ones(2**number)}, {"loss": loss})
    browser.open(serve(tmp_path / "sweep").url)
    browser.until("return document.querySelectorAll('tbody tr').length === 9")
    column = """
        return [...document.querySelectorAll('tbody tr')].map(
            (x) => x.cells[arguments[0]].innerText.trim())"""
    assert browser.run(column, 0) == [f"{i}" for i in range(9)]
    assert browser.run("return document.querySelectorAll('path.line').length") == 9
    assert browser.run("return document.querySelectorAll('path.rest').length") == 3

    def press(title):
        browser.run(
            "[...document.querySelectorAll('th button')].find("
            "(x) => x.innerText.startsWith(arguments[0])).focus()",
            title,
        )
        browser.press(Keys.ENTER)

    press("loss")
    losses = [*map(float, browser.run(column, 2))]
    assert losses == sorted(losses)
    press("loss")
    assert [*map(float, browser.run(column, 2))] == sorted(losses, reverse=True)
    press("size")  # By bytes, and not as text.
    assert browser.run(column, 0) == [f"{i}" for i in range(9)]
    browser.run("""
        const one = document.querySelector('select');
        one.value = 'greatest';
        one.dispatchEvent(new Event('change'))""")
    assert float(browser.run(column, 2)[1]) == 7
    # The eighth gets a colour; the ninth takes that of the first.
    for key, left in (("7", 3), ("0", 3), ("8", 3)):
        browser.run(f"document.querySelector('[data-key=\"{key}\"]').click()")
        assert browser.run("return document.querySelectorAll('.rest').length") == left
    # One of them, a step of it, and back.
    browser.run("document.querySelector('tbody a').click()")
    browser.until("return document.querySelector('h1').innerText.includes('‹ runs')")
    browser.until("return document.querySelectorAll('.row').length === 1")
    browser.run("document.querySelector('tbody a').click()")
    browser.until("return document.querySelector('h1').innerText.includes('‹ run ')")
    browser.press(Keys.ESCAPE)
    browser.until("return document.querySelector('h1').innerText.includes('‹ runs')")
    browser.press(Keys.ESCAPE)
    browser.until("return document.querySelectorAll('tbody tr').length === 9")


def test_scalars_stand_last_and_states_have_names(serve, browser, save):
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema")
    tree = {"count": 1, "key": jax.random.key(0), "norm": model, "state": state}
    browser.open(serve(save("ckpt", tree)).url)
    browser.until(READY)
    rows = "return [...document.querySelectorAll('.row .part')].map((x) => x.innerText)"
    found = browser.run(rows)
    assert found[-2:] == ["count", "key"]
    assert "1 norm.ema_state_index" in found
    assert "momentum = 0.99" in browser.text()
    browser.run("""
        const box = document.querySelector('[type=search]');
        box.value = 'ema_state';
        box.dispatchEvent(new Event('input'))""")
    assert browser.run(rows) == ["state.1.0", "state.1.1"]


def test_a_checkpoint_that_is_replaced(serve, browser, save):
    server = serve(save("ckpt", {"w": jnp.ones(3)}))
    browser.open(server.url)
    browser.until(READY)
    save("ckpt", {"w": jnp.full(3, 7.0), "v": jnp.ones(2)}, overwrite=True)
    browser.driver.refresh()
    browser.until("return document.body.innerText.includes('2 leaves')")
    browser.run("location.hash = 'n=1'")
    browser.until(
        "return document.querySelector('pre')?.innerText === '[7.0, 7.0, 7.0]'"
    )


def test_odd_leaves(serve, browser, save):
    """Each is looked at, with nothing to complain of in the browser's own log."""
    rng = np.random.default_rng(0)
    tree = {
        "bf16": jnp.ones((4, 4), jnp.bfloat16),
        "fp8": jnp.ones((4, 4), jnp.float8_e4m3fn),
        "int4": jnp.arange(6).astype(jnp.int4),
        "bool": jnp.eye(5) > 0,
        "complex": jnp.exp(1j * jnp.arange(12.0)),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(3), 6),
        "empty": np.zeros((3, 0, 4)),
        "nan": np.full((3, 3), np.nan),
        "inf": np.array([[1, np.inf], [-np.inf, 0]]),
        "huge": np.array([1e308, -1e308]),
        "five": rng.normal(size=(2, 3, 4, 5, 6)),
        "row": rng.normal(size=(1, 4000)),
        "scalars": [1, 1.5, 1 + 2j, True, "text", b"\0", 10**30],
    }
    server = serve(save("odd", tree))
    browser.open(server.url, 390, 844)
    browser.until(READY)
    for n in range(len(ec.open(server.site._subject.path))):
        browser.run(f"location.hash = 'n={n}'")
        browser.until("return document.querySelector('pre, .figures') !== null")
        assert browser.run("return document.querySelector('p.bad')") is None, n
        assert browser.run("return document.documentElement.scrollWidth") <= 390


def test_damage_is_said_in_lines(serve, browser, save):
    path = save("damaged", {"w": jnp.arange(4000.0), "v": jnp.ones(3)})
    data = max(path.glob("d/*/*"), key=lambda x: x.stat().st_size)
    whole = bytearray(data.read_bytes())
    whole[len(whole) // 2] ^= 1
    data.write_bytes(whole)
    browser.open(serve(path).url + "#n=1")
    said = browser.until("return document.querySelector('p.bad')?.innerText")
    assert "w: its bytes are not those that were saved" in said.split("\n")[1]
    browser.run("location.hash = 'n=0'")
    browser.until(
        "return document.querySelector('pre')?.innerText === '[1.0, 1.0, 1.0]'"
    )


def test_formats_that_differ_are_compared(serve, browser, save, tmp_path):
    from selenium.webdriver.common.keys import Keys

    x = jnp.arange(16.0).reshape(4, 4)
    ec.export_safetensors(tmp_path / "b.safetensors", {"w": x * 2, "v": x})
    server = serve(save("a", {"w": x, "v": x}), tmp_path / "b.safetensors")
    browser.open(server.url)
    browser.until(READY)
    assert "Leaves to compare" in browser.text()
    browser.run("document.querySelector('.detail button').focus()")
    browser.press(Keys.ENTER)
    browser.until("return document.querySelectorAll('.bars li').length === 1")
    text = browser.text()
    assert "Changed" in text and "The same" in text


def test_a_picture_is_looked_at_closer(serve, browser, save):
    from selenium.webdriver.common.keys import Keys

    tree = {"w": np.random.default_rng(0).normal(size=(2, 1000, 1200))}
    browser.open(serve(save("ckpt", tree)).url + "#n=0")
    box = "return document.querySelector('.slice input')?.value"
    browser.until(f"{box} === '0, :, :'")
    browser.run("document.querySelector('.holder canvas').focus()")
    browser.press(Keys.ARROW_DOWN, Keys.ENTER)
    browser.until(f"{box} === '0, 0:256, 0:256'")
    browser.until(
        "return document.querySelector('.beside output')?.innerText === '256 × 256'"
    )
    # Back, and by the mouse.
    browser.run("document.querySelector('.slice input').value = '1, 100:, 5:1200'")
    browser.run("document.querySelector('.slice button').click()")
    said = "return document.querySelector('.beside output')?.innerText"
    browser.until(f"{said}?.startsWith('each dot')")
    browser.run("document.querySelector('.holder canvas').scrollIntoView()")
    place = (
        "const box = document.querySelector('.holder canvas').getBoundingClientRect();"
    )
    x, y = browser.run(
        f"{place} return [box.left + box.width / 2, box.top + box.height / 2]"
    )
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        at = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
        browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", at)
    found = browser.until(f"{box} !== '1, 100:, 5:1200' && {box[7:]}")
    plane, rows, columns = found.split(", ")
    assert plane == "1" and 400 <= int(rows.split(":")[0]) <= 440
    assert 440 <= int(columns.split(":")[0]) <= 510


def test_the_steps_of_a_notebook_on_a_telephone(browser, tmp_path):
    """The metrics fit; what does not is moved sideways, and not the page."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        for step in range(3):
            metrics = {"loss": 1 / 3, "accuracy": 0.123456, "a metric": 1e-9}
            manager.save(step, {"w": jnp.full(2, float(step))}, metrics)
        manager.wait()
        html = manager._repr_html_()
    page = tmp_path / "notebook.html"
    page.write_text(f'<!doctype html><meta name="viewport" content="width=390">{html}')
    browser.open(page.as_uri(), 390)
    assert browser.run("return document.documentElement.scrollWidth") <= 390
    shown = browser.run("""
        const shown = [...document.querySelectorAll('th')].filter((x) => x.offsetWidth);
        return shown.map((x) => x.innerText)""")
    assert shown == ["step", "size", "loss", "accuracy", "a metric"]
    rows = browser.run("return document.querySelectorAll('td:first-child').length")
    assert rows == 3
