"""Pages and summaries of runs: right numbers, nothing from outside, and usable in a real browser."""

import io
import json
import math
import re
import shutil
import sys
import time

import pytest
import torch
from small import begin, small

from fednmap.commands.show import sparkline, state
from fednmap.measure import quantities, quantity
from fednmap.report import coefficients, report
from fednmap.report.closing import closing_table, columns, rows
from fednmap.report.page import curve_figure
from fednmap.report.plots import comparison, plot
from fednmap.report.progress import Bar, describe
from fednmap.report.series import collect
from fednmap.report.terminal import console
from fednmap.runs.execution import RunInfo, summary
from fednmap.runs.folder import HEADING, Job, Model, RunFolder

METHODS = ("fednmap", "zhang", "fedcanon", "fedda", "fedmid", "fast-fedda", "feddr", "fedadmm", "fedavg", "scaffold")


def made_up(path, methods=METHODS, rounds=1000, trials=1, more=None, without=(None, None), closing=None, **settings):
    """A run folder as a comparison leaves it, with curves from a formula instead of an hour's computation.

    more: further metrics, as functions of the round; without: a metric that a method lacks; closing: other closing
    numbers of a method. Methods that nobody knows may be named too.
    """
    config = small(rounds=rounds, eval_every=1, trials=trials, **settings)
    folder = RunFolder.create(path, config, "compare")
    toml = (path / "run.toml").read_text().replace('"fednmap",', ", ".join(f'"{m}"' for m in methods) + ",")
    (path / "run.toml").write_text(toml)
    torch.manual_seed(0)
    (path / "metrics.csv").write_bytes(HEADING)
    for k, job in ((k, Job(method, trial)) for k, method in enumerate(methods) for trial in range(trials)):
        lines = []
        for t in range(rounds + 1):
            decay = math.exp(-(k + 1) * t / 900) * (1 + 0.05 * math.sin(t + job.trial))
            record = {
                "objective": 1.0 + decay,
                "loss": 0.8 + decay,
                "stationarity": 0.1 * decay**2 + 1e-6,
                "zeros": 0.7 * (1 - decay / 2),
                "hoyer": 0.5,
                "test_accuracy": 0.9 - 0.5 * decay,
                "train_seconds": 0.01 * t * (1 + k),
                "eval_seconds": 0.001 * t,
                "bytes_up": 4e4 * t,
                "bytes_down": 8e4 * t,
                **{name: f(t) for name, f in (more or {}).items()},
            }
            if job.method == without[1]:
                del record[without[0]]
            lines += [f"{job.method},{job.trial},{t},{name},{value!r}\n" for name, value in record.items()]
        with (folder.path / "metrics.csv").open("a") as file:
            file.writelines(lines)
        weight = torch.randn(32, 64) * (torch.rand(32, 64) > 0.1 * k) * (torch.arange(64) % 8 > 1)
        parameters = {"1.weight": weight, "1.bias": torch.randn(32), "3.weight": torch.randn(10, 32)}
        result = {**record, "rounds": rounds, "seconds": 0.011 * rounds} | (closing or {}).get(job.method, {})
        folder.finish(job, result, Model(parameters, (1, 8, 8)))
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The page about ten methods and a thousand rounds."""
    path = tmp_path_factory.mktemp("report")
    report([made_up(path / "run")], path / "report.html")
    return path / "report.html"


ODD = "my [/x] :warning: <i> $m^$"
"""A name in the markup of rich, HTML and formulas."""


def test_names_of_users_are_printed_as_they_are(tmp_path):
    """In tables, bars, pictures and figures."""
    folder = made_up(tmp_path / "run", methods=("[x] <i> $m^$", "_y"), rounds=3, more={ODD: float})
    screen = console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    screen.print(closing_table([{"method": ODD, "trial": 0, "rounds": 3, f"metric {ODD}": 1.0}]))
    model = Model({"x": torch.ones(2)}, (2,), ("[/min]", "b"), (ODD, f"label {ODD}"))
    for table in coefficients.shown({f"title {ODD}": model}):
        screen.print(table)
    bar = Bar(screen)
    with bar.progress:
        bar.begin(RunInfo(Job(f"bar {ODD}", 0), 0, 3, 1, {}))
        bar.on_record({"round": 3.0, f"state {ODD}": 1.0, "objective": 1.0})
    out = screen.file.getvalue()
    shown = (f"metric {ODD}", "[/min]", f"title {ODD}, for label {ODD}", f"bar {ODD}", f"state {ODD}")
    assert [words for words in shown if words not in " ".join(out.split())] == []  # titles are wrapped
    comparison(folder, tmp_path / "plot.png")  # a formula $m^$ would be refused
    drawn = json.dumps(curve_figure(collect([folder]))[0])
    assert "&lt;i&gt;" in drawn
    assert "<i>" not in drawn


def test_a_large_comparison_stays_below_ten_megabytes(large):
    print(f"{large.stat().st_size / 1e6:.2f} MB")
    assert large.stat().st_size < 10e6


@pytest.mark.slow
@pytest.mark.ci(turn=0)
def test_twenty_thousand_rounds_do_not_make_a_larger_page(tmp_path, large):
    report([made_up(tmp_path / "run", METHODS[:3], 20_000)], tmp_path / "long.html")
    assert (tmp_path / "long.html").stat().st_size < 10e6
    assert "fewer points" in (tmp_path / "long.html").read_text()
    assert "fewer points" not in large.read_text()


def test_the_page_tells_how_it_was_made_and_fetches_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fednmap", "train", "--out", "a <b> & c"])
    folder = begin(tmp_path / "a <b> & c", rounds=6)
    report([folder], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "fednmap train --out &#x27;a &lt;b&gt; &amp; c&#x27;" in page
    assert "participation = 0.5" in page
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)\s*=\s*[\"']?(?!data:)[a-z]*:", own)
    assert "default-src 'none'" in page
    assert "<b> & c" not in own


def test_several_runs_are_told_apart_and_their_differences_named(tmp_path):
    folders = [made_up(tmp_path / name / "run", METHODS[:2], 20, trials) for name, trials in (("a", 1), ("b", 2))]
    assert [s.label for s in collect(folders)] == ["a/run: fednmap", "a/run: zhang", "b/run: fednmap", "b/run: zhang"]
    report(folders, tmp_path / "page.html")
    assert "The runs differ in trials (1, 2)." in (tmp_path / "page.html").read_text()


def test_an_unfinished_run_can_be_looked_at(tmp_path):
    folder = made_up(tmp_path / "run", METHODS[:2], 20)
    results = folder.results()
    (folder.path / "results.json").write_text(json.dumps(results[:1]))
    folder.model_path(Job("zhang", 0)).unlink()
    report([folder], tmp_path / "page.html")
    assert "run is not finished" in (tmp_path / "page.html").read_text()
    assert state(folder) == "stopped, 1 of 2 methods done, last measured at round 20 of 20"


def test_a_method_that_runs_away_without_overflow_is_drawn_as_far_as_it_can_be(tmp_path):
    folder = made_up(tmp_path / "run", ("fednmap",), 40, more={"objective": lambda t: 10.0 ** (7 * t)})
    comparison(folder, tmp_path / "plot.png")  # up to 1e280: the axes' margin would be infinite
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_a_run_without_measurements_is_refused(tmp_path):
    folder = RunFolder.create(tmp_path / "run", small(), "train")
    with pytest.raises(ValueError, match="nothing was measured yet"):
        report([folder], tmp_path / "page.html")


def test_the_best_is_marked_but_no_diverged_method_and_nobody_where_all_are_alike():
    common = dict.fromkeys(("objective", "stationarity", "zeros", "hoyer", "bytes_up", "seconds"), 1.0)
    one, two = common | {"objective": 2.0}, common | {"objective": 3.0, "hoyer": None}
    bad = common | {"objective": 1.0, "error": "diverged"}
    worse = common | {"objective": 0.5, "warning": "psi ended above its start"}
    table = rows({"one": [one, two], "two": [two], "bad": [bad], "worse": [worse]})
    assert [row.title for row in table] == ["one", "two", "bad (diverged)", "worse (psi rose)"]
    assert [[cell.best for cell in row.cells].count(True) for row in table] == [1, 0, 0, 0]
    assert table[0].cells[0].text == "2.5000 ± 0.7071"
    assert table[1].cells[3].text == "-"


def test_only_psi_and_accuracy_have_a_best(tmp_path):
    worse = {"objective": 2.0, "stationarity": 1e-9, "zeros": 0.99, "test_accuracy": 0.5, "bytes_up": 1.0}
    better = {"objective": 1.0, "stationarity": 1e-2, "zeros": 0.10, "test_accuracy": 0.6, "bytes_up": 9.0}
    results = {"worse": [worse], "better": [better]}
    keys = [q.key for q in columns(results)]
    best = [[key for key, cell in zip(keys, row.cells, strict=True) if cell.best] for row in rows(results)]
    assert best == [[], ["objective", "test_accuracy"]]


def test_one_quantity_of_folders_and_results_is_drawn_with_the_labels_that_were_asked_for(tmp_path):
    import numpy as np

    from fednmap import run
    from fednmap.algorithms import FedAvg
    from fednmap.regularizers import Zero
    from fednmap.testing import heterogeneous

    made_up(tmp_path / "one", ("fednmap", "zhang"), rounds=20, trials=2, labels={"fednmap": "F [3]"})
    result = run(FedAvg(Zero(), eta_a=0.01, Q=2), heterogeneous(), rounds=20)
    figure = plot(tmp_path / "one", "stationarity", along="bytes_up", file=tmp_path / "figure.pdf")
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == ["F [3]", "zhang"]
    assert np.allclose(figure.axes[0].get_lines()[0].get_xdata(), 0.04 * np.arange(21))
    labels = {"mine": "ours", "one: zhang": "theirs"}
    figure = plot({"mine": result, "one": tmp_path / "one"}, labels=labels)
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == ["ours", "one: F [3]", "theirs"]
    assert np.allclose(figure.axes[0].get_lines()[0].get_ydata(), result.column("objective"))
    assert len(plot([result, result, tmp_path / "one"]).axes[0].get_lines()) == 4
    with pytest.raises(ValueError, match=r"one of .*stationarity.*, got 'nothing'"):
        plot(result, "nothing")


# --- what is measured is told by one catalogue


def test_the_catalogue_tells_how_a_number_is_shown():
    assert quantity("zeros").words(0.5) == "zeros 50.0 %"
    assert quantity("bytes_up").words(2.5e6) == "2.50 MB up"
    assert quantity("objective").text(math.nan) == quantity("objective").text(None) == "-"
    assert len(quantity("objective").text(1.25e30)) <= 10
    own = quantity("margin")
    assert (own.head, own.axis, own.log, own.better, own.cost) == ("margin", "margin", False, 0, False)
    keys = ["bytes_up", "margin", "round", "zeros", "objective", "train_seconds", "wire_up", "margin"]
    assert [q.key for q in quantities(keys)] == ["objective", "zeros", "margin", "bytes_up"]


def test_a_metric_of_ones_own_is_shown_everywhere(tmp_path, command):
    folder = made_up(
        tmp_path / "run", METHODS[:2], 20, more={"margin": lambda t: 0.5 + t, "wire_up": lambda t: 1e6 * t}
    )
    assert "margin" in describe(folder.records("zhang", 0)[-1])
    assert "wire" not in describe(folder.records("zhang", 0)[-1])
    code, out, err = command("show", "run")
    assert (code, err) == (0, "")
    table, _, sparks = out.partition("along the rounds")
    assert table.count("margin") == 1
    assert "20.5" in table
    assert "margin" in sparks
    assert "wire" not in out
    assert all(cell in table for cell in ("|F_nat|^2", "MB up", "psi"))
    report([folder], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<th>margin</th>" in page
    assert '"title": "margin"' in page
    assert axes_of(folder, tmp_path) == {
        "margin",
        "objective ψ(x)",
        "zero weights (%)",
        "Hoyer sparsity",
        "test accuracy (%)",
        r"$\|F_{nat}(x)\|^2$",
    }


def axes_of(folder, path):
    """What the picture of a run has on its upright axes."""
    from matplotlib.figure import Figure

    found = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, *args, **options: found.update(a.get_ylabel() for a in self.axes))
        comparison(folder, path / "plot.png")
    return found


@pytest.mark.parametrize("missing", ["stationarity", "objective", "zeros"])
def test_a_column_that_was_not_measured_is_a_dash(tmp_path, command, missing):
    """As Flower leaves it without stationarity, or an older version."""
    folder = made_up(tmp_path / "run", METHODS[:2], 20, without=(missing, "zhang"))
    results = [{k: v for k, v in r.items() if (k, r["method"]) != (missing, "zhang")} for r in folder.results()]
    rows_ = {r["method"]: [r] for r in results}
    if missing in (shown := [q.key for q in columns(rows_)]):
        assert rows(rows_)[1].cells[shown.index(missing)].text == "-"
    describe(folder.records("zhang", 0)[-1])
    assert command("show", "run")[0] == command("show", "--list", ".")[0] == command("report", "run")[0] == 0
    comparison(folder, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_numbers_that_are_not_finite_are_shown(tmp_path, command):
    unknown = {"objective": None, "hoyer": None}
    diverged = {"stationarity": math.nan, "error": "diverged in round 3"}
    made_up(tmp_path / "run", METHODS[:2], 20, closing={"fednmap": unknown, "zhang": diverged})
    code, out, err = command("show", "run")
    assert (code, err) == (0, "")
    assert "finished, with methods that diverged" in out
    assert "zhang (diverged)" in out
    assert command("report", "run")[0] == 0
    assert "zhang: diverged in round 3" in (tmp_path / "report.html").read_text()
    assert "-" in command("show", "--list", ".")[1]


def test_the_gamma_of_the_natural_residual_is_said(tmp_path, command):
    folder = made_up(tmp_path / "run", METHODS[:2], 20, measure_gamma=0.25)
    line = "|F_nat|^2 with gamma = 0.25"
    assert line in command("show", "run")[1]
    command("report", "run")
    assert line in (tmp_path / "report.html").read_text()
    assert line in closing_table(folder.results(), folder.about()).below
    told = [{**r, "measure_gamma": 0.5} for r in folder.results()]
    assert "|F_nat|^2 with gamma = 0.5" in closing_table(told).below
    own = {method: {"measure_gamma": 0.5} for method in METHODS[:2]}
    report([made_up(tmp_path / "own", METHODS[:2], 5, closing=own)], tmp_path / "own.html")
    assert "|F_nat|^2 with gamma = 0.5" in (tmp_path / "own.html").read_text()
    assert "F_nat" not in closing_table([{k: v for k, v in r.items() if k != "stationarity"} for r in told]).below


def test_names_that_nobody_knows_any_more_stay_readable(tmp_path, command):
    folder = made_up(tmp_path / "run", ("fednmap", "someone.else:Method", "fedcanon"), 20)
    toml = (folder.path / "run.toml").read_text().replace("l1:0.001", "ours:1").replace("digits", "gone")
    (folder.path / "run.toml").write_text(toml.replace(', "fedcanon"', ', "never-ran"'))
    assert [s.label for s in collect([folder])] == ["fednmap", "someone.else:Method", "fedcanon"]
    code, out, _ = command("show", "run")
    assert code == 0
    assert "gone, logistic, ours:1, 10 clients, 20 rounds" in out
    assert "someone.else:Method" in command("show", "--list", ".")[1]
    assert command("report", "run")[0] == 0
    comparison(folder, tmp_path / "plot.png")


@pytest.mark.slow
@pytest.mark.ci(turn=1)
@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.77])
def test_a_cut_table_of_measurements_can_be_looked_at(tmp_path, command, share):
    """Also where not one measurement of a method, or of a trial, is whole."""
    folder = made_up(tmp_path / "run", METHODS[:2], 5, trials=2)
    metrics = folder.path / "metrics.csv"
    whole = metrics.read_bytes()
    starts = [k for k in range(len(whole)) if whole[k : k + 11] == b",0,objective"[:11]]
    cuts = [int(share * len(whole)), *(start + 60 for start in starts)]
    for cut in cuts:
        metrics.write_bytes(whole[:cut])
        code, out, _ = command("show", "run")
        assert code == 0
        assert command("report", "run")[::2] == (0, "")
        page = (tmp_path / "report.html").read_text()
        for job in (Job(method, trial) for method in METHODS[:2] for trial in range(2)):
            measured = len(folder.records(*job))
            line = f"metrics.csv was changed or cut short: the measurements of {job} are not those that were written"
            assert (line in out, line in page) == (measured < 6, measured < 6)
        assert page.count("<tr><td>") == 2  # the closing numbers are all there
        comparison(folder, tmp_path / "plot.png")


def test_a_damaged_model_is_named_and_the_rest_is_shown(tmp_path, command):
    folder = made_up(tmp_path / "run", METHODS[:2], 5)
    path = folder.model_path(Job("zhang", 0))
    path.write_bytes(path.read_bytes()[:100])
    assert command("show", "run")[0] == 0
    assert command("report", "run")[0] == 0
    page = (tmp_path / "report.html").read_text()
    assert "zhang-0.safetensors" in page
    assert "Zeros of each layer" in page


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_table_wider_than_the_terminal_goes_on_below(width):
    from rich.console import Console

    result = {"method": "fednmap", "rounds": 3, **{f"metric_{k}": float(k) for k in range(12)}}
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(closing_table([result]))
    text = console.export_text()
    assert all(f"metric_{k}" in text for k in range(12))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert text.count("method ") == {40: 4, 80: 2, 200: 1}[width]


def test_sparklines():
    assert sparkline([1, 10, 100, 1000], log=True) == "▁▃▆█"
    assert sparkline([5, 5]) == "▁▁"
    assert sparkline([math.nan, 1, math.inf, 2]) == " ▁ █"
    assert sparkline([]) == ""
    assert len(sparkline(range(1000))) == 14


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium without a window and without a network."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium and chromedriver: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
        "--window-size=1280,1700",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    found.set_network_conditions(offline=True, latency=0, throughput=0)
    found.set_page_load_timeout(120)
    yield found
    found.quit()


def drawn(browser):
    """The curves that are visible, by name."""
    script = "return [...document.querySelectorAll('#curves .scatterlayer .trace path.js-line')].length"
    return browser.execute_script(script)


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def requests(browser):
    """What the page asked for."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def test_in_a_browser(browser, large, tmp_path):
    began = time.monotonic()
    browser.get(large.as_uri())
    until(lambda: drawn(browser) == 50)
    print(f"ten methods drawn after {time.monotonic() - began:.1f} s")
    until(lambda: browser.execute_script("return document.querySelectorAll('#first-layer .hm').length") == 10)

    find = browser.find_element
    toggle = browser.find_elements("css selector", "#curves .legend .legendtoggle")[1]
    began = time.monotonic()
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", toggle)
    from selenium.webdriver import ActionChains

    ActionChains(browser).move_to_element(toggle).click().perform()
    until(lambda: drawn(browser) == 45)
    print(f"a method hidden after {time.monotonic() - began:.1f} s")

    def titles():
        return {e.text for e in browser.find_elements("css selector", "#curves .xtitle")}

    def press(label):
        buttons = browser.find_elements("css selector", "#curves .updatemenu-button")
        (button,) = (b for b in buttons if b.text == label)
        ActionChains(browser).move_to_element(button).click().perform()

    assert titles() == {"communication rounds"}
    press("seconds")
    until(lambda: titles() == {"seconds"})
    press("megabytes")
    until(lambda: titles() == {"megabytes sent by the clients"})
    assert drawn(browser) == 45  # what was hidden stays hidden
    last = browser.execute_script("const x = document.getElementById('curves').data[0].x; return x[x.length - 1]")
    assert last == pytest.approx(40)
    press("linear axes")
    kinds = (
        "const l = document.getElementById('curves')._fullLayout; return [l.yaxis.type, l.yaxis2.type, l.yaxis3.type]"
    )
    until(lambda: browser.execute_script(kinds) == ["linear", "linear", "linear"])
    press("log axes")
    until(lambda: browser.execute_script(kinds) == ["log", "log", "linear"])

    def column(k):
        cells = browser.find_elements("css selector", f"#numbers tbody td:nth-child({k})")
        return [cell.text for cell in cells]

    head = find("css selector", "#numbers th:nth-child(2)")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", head)
    head.click()
    assert column(2) == sorted(column(2), key=float)
    head.click()
    assert column(2) == sorted(column(2), key=float, reverse=True)
    find("css selector", "#numbers th:first-child").click()
    assert column(1) == sorted(METHODS)
    buttons = [e.get_attribute("data-title") for e in browser.find_elements("css selector", ".modebar-btn")]
    assert buttons
    assert not [title for title in buttons if "Share" in title or "cloud" in title.lower()]
    best = [e.text for e in browser.find_elements("css selector", "#numbers td.best")]
    assert "1.0000" in best  # psi of the fastest

    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert not {url.partition(":")[0] for url in requests(browser)} & {"http", "https", "ws", "wss"}
    browser.save_screenshot(str(tmp_path / "report.png"))
    assert (tmp_path / "report.png").stat().st_size > 50_000


