// Makes the pictures of a report live: zoom, hover, choosing runs. Without it they show the same, but are not interactive.
// The numbers are those of the SVG paths; nothing is requested from anywhere.
(() => {
  "use strict";
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector, root = document) => root.querySelector(selector);
  const svg = (name, kind) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    made.setAttribute("class", kind);
    return made;
  };
  // The units of the pictures, and the ticks of their axes, as the page has them.
  const size = one(".plot")?.viewBox.baseVal;
  const WIDTH = size?.width ?? 1, HEIGHT = size?.height ?? 1, TICKS = all(".charts figure:first-child .y-axis span").length;
  const view = { axis: "step", from: null, to: null, log: false, smooth: 0, hidden: new Set() };
  const origin = Number(one("#charts")?.dataset.origin ?? 0);
  const names = all("main > .cards > article > h2").map((title) => title.childNodes[1].textContent);

  // "M0 2.5 10 2.25M30 2h0" -> [[[0, 2.5], [10, 2.25]], [[30, 2]]]
  const parts = (d) => d.split("M").slice(1).map((part) => {
    const numbers = part.replace("h0", "").split(" ").map(Number);
    return numbers.flatMap((x, index) => (index % 2 ? [] : [[x, numbers[index + 1]]]));
  });

  const knots = new Map(all(".knots").map((each) => [
    Number(each.dataset.run),
    each.dataset.knots.split(" ").map((knot) => knot.split(",").map(Number)),
  ]));

  // Where a step of a run is on the chosen axis; NaN if that is not known.
  function place(run, step) {
    if (view.axis === "step") return step + origin;
    const known = knots.get(run);
    if (!known) return NaN;
    const column = view.axis === "tokens" ? 1 : 2;
    let low = 0, high = known.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (known[middle][0] <= step) low = middle; else high = middle;
    }
    const [a, b] = [known[low], known[high]];
    const part = b[0] > a[0] ? (step - a[0]) / (b[0] - a[0]) : 0;
    return a[column] + (b[column] - a[column]) * part;
  }

  function digits(value, most) {
    return String(Number(value.toPrecision(most)));
  }

  // As `number_text` in curves.py.
  function numberText(value, unit) {
    if (unit === "%") return `${value.toFixed(0)}%`;
    const size = Math.abs(value);
    for (const [limit, sign] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= limit && size < 1e15)
        return `${digits(value / (sign === "k" ? 1e3 : limit), 4)}${unit ? " " : ""}${sign}${unit}`;
    const text = size && !(size >= 1e-3 && size < 1e15) ? value.toExponential(2) : digits(value, 4);
    return unit ? `${text} ${unit}` : text;
  }

  function placeText(value) {
    if (view.axis === "tokens") return numberText(value, "");
    if (view.axis === "step") return Math.round(value).toLocaleString("en-US");
    const seconds = Math.round(value), hours = Math.floor(seconds / 3600);
    const two = (number) => String(number).padStart(2, "0");
    const minutes = Math.floor(seconds / 60) % 60;
    return hours ? `${hours}:${two(minutes)}:${two(seconds % 60)}` : `${minutes}:${two(seconds % 60)}`;
  }

  // Round numbers around values, as `bounds` in curves.py.
  function bounds(low, high) {
    if (!(high > low)) {
      const margin = Math.abs(high) / 10 || 1;
      [low, high] = [low - margin, high + margin];
    }
    const unit = 10 ** Math.floor(Math.log10((high - low) / (TICKS - 1)));
    for (const step of [1, 2, 2.5, 5, 10, 20].map((factor) => factor * unit)) {
      const first = Math.floor(low / step) * step;
      if (first + (TICKS - 1) * step >= high) return [first, first + (TICKS - 1) * step];
    }
    return [low, high];
  }

  // A mean that forgets; corrected at the start, where it has little to forget.
  function smoothed(points) {
    const keep = view.smooth / 100;
    let sum = 0, weight = 0;
    return points.map(([x, y]) => {
      sum = keep * sum + (1 - keep) * y;
      weight = keep * weight + (1 - keep);
      return [x, sum / weight];
    });
  }

  const charts = all(".charts figure").map((figure) => {
    const group = one(".lines", figure);
    const chart = {
      figure, group, picture: one(".plot", figure), frame: one(".frame", figure),
      unit: figure.dataset.unit,
      y: all(".y-axis span", figure), x: all(".x-axis span", figure),
      cross: svg("path", "cross"), chosen: svg("rect", "chosen"), tip: document.createElement("div"),
      lines: all(".line", figure).map((path) => ({
        path, colour: path.classList[1], run: Number(path.dataset.run), metric: path.dataset.metric,
        parts: parts(path.getAttribute("d")), pale: null, shown: [],
      })),
    };
    chart.tip.className = "tip";
    chart.tip.hidden = true;
    chart.picture.classList.add("live");
    group.removeAttribute("transform");
    chart.picture.append(chart.chosen, chart.cross);
    chart.frame.append(chart.tip);
    return chart;
  });

  const isShown = (line) => !view.hidden.has(line.run) && (view.axis === "step" || knots.has(line.run));

  function extent() {
    let low = Infinity, high = -Infinity;
    for (const chart of charts)
      for (const line of chart.lines.filter(isShown))
        for (const part of line.parts) {
          low = Math.min(low, place(line.run, part[0][0]));
          high = Math.max(high, place(line.run, part[part.length - 1][0]));
        }
    return low <= high ? [low, high > low ? high : low + 1] : [0, 1];
  }

  let domain = [0, 1];

  function draw() {
    const whole = extent();
    domain = view.from === null ? whole : [view.from, view.to];
    charts.forEach(drawChart);
    one("#reset").disabled = view.from === null;
  }

  function drawChart(chart) {
    const [left, right] = domain;
    const inside = ([x]) => x >= left && x <= right;
    let low = Infinity, high = -Infinity, least = Infinity;
    for (const line of chart.lines) {
      line.shown = isShown(line)
        ? line.parts.map((part) => part.map(([step, y]) => [place(line.run, step), y, step])) : [];
      // A few evaluations need no smoothing, and would be far behind.
      const isLong = line.shown.flat().length >= 50;
      line.curve = view.smooth && isLong ? line.shown.map(smoothed) : line.shown;
      for (const [x, y] of line.curve.flat()) {
        if (x < left || x > right) continue;
        low = Math.min(low, y);
        high = Math.max(high, y);
        if (y > 0) least = Math.min(least, y);
      }
    }
    // Only what is positive has a logarithm.
    const isLog = view.log && least < Infinity;
    const turn = isLog ? (y) => Math.log10(Math.max(y, least)) : (y) => y;
    const [bottom, top] = low > high ? [0, 1]
      : isLog ? (high > least ? [Math.log10(least), Math.log10(high)] : [turn(least) - 1, turn(least) + 1])
        : bounds(low, high);
    const toX = (x) => ((x - left) / (right - left)) * WIDTH;
    const toY = (y) => HEIGHT - ((turn(y) - bottom) / (top - bottom)) * HEIGHT;
    const path = (curves) => curves.map((points) => {
      const first = points.findIndex(inside), last = points.findLastIndex(inside);
      // One point more on each side: the line goes on to the edge.
      const seen = first < 0 ? points : points.slice(Math.max(0, first - 1), last + 2);
      const text = seen.map(([x, y]) => `${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`).join(" ");
      return text && `M${text}${seen.length > 1 ? "" : "h0"}`;
    }).join("");
    for (const line of chart.lines) {
      line.path.setAttribute("d", path(line.curve));
      if (view.smooth && !line.pale) {
        line.pale = line.path.cloneNode();
        line.pale.classList.add("pale");
        chart.group.prepend(line.pale);
      }
      line.pale?.setAttribute("d", view.smooth ? path(line.shown) : "");
    }
    chart.y.forEach((label, index) => {
      const value = top - ((top - bottom) * index) / (TICKS - 1);
      label.textContent = numberText(isLog ? 10 ** value : value, chart.unit);
    });
    chart.x.forEach((label, index) => {
      label.textContent = placeText(left + ((right - left) * index) / (TICKS - 1));
    });
  }

  // The point of a line that is meant at a place: none if the line has ended before, or begins later.
  function nearest(line, x) {
    const first = line.curve[0]?.[0], last = line.curve.at(-1)?.at(-1);
    const near = (domain[1] - domain[0]) / 100;
    if (!first || x < first[0] - near || x > last[0] + near) return null;
    let best = null;
    for (const curve of line.curve)
      for (const point of curve)
        if (!best || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
    return best;
  }

  function hover(chart, event) {
    const box = chart.picture.getBoundingClientRect();
    const part = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const x = domain[0] + part * (domain[1] - domain[0]);
    // On all charts: what happened at this step elsewhere?
    for (const each of charts) each.cross.setAttribute("d", `M${part * WIDTH} 0V${HEIGHT}`);
    const near = chart.lines.map((line) => [line, nearest(line, x)]).filter(([, point]) => point);
    if (!near.length) return;
    const isMany = new Set(chart.lines.map((line) => line.metric)).size > 1;
    const close = (domain[1] - domain[0]) / 50;
    const rows = near.map(([line, [at, y]]) => {
      const row = document.createElement("div"), chip = document.createElement("span");
      chip.className = `chip ${line.colour}`;
      const words = [names.length > 1 ? names[line.run] : "", isMany ? line.metric : "", numberText(y, chart.unit),
        Math.abs(at - x) > close ? `at ${placeText(at)}` : ""];
      row.append(chip, words.filter(Boolean).join(" "));
      return row;
    });
    const title = document.createElement("b");
    title.textContent = `${view.axis} ${placeText(x)}`;
    show(chart.tip, [title, ...rows], part * box.width, box.width);
  }

  function show(tip, children, x, width) {
    tip.replaceChildren(...children);
    tip.hidden = false;
    // To the other side before it would leave the picture.
    const left = x + 12 + tip.offsetWidth > width ? x - 12 - tip.offsetWidth : x + 12;
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = "4px";
  }

  function leave() {
    for (const chart of charts) {
      chart.tip.hidden = true;
      chart.cross.removeAttribute("d");
    }
  }

  for (const chart of charts) {
    let start = null;
    const at = (event) => {
      const box = chart.picture.getBoundingClientRect();
      return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    };
    const choose = (from, to) => {
      chart.chosen.setAttribute("x", Math.min(from, to) * WIDTH);
      chart.chosen.setAttribute("width", Math.abs(to - from) * WIDTH);
      chart.chosen.setAttribute("height", HEIGHT);
    };
    chart.picture.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || event.button) return;
      start = at(event);
      chart.picture.setPointerCapture(event.pointerId);
    });
    chart.picture.addEventListener("pointermove", (event) => {
      hover(chart, event);
      if (start !== null) choose(start, at(event));
    });
    chart.picture.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const [from, to] = [start, at(event)].sort((a, b) => a - b);
      start = null;
      choose(0, 0);
      if (to - from < 0.01) return;
      const width = domain[1] - domain[0];
      [view.from, view.to] = [domain[0] + from * width, domain[0] + to * width];
      draw();
    });
    chart.picture.addEventListener("pointerleave", leave);
    chart.picture.addEventListener("dblclick", reset);
  }

  function reset() {
    view.from = view.to = null;
    draw();
  }

  // What each pixel of the heat map means, read back from its colours.
  for (const picture of all(".heat")) {
    const tip = document.createElement("div"), canvas = document.createElement("canvas");
    const steps = picture.dataset.steps.split(" "), ratios = picture.dataset.ratios.split(" ");
    const palette = picture.dataset.palette.match(/.{6}/g), perRow = Number(picture.dataset.ranks);
    let pixels = null;
    tip.className = "tip";
    tip.hidden = true;
    picture.parentElement.append(tip);
    picture.decode().then(() => {
      [canvas.width, canvas.height] = [picture.naturalWidth, picture.naturalHeight];
      const context = canvas.getContext("2d");
      context.drawImage(picture, 0, 0);
      pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
    });
    picture.addEventListener("pointermove", (event) => {
      if (!pixels) return;
      const box = picture.getBoundingClientRect();
      const inside = (part, size) => Math.min(size - 1, Math.max(0, Math.floor(part * size)));
      const column = inside((event.clientX - box.left) / box.width, canvas.width);
      const row = inside((event.clientY - box.top) / box.height, canvas.height);
      const start = 4 * (row * canvas.width + column);
      const colour = [0, 1, 2].map((part) => pixels[start + part].toString(16).padStart(2, "0")).join("");
      const level = palette.indexOf(colour), first = row * perRow;
      const ranks = perRow > 1 ? `ranks ${first}–${first + perRow - 1}` : `rank ${row}`;
      const text = level > 0 ? `${ratios[level - 1]} × the median` : "not recorded";
      const line = document.createElement("div");
      line.textContent = `${ranks}, steps ${steps[column].replace("-", "–")}: ${text}`;
      show(tip, [line], event.clientX - box.left, box.width);
    });
    picture.addEventListener("pointerleave", () => { tip.hidden = true; });
  }

  const on = (selector, kind, act) => one(selector)?.addEventListener(kind, act);
  on("#axis", "change", (event) => { view.axis = event.target.value; reset(); });
  on("#smooth", "input", (event) => { view.smooth = Number(event.target.value); draw(); });
  on("#log", "change", (event) => { view.log = event.target.checked; draw(); });
  on("#reset", "click", reset);
  on("#theme", "click", () => {
    const root = document.documentElement;
    const isDark = root.dataset.theme ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
  });
  for (const box of all("#choose input"))
    box.addEventListener("change", () => {
      view.hidden[box.checked ? "delete" : "add"](Number(box.dataset.run));
      draw();
    });

  // On paper nobody can open what is folded.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = all("details:not([open])");
    for (const each of opened) each.open = true;
  });
  addEventListener("afterprint", () => { for (const each of opened) each.open = false; });

  one("#controls").hidden = false;
  if (charts.length) draw();
})();
