// What a page cannot do without a script: a crosshair over each drawing, and tables that sort.
// Everything that is shown is in the page already; nothing is loaded.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

/** A value in the unit of its axis, to about three digits; as `Axis::text` does. */
function text(value, axis) {
  const number = value / axis.size;
  const least = number > 0 && number < 0.1 && axis.digits > 0 ? 3 : axis.digits;
  const digits = number >= 100 ? 0 : number >= 10 ? Math.min(axis.digits, 1) : least;
  return `${Number(number.toFixed(digits))} ${axis.unit}`;
}

/** The index of the last of the sorted `values` that is at most `value`; -1 if there is none. */
function lastUpTo(values, value) {
  let [from, to] = [0, values.length];
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] <= value) from = middle + 1;
    else to = middle;
  }
  return from - 1;
}

function element(parent, name, attributes) {
  const made = parent.appendChild(document.createElementNS(SVG, name));
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** The crosshair of a figure: pointer, arrow keys, and the values under it. */
function crosshair(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const stage = figure.querySelector(".stage");
  const readout = figure.querySelector(".readout");
  const [at, time, layer] = [".at", ".time", ".layer"].map((part) => readout.querySelector(part));
  const values = [...readout.querySelectorAll("li b")];
  const times = [...new Set(data.curves.flatMap((curve) => curve.us))].sort((one, other) => one - other);
  const ends = data.curves.flatMap((curve) => curve.layers.map(([end]) => end)).sort((one, other) => one - other);
  const atRest = [at, time, layer, ...values].map((part) => [part, part.textContent]);
  if (times.length === 0 || data.series.length === 0) return;

  // A slider, so that a screen reader knows what the arrow keys do.
  const pointer = stage.appendChild(document.createElement("div"));
  pointer.className = "pointer";
  pointer.tabIndex = 0;
  const caption = figure.querySelector("figcaption");
  const attributes = {
    "role": "slider",
    "aria-label": `Time${caption ? ` of ${caption.textContent}` : ""}: arrow keys, with Shift by layers`,
    "aria-valuemin": 0,
    "aria-valuemax": times.length - 1,
  };
  for (const [key, value] of Object.entries(attributes)) pointer.setAttribute(key, value);

  const lines = data.series.map((series, index) => ({ ...series, index })).filter((series) => series.is_line);
  const crosses = [...stage.querySelectorAll("svg")].map((svg) => {
    // The titles are for pages without a script; here they would cover the values.
    for (const title of svg.querySelectorAll(".cells title")) title.remove();
    const [left, top, width, height, bottom] = svg.dataset.frame.split(" ").map(Number);
    const group = element(svg, "g", { "class": "cross", "visibility": "hidden", "pointer-events": "none" });
    const line = element(group, "line", { y1: top, y2: bottom });
    const dots = lines.map(() => element(group, "circle", { r: 4 }));
    return { svg, group, line, dots, left, top, width, height };
  });

  // The first position of the keys is the peak.
  const main = lines[lines.length - 1] ?? data.series[0];
  const highest = main.kib.indexOf(Math.max(...main.kib));
  let position = Math.max(0, lastUpTo(times, data.curves[main.curve].us[highest]));
  describe(position);

  /** What every curve has at a time. */
  function valuesAt(us) {
    return data.series.map((series) => {
      const place = lastUpTo(data.curves[series.curve].us, us);
      return place < 0 || us > data.curves[series.curve].us.at(-1) ? null : series.kib[place];
    });
  }

  function layerAt(us) {
    const names = data.curves.map((curve) => curve.layers.find(([end]) => end >= us)?.[1]);
    return names.some(Boolean) ? names.map((name) => name ?? "-").join(" / ") : ends.length ? "all layers delivered" : "";
  }

  /** Tells the position to a screen reader. */
  function describe(index) {
    const us = times[index];
    const kinds = values.map((value) => value.parentElement.textContent.replace(value.textContent, "").trim());
    const sizes = valuesAt(us).map((kib, series) => `${kinds[series]} ${size(kib, series)}`);
    pointer.setAttribute("aria-valuenow", index);
    pointer.setAttribute("aria-valuetext", [text(us / 1e6, data.time), layerAt(us), ...sizes].filter(Boolean).join(", "));
  }

  function size(kib, series) {
    return kib === null ? "-" : text(kib * 1024, data[data.series[series].axis]);
  }

  function show(index) {
    position = Math.min(Math.max(index, 0), times.length - 1);
    const us = times[position];
    const found = valuesAt(us);
    at.textContent = "At";
    time.textContent = text(us / 1e6, data.time);
    layer.textContent = layerAt(us);
    values.forEach((value, series) => { value.textContent = size(found[series], series); });
    for (const cross of crosses) {
      const x = cross.left + Math.min(us / data.end_us, 1) * cross.width;
      cross.line.setAttribute("x1", x);
      cross.line.setAttribute("x2", x);
      lines.forEach((line, index) => {
        const kib = found[line.index];
        const dot = cross.dots[index];
        dot.setAttribute("visibility", kib === null ? "hidden" : "inherit");
        dot.setAttribute("cx", x);
        dot.setAttribute("cy", cross.top + (1 - Math.min((kib ?? 0) / data.end_kib, 1)) * cross.height);
      });
      cross.group.setAttribute("visibility", "visible");
    }
    describe(position);
  }

  function rest() {
    for (const [part, before] of atRest) part.textContent = before;
    for (const cross of crosses) cross.group.setAttribute("visibility", "hidden");
  }

  function follow(event) {
    const cross = crosses.find(({ svg }) => svg.getBoundingClientRect().width > 0);
    const box = cross.svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * cross.svg.viewBox.baseVal.width / box.width;
    const us = (x + cross.svg.viewBox.baseVal.x - cross.left) / cross.width * data.end_us;
    const below = lastUpTo(times, us);
    const above = Math.min(below + 1, times.length - 1);
    show(below < 0 || times[above] - us < us - times[below] ? above : below);
  }

  /** The sample at the end of the next layer, or of the one before. */
  function nextLayer(step) {
    const us = times[position];
    const end = step > 0 ? ends.find((end) => end > us) : ends.findLast((end) => end < us);
    if (end === undefined) return step > 0 ? times.length - 1 : 0;
    const index = lastUpTo(times, end);
    return index === position ? position + step : index;
  }

  pointer.addEventListener("pointermove", follow);
  pointer.addEventListener("pointerdown", follow);
  pointer.addEventListener("pointerleave", () => { if (document.activeElement !== pointer) rest(); });
  pointer.addEventListener("focus", () => { if (pointer.matches(":focus-visible")) show(position); });
  pointer.addEventListener("blur", rest);
  pointer.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 };
    const layers = { PageUp: 1, PageDown: -1 };
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "Home") show(0);
    else if (event.key === "End") show(times.length - 1);
    else if (event.key === "Escape") pointer.blur();
    else if (event.key in layers || (event.shiftKey && event.key in steps)) show(nextLayer(layers[event.key] ?? steps[event.key]));
    else if (event.key in steps) show(position + steps[event.key]);
    else return;
    event.preventDefault();
  });
}

/** Columns that sort: first with the largest on top, and names from A. */
function sortable(table) {
  const body = table.tBodies[0];
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const isName = column === 0;
      const before = header.getAttribute("aria-sort");
      const first = isName ? "ascending" : "descending";
      const other = isName ? "descending" : "ascending";
      const direction = before === first ? other : first;
      for (const one of headers) one.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", direction);
      const sign = direction === "ascending" ? 1 : -1;
      const number = (row) => Number(row.cells[column].dataset.value ?? -Infinity);
      const order = isName
        ? (one, other) => one.cells[0].textContent.localeCompare(other.cells[0].textContent, "en", { numeric: true })
        : (one, other) => number(one) - number(other) || 0;
      body.append(...[...body.rows].sort((one, other) => sign * order(one, other)));
    });
  });
}

for (const stage of document.querySelectorAll("figure .stage")) crosshair(stage.closest("figure"));
for (const table of document.querySelectorAll("table.sortable")) sortable(table);