def test_hovering_shows_the_numbers(browser, large):
    from selenium.webdriver import ActionChains

    browser.get(large.as_uri())
    until(lambda: drawn(browser) == 50)
    plot = browser.find_element("css selector", "#curves .xy .nsewdrag, #curves .nsewdrag")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    moves = ActionChains(browser).move_to_element(plot)
    for k in range(-60, 60, 6):  # somewhere on the way up there is a curve
        moves.move_to_element_with_offset(plot, 0, k)
    moves.perform()
    hover = "return document.querySelectorAll('#curves .hoverlayer .hovertext').length"
    for k in range(-80, 80, 4):
        ActionChains(browser).move_to_element_with_offset(plot, 0, k).perform()
        if browser.execute_script(hover):
            break
    assert browser.execute_script(hover) == 1


@pytest.fixture
def phone(browser):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_on_a_phone_the_panels_stand_in_one_column_with_the_legend_below(phone, large):
    phone.get(large.as_uri())
    until(lambda: drawn(phone) == 50)
    boxes = """return [...document.querySelectorAll("#curves .subplot .bglayer, #curves .nsewdrag")]
        .map(e => e.getBoundingClientRect()).filter(b => b.width > 50).map(b => [b.left, b.top, b.bottom])"""
    until(lambda: len({round(left) for left, _, _ in phone.execute_script(boxes)}) == 1)
    panels = phone.execute_script(boxes)
    assert len(panels) == 5
    legend = phone.execute_script("return document.querySelector('#curves .legend').getBoundingClientRect().top")
    assert legend > max(bottom for _, _, bottom in panels)
    assert phone.execute_script("return document.documentElement.scrollWidth") <= 390
    for part in phone.find_elements("id", "layers"):  # what follows is not covered
        assert phone.execute_script("return arguments[0].getBoundingClientRect().top", part) > legend
    glossary = phone.execute_script("return document.querySelector('details dl').textContent")
    assert "exactly 0" in glossary


def test_closing_numbers_keep_a_metric_of_ones_own():
    spent = dict.fromkeys(("train_seconds", "eval_seconds", "bytes_up", "bytes_down"), 1.0)
    found = summary({"round": 3, "objective": 1.0, "margin": 0.5, "clients_measured": 4.0, **spent})
    assert (found["margin"], found["test_accuracy"], found["seconds"]) == (0.5, None, 2.0)
    assert not {"round", "clients_measured"} & found.keys()


def test_a_column_that_a_model_has_not_is_not_a_coefficient_of_zero():
    """Two runs on tables of their own, on one page."""
    first = Model({"x": torch.tensor([1.5, 0.0])}, (2,), ("age", "weight"), ("healthy", "sick"))
    other = Model({"x": torch.tensor([2.0, 0.5])}, (2,), ("age", "height"), ("alive", "dead"))
    page = coefficients.page({"a": first, "b": other})
    assert "<td>age</td><td>1.5</td><td>2</td>" in page
    assert "<td>height</td><td>-</td><td>0.5</td>" in page
    assert ", for dead or sick, on" in page
    assert ", for sick, on" in coefficients.page({"a": first})
