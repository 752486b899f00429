"use strict";
// Unpacks the data, draws the figures with Bokeh, and shows the selected step throughout the page.
// Nothing is fetched. Text from models is inserted only through textContent.
const timTrace = (() => {
  const state = {step: null, sequences: null, views: {}};
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const element = (tag, options = {}, ...children) => {
    const made = document.createElement(tag);
    Object.entries(options).forEach(([name, value]) => {
      if (name === "text") made.textContent = value;
      else if (name === "class") made.className = value;
      else made.setAttribute(name, value);
    });
    made.append(...children);
    return made;
  };
  const later = () => new Promise((done) => setTimeout(done, 0));
  const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));

  const inFrame = location.protocol === "about:";  // in a notebook, whose address must not change

  // --- data ---------------------------------------------------------------------------------------------------------
  const bytes = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  async function unpacked(id) {
    const packed = new Blob([bytes($("#" + id).textContent)]).stream();
    return new Response(packed.pipeThrough(new DecompressionStream("gzip"))).text();
  }
  const floats = (text) => new Float32Array(bytes(text).buffer);
  const number = (value, digits = 4) => {
    if (value === null || value === undefined || Number.isNaN(value)) return "no finite value";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(digits - 2);
    return String(Number(value.toPrecision(digits)));
  };

  // --- figures ------------------------------------------------------------------------------------------------------
  async function draw() {
    const script = document.createElement("script");
    let [bokeh, figures] = await Promise.all([unpacked("pack-bokeh"), unpacked("pack-figures")]);
    script.textContent = bokeh;
    document.head.append(script);
    await later();
    const theme = JSON.parse($("#run").dataset.colours), drawn = themed();
    for (const [name, placeholder] of Object.entries(theme)) figures = figures.replaceAll(placeholder, colour(name));
    const packed = JSON.parse(figures);
    for (const group of packed.groups) {
      const views = await Bokeh.embed.embed_items(group.docs, group.items);
      for (const one of views) for (const view of one.roots) state.views[view.model.name] = view;
      if (!state.rows) stackDrawn();
      for (const one of views) for (const view of one.roots) update(view.model.name);
      await later();
    }
    if (drawn !== themed()) await recolour();
    document.body.dataset.drawn = "yes";
  }

  // The series are drawn first, so that a selected step shows its values before the other figures are ready.
  function stackDrawn() {
    lines();
    state.rows = rowsByStep();
    const first = state.views[$("#run figure.chart")?.dataset.key];
    first?.model.x_range.properties.end.change.connect(place);
    window.addEventListener("resize", () => setTimeout(place, 100));
    place();
    if (state.step !== null) readout(state.step);
  }

  const plots = () => Object.values(state.views).map((view) => view.model);
  const found = (plot, name) => plot.renderers.map((each) => each.data_source).find((each) => each && each.name === name);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Properties that hold a theme colour; `names` maps the colours of both themes to their CSS variables.
  const COLOURS = ["axis_label_text_color", "major_label_text_color", "axis_line_color", "major_tick_line_color",
    "grid_line_color", "label_text_color", "title_text_color", "bar_line_color", "text_color", "border_fill_color"];
  const names = new Map();
  function themed() {
    for (const name of Object.keys(JSON.parse($("#run").dataset.colours))) names.set(colour(name), name);
    return colour("--paper");
  }

  async function recolour() {
    themed();
    await painted();
    for (const plot of plots()) {
      for (const model of plot.references()) {
        const own = COLOURS.filter((property) => property in model && names.has(model[property]));
        if (own.length) model.setv(Object.fromEntries(own.map((property) => [property, colour(names.get(model[property]))])));
      }
      await later();
    }
  }

  function lines() {
    const off = new Set($$("[data-line]").filter((box) => !box.checked).map((box) => box.dataset.line));
    for (const box of $$("#run figure.chart")) {
      const plot = state.views[box.dataset.key]?.model;
      for (const each of plot?.renderers ?? []) each.visible = !off.has(each.name);
    }
    if (state.rows && state.step !== null) readout(state.step);
  }

  // --- one step, everywhere -----------------------------------------------------------------------------------------
  function rowsByStep() {
    return $$("#run figure.chart").map((box) => {
      const plot = state.views[box.dataset.key]?.model;
      const lines = [];
      for (let place = 0; plot && found(plot, `${box.dataset.key}/${place}`); place++) {
        const held = found(plot, `${box.dataset.key}/${place}`), at = new Map();
        const xs = held.data.x, ys = held.data.y;
        for (let i = 0; i < xs.length; i++) at.set(xs[i], ys[i]);
        lines.push({at, plot, name: plot.renderers.find((each) => each.data_source === held).name});
      }
      return {out: $("output", box), unit: box.dataset.unit, lines};
    });
  }

  function readout(step) {
    for (const {out, lines, unit} of state.rows ?? []) {
      const shown = lines.filter(({at, plot, name}) => at.has(step) && plot.renderers.find((each) => each.name === name).visible);
      const told = shown.map(({at}) => number(at.get(step)));
      out.textContent = told.length ? `${told.slice(0, 4).join(" · ")} ${unit}` : "";
    }
    $("#hovered").textContent = `step ${step}`;
  }

  // Arrow keys read out a focused figure: the series by step, the other figures point by point.
  function readFigure(event) {
    const box = event.target.closest(".plot")?.closest("figure.chart"), move = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    const plot = move && state.views[box?.dataset.key]?.model;
    if (!plot) return;
    event.preventDefault();
    const next = (at, length) => Math.max(0, Math.min(length - 1, at + move));
    if (box.closest("#run")) return choose(state.axis[next(state.step === null ? -1 : state.axis.indexOf(state.step), state.axis.length)]);
    const points = pointsOf(plot, box.dataset), at = next(Number(box.dataset.at ?? -1), points.length);
    box.dataset.at = at;
    $("output", box).textContent = points[at];
    $("figcaption", box).scrollIntoView({block: "nearest"});
  }

  function pointsOf(plot, {key, unit}) {
    const points = new Map();
    const add = (x, text) => points.set(x, [...points.get(x) ?? [], text]);
    for (let i = 0, held; (held = found(plot, `${key}/${i}`)); i++) {
      const {x, y, value, counts} = held.data, name = plot.renderers.find((each) => each.data_source === held).name;
      if (value) Array.from(value, (each, j) => add(held.data.name[j], `${name} ${number(each)}`));
      else if (x) Array.from(x, (each, j) => add(number(each), `${name} ${number(y[j])} ${unit}`));
      else for (let j = 0, [rows, columns] = counts[0].shape; j < columns; j++) {
        const column = Array.from({length: rows}, (_, row) => counts[0][row * columns + j]), most = column.indexOf(Math.max(...column));
        const middle = ({start, end}, part) => number(start + part * (end - start), 3);
        add(middle(plot.x_range, (j + .5) / columns), `${column.reduce((sum, each) => sum + each)} tokens, most at d = ${middle(plot.y_range, (most + .5) / rows)} nats`);
      }
    }
    return [...points].map(([x, texts]) => `${x}: ${texts.join(", ")}`);
  }

  const nearest = (steps, x) => steps.reduce((best, step) => Math.abs(step - x) < Math.abs(best - x) ? step : best, steps[0]);

  // Step markers are overlays, so that no figure has to be redrawn.
  function place() {
    const view = state.views[$("#run figure.chart")?.dataset.key];
    if (!view) return;
    const range = view.model.x_range, left = view.el.getBoundingClientRect().left - $(".stack").getBoundingClientRect().left;
    for (const [id, step] of [["hovered-line", state.hovered], ["chosen-line", state.step]]) {
      const inside = step !== null && step !== undefined && step >= range.start && step <= range.end;
      const line = $("#" + id);
      line.style.display = inside ? "block" : "none";
      if (inside) line.style.left = `${left + view.frame.x_scale.compute(step)}px`;
    }
    const fall = $("#fall");
    if (!fall) return;
    const from = Math.max(Number(fall.dataset.low), range.start), to = Math.min(Number(fall.dataset.high), range.end);
    fall.style.display = from <= to ? "block" : "none";
    fall.style.left = `${left + view.frame.x_scale.compute(from)}px`;
    fall.style.width = `${Math.max(2, view.frame.x_scale.compute(to) - view.frame.x_scale.compute(from))}px`;
    const label = fall.firstElementChild, room = $(".stack").clientWidth - fall.offsetLeft - label.offsetWidth;
    label.style.left = `${Math.max(-fall.offsetLeft, Math.min(0, room))}px`;
  }

  let waiting = null;
  function hover(x) {
    if (waiting === null) requestAnimationFrame(() => {
      const step = nearest(state.axis, waiting);
      waiting = null;
      if (step === state.hovered) return;
      readout(state.hovered = step);
      place();
    });
    waiting = x;
  }

  function click(x) { choose(nearest(state.axis, x)); }

  async function choose(step) {
    if (!state.axis?.length) return;
    state.step = step === null ? null : nearest(state.axis, step);
    const turn = state.turn = (state.turn ?? 0) + 1, slider = $("#step");
    if (step !== null) {
      slider.value = state.axis.indexOf(state.step);
      readout(state.step);
    }
    $("#chosen").textContent = step === null ? "whole run" : `step ${state.step}`;
    $("#whole").hidden = step === null;
    slider.setAttribute("aria-valuetext", step === null ? "whole run" : `step ${state.step}`);
    document.body.dataset.step = step === null ? "" : state.step;
    place();
    // Show the selection at once, then update figures one by one until another step is selected.
    await painted();
    if (turn !== state.turn) return;
    if (!inFrame) history.replaceState(null, "", step === null ? location.pathname + location.search : `#step=${state.step}`);
    rows();
    if (state.step !== null) openStep();
    for (const key of Object.keys(state.views)) {
      if (turn !== state.turn) return;
      update(key);
      await later();
    }
  }

  // Charts by step mark the selected step with a line.
  function update(key) {
    const span = (state.views[key].model.center ?? []).find((each) => each.name === "chosen");
    if (span) span.setv({location: state.step ?? 0, visible: state.step !== null});
  }

  function whole() {
    for (const box of $$("#run figure.chart")) state.views[box.dataset.key]?.model.reset.emit();
  }

  // --- tokens -------------------------------------------------------------------------------------------------------
  function rows() {
    const text = $("#filter-text").value.trim().toLowerCase(), why = $("#filter-why").value;
    const own = $("#filter-step").checked && state.step !== null ? String(state.step) : null;
    let shown = 0;
    for (const row of $$("#sequences tbody tr")) {
      const fits = (!own || row.dataset.step === own) && (!why || row.dataset.why.includes(why)) &&
        (!text || row.textContent.toLowerCase().includes(text));
      row.hidden = !fits;
      shown += fits;
      row.classList.toggle("of-step", state.step !== null && row.dataset.step === String(state.step));
    }
    reachable();
    $("#num-shown").textContent = `${shown} shown`;
    $("#none-shown").hidden = shown > 0;
  }

  // Tab reaches one row, arrow keys the others; otherwise the controls below would be hundreds of Tabs away.
  const shownRows = () => $$("#sequences tbody tr").filter((row) => !row.hidden);
  function reachable(wanted) {
    const all = shownRows(), row = wanted ?? all.find((each) => each.tabIndex === 0) ?? all[0];
    for (const each of $$("#sequences tbody tr[tabindex='0']")) each.tabIndex = -1;
    if (row) row.tabIndex = 0;
  }

  function moveRow(event, row) {
    const all = shownRows(), at = all.indexOf(row);
    const to = {ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1}[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = all[Math.max(0, Math.min(all.length - 1, to))];
    reachable(next);
    next.focus();
  }

  function sort(head) {
    const place = [...head.parentNode.children].indexOf(head);
    const down = head.getAttribute("aria-sort") !== "descending";
    $$("th", head.parentNode).forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = $("#sequences tbody");
    const value = (row) => {
      const cell = row.children[place], text = cell.dataset.value ?? cell.textContent;
      return cell.dataset.value === undefined ? text : text === "" ? -Infinity : Number(text);
    };
    const order = (a, b) => typeof a === "number" ? a - b : String(a).localeCompare(String(b));
    body.append(...[...body.children].sort((a, b) => (down ? -1 : 1) * order(value(a), value(b))));
  }

  const MODES = {
    d: {title: "d", of: (one, i) => one.d[i], both: true, unit: "nats"},
    ratio: {title: "ln ratio", of: (one, i) => one.ratio[i], both: true, unit: "nats"},
  };

  // Open the first listed sequence of the selected step, unless a sequence of that step is already open.
  function openStep() {
    if (state.open?.step === state.step) return;
    const row = $$("#sequences tbody tr").find((each) => each.dataset.step === String(state.step));
    if (row) showTokens(row);
  }

  async function open(row) {
    await showTokens(row);
    $("#tokens-view").scrollIntoView({block: "nearest"});
    $("#tokens-text").focus({preventScroll: true});
  }

  async function showTokens(row) {
    $$("#sequences tr[aria-selected=true]").forEach((each) => each.setAttribute("aria-selected", "false"));
    row.setAttribute("aria-selected", "true");
    reachable(row);
    state.sequences ??= JSON.parse(await unpacked("pack-sequences"));
    if (row.getAttribute("aria-selected") !== "true") return;  // another one was opened meanwhile
    const one = prepared(state.sequences.sequences[Number(row.dataset.place)]);
    state.open = one;
    const box = $("#tokens-view");
    box.hidden = false;
    $("h3", box).textContent = `Step ${one.step}, sequence ${one.seq_id}`;
    $(".facts", box).textContent = one.facts;
    paint();
  }

  function prepared(one) {
    if (one.d) return one;
    const passes = state.sequences.passes, [a, b] = state.sequences.pair;
    one.p = Object.fromEntries(passes.filter((name) => one.logprobs[name]).map((name) => [name, floats(one.logprobs[name])]));
    for (const name of ["entropy", "advantages"]) if (one[name]) one[name] = floats(one[name]);
    const nothing = new Float32Array(one.texts.length).fill(NaN);
    const difference = (x, y) => x && y ? x.map((value, i) => value - y[i]) : nothing;
    one.d = difference(one.p[a], one.p[b]);
    one.ratio = difference(one.p.current ?? one.p[a], one.p[b]);
    return one;
  }

  const STATES = ["", "not recorded", "NaN", "infinite"];
  function paint() {
    const one = state.open, mode = $("#mode").value;
    const of = mode.startsWith("p:") ? (i) => Math.exp(one.p[mode.slice(2)]?.[i] ?? NaN) : (i) => MODES[mode].of(one, i);
    const both = !mode.startsWith("p:");
    const full = both ? state.sequences.full : 1;
    $("#scale").textContent = both ? `Full colour: ${number(full, 3)} ${MODES[mode].unit} or more.` : "Darker: less probable.";
    const [up, down] = mode === "ratio" ? ["more likely than when sampled", "less likely"] :
      [`more likely under ${state.sequences.pair[0]}`, `more likely under ${state.sequences.pair[1]}`];
    $("#ends").replaceChildren(...(both ? [element("span", {class: "key up", text: up}), element("span", {class: "key down", text: down})] : []));
    const text = $("#tokens-text");
    const prompt = one.prompt.map(([id, piece], i) => token(piece, {class: "token prompt", "data-prompt": i}));
    const gap = one.num_prompt_tokens > one.prompt.length ? [element("span", {class: "cut", text: `${one.num_prompt_tokens - one.prompt.length} earlier prompt tokens `})] : [];
    const before = one.first_token ? [element("span", {class: "cut", text: ` ${one.first_token} earlier tokens `})] : [];
    const rest = one.num_tokens - one.first_token - one.texts.length;
    const after = rest > 0 ? [element("span", {class: "cut", text: ` ${rest} later tokens`})] : [];
    const body = one.texts.map((piece, i) => {
      const value = of(i), holes = one.holes[i];
      const made = token(piece, {class: "token", "data-i": i});
      if (!one.mask[i]) made.classList.add("masked");
      if (holes) made.classList.add("hole");
      if (Number.isFinite(value)) {
        const part = Math.min(1, Math.abs(value) / full), strength = both ? part : 1 - part;
        made.classList.add(both && value < 0 ? "down" : "up");
        made.style.setProperty("--strength", `${Math.round(88 * Math.sqrt(strength))}%`);
      }
      return made;
    });
    const breakable = (tokens) => tokens.flatMap((each) => [each, element("wbr")]);
    text.replaceChildren(...gap, ...breakable(prompt), element("span", {class: "turn", text: " response "}), ...before,
      ...breakable(body), ...after);
    tell(0, false);
  }
  const token = (piece, options) => element("span", {...options, text: piece});

  function tell(place, focus) {
    const one = state.open, all = $$("#tokens-text .token[data-i]");
    if (!all.length) return;
    place = Math.max(0, Math.min(all.length - 1, place));
    $$("#tokens-text .at").forEach((each) => each.classList.remove("at"));
    all[place].classList.add("at");
    if (focus) all[place].scrollIntoView({block: "nearest"});
    state.place = place;
    const facts = [["position", `${one.first_token + place} (0 to ${one.num_tokens - 1})`], ["id", one.ids[place]], ["text", one.texts[place]]];
    for (const [name, values] of Object.entries(one.p)) {
      const hole = STATES[one.states[name]?.[place] ?? 0];
      facts.push([`logprob ${name}`, hole || exact(values[place])], [`p ${name}`, hole ? "" : number(Math.exp(values[place]), 6)]);
    }
    facts.push(["d", Number.isFinite(one.d[place]) ? `${exact(one.d[place])} nats` : "none"]);
    if (Number.isFinite(one.ratio[place])) facts.push(["ratio", number(Math.exp(one.ratio[place]), 6)]);
    const advantage = one.advantages ? one.advantages[place] : one.advantage;
    if (advantage !== null) facts.push(["advantage", number(advantage, 6)]);
    if (one.entropy && Number.isFinite(one.entropy[place])) facts.push(["entropy", number(one.entropy[place], 6)]);
    if (!one.mask[place]) facts.push(["mask", "excluded from the loss"]);
    $("#token-facts").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", {text: name}), element("dd", {text: value})]));
  }
  const exact = (value) => Number.isFinite(value) ? Number(value.toPrecision(9)).toString() : String(value);

  function keys(event) {
    const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 12, ArrowUp: -12, PageDown: 100, PageUp: -100}[event.key];
    const end = {Home: 0, End: 1e9}[event.key];
    if (step === undefined && end === undefined) return;
    event.preventDefault();
    tell(end ?? state.place + step, true);
  }

  // --- the page -----------------------------------------------------------------------------------------------------
  async function copy(button) {
    const text = $("#" + button.dataset.copy).textContent;
    try { await navigator.clipboard.writeText(text); } catch {
      const box = element("textarea", {class: "off"});
      box.value = text;
      document.body.append(box);
      box.select();
      document.execCommand("copy");
      box.remove();
    }
    const said = button.textContent;
    button.textContent = "copied";
    setTimeout(() => { button.textContent = said; }, 1200);
  }

  // Notes open below their word, shifted left or placed above it if they would leave the window.
  function within(term) {
    const tip = term && $(".tip", term);
    if (!tip) return;
    tip.style.left = "0px";
    tip.style.top = "";
    const box = tip.getBoundingClientRect(), over = box.right - (document.documentElement.clientWidth - 8);
    if (over > 0) tip.style.left = `${-Math.min(over, box.left - 8)}px`;
    if (box.bottom > innerHeight && box.height < term.getBoundingClientRect().top) tip.style.top = `${-box.height - 3}px`;
  }

  // Sticky elements need the height of the header.
  function header() {
    document.documentElement.style.setProperty("--header", `${$("header").offsetHeight}px`);
  }

  function theme() {
    const root = document.documentElement.dataset;
    const now = root.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.theme = now === "dark" ? "light" : "dark";
    try { localStorage.setItem("tim-trace-theme", root.theme); } catch { /* no storage: the choice lasts until the page is closed */ }
    recolour();
  }

  // Reserve room below the answers for an opened one, so that it covers no text.
  function makeRoom() {
    const panel = $$(".answers details[open] .why").find((each) => getComputedStyle(each).position === "absolute");
    $(".answers").style.marginBottom = panel ? `${panel.offsetHeight + 16}px` : "";
  }

  function listen() {
    for (const name of ["mouseover", "focusin"]) document.addEventListener(name, (event) => within(event.target.closest?.(".term, .noted")));
    document.addEventListener("keydown", readFigure, true);
    window.addEventListener("resize", header);
    header();
    document.addEventListener("click", (event) => {
      const on = (selector) => event.target.closest(selector);
      if (on("[data-copy]")) copy(on("[data-copy]"));
      else if (inFrame && on('a[href^="#"]')) {
        event.preventDefault();
        $(on("a").getAttribute("href")).scrollIntoView();
      }
      else if (on("[data-step-link]")) choose(Number(on("[data-step-link]").dataset.stepLink));
      else if (on("#sequences th button")) sort(on("th"));
      else if (on("#sequences tbody tr")) open(on("tr"));
      else if (on(".token[data-i]")) tell(Number(on(".token").dataset.i), false);
    });
    for (const each of $$(".answers details")) each.addEventListener("toggle", makeRoom);
    window.addEventListener("resize", makeRoom);
    $("#theme").addEventListener("click", theme);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => recolour());
    $("#whole")?.addEventListener("click", () => choose(null));
    $("#step")?.addEventListener("input", (event) => choose(state.axis[Number(event.target.value)]));
    $$("[data-line]").forEach((box) => box.addEventListener("change", () => setTimeout(lines, 0)));
    $("#reset")?.addEventListener("click", whole);
    window.addEventListener("hashchange", () => {
      const wanted = /step=(-?\d+)/.exec(location.hash);
      if (wanted && Number(wanted[1]) !== state.step) choose(Number(wanted[1]));
    });
    if (!$("#sequences")) return;
    for (const id of ["filter-text", "filter-why", "filter-step"]) $("#" + id).addEventListener("input", rows);
    $("#sequences").addEventListener("keydown", (event) => {
      const row = event.target.closest("tbody tr");
      if (row && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); open(row); }
      else if (row) moveRow(event, row);
    });
    $("#mode").addEventListener("input", paint);
    $("#tokens-text").addEventListener("keydown", keys);
    $("#tokens-text").addEventListener("mouseover", (event) => {
      const on = event.target.closest(".token[data-i]");
      if (on) tell(Number(on.dataset.i), false);
    });
  }

  function start() {
    state.axis = JSON.parse($("#step").dataset.steps);
    listen();
    const wanted = /(?:^|[#&])step=(-?\d+)/.exec(location.hash);
    if (wanted) choose(Number(wanted[1]));
    else if ($("#sequences tbody tr")) showTokens($("#sequences tbody tr"));
    const go = () => draw().catch((error) => {
      document.body.dataset.drawn = "no";
      $("#trouble").hidden = false;
      $("#trouble").append(element("code", {text: String(error)}));
      throw error;
    });
    // Show the text before drawing the figures.
    requestAnimationFrame(() => setTimeout(go, 0));
  }

  return {start, hover, click, whole, choose, state};
})();
timTrace.start();
