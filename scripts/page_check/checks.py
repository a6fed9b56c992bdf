"""What is promised of every page of loadcheck, checked in a browser."""

import sys

# Of text on its background, by WCAG 2 (AA).
CONTRAST_MIN = 4.5

# The contrast of every visible text with the nearest background behind it: the worst one.
WORST_CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([red, green, blue]) => [red, green, blue]
    .map((part) => part / 255)
    .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const paper = getComputedStyle(document.body).backgroundColor;
  let worst = [99, ""];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const parent = walker.currentNode.parentElement;
    if (!text || parent.closest("script, title") || parent.getBoundingClientRect().width === 0) continue;
    const style = getComputedStyle(parent);
    const colours = [rgb(parent.closest("svg") ? style.fill : style.color), rgb(paper)].map(light);
    const ratio = (Math.max(...colours) + 0.05) / (Math.min(...colours) + 0.05);
    if (ratio < worst[0]) worst = [ratio, text];
  }
  return worst;
})()"""

# Pairs of texts of one drawing that cover each other.
OVERLAPS = """[...document.querySelectorAll(".stage svg")].flatMap((svg) => {
  const texts = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  const meet = (one, other) => one.left < other.right - 1 && other.left < one.right - 1
    && one.top < other.bottom - 3 && other.top < one.bottom - 3;
  return texts.flatMap(([name, box], index) => texts.slice(index + 1)
    .filter(([, other]) => box.width > 0 && meet(box, other)).map(([other]) => `${name} / ${other}`));
})"""

READOUT = 'document.querySelector(".readout").textContent.replace(/\\s+/g, " ").trim()'


def passes(check, browser, page, screenshots):
    """Carries out a check and says how it ended."""
    name = f"{page.stem}: {check.__doc__}"
    try:
        check(browser, page, screenshots)
    except (AssertionError, RuntimeError, TimeoutError) as error:
        print(f"FAIL  {name}\n      {error}", file=sys.stderr)
        return False
    print(f"ok    {name}")
    return True


def quiet(browser, page, screenshots):
    """no errors, no policy violations, no requests, and no name has become an element"""
    with browser.open(page) as tab:
        title = tab.value("document.title")
        assert title.endswith(": memory over time"), title
        assert tab.value('document.querySelectorAll("script").length') == 1 + tab.value(
            'document.querySelectorAll(".stage").length'
        ), "a name became a script"
        assert tab.value('document.querySelectorAll("img, link, iframe, object, a").length') == 0
        loud = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        said = [event for event in tab.events() if event["method"] in loud]
        assert not said, said
        requests = [event["params"]["request"]["url"] for event in tab.events() if event["method"] == "Network.requestWillBeSent"]
        assert requests == [page.resolve().as_uri()], requests
        assert tab.value(POLICY_HOLDS), "an inline script that is not the page's own would run"
        if screenshots:
            tab.screenshot(screenshots / f"{page.stem}-wide.png")


# A script that the page does not know must not run.
POLICY_HOLDS = """(() => {
  const foreign = document.createElement("script");
  foreign.textContent = "window.foreign = true";
  document.body.append(foreign);
  foreign.remove();
  return !window.foreign;
})()"""


def crosshair(browser, page, screenshots):
    """pointer and keys move the crosshair, and its text changes"""
    with browser.open(page) as tab:
        at_rest = tab.value(READOUT)
        box = tab.value('(({x, y, width, height}) => [x, y, width, height])(document.querySelector(".pointer").getBoundingClientRect())')
        x, y, width, height = box
        seen = set()
        for share in (0.2, 0.5, 0.9):
            tab.pointer(x + share * width, y + height / 2)
            seen.add(tab.value(READOUT))
        assert len(seen) > 1 and at_rest not in seen, seen
        assert tab.value('document.querySelector(".cross").getAttribute("visibility")') == "visible"
        tab.pointer(1, 1)
        assert tab.value(READOUT) == at_rest, "the text at rest is back when the pointer leaves"
        tab.value('document.querySelector(".pointer").focus()')
        values = 'document.querySelector(".pointer").getAttribute("aria-valuetext")'
        texts = []
        for key, shift in (("Home", False), ("ArrowRight", False), ("ArrowRight", True), ("End", False), ("ArrowLeft", False)):
            tab.key(key, shift)
            texts.append((tab.value(values), tab.value(READOUT)))
        if screenshots:
            tab.key("ArrowLeft", True)
            tab.screenshot(screenshots / f"{page.stem}-crosshair.png")
        assert len({spoken for spoken, _ in texts}) >= 3 and len({shown for _, shown in texts}) >= 3, texts


def sorting(browser, page, screenshots):
    """a click and a key sort the table of layers, and its header says how"""
    with browser.open(page) as tab:
        if not tab.value('document.querySelectorAll("table.sortable").length'):
            assert page.stem == "both", "no table of layers"
            return
        numbers = '[...document.querySelector(".sortable").tBodies[0].rows].map((row) => Number(row.cells[1].dataset.value))'
        names = '[...document.querySelector(".sortable").tBodies[0].rows].map((row) => row.cells[0].textContent)'
        column = 'document.querySelectorAll(".sortable th button")[{}]'
        before = tab.value(names)
        tab.value(column.format(1) + ".click()")
        found = tab.value(numbers)
        assert found == sorted(found, reverse=True), found
        assert tab.value('document.querySelector("th[aria-sort]").getAttribute("aria-sort")') == "descending"
        tab.value(column.format(1) + ".focus()")
        tab.key("Enter")
        found = tab.value(numbers)
        assert found == sorted(found), found
        tab.value(column.format(0) + ".click()")
        assert sorted(tab.value(names)) == sorted(before), "no row is lost"
        assert tab.value('document.querySelectorAll("th[aria-sort]").length') == 1


def fits(browser, page, screenshots):
    """nothing is wider than the screen, and no label covers another"""
    for width in (1280, 768, 360, 320):
        with browser.open(page, width=width) as tab:
            found = tab.value("document.documentElement.scrollWidth")
            assert found <= width, f"{found} pixels at {width}"
            overlaps = tab.value(OVERLAPS)
            assert not overlaps, f"{overlaps} at {width}"
            if screenshots and width == 360:
                tab.screenshot(screenshots / f"{page.stem}-360.png")


def colours(browser, page, screenshots):
    """texts can be read in light and dark"""
    papers = set()
    for dark in (False, True):
        with browser.open(page, dark=dark) as tab:
            papers.add(tab.value("getComputedStyle(document.body).backgroundColor"))
            ratio, text = tab.value(WORST_CONTRAST)
            assert ratio >= CONTRAST_MIN, f"{ratio:.1f} for `{text}`, dark: {dark}"
            if screenshots and dark:
                tab.screenshot(screenshots / f"{page.stem}-dark.png")
    assert len(papers) == 2, papers


def focus(browser, page, screenshots):
    """everything that a key can reach has a visible frame"""
    with browser.open(page) as tab:
        for _ in range(tab.value('document.querySelectorAll(".pointer, button, [tabindex]").length')):
            tab.key("Tab")
            style = tab.value("(({outlineStyle, outlineWidth}) => [outlineStyle, outlineWidth])(getComputedStyle(document.activeElement))")
            name = tab.value("document.activeElement.outerHTML.slice(0, 80)")
            assert name.startswith("<body") or (style[0] == "solid" and style[1] == "2px"), (name, style)


def scriptless(browser, page, screenshots):
    """without scripts the drawing, the values at the peak and the tables are there"""
    with browser.open(page, scripts=False) as tab:
        assert tab.value('document.querySelectorAll(".pointer, th button").length') == 0, "the script ran"
        assert tab.value('document.querySelectorAll(".stage svg path.host").length') > 0
        assert any(unit in tab.value(READOUT) for unit in ("KiB", "MiB", "GiB")), tab.value(READOUT)
        assert tab.value('document.querySelectorAll("table caption").length') == tab.value('document.querySelectorAll("table").length') > 0
        assert tab.value('document.querySelector("h1").textContent.length') > 20


def printing(browser, page, screenshots):
    """it prints"""
    with browser.open(page) as tab:
        pdf = tab.pdf()
        assert pdf.startswith(b"%PDF-") and len(pdf) > 10_000, len(pdf)
        if screenshots:
            (screenshots / f"{page.stem}.pdf").write_bytes(pdf)


ALL = (quiet, crosshair, sorting, fits, colours, focus, scriptless, printing)
