"""The page of `trainckpt report --html`: what stands in it, and how a real browser shows it."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.cli.browser import SCHEMES, WIDTHS, OpenPage, chromium, why_no_browser
from tests.cli.recorded_runs import record_run
from trainckpt.cli.main import main
from trainckpt.format import manifest as manifests
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import LocalTier

MOST_BYTES = 2_000_000
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
HOSTILE_NAME = "<img src=x onerror=alert(3)>"  # of a folder


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in ("TRAINCKPT_PROVE", "TRAINCKPT_SUPERVISOR", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def browser():
    if why := why_no_browser():
        pytest.skip(why)
    with chromium() as started:
        yield started


def page_of(run):
    """Write the page of a run beside it; returns the file."""
    file = run.parent / "report.html"
    assert main(["report", str(run), "--html", str(file)]) == 0
    assert file.stat().st_size < MOST_BYTES
    return file


class Elements(HTMLParser):
    """The elements of a page, each with its attributes, in order."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


# ---- what stands in it


def test_a_page_names_nothing_outside_itself_and_forbids_it(tmp_path):
    text = page_of(record_run(tmp_path / "run")).read_text()
    elements = Elements(text).found
    for tag, attributes in elements:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form", "audio", "video")
        assert not any(name.startswith("on") or name == "style" for name in attributes), attributes
        for name in ("href", "src", "xlink:href", "action"):
            value = attributes.get(name, "")
            assert value.startswith("#") or value in ("", "data:,"), (tag, value)
        if tag == "script":
            assert attributes == {}
    policy = next(a["content"] for t, a in elements if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "http" not in policy
    style = re.search("<style>(.*?)</style>", text, re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style


def test_beside_each_picture_stands_a_table_and_each_id_is_one_elements(tmp_path):
    elements = Elements(page_of(record_run(tmp_path / "run")).read_text()).found
    figures = [at for at, (tag, _) in enumerate(elements) if tag == "figure"]
    tables = [at for at, (tag, _) in enumerate(elements) if tag == "table"]
    assert len(figures) == 5
    assert len(tables) >= len(figures)
    assert all(attributes.get("aria-label") for tag, attributes in elements if tag == "figure")
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in elements:
        if (target := attributes.get("xlink:href")) is not None:
            assert target[1:] in ids


def test_texts_of_a_run_are_escaped_wherever_they_stand(tmp_path, make_run):
    run = hostile_run(make_run, tmp_path)
    text = page_of(run).read_text()
    assert "<script>alert" not in text
    assert "<img" not in text
    assert text.count("&lt;script&gt;alert(1)") >= 5
    assert text.count("<script") == 1


def hostile_run(make_run, folder):
    """A real run, every text of which is markup."""
    run = make_run(HOSTILE_NAME)
    tier = LocalTier(run)
    record = attempt_history.read_attempts(tier)[1]
    outcome = {"outcome": "failed", "reason": HOSTILE, "exactness": HOSTILE, "snapshot": HOSTILE}
    facts = {
        **record.facts,
        "hosts": [HOSTILE],
        "tiers": [{"name": HOSTILE, "url": f"{folder}/{HOSTILE_NAME}-far"}],
        "tier_trouble": {HOSTILE: {"breaker": HOSTILE, "lags": HOSTILE, "since": 1.0}},
    }
    saves = facts["saves"]
    saves["rows"]["copies"] = {HOSTILE: [1.0] * len(saves["rows"]["at"])}
    saves["not_kept"] = [["s1~1.1", "not copied", HOSTILE, HOSTILE, saves["rows"]["at"][0]]]
    record = record.with_(outcome=outcome, facts=facts, parent=HOSTILE, newest_commit=HOSTILE)
    attempt_history.replace(tier, record)
    path = next(run.glob("snapshots/*/manifest.json"))
    manifest = manifests.load(path.read_bytes(), "it")
    changed = manifests.Manifest(
        **{**vars(manifest), "tags": (HOSTILE,), "reason": HOSTILE, "writer": HOSTILE}
    )
    path.write_bytes(manifests.dump(changed))
    return run


@pytest.mark.parametrize(("attempts", "saves"), [(1, 3), (300, 4), (2, 5000), (1, 0)])
def test_a_run_of_any_length_has_a_page_that_says_what_it_leaves_out(tmp_path, attempts, saves):
    run = record_run(tmp_path / "run", attempts=attempts, saves=saves)
    text = page_of(run).read_text()
    assert ("since there are 300; saves are left out." in text) == (attempts == 300)
    assert ("10,000 saves in 200 rows" in text) == (saves == 5000)
    assert ("10,000 saves in 120 rows" in text) == (saves == 5000)
    assert ("Nothing yet: no attempt of this run has measured a save" in text) == (not saves)
    assert ("The last 200 of 299" in text) == (attempts == 300)


def test_a_run_without_attempts_and_one_with_a_damaged_record_have_pages(tmp_path):
    bare = tmp_path / "bare" / "run"
    attempt_history.found_run(LocalTier(bare))
    assert "No attempt has begun." in page_of(bare).read_text()
    run = record_run(tmp_path / "run", attempts=2)
    (run / "attempts" / "1.json").write_text("{")
    assert "record damaged" in page_of(run).read_text()


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_without_the_extra_the_summary_works_and_html_says_what_to_install(
    tmp_path, monkeypatch, capsys, package
):
    run = record_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["report", str(run)]) == 0
    capsys.readouterr()
    assert main(["report", str(run), "--html", str(tmp_path / "x.html")]) == 78
    refused = capsys.readouterr().err
    assert package in refused
    assert "pip install 'trainckpt[report]'" in refused
    assert not (tmp_path / "x.html").exists()


def test_a_page_that_cannot_be_written_is_refused(tmp_path, capsys):
    run = record_run(tmp_path / "run")
    (tmp_path / "file").touch()
    for place in ("no/x.html", "file/x.html", "run", "x" * 300):
        assert main(["report", str(run), "--html", str(tmp_path / place)]) == 78
        refused = capsys.readouterr().err
        assert f"cannot be written to {tmp_path / place}" in refused
        assert "name a file such as report.html" in refused
    assert main(["report", str(run), "--html", "-"]) == 78
    assert "- names none" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_a_page_replaces_an_older_one_whole_and_keeps_its_permissions_and_links(
    tmp_path, monkeypatch
):
    run = record_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    page.write_text("old")
    page.chmod(0o640)
    link.symlink_to("page.html")
    assert main(["report", str(run), "--html", "link.html"]) == 0
    assert link.is_symlink()
    assert page.stat().st_mode & 0o777 == 0o640
    assert page.read_text().startswith("<!doctype html>")
    assert main(["report", str(run), "--html", "new.html"]) == 0
    (tmp_path / "touched").touch()
    assert Path("new.html").stat().st_mode == Path("touched").stat().st_mode
    assert len(list(tmp_path.iterdir())) == 5, "nothing else is left there"


def test_a_full_disk_leaves_the_older_page(tmp_path):
    run, page = record_run(tmp_path / "run"), tmp_path / "page.html"
    page.write_text("old")
    command = [sys.executable, "-m", "trainckpt", "report", str(run), "--html", str(page)]
    limit = (20_000, resource.RLIM_INFINITY)  # of a file's bytes; the page has more
    ended = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert ended.returncode == 78
    assert "File too large" in ended.stderr
    assert page.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_a_page_is_written_to_a_pipe(tmp_path):
    run = record_run(tmp_path / "run", attempts=1)
    command = [sys.executable, "-m", "trainckpt", "report", str(run), "--json"]
    ended = subprocess.run([*command, "--html", "/dev/stderr"], check=True, capture_output=True)
    assert b"</html>" in ended.stderr


def test_a_name_that_is_no_text_is_shown(tmp_path):
    run = tmp_path / os.fsdecode(b"caf\xe9")
    record_run(run, hosts=["\ud800\u2028"])
    page = tmp_path / "report.html"
    record = attempt_history.read_attempts(LocalTier(run))[1]
    attempt_history.replace(LocalTier(run), record.with_(parent="\ud800", newest_commit="\udfff"))
    assert main(["report", str(run), "--html", str(page)]) == 0
    assert "caf" in page.read_text()


def test_a_thousand_attempts_with_long_reasons_make_no_long_page(tmp_path):
    reason = "<&\"'" * 500
    run = record_run(tmp_path / "run", attempts=1000, saves=10, reason=reason)
    text = page_of(run).read_text()
    assert "since there are 1,000; saves are left out. 3 neighbours share a bar." in text
    assert "The last 300 of 1,000 attempts." in text
    assert "The last 200 of 999 on record." in text
    assert "10,000 saves in 10,000" not in text


def test_the_table_of_stages_counts_no_save_that_did_not_reach_it(tmp_path):
    def counts(saves):
        elements = page_of(record_run(tmp_path / str(saves) / "run", attempts=1, saves=saves))
        cells = re.search("<caption>Stages of a save.*?</table>", elements.read_text(), re.DOTALL)
        rows = re.findall(r"<tr.*?</tr>", cells[0], re.DOTALL)
        return [re.findall(r">([^<>\n]+)</t[hd]>", row) for row in rows]

    few, many = counts(8), counts(5000)
    assert few[0][-1] == "saves"
    assert [row[-1] for row in few if row[0] == "in s3"] == ["2"], "each fourth"
    assert many[0][-1] == "rows"
    assert all(int(row[-1]) <= 100 for row in many[1:])


@pytest.mark.parametrize("how", ["x" * 500, "\u4f11\u6b62", "$\\frac{1}$", ""])
def test_an_outcome_of_another_release_is_shown(tmp_path, how):
    run = record_run(tmp_path / "run", attempts=2, last=how)
    text = page_of(run).read_text()
    assert how[:20] in text


# ---- how a browser shows it

OVERLAPS = """() => {
  const wrong = [];
  for (const svg of document.querySelectorAll("svg")) {
    if (!svg.checkVisibility()) continue;
    const texts = [...svg.querySelectorAll("text")].filter((each) => each.textContent.trim());
    const boxes = texts.map((each) => [each.textContent, each.getBoundingClientRect()]);
    boxes.forEach(([text, box], index) => {
      if (box.left < 0 || box.right > window.innerWidth) wrong.push(`${text} is cut off`);
      for (const [other, its] of boxes.slice(index + 1)) {
        const across = Math.min(box.right, its.right) - Math.max(box.left, its.left);
        const down = Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top);
        if (across > 1 && down > 3) wrong.push(`${text} lies on ${other}`);
      }
    });
  }
  if (document.documentElement.scrollWidth > window.innerWidth) wrong.push("it scrolls sideways");
  return wrong;
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of three runs, written once."""
    found = {}
    for name, attempts, saves in (("short", 4, 12), ("many", 300, 4), ("long", 2, 5000)):
        folder = tmp_path_factory.mktemp(name)
        found[name] = page_of(record_run(folder / "run", attempts=attempts, saves=saves))
    return found


@pytest.mark.parametrize("name", ["short", "many", "long"])
def test_a_browser_shows_a_page_without_a_complaint_a_request_or_texts_on_each_other(
    browser, pages, name
):
    for scheme in SCHEMES:
        for width in WIDTHS:
            with OpenPage(browser, pages[name], scheme=scheme, width=width) as shown:
                for summary in shown.page.locator("summary").all():
                    summary.click()
                assert shown.page.evaluate(OVERLAPS) == [], (scheme, width)
                assert shown.complaints == []
                assert shown.requests == []


def test_light_and_dark_follow_the_system_and_texts_stand_out(browser, pages):
    found = {}
    for scheme in SCHEMES:
        with OpenPage(browser, pages["short"], scheme=scheme) as shown:
            back = shown.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
            text = shown.page.evaluate(
                "() => getComputedStyle(document.querySelector('#timeline text')).fill"
            )
            found[scheme] = brightness(back), brightness(text)
    light, dark = found["light"], found["dark"]
    assert light[0] > 230 > 120 > light[1]
    assert dark[0] < 40 < 120 < dark[1]


def brightness(color):
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3


def test_a_legend_hides_a_series_and_a_mark_tells_what_it_is(browser, pages):
    with OpenPage(browser, pages["short"]) as shown:
        page = shown.page
        button = page.locator("#stages button", has_text="in shared memory")
        marks = page.locator("#stages .wide .mark[data-series='in shared memory']")
        assert marks.first.is_visible()
        button.click()
        assert button.get_attribute("aria-pressed") == "false"
        assert not marks.first.is_visible()
        assert page.locator("#stages .wide .mark[data-series='training waits']").first.is_visible()
        button.click()
        assert marks.first.is_visible()
        bar = page.locator("#buckets .wide .mark").first
        bar.click()
        assert "of the wall time" in page.locator("#tip").inner_text()
        page.keyboard.press("Escape")
        assert not page.locator("#tip").is_visible()
        for each in page.locator("button, summary").all():
            each.click()
        assert shown.complaints == []


def test_an_attempt_among_many_tells_how_it_ended(browser, pages):
    with OpenPage(browser, pages["many"]) as shown:
        mark = shown.page.locator("#timeline .wide .mark").nth(150)
        mark.hover()
        assert "attempt 151, killed: out of memory" in shown.page.locator("#tip").inner_text()
        assert shown.complaints == []


def test_markup_in_a_runs_texts_does_nothing_in_a_browser(browser, make_run, tmp_path):
    file = page_of(hostile_run(make_run, tmp_path))
    with OpenPage(browser, file) as shown:
        shown.page.locator("#buckets .wide .mark").first.hover()
        for each in shown.page.locator("button, summary").all():
            each.click()
        assert shown.page.locator("img").count() == 0
        assert "<script>" in shown.page.locator("body").inner_text()
        assert shown.complaints == []
        assert shown.requests == []


def test_without_scripts_marks_have_titles(browser, pages, tmp_path):
    bare = tmp_path / "bare.html"
    shutil.copy(pages["short"], bare)
    bare.write_text(re.sub(r"<script>.*?</script>", "", bare.read_text(), flags=re.S))
    with OpenPage(browser, bare) as shown:
        assert shown.page.locator(".wide .mark > title").count() > 20
        assert shown.complaints == []
