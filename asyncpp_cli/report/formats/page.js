"use strict";
(async () => {
  const packed = document.getElementById("plotly");
  if (packed) {
    const bytes = Uint8Array.from(atob(packed.textContent), (character) => character.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
    document.head.append(script);
  }
  const { arms, charts, atFirst, reload, hues, dashes, markers } = JSON.parse(document.getElementById("data").textContent);
  // What the reader chose is in the address, so that a reload and a link keep it.
  const address = new URLSearchParams(location.hash.slice(1));
  const keysOf = (name) => new Set(address.get(name)?.split("."));
  const DEFAULTS = { kind: "train", axis: "step", range: "all", seeds: "band", smoothing: 2, scale: "linear", colour: "" };
  const [added, hidden, pinned] = [keysOf("shown"), keysOf("hidden"), keysOf("pinned")];
  const zooms = [...address].filter(([name]) => name.endsWith("-chart")).map(([name, text]) => {
    const ends = text.split("_").map((end) => (end === "" ? undefined : Number(end)));
    const axis = (from) => (Number.isFinite(ends[from]) && Number.isFinite(ends[from + 1]) ? ends.slice(from, from + 2) : undefined);
    return [name, { xaxis: axis(0), yaxis: axis(2) }];
  });
  const state = {
    ...DEFAULTS, width: undefined, zooms: Object.fromEntries(zooms), pinned: arms.map((arm) => pinned.has(arm.key)),
    shown: arms.map((arm) => !hidden.has(arm.key) && (arm.rank < atFirst || added.has(arm.key))),
  };
  const BASE = { margin: { l: 56, r: 12, t: 28, b: 44 }, showlegend: false, hovermode: "closest", hoverlabel: { namelength: -1 } };
  // Nothing leaves the page: without "Share chart...", and without an address that it could go to.
  const CONFIG = {
    responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtonsToRemove: ["lasso2d", "select2d"], toImageButtonOptions: { format: "svg" },
    modeBarButtonsToAdd: [{ name: "csv", title: "Download the numbers as CSV", icon: Plotly.Icons.disk, click: saveNumbers }],
  };

  // The points that a chart draws, one per line: what they belong to, x and y; of a heat map its fields.
  function saveNumbers(chart) {
    const field = (value) => `"${String(value ?? "").replace(/"/g, '""')}"`;
    const labels = chart.layout.yaxis?.ticktext;
    const lines = chart.data.filter((trace) => trace.visible !== "legendonly").flatMap((trace) => trace.z
      ? trace.z.flatMap((row, place) => row.map((value, column) => [labels[place], column, value]))
      : trace.x.map((x, place) => [labels?.[trace.y[place]] ?? trace.name ?? trace.text, x, trace.y[place]]));
    const text = [["arm", "x", "y"], ...lines].map((line) => line.map(field).join(",")).join("\n");
    const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: `${chart.id}.csv` });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  const AXES = { step: "steps", tokens: "tokens" };
  // Replayed runs say nothing about the time that training takes.
  if (arms.some((arm) => arm.runs.some((run) => run.timed))) AXES.seconds = "training time";

  // Whatever else the address keeps: searches, the order of tables, what is open, and how far all is scrolled.
  const searches = () => [...document.querySelectorAll("input[type=search]")];
  const sorted = () => [...document.querySelectorAll("th[aria-sort]")];
  const details = () => [...document.querySelectorAll("details")];
  const scrolling = () => [document.scrollingElement, ...document.querySelectorAll(".scroll, #arm-list")];
  const focusable = () => [...document.querySelectorAll("a, button, input, select, summary, [tabindex]")];
  const nameOf = (heading) => heading.closest("table").caption.textContent + heading.textContent;

  function save() {
    const view = new URLSearchParams();
    const put = (name, value) => { if (value) view.append(name, value); };
    for (const [name, usual] of Object.entries(DEFAULTS)) if (state[name] !== usual) view.set(name, state[name]);
    const keys = (chosen) => arms.filter((arm, place) => state.shown[place] !== arm.rank < atFirst && state.shown[place] === chosen).map((arm) => arm.key);
    put("shown", keys(true).join("."));
    put("hidden", keys(false).join("."));
    put("pinned", arms.filter((_, place) => state.pinned[place]).map((arm) => arm.key).join("."));
    for (const [chart, { xaxis, yaxis }] of Object.entries(state.zooms)) if (xaxis || yaxis) put(chart, [...(xaxis ?? ["", ""]), ...(yaxis ?? ["", ""])].join("_"));
    for (const search of searches()) put(search.getAttribute("aria-label"), search.value);
    for (const heading of sorted()) put(heading.getAttribute("aria-sort"), nameOf(heading));
    put("every-column", document.getElementById("every-column").checked ? 1 : "");
    for (const each of details()) if (each.open) put("open", each.firstElementChild.textContent);
    scrolling().forEach((each, place) => put("scroll", each.scrollTop || each.scrollLeft ? [place, each.scrollTop, each.scrollLeft].map(Math.round).join("_") : ""));
    put("focus", focusable().indexOf(document.activeElement) + 1);
    history.replaceState(null, "", `${location.href.split("#")[0]}#${view}`);
  }

  function restore() {
    for (const search of searches()) {
      search.value = address.get(search.getAttribute("aria-label")) ?? "";
      search.dispatchEvent(new Event("input"));
    }
    for (const [order, clicks] of [["ascending", 1], ["descending", 2]]) {
      const names = address.getAll(order);
      const chosen = [...document.querySelectorAll("th[tabindex]")].filter((heading) => names.includes(nameOf(heading)));
      for (const heading of chosen) for (let click = 0; click < clicks; click += 1) heading.click();
    }
    document.getElementById("every-column").checked = address.has("every-column");
    const open = address.getAll("open");
    for (const each of details()) each.open = open.includes(each.firstElementChild.textContent);
    history.scrollRestoration = "manual";
    const boxes = scrolling();
    // The lines above wide tables, now that their columns are chosen: what they move is moved before the page is scrolled.
    for (const box of boxes) box.dispatchEvent(new Event("scroll"));
    for (const [place, top, left] of address.getAll("scroll").map((text) => text.split("_"))) boxes[place]?.scrollTo(left, top);
    focusable()[address.get("focus") - 1]?.focus({ preventScroll: true });
  }

  // The address follows what the reader does; the page of an experiment that is running loads itself again, but not under the reader's hands.
  function keepView() {
    let [touched, later] = [0, 0];
    const events = ["click", "input", "change", "toggle", "scroll", "keydown", "pointerdown", "wheel"];
    for (const event of events) document.addEventListener(event, () => {
      touched = Date.now();
      clearTimeout(later);
      later = setTimeout(save, 200);
    }, { capture: true, passive: true });
    window.addEventListener("hashchange", ({ newURL }) => { if (new URL(newURL).hash.includes("=")) location.reload(); });
    const again = () => {
      if (Date.now() - touched < 3000) return setTimeout(again, 1000);
      save();
      location.reload();
    };
    if (reload !== null) setTimeout(again, 1000 * reload);
  }

  // The page's colours, light or dark; plotly asks for none of them by itself.
  const BLACK = "#000000";
  let LAYOUT, GRID, COLOURS;
  function takeColours() {
    const page = getComputedStyle(document.documentElement);
    COLOURS = Object.fromEntries(["page", "ink", "faint", "thin", "black-arm", "heat"].map((name) => [name, page.getPropertyValue(`--${name}`).trim()]));
    LAYOUT = { ...BASE, paper_bgcolor: COLOURS.page, plot_bgcolor: COLOURS.page, font: { family: "inherit", size: 12, color: COLOURS.ink } };
    GRID = { gridcolor: COLOURS.thin, zerolinecolor: "#8c959f", linecolor: "#8c959f", automargin: true };
  }
  const colourOf = (arm) => (arm.colour === BLACK ? COLOURS["black-arm"] : arm.colour);

  // Plotly takes some markup in texts; names are no markup.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const ranked = arms.map((_, place) => place).sort((a, b) => arms[a].rank - arms[b].rank);
  const shown = () => ranked.filter((place) => state.shown[place]).map((place) => arms[place]);
  const element = (tag, attributes, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };

  function tokensOf(part) {
    return typeof part.tokens === "number" ? part.step.map((step) => step * part.tokens) : part.tokens;
  }

  function along(part) {
    return state.axis === "tokens" ? tokensOf(part) : part[state.axis];
  }

  // Bins know their mean step alone; the other axes are read off the steps that were kept.
  function alongOf(steps, part) {
    const to = along(part);
    let place = 0;
    return steps.map((step) => {
      while (place + 2 < part.step.length && part.step[place + 1] < step) place += 1;
      const [from, until] = [part.step[place], part.step[place + 1] ?? part.step[place]];
      const share = until > from ? Math.min(1, Math.max(0, (step - from) / (until - from))) : 0;
      return to[place] + share * ((to[place + 1] ?? to[place]) - to[place]);
    });
  }

  // A centred mean over a share of the run, in percent; at the ends over what there is of it.
  function smoothed(values, percent) {
    const reach = Math.floor((values.length * percent) / 200);
    if (reach === 0) return values;
    const sums = [0];
    const counts = [0];
    for (const value of values) {
      sums.push(sums[sums.length - 1] + (value ?? 0));
      counts.push(counts[counts.length - 1] + (value === null ? 0 : 1));
    }
    return values.map((_, place) => {
      const begin = Math.max(0, place - reach);
      const end = Math.min(values.length, place + reach + 1);
      const count = counts[end] - counts[begin];
      return count ? (sums[end] - sums[begin]) / count : null;
    });
  }

  // What a run's line goes through: means of its bins, or every point.
  function course(run, unit) {
    const part = run[state.kind];
    if (state.kind !== "train") return { x: (part.seconds ? along(part) : alongOf(part.step, run.train)).map((value) => value / unit), y: part.loss };
    const binned = run.mean ?? part;
    return { x: alongOf(binned.step, part).map((value) => value / unit), y: smoothed(binned.loss, state.smoothing) };
  }

  function at(line, x) {
    let place = 0;
    return x.map((value) => {
      while (place + 2 < line.x.length && line.x[place + 1] < value) place += 1;
      const [from, until] = [line.x[place], line.x[place + 1] ?? line.x[place]];
      const [low, high] = [line.y[place], line.y[place + 1] ?? line.y[place]];
      if (value === from || low === null || high === null) return value === from ? low : null;
      return low + ((value - from) / (until - from)) * (high - low);
    });
  }

  // Mean and standard deviation (n - 1) of an arm's runs, where all of them have been.
  function meanAndBand(lines) {
    const begin = Math.max(...lines.map((line) => line.x[0]));
    const end = Math.min(...lines.map((line) => line.x[line.x.length - 1]));
    const x = lines[0].x.filter((value) => value >= begin && value <= end);
    const values = lines.map((line) => at(line, x));
    const mean = [], low = [], high = [];
    x.forEach((_, place) => {
      const here = values.map((row) => row[place]);
      const known = here.every((value) => value !== null);
      const centre = known ? here.reduce((a, b) => a + b) / here.length : null;
      const spread = known ? Math.sqrt(here.reduce((a, b) => a + (b - centre) ** 2, 0) / (here.length - 1)) : null;
      mean.push(centre);
      low.push(known ? centre - spread : null);
      high.push(known ? centre + spread : null);
    });
    return { x, mean, low, high };
  }

  const EVERY_KIND = {
    train: ["Training", "training loss, nats per token"], val: ["Validation", "validation loss, nats per token"],
    lr: ["Learning rate", "learning rate"], grad_norm: ["Gradient norm", "gradient norm, before clipping"],
    speed: ["Tokens/s", "tokens per second, in steady state"], memory: ["Memory", "peak memory of the fullest rank, GiB"],
    load: ["Load of experts", "largest load of an expert over the mean"],
  };
  const KINDS = Object.fromEntries(Object.entries(EVERY_KIND).filter(([kind]) => kind === "train" || kind === "val" || arms.some((arm) => arm.runs.some((run) => run[kind]))).map(([kind, [name]]) => [kind, name]));
  // Those of steps, whose points are not marked.
  const ofSteps = () => ["train", "lr", "grad_norm"].includes(state.kind);
  const HOVER = "%{y:.5~g} at %{x:,}<br>%{text}<extra></extra>";
  const lineOf = (arm, width) => ({ color: colourOf(arm), width, dash: arm.dash });
  const pointsOf = (arm) => (ofSteps() ? {} : { marker: { color: colourOf(arm), symbol: arm.marker, size: 6 } });

  function faint(hex) {
    const parts = [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
    return `rgba(${parts.join(",")},0.18)`;
  }

  function armTraces(arm, runs, unit, wider) {
    const lines = runs.map((run) => course(run, unit));
    const mode = ofSteps() ? "lines" : "lines+markers";
    if (state.seeds === "band" && lines.length > 1) {
      const { x, mean, low, high } = meanAndBand(lines);
      if (x.length) {
        const text = plain(`${arm.name}, mean of ${lines.length} runs`);
        const edge = { x, type: "scatter", mode: "lines", hoverinfo: "skip", line: { width: 0 }, opacity: 0.5, band: true };
        return [
          { ...edge, y: low },
          { ...edge, y: high, fill: "tonexty", fillcolor: faint(colourOf(arm)) },
          { x, y: mean, text, type: "scatter", mode, hovertemplate: HOVER, line: lineOf(arm, 2 + wider), ...pointsOf(arm) },
        ];
      }
    }
    return runs.flatMap((run, place) => {
      const text = plain(`${arm.name}, seed ${run.seed}`);
      const line = { ...lines[place], text, type: "scatter", mode, hovertemplate: HOVER, ...pointsOf(arm) };
      if (state.kind !== "train") return [{ ...line, line: lineOf(arm, 1.5 + wider) }];
      if (state.smoothing === 0 && !run.mean) return [{ ...line, line: lineOf(arm, 1.2 + wider) }];
      const raw = {
        x: along(run.train).map((value) => value / unit), y: run.train.loss, text, type: "scatter", mode: "lines", hoverinfo: "skip",
        line: { color: colourOf(arm), width: 0.8 }, opacity: 0.28,
      };
      return [raw, { ...line, line: lineOf(arm, 2 + wider) }];
    });
  }

  function timeUnit(parts) {
    const longest = Math.max(0, ...parts.map((part) => part.seconds[part.seconds.length - 1] ?? 0));
    return longest > 7200 ? [3600, "hours"] : longest > 120 ? [60, "minutes"] : [1, "seconds"];
  }

  function drawLoss() {
    const chart = document.getElementById("loss-chart");
    const runs = shown().flatMap((arm) => arm.runs.map((run) => [arm, run]))
      .filter(([, run]) => run[state.kind] && (state.axis !== "seconds" || run.timed));
    const [unit, name] = state.axis === "seconds" ? timeUnit(runs.map(([, run]) => run.train ?? run[state.kind])) : [1, AXES[state.axis]];
    const filled = pinnedLast(shown(), (arm) => arms.indexOf(arm)).map((arm) => [arm, runs.filter(([owner]) => owner === arm).map(([, run]) => run)]).filter(([, own]) => own.length);
    const lines = filled.map(([, own]) => course(own[0], unit).y);
    const traces = filled.flatMap(([arm, own], place) => {
      // Under later curves that coincide with this one, as those of synchronous schedules do: wider, so that all are seen.
      const above = lines.slice(place + 1).filter((line) => coincide(line, lines[place])).length;
      const wider = 2.5 * Math.min(above, 4) + (state.pinned[arms.indexOf(arm)] ? 2 : 0);
      return armTraces(arm, own, unit, wider).map((trace) => ({ ...trace, diverged: arm.diverged }));
    });
    const x = { ...GRID, title: { text: state.axis === "seconds" ? `training time, ${name}` : name }, rangemode: "tozero" };
    const y = { ...GRID, title: { text: EVERY_KIND[state.kind][1] } };
    if (state.scale === "log") y.type = "log";
    // The axis is that of the arms that did not diverge; at its edge an arrow for each of the others.
    const isLoss = state.kind === "train" || state.kind === "val";
    const staying = traces.filter((trace) => !trace.diverged && trace.y.some((value) => value !== null));
    const leaving = isLoss && staying.length ? traces.filter((trace) => trace.diverged) : [];
    const within = leaving.length ? staying : traces;
    if (leaving.length) y.range = rangeOf(within.flatMap((trace) => trace.y));
    if (state.range === "end") Object.assign(x, endOf(within, x, y));
    const annotations = leaving.length ? arrowsOf(leaving, state.scale === "log" ? 10 ** y.range[1] : y.range[1]) : [];
    drawn(chart, traces, { ...LAYOUT, width: state.width, xaxis: x, yaxis: y, annotations });
  }

  // Draws a chart as far as the reader has zoomed into it.
  function drawn(chart, traces, layout) {
    const zoom = (state.zooms[chart.id] ??= {});
    for (const axis of ["xaxis", "yaxis"]) if (zoom[axis]) Object.assign(layout[axis], { range: zoom[axis], autorange: false });
    const first = !chart.on;
    Plotly.react(chart, traces, layout, CONFIG);
    if (!first) return;
    // A click in a legend hides the arm in all charts, a double click all others.
    chart.on("plotly_legendclick", ({ curveNumber }) => toggled(chart.data[curveNumber].meta, false));
    chart.on("plotly_legenddoubleclick", ({ curveNumber }) => toggled(chart.data[curveNumber].meta, true));
    chart.on("plotly_relayout", (change) => {
      for (const axis of ["xaxis", "yaxis"]) {
        const range = change[`${axis}.range`] ?? [change[`${axis}.range[0]`], change[`${axis}.range[1]`]];
        if (change[`${axis}.autorange`]) delete state.zooms[chart.id][axis];
        else if (range[0] !== undefined) state.zooms[chart.id][axis] = range;
      }
      save();
    });
  }

  function coincide(one, other) {
    const known = one.filter((value) => value !== null);
    const span = Math.max(...known) - Math.min(...known);
    return one.length === other.length && one.every((value, place) => value === other[place] || Math.abs(value - other[place]) <= 0.005 * span);
  }

  // The second half of the steps, with losses as far apart as the lines in it are; single spikes may stand out.
  function endOf(traces, x, y) {
    const lines = traces.filter((trace) => trace.opacity === undefined || trace.opacity === 1);
    const last = Math.max(...lines.map((trace) => trace.x[trace.x.length - 1] ?? 0));
    const values = lines.flatMap((trace) => trace.y.filter((value, place) => value !== null && trace.x[place] >= last / 2));
    if (!values.length) return {};
    y.range = rangeOf(values);
    return { range: [last / 2, last * 1.01] };
  }

  // The ends of an axis for these values, with some room.
  function rangeOf(values) {
    const known = values.filter((value) => value !== null);
    const low = known.reduce((a, b) => Math.min(a, b));
    const high = known.reduce((a, b) => Math.max(a, b));
    const room = (high - low) * 0.06 || 0.01;
    return state.scale === "log" ? [Math.log10(low) - 0.01, Math.log10(high) + 0.01] : [low - room, high + room];
  }

  function arrowsOf(traces, top) {
    const lines = traces.filter((trace) => trace.hovertemplate);
    return lines.flatMap(({ x, y, text, line }) => {
      const place = y.findIndex((value) => value === null || value > top);
      if (place < 0) return [];
      const before = Math.max(place - 1, 0);
      const share = place && y[place] !== null ? (top - y[before]) / (y[place] - y[before]) : 0;
      return { x: x[before] + share * (x[place] - x[before]), y: 1, yref: "paper", ax: 0, ay: 26, text: "", hovertext: `${text} diverged`, arrowcolor: line.color, arrowwidth: 2 };
    });
  }

  // The charts beside the losses come drawn for all arms; `meta` names the arm of a trace, or of each of its points.
  function drawCharts() {
    for (const [name, figure] of Object.entries(charts)) {
      const chart = document.getElementById(`${name}-chart`);
      const { meta, ...given } = inTheme(figure.layout);
      const rows = meta && ranked.filter((arm) => state.shown[arm] && meta.includes(arm));
      given.annotations = given.annotations?.filter((arrow) => state.shown[arrow.name])
        .map((arrow) => ({ ...arrow, arrowcolor: colourOf(arms[arrow.name]) }));
      const hasLegend = /^(tuning|over)-/.test(name);
      const layout = { ...LAYOUT, ...given, width: state.width, xaxis: { ...GRID, ...given.xaxis }, yaxis: { ...GRID, ...given.yaxis } };
      if (rows) Object.assign(layout, layoutOfRows(chart, rows, layout));
      else if (hasLegend) Object.assign(layout, { showlegend: true, legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" } });
      const traces = figure.data.map((trace) => ofShown(styled(inTheme(trace)), rows, hasLegend)).filter((trace) => trace !== null);
      drawn(chart, rows ? traces : pinnedLast(traces, (trace) => trace.meta), layout);
    }
  }

  // As on white paper, in the page's colours.
  function inTheme(value) {
    const colours = { [BLACK]: COLOURS["black-arm"], "#57606a": COLOURS.faint, "#ffffff": COLOURS.page, "#2f8fc4": COLOURS.heat };
    if (Array.isArray(value)) return value.map(inTheme);
    if (value !== null && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, inTheme(item)]));
    return colours[value] ?? value;
  }

  // In the colours that the reader chose.
  function styled(trace) {
    const { meta } = trace;
    if (Array.isArray(meta)) {
      if (!Array.isArray(trace.marker?.color)) return trace;
      const color = meta.map((arm) => colourOf(arms[arm]));
      return { ...trace, marker: { ...trace.marker, color }, insidetextfont: { color: color.map(inkOn) } };
    }
    const colour = colourOf(arms[meta]);
    if (trace.fill) return { ...trace, fillcolor: colour };
    const line = { ...trace.line, color: colour, dash: arms[meta].dash, width: trace.line.width + (state.pinned[meta] ? 2 : 0) };
    return { ...trace, line, marker: trace.marker && { ...trace.marker, color: colour } };
  }

  // Black or white on a colour, whichever has the better contrast (by the relative luminance of WCAG 2.1).
  function inkOn(hex) {
    const parts = [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16) / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] < 0.179 ? "#ffffff" : "#000000";
  }

  const pinnedLast = (items, place) => [...items].sort((one, other) => state.pinned[place(one)] - state.pinned[place(other)]);

  function ofShown(trace, rows, hasLegend) {
    if (!Array.isArray(trace.meta)) {
      if (state.shown[trace.meta]) return trace;
      return hasLegend && arms[trace.meta].rank < atFirst ? { ...trace, visible: "legendonly" } : null;
    }
    // In the order of the rows: a heat map paints its bands in the order of its entries, whatever their places.
    const kept = trace.meta.map((_, place) => place).filter((place) => state.shown[trace.meta[place]])
      .sort((one, other) => rows.indexOf(trace.meta[one]) - rows.indexOf(trace.meta[other]));
    const pick = (value) => {
      if (Array.isArray(value)) return kept.map((place) => value[place]);
      if (value !== null && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, pick(item)]));
      return value;
    };
    const picked = pick(trace);
    return { ...picked, y: picked.meta.map((arm) => rows.indexOf(arm)) };
  }

  function layoutOfRows(chart, rows, { yaxis }) {
    const narrow = (state.width ?? chart.clientWidth) < 560;
    const labels = rows.map((arm) => inLines(arms[arm].name, narrow ? 14 : 60).map(plain));
    const lines = Math.max(1, ...labels.map((label) => label.length));
    const height = 90 + rows.length * Math.max(30, 15 * lines + 8);
    // Plotly forgets the height of a layout when the window changes its size.
    chart.style.height = `${height}px`;
    const y = { tickvals: rows.map((_, place) => place), ticktext: labels.map((label) => label.join("<br>")), range: [rows.length - 0.5, -0.5] };
    return { height, yaxis: { ...yaxis, ...y, autorange: false, fixedrange: true } };
  }

  function inLines(text, most) {
    const lines = [];
    for (const word of text.split(" ")) {
      const last = lines[lines.length - 1];
      if (last !== undefined && last.length + word.length < most) lines[lines.length - 1] = `${last} ${word}`;
      else lines.push(word);
    }
    return lines;
  }

  function draw() {
    for (const line of document.querySelectorAll("#arm-list line")) {
      const arm = arms[line.dataset.place];
      line.setAttribute("stroke", colourOf(arm));
      line.setAttribute("stroke-dasharray", { solid: "", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "11 4" }[arm.dash]);
    }
    drawLoss();
    drawCharts();
  }

  // Rows of the list of arms, by place.
  const listed = [];

  function show(place, on) {
    state.shown[place] = on;
    listed[place].box.checked = on;
    listed[place].row.classList.toggle("hidden-arm", !on);
  }

  function toggled(place, alone) {
    if (alone) arms.forEach((_, other) => show(other, other === place || state.pinned[other]));
    else show(place, !state.shown[place]);
    draw();
    return false;
  }

  // Colours by the values of one key of the matrix, dashes and marks by those of the others.
  const STYLES = arms.map(({ colour, dash, marker }) => ({ colour, dash, marker }));
  function recolour() {
    const key = state.colour;
    const othersOf = (arm) => JSON.stringify({ ...arm.axes, [key]: "" });
    const [values, others] = [(arm) => arm.axes[key], othersOf].map((of) => [...new Set(arms.map(of))]);
    arms.forEach((arm, place) => {
      const other = others.indexOf(othersOf(arm)) % dashes.length;
      const chosen = { colour: hues[values.indexOf(arm.axes[key]) % hues.length], dash: dashes[other], marker: markers[other] };
      Object.assign(arm, key ? chosen : STYLES[place]);
    });
  }

  function choice(name, options, label) {
    if (Object.hasOwn(options, address.get(name))) state[name] = address.get(name);
    const buttons = Object.entries(options).map(([value, text]) => {
      const button = element("button", { type: "button", "aria-pressed": String(state[name] === value) }, text);
      button.dataset[name] = value;
      button.addEventListener("click", () => {
        state[name] = value;
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
        if (name !== "seeds") delete state.zooms["loss-chart"];
        drawLoss();
      });
      return button;
    });
    return element("fieldset", {}, element("legend", {}, label), ...buttons);
  }

  function makeControls() {
    state.smoothing = Math.min(20, Math.max(0, Number(address.get("smoothing") ?? state.smoothing))) || 0;
    const slider = element("input", { type: "range", min: 0, max: 20, step: 1, value: state.smoothing, id: "smoothing" });
    const said = element("output", { for: "smoothing" }, `${state.smoothing}%`);
    slider.addEventListener("input", () => {
      state.smoothing = Number(slider.value);
      said.value = `${state.smoothing}%`;
      drawLoss();
    });
    const keys = Object.keys(arms[0]?.axes ?? {});
    if (keys.includes(address.get("colour"))) state.colour = address.get("colour");
    const colour = element("select", { id: "colour" }, ...["", ...keys].map((key) => new Option(key || "automatic", key, false, key === state.colour)));
    colour.addEventListener("change", () => {
      state.colour = colour.value;
      recolour();
      draw();
    });
    recolour();
    document.getElementById("controls").append(
      choice("kind", KINDS, "Which curve"),
      choice("axis", AXES, "Along what"),
      ...(arms.some((arm) => arm.runs.length > 1) ? [choice("seeds", { band: "mean and band", single: "single runs" }, "Seeds")] : []),
      choice("range", { all: "whole run", end: "second half" }, "How much"),
      choice("scale", { linear: "linear", log: "log" }, "Which scale"),
      element("label", {}, "smoothing ", slider, " ", said),
      ...(keys.length > 1 ? [element("label", {}, "colour by ", colour)] : []),
    );
  }

  function makeArmList() {
    const list = document.getElementById("arm-list");
    const rows = ranked.map((place) => {
      const arm = arms[place];
      const box = element("input", { type: "checkbox" });
      box.checked = state.shown[place];
      box.dataset.arm = place;
      const sample = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      sample.setAttribute("width", 26);
      sample.setAttribute("height", 8);
      const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      for (const [name, value] of Object.entries({ x1: 0, x2: 26, y1: 4, y2: 4, "stroke-width": 3, "data-place": place })) line.setAttribute(name, value);
      sample.append(line);
      const loss = arm.val_loss !== null ? arm.val_loss.toFixed(3) : arm.without_loss;
      const row = element("label", {}, box, sample, element("span", {}, arm.name), element("span", { class: "value" }, loss));
      row.classList.toggle("hidden-arm", !box.checked);
      box.addEventListener("change", () => toggled(place, false));
      // A pinned arm is drawn above the others, and stays when none is chosen.
      const pin = element("button", { type: "button", class: "pin", "aria-pressed": String(state.pinned[place]), "aria-label": `pin ${arm.name}` }, "pin");
      pin.addEventListener("click", () => {
        state.pinned[place] = !state.pinned[place];
        pin.setAttribute("aria-pressed", String(state.pinned[place]));
        if (state.pinned[place]) show(place, true);
        draw();
      });
      listed[place] = { row, box };
      return { whole: element("div", { class: "arm" }, row, pin), place, name: arm.name.toLowerCase() };
    });
    const search = element("input", { type: "search", placeholder: "find arms", "aria-label": "find arms" });
    const matching = () => rows.filter(({ name }) => search.value.toLowerCase().split(/\s+/).every((word) => name.includes(word)));
    search.addEventListener("input", () => {
      const found = new Set(matching());
      for (const entry of rows) entry.whole.style.display = found.has(entry) ? "" : "none";
    });
    const all = (checked) => () => {
      for (const { place } of matching()) show(place, checked || state.pinned[place]);
      draw();
    };
    const buttons = [["all", true], ["none", false]].map(([text, checked]) => {
      const button = element("button", { type: "button" }, text);
      button.addEventListener("click", all(checked));
      return button;
    });
    if (arms.length > atFirst) list.append(element("p", { class: "conditions" }, `The best of each arm, ${atFirst} of ${arms.length}; choose others here.`));
    if (arms.length > 8) list.append(search);
    list.append(element("div", { class: "buttons" }, ...buttons), ...rows.map(({ whole }) => whole));
  }

  // Rows of a table are sorted by a click on a heading, and filtered by words; one wider than the page says so.
  function makeTable(scroll) {
    const table = scroll.querySelector("table");
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const headings = [...table.tHead.rows[0].cells];
    const valueOf = (row, place) => row.cells[place].textContent;
    const numberOf = (text) => parseFloat(text.replace(/,/g, ""));
    headings.forEach((heading, place) => {
      heading.tabIndex = 0;
      heading.title = "sort";
      const sort = () => {
        const down = heading.getAttribute("aria-sort") === "ascending";
        headings.forEach((other) => other.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        const sorted = [...rows].sort((a, b) => {
          const [one, other] = [valueOf(a, place), valueOf(b, place)];
          const [x, y] = [numberOf(one), numberOf(other)];
          // Texts without a number are last, in both directions.
          if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
          const order = Number.isNaN(x) || x === y ? one.localeCompare(other) : x - y;
          return down ? -order : order;
        });
        body.append(...sorted);
      };
      heading.addEventListener("click", sort);
      heading.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
    });
    if (rows.length > 8) {
      const search = element("input", { type: "search", class: "filter", placeholder: "filter rows", "aria-label": `filter rows: ${table.caption.textContent}` });
      const said = element("output", { class: "conditions" });
      search.addEventListener("input", () => {
        const words = search.value.toLowerCase().split(/\s+/);
        for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
        said.value = search.value ? ` ${rows.filter((row) => !row.hidden).length} of ${rows.length} rows` : "";
      });
      scroll.before(search, said);
    }
    const hint = element("p", { class: "hint" });
    scroll.before(hint);
    const tell = () => {
      const right = scroll.getBoundingClientRect().right;
      const beyond = headings.filter((heading) => heading.offsetParent && heading.getBoundingClientRect().right > right + 1).length;
      hint.textContent = beyond ? `${beyond} more column${beyond > 1 ? "s" : ""} to the right: scroll sideways \u2192` : "";
      scroll.classList.toggle("beyond", beyond > 0);
    };
    scroll.addEventListener("scroll", tell);
    new ResizeObserver(tell).observe(scroll);
    tell();
  }

  function addCopyButtons() {
    for (const code of document.querySelectorAll("li code")) {
      const button = element("button", { type: "button", class: "copy", "aria-label": `copy ${code.textContent}` }, "copy");
      button.addEventListener("click", () => {
        getSelection().selectAllChildren(code);
        document.execCommand("copy");
        button.textContent = "copied";
      });
      code.after(button);
    }
  }

  document.querySelectorAll("#table .scroll, #tuning .scroll").forEach(makeTable);
  addCopyButtons();
  takeColours();
  makeControls();
  makeArmList();
  draw();
  restore();
  keepView();
  // Another theme of the system's, or paper: which is white.
  function inColours() {
    takeColours();
    draw();
  }
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", inColours);
  const PAPER = 690;
  const drawAt = (width) => () => {
    state.width = width;
    // Paper is white, whatever the screen is.
    document.documentElement.toggleAttribute("data-paper", width !== undefined);
    // One that is wider than paper would make all else smaller.
    for (const table of document.querySelectorAll("table")) {
      table.style.zoom = "";
      if (width !== undefined) table.style.zoom = Math.min(1, width / table.offsetWidth);
    }
    inColours();
  };
  window.addEventListener("beforeprint", drawAt(PAPER));
  window.addEventListener("afterprint", drawAt(undefined));
  document.documentElement.dataset.ready = "yes";
})();
