"""The HTML report: one file that loads nothing, sorts, and fits a phone (looked at in headless Chromium)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.compare import compare, save_comparison
from harness.report import html as html_page
from harness.report import style
from harness.report.html import write_html
from harness.verify.derived import find_runs
from tests.report.fake_run import make_frame, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --allow-file-access-from-files"
).split()


DOT = "data:image/png;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report whose pictures are one dot each; the real ones are drawn in their own tests."""
    folder = tmp_path_factory.mktemp("html")
    frame = make_frame(rows=6, length=65)
    measurement = write_run(folder, frame)
    rows = [row.model_copy(update={"document": "<b>|&" + row.document}) for row in measurement.per_row]
    write_run(folder, frame, per_row=rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html_page, "data_uri", lambda draw, theme: DOT)
        return write_html(folder)


def in_browser(page: Path, folder: Path, script: str) -> list[object]:
    """Load the page in two iframes, 1280 and 400 pixels wide, and return what ``script`` gives for each ``doc``."""
    outer = folder / "outer.html"
    frames = "".join(f'<iframe src="{page.as_uri()}" width="{width}" height="900"></iframe>' for width in (1280, 400))
    outer.write_text(
        f'{frames}<pre id="out"></pre><script>window.onload = () => {{'
        "const look = (doc) => { let result; " + script + "; return result; };"
        'const found = [...document.querySelectorAll("iframe")].map((frame) => look(frame.contentDocument));'
        'document.getElementById("out").textContent = "RESULT " + JSON.stringify(found) + " END"; };</script>'
    )
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000"]
    command += ["--virtual-time-budget=4000", "--dump-dom", outer.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    found = re.search(r"RESULT (.*?) END", done.stdout)
    assert found, done.stdout[-500:]
    return list(json.loads(found.group(1)))


def test_it_loads_nothing(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r'(?:src|href|srcset)="(?!data:image/png;base64,)', text)
    assert "http://" not in text and "https://" not in text and "@import" not in text
    assert text.count("data:image/png;base64,") == 8


def test_names_are_escaped(page: Path) -> None:
    text = page.read_text()
    assert "&lt;b&gt;|&amp;doc-00" in text and "<b>|&doc" not in text


def test_worst_positions_are_open_and_lead_to_their_text(page: Path) -> None:
    text = page.read_text()
    assert text.count("<details open>") == 20
    assert "token ids before it: " in text


def test_a_comparison_has_its_tables_and_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = {"a": make_frame(rows=4, length=33, noise=0.6), "b": make_frame(rows=4, length=33, noise=0.4)}
    for name, frame in frames.items():
        write_run(tmp_path / name, frame, name=name)
    save_comparison(tmp_path / "cmp", compare([tmp_path / "a", tmp_path / "b"]))
    runs = find_runs(tmp_path / "cmp", [])
    assert sorted(runs.values()) == [tmp_path / "a", tmp_path / "b"], "runs beside it give their positions"
    monkeypatch.setattr(html_page, "data_uri", lambda draw, theme: "data:image/png;base64,")
    text = write_html(tmp_path / "cmp").read_text()
    assert "b is better than a" in text and text.count("<details open>") == 20
    assert "Distribution of per-position KL" in text


def test_pictures_are_inside_the_file() -> None:
    with style.drawing(style.DARK):
        figure = style.new_figure(1.0)
    uri = html_page.data_uri(lambda theme: figure, style.DARK)
    assert uri.startswith("data:image/png;base64,iVBOR")


@needs_chromium
def test_a_click_sorts_and_neither_width_scrolls_sideways(page: Path, tmp_path: Path) -> None:
    script = """
      const table = [...doc.querySelectorAll("h3")].find((h) => h.textContent === "Every row").nextElementSibling
        .querySelector("table");
      const at = [...table.tHead.rows[0].cells].findIndex((c) => c.textContent.startsWith("KL mean"));
      const values = () => [...table.tBodies[0].rows].map((r) => parseFloat(r.cells[at].textContent));
      const button = table.tHead.rows[0].cells[at].querySelector("button");
      button.click(); const up = values(); button.click(); const down = values();
      result = { rows: up.length, up: up.every((v, i) => !i || up[i - 1] <= v),
        down: down.every((v, i) => !i || down[i - 1] >= v), sort: button.parentElement.getAttribute("aria-sort"),
        fits: doc.documentElement.scrollWidth <= doc.documentElement.clientWidth, images: doc.images.length }"""
    expected = {"rows": 6, "up": True, "down": True, "sort": "descending", "fits": True, "images": 4}
    assert in_browser(page, tmp_path, script) == [expected, expected]
