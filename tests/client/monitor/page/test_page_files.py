"""The page's files: the charts' library is the one that was reviewed, and colours can be told."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from shoal.client.monitor import page
from shoal.client.monitor.page.view import COLUMNS

STATIC = Path(page.__file__).parent / "static"
ECHARTS_6_1_0 = "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
LEAST_CONTRAST = 4.5
"""Of text with its background: success criterion 1.4.3 of WCAG 2.2, level AA."""


def test_library_of_charts_is_the_released_one_with_its_licence() -> None:
    assert hashlib.sha256((STATIC / "echarts.min.js").read_bytes()).hexdigest() == ECHARTS_6_1_0
    assert "Apache License" in (STATIC / "echarts.LICENSE").read_text()
    assert "Apache ECharts" in (STATIC / "echarts.NOTICE").read_text()


def test_script_fills_the_columns_that_the_template_makes() -> None:
    script = (STATIC / "page.js").read_text()
    listed = re.search(r"const columns = \[(.*?)\];", script, re.DOTALL)
    assert listed is not None

    assert re.findall(r'"(\w+)"', listed[1]) == [name for name, _ in COLUMNS]


def test_style_has_a_width_for_each_column() -> None:
    style = (STATIC / "page.css").read_text()
    widths = re.search(
        r"table\.peers tr \{ display: grid; grid-template-columns:(.*?);", style, re.S
    )
    assert widths is not None

    assert len(widths[1].split()) == len(COLUMNS)


def test_colours_of_text_contrast_with_their_background() -> None:
    style = (STATIC / "page.css").read_text()
    pairs = dict(re.findall(r"--(\w+): light-dark\((#\w+, #\w+)\)", style))
    backs = pairs.pop("back").split(", ")
    del pairs["line"]

    contrasts = {
        (name, scheme): _find_contrast(colours.split(", ")[scheme], backs[scheme])
        for name, colours in pairs.items()
        for scheme in (0, 1)
    }

    assert len(contrasts) == 10
    assert min(contrasts.values()) >= LEAST_CONTRAST, contrasts


def _find_contrast(first: str, second: str) -> float:
    darker, lighter = sorted(map(_find_luminance, (first, second)))
    return (lighter + 0.05) / (darker + 0.05)


def _find_luminance(colour: str) -> float:
    """Return the relative luminance of an sRGB colour, as WCAG 2.2 defines it."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
