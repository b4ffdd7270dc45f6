"""The pages of a run in a browser: no error, no request, and tables that sort when asked to."""

import glob
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from evaluation_support import run_of_three

from lcjax.evaluation import ManyShot, OpenQa, Passkey, Perplexity, report, results
from lcjax.evaluation.compare import compare

NAMES = (
    "chromium", "chromium-browser", "chromium-headless-shell", "google-chrome",
    "google-chrome-stable", "chrome",
)  # fmt: skip
DOWNLOADED = (
    "chromium-*/chrome-linux*/chrome",
    "chromium_headless_shell-*/chrome-linux*/headless_shell",
    "chromium_headless_shell-*/chrome-headless-shell-linux*/chrome-headless-shell",
)
FLAGS = (
    "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-default-apps",
    "--disable-extensions", "--enable-logging=stderr", "--v=0", "--virtual-time-budget=3000",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom",
)  # fmt: skip
_OWN = "not an origin"
# Clicks every head of every table twice and notes what the column then says, and what sticks out.
ASK = """
<script>
const found = [...document.querySelectorAll("table.sort")].map(table =>
  [...table.tHead.rows[0].cells].map((head, column) => [0, 1].map(() => {
    head.querySelector("button").click();
    return [head.getAttribute("aria-sort"), [...table.tBodies[0].rows].map(row => {
      const cell = row.cells[column], value = cell.dataset.v;
      return value === undefined ? cell.textContent.trim() : value === "" ? null : Number(value);
    })];
  })));
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.body.dataset.found = JSON.stringify({tables: found, wide: wide});
</script>
"""


@pytest.fixture(scope="module")
def browser():
    found = [path for name in NAMES if (path := shutil.which(name))]
    cache = os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache" / "ms-playwright")
    for pattern in DOWNLOADED:
        found += sorted(glob.glob(f"{cache}/{pattern}"))
    if not found:
        pytest.skip("no Chromium or Chrome is installed: playwright install chromium")
    return found[0]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run whose report has every kind of figure: over lengths, positions, depths and counts."""
    curves = Perplexity(protocol="slide_full", position_bins="log")
    tasks = curves, Passkey(depths=3, trials=2)
    config = run_of_three(tmp_path_factory.mktemp("run"), tasks, drawn=False)
    run = results.read(config.run.folder)
    like = next(own for task, own in run.tasks.items() if isinstance(task, Passkey))
    counted = (
        ManyShot(path="", tasks=("trec_1shots", "trec_5shots", "trec_100shots")),
        OpenQa(path="", tasks=("nq_1", "nq_5", "popqa_1", "popqa_5")),
    )
    tasks = run.tasks | {task: _answers(task, like) for task in counted}
    notes = "| method | loss |\n| --- | ---: |\n| base | 2.5 |\n"
    report.write(
        run.folder,
        run.settings,
        tasks,
        order=run.order,
        published=(),
        notes=notes,
        environment=run.environment,
    )
    return run.folder


def _answers(task, like):
    """Records of a task over several data sets, with the costs and names of others'."""
    rng, made = np.random.default_rng(0), []
    for method, length in sorted({(record["method"], record["length"]) for record in like}):
        own = next(r for r in like if (r["method"], r["length"]) == (method, length))
        for index, dataset in enumerate(sorted(task.tasks * 8)):
            right = float(rng.random() < 0.3 + 0.3 * (method != "base"))
            facts = {"window": index, "line": index, "dataset": dataset}
            facts |= {"correct": right, "answer": "<b>x</b>"}
            scores = dict.fromkeys(("em", "exact_match", "substring_match", "f1"), right)
            made.append({**own, **facts, "protocol": task.label, "scores": scores})
    return made


def opened(browser, page, tmp_path, anchor=""):
    """The DOM of a page, what it said on the console, and what it asked the network for."""
    net = tmp_path / "net.json"
    words = [browser, *FLAGS, f"--log-net-log={net}", f"--user-data-dir={tmp_path / 'profile'}"]
    words += ["--no-sandbox"] * (os.geteuid() == 0)
    done = subprocess.run(
        [*words, f"{page.resolve().as_uri()}{anchor}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    log = json.loads(net.read_text())
    kind = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    asked = [event.get("params", {}) for event in log["events"] if event["type"] == kind]
    # The browser asks its maker what time it is and the like: that has no page as its origin.
    asked = [params for params in asked if params.get("initiator", _OWN) != _OWN]
    return done.stdout, said, [params["url"] for params in asked]


def checked(browser, page, tmp_path, anchor=""):
    """The DOM and what `ASK` has found, of a page without errors and requests."""
    asking = tmp_path / page.name
    asking.write_text(page.read_text().replace("</body>", f"{ASK}</body>"))
    dom, said, asked = opened(browser, asking, tmp_path, anchor)
    assert said == [] and asked == []
    (found,) = re.findall(r'data-found="([^"]*)"', dom)
    return dom, json.loads(found.replace("&quot;", '"').replace("&lt;", "<").replace("&amp;", "&"))


def _in_order(values, down):
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) + values.count(None) < len(values):
        return True  # words: the order of the reader's language
    count = len(numbers)
    return values[:count] == sorted(numbers, reverse=down)  # what has no number comes last


def test_a_report_opens_without_errors_or_requests_and_sorts(browser, run_folder, tmp_path):
    dom, found = checked(
        browser, run_folder / "report.html", tmp_path, "#examples-passkey-base-1000"
    )
    assert (
        dom.count("<svg") >= 9
    )  # over lengths 4, positions, depths, shots, passages, cost, scatter
    assert len(found["tables"]) >= 12
    for table in found["tables"]:
        for (up, ascending), (down, descending) in table:
            assert (up, down) == ("ascending", "descending")
            assert _in_order(ascending, False) and _in_order(descending, True)
            assert sorted(map(str, ascending)) == sorted(map(str, descending))
    lengths = [[head[0][1] for head in table] for table in found["tables"]]
    assert any(len(set(column)) > 2 for table in lengths for column in table[1:])
    assert '<details id="examples-passkey-base-1000" open' in dom
    assert found["wide"] <= 0
    said = " ".join(re.sub("<[^>]*>", " ", dom).split())
    assert "At the longest length" in said and "inf –" not in said


def test_a_comparison_opens_without_errors_or_requests(browser, run_folder, tmp_path):
    page = compare([run_folder], tmp_path / "compare").files[0]
    dom, found = checked(browser, page, tmp_path)
    assert "Paired differences" in dom and found["tables"] and found["wide"] <= 0


def test_errors_and_requests_would_be_seen(browser, tmp_path):
    page = tmp_path / "a.html"
    page.write_text(
        '<!doctype html><img src="http://lcjax.invalid/a.png"><script>absent()</script>'
        "<script>console.error('this is said')</script>"
    )
    _, said, asked = opened(browser, page, tmp_path)
    assert "http://lcjax.invalid/a.png" in asked
    assert any("absent is not defined" in line for line in said)
    assert any("this is said" in line for line in said)
