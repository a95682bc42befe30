// SPDX-License-Identifier: MIT OR Apache-2.0
// The page of the gauge: shows the state that the server sends, and starts and stops measurements.

import {
  announce, Chart, connect, countText, figure, get, make, onSubmit, rateText, send, setClass, setHidden, setText, showList,
  showMessage, sizeText, swatch, timeText,
} from "/assets/common.js";

const MIB = 1 << 20;
const WINDOW = 120;
/** The most pairs of the table; a matrix has many. */
const MAX_PAIRS = 6;

/** The latest state of the gauge. */
let current;

const rate = (bytes) => rateText(bytes, MIB);
/** Returns a rate in MiB/s as text. */
const mibText = (value) => rate(value * MIB);
const pairName = ({ from, to }) => `${from} → ${to}`;
const plain = (number) => number.toLocaleString("en", { maximumFractionDigits: number < 100 ? 1 : 0 });

// --- rates ------------------------------------------------------------------------------------------------------------

const pairChart = new Chart(get("pair-chart"), "Rate of each pair of memories in MiB/s over the last two minutes", WINDOW, MIB);
const portChart = new Chart(get("port-chart"), "Rate of each port in MiB/s over the last two minutes", WINDOW, MIB);

/** Returns the history for the charts. Between measurements, it has no rates. */
function charted(state) {
  const none = () => ({ pairs: new Map(), ports: new Map() });
  const entries = [];
  let pair;
  for (const sample of state.history) {
    const time = sample.time / 1000;
    if (time < state.elapsed / 1000 - WINDOW) continue;
    const total = Object.values(sample.ports).reduce((sum, value) => sum + value, 0);
    // A line does not go from one measurement of a pair to the next one.
    if (pair !== undefined && pair !== sample.pair) entries.push({ time: time - 0.001, ...none() });
    pair = sample.pair;
    entries.push({
      time,
      pairs: new Map([[sample.pair, { rate: total }]]),
      ports: new Map(Object.entries(sample.ports).map(([port, value]) => [port, { rate: value }])),
    });
  }
  // Without a measurement, the lines move to the left.
  if (!state.job || entries.length === 0) entries.push({ time: state.elapsed / 1000, ...none() });
  return entries;
}

/** Shows the rates of all pairs or ports: the rate now, and the highest one. */
function showRates(list, chart, history, kind, running) {
  const highest = new Map();
  for (const entry of history) {
    for (const [name, { rate: value }] of entry[kind]) {
      const before = highest.get(name) ?? 0;
      // The order of the map is that of the latest rates.
      highest.delete(name);
      highest.set(name, Math.max(before, value));
    }
  }
  const names = kind === "pairs" ? [...highest.keys()].reverse().slice(0, MAX_PAIRS) : [...highest.keys()].sort();
  const latest = running ? history.findLast((entry) => entry[kind].size > 0)?.[kind] : undefined;
  const rows = names.map((name) => ({ name, now: latest?.get(name)?.rate ?? 0, most: highest.get(name) }));
  showList(list, rows, ({ name }) => name, ({ name }) => {
    const cells = [1, 2].map(() => make("td", { class: "number" }));
    return {
      element: make("tr", { "data-name": name }, make("th", { scope: "row" }, swatch(chart, name), name), ...cells),
      update({ now, most }) {
        setText(cells[0], rate(now));
        setText(cells[1], rate(most));
      },
    };
  });
}

// --- the job ----------------------------------------------------------------------------------------------------------

const jobName = (job) =>
  job.kind === "matrix" ? `Matrix ${job.id}` : `Run ${job.id}: ${pairName(job)}, ${job.mode}`;

function showJob(state) {
  const { job } = state;
  setHidden(get("no-job"), Boolean(job));
  setHidden(get("job"), !job);
  if (!job) return;
  setText(get("job-name"), jobName(job));
  const pair = job.kind === "matrix" ? `${pairName(job)}, ${job.mode}; ` : "";
  const nics = job.nics.length > 0 ? `${job.nics.join(", ")}; ` : "";
  setText(get("job-about"), `${pair}${nics}started by the viewer at ${job.by}, ${timeText(job.started)} UTC`);
  const done = job.done.reduce((sum, count) => sum + count, 0);
  const all = job.messages * Math.max(1, job.nics.length);
  const progress = get("job-progress");
  const { pairs } = job;
  progress.max = pairs ? pairs.of : Math.max(1, all);
  progress.value = pairs ? pairs.ended : done;
  const parts = [];
  if (pairs) parts.push(`${countText(pairs.ended)} of ${countText(pairs.of)} pairs`);
  else if (job.kind === "matrix") parts.push("Measuring the link");
  if (job.bytes === null) parts.push("connecting");
  else parts.push(`${countText(done)} of ${countText(all)} messages of ${sizeText(job.bytes)}`);
  setText(get("job-count"), parts.join(", "));
  const stop = get("stop");
  if (stop.dataset.job !== String(job.id)) {
    stop.dataset.job = job.id;
    showMessage(get("job-message"));
  }
  stop.disabled = Boolean(job.stopped_by);
  setText(stop, job.stopped_by ? "Stopping" : "Stop");
}

get("stop").addEventListener("click", async () => {
  const { job } = get("stop").dataset;
  try {
    await send("POST", `/jobs/${job}/stop`);
    announce(`Measurement ${job} is stopping`);
    get("job-title").focus();
  } catch (error) {
    showMessage(get("job-message"), `Cannot stop measurement ${job}: ${error.message}`);
  }
});

// --- the matrix -------------------------------------------------------------------------------------------------------

/** Returns a cell of the heat map, which shows the latest entry of its pair. */
function heatCell(mode, from, to) {
  const [ratio, mib, note] = [make("span", { class: "ratio" }), make("span", { class: "rate" }), make("span", { class: "unseen" })];
  const element = make("td", { "data-pair": `${mode} ${from} ${to}` }, ratio, mib, note);
  return {
    element,
    update(entry, running) {
      const measured = typeof entry?.mib_per_s === "number";
      const heat = measured ? Math.min(1, Math.max(0, entry.ratio_to_link)) : 0;
      element.style.setProperty("--heat", `${(45 * heat).toFixed(1)}%`);
      setText(ratio, measured ? entry.ratio_to_link.toFixed(2) : entry?.error ? "–" : running ? "…" : "");
      setText(mib, measured ? `${mibText(entry.mib_per_s)}` : "");
      const wrong = measured && entry.verified === false;
      setText(note, wrong ? "wrong bytes" : measured ? "" : entry?.error ? "not possible" : running ? "is being measured" : "not measured");
      element.title = wrong ? "Wrong bytes were found" : entry?.error ?? "";
      setClass(element, "now", running);
      setClass(element, "wrong", wrong);
    },
  };
}

/** Returns the name of a memory, which may be broken in a narrow column. */
const narrow = (name) => name.replace("accelerator", "accel\u00aderator");

/** Returns the heat map of a mode. */
function heatMap(mode, matrix) {
  const cells = new Map();
  const rows = matrix.memory.map((from) => {
    const row = matrix.peer_memory.map((to) => {
      const cell = heatCell(mode, from, to);
      cells.set(`${from} ${to}`, cell);
      return cell.element;
    });
    return make("tr", {}, make("th", { scope: "row" }, narrow(from)), ...row);
  });
  const head = matrix.peer_memory.map((to) => make("th", { scope: "col" }, narrow(to)));
  return {
    element: make("table", { "data-mode": mode },
      make("caption", {}, mode),
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, make("span", { class: "unseen" }, "Memory of this node; the other columns: memory of the server")), ...head)),
      make("tbody", {}, ...rows)),
    update({ entries, running }) {
      for (const [pair, cell] of cells) {
        const [from, to] = pair.split(" ");
        cell.update(entries.get(`${mode} ${pair}`), running === `${mode} ${from} ${to}`);
      }
    },
  };
}

/** What the cells show: the entries by mode and pair, and the pair that is being measured. */
let shownMatrix = { entries: new Map(), running: undefined };

function showMatrix(state) {
  const { matrix, job } = state;
  setHidden(get("no-matrix"), Boolean(matrix));
  setHidden(get("matrix"), !matrix);
  if (!matrix) return;
  const select = get("matrix-size");
  const sizes = matrix.link.map((link) => link.size);
  showList(select, sizes, (size) => size, (size) => (
    { element: make("option", { value: size }, `of ${sizeText(size)}`), update() {} }
  ));
  setHidden(get("matrix-size-label"), sizes.length < 2);
  const size = sizes.includes(Number(select.value)) ? Number(select.value) : sizes[0];
  const link = matrix.link.find((entry) => entry.size === size);
  const how = matrix.running ? "is being measured" : matrix.error ? "ended early" : "is complete";
  setText(get("matrix-about"),
    `Matrix ${matrix.id} ${how}. Each cell: share of the link's ${mibText(link?.mib_per_s ?? 0)} MiB/s, and MiB/s, for messages of ${sizeText(size)}. Rows: memory of this node, columns: memory of the server.`);
  showMessage(get("matrix-error"), matrix.error);
  const shown = matrix.entries.filter((entry) => entry.size === size);
  const entries = new Map(shown.map((entry) => [`${entry.mode} ${entry.from} ${entry.to}`, entry]));
  const running = job?.kind === "matrix" && job.id === matrix.id && job.pairs ? `${job.mode} ${job.from} ${job.to}` : undefined;
  shownMatrix = { entries, running };
  // Another matrix has other rows.
  const key = (mode) => `${mode} ${matrix.memory} ${matrix.peer_memory}`;
  showList(get("heat"), matrix.modes, key, (mode) => {
    const map = heatMap(mode, matrix);
    return { element: map.element, update: () => map.update(shownMatrix) };
  });
  const reasons = new Map();
  for (const entry of shown.filter(({ error }) => error)) {
    const pairs = reasons.get(entry.error) ?? [];
    reasons.set(entry.error, [...pairs, `${pairName(entry)} (${entry.mode})`]);
  }
  showList(get("matrix-reasons"), [...reasons], ([error]) => error, () => {
    const element = make("li");
    return { element, update: ([error, pairs]) => setText(element, `Not measured: ${pairs.join(", ")}: ${error}`) };
  });
}

get("matrix-size").addEventListener("change", () => showMatrix(current));

// --- forms ------------------------------------------------------------------------------------------------------------

/** Fills the lists of the forms once, so that later states do not change what a person selects. */
function fillForms(state) {
  if (get("run-memory").children.length > 0) return;
  const options = (names) => names.map((name) => make("option", { value: name }, name));
  get("run-memory").append(...options(state.memory));
  get("run-peer").append(make("option", { value: "" }, "the server's own"), ...options(state.memory));
  get("run-mode").append(...options(state.modes));
  const boxes = {
    nics: { names: state.nics, checked: (name, index) => index === 0 },
    memory: { names: state.memory, checked: (name) => name !== "pageless" },
    modes: { names: [...state.modes, "staged"], checked: (name) => ["write", "read", "send"].includes(name) },
  };
  for (const part of document.querySelectorAll("[data-boxes]")) {
    const { names, checked } = boxes[part.dataset.boxes];
    part.append(...names.map((name, index) => make("label", {},
      make("input", { type: "checkbox", name: part.dataset.boxes, value: name, checked: checked(name, index) }), name)));
  }
}

const checkedBoxes = (form, name) => [...form.querySelectorAll(`input[name=${name}]:checked`)].map((box) => box.value);

const started = (kind) => () => {
  announce(`The ${kind} starts`);
  get("job-title").focus();
};

const readRun = (form) => ({
  path: "/run",
  body: {
    memory: form.elements.memory.value,
    peer_memory: form.elements.peer.value,
    mode: form.elements.mode.value,
    size: form.elements.size.value,
    messages: Number(form.elements.messages.value),
    nics: checkedBoxes(form, "nics"),
    staged: form.elements.staged.checked,
    verify: form.elements.verify.checked,
  },
});

const readMatrix = (form) => {
  const memory = checkedBoxes(form, "memory");
  const modes = checkedBoxes(form, "modes");
  return {
    path: "/matrix",
    body: {
      memory,
      peer_memory: memory,
      modes: modes.filter((mode) => mode !== "staged"),
      size: form.elements.size.value,
      messages: Number(form.elements.messages.value),
      nics: checkedBoxes(form, "nics"),
      staged: modes.includes("staged"),
    },
  };
};

onSubmit(get("run-form"), readRun, started("run"));
onSubmit(get("matrix-form"), readMatrix, started("matrix"));

// --- results ----------------------------------------------------------------------------------------------------------

/** Returns the rows of the table of results: one for each size, and one for a result without any. */
function resultRows(results) {
  return results.flatMap((ended) => {
    const sizes = ended.report?.results ?? [];
    const rows = sizes.map((result, index) => ({ key: `${ended.id}/${index}`, ended, result, last: index === sizes.length - 1 }));
    return rows.length > 0 ? rows : [{ key: `${ended.id}`, ended, result: undefined, last: true }];
  });
}

function showResults(state) {
  const rows = resultRows(state.results);
  setHidden(get("no-result"), rows.length > 0);
  setHidden(get("results"), rows.length === 0);
  showList(get("result-list"), rows, ({ key }) => key, ({ ended }) => {
    const cells = [1, 2, 3, 4].map(() => make("td", { class: "number" }));
    const end = make("td");
    return {
      element: make("tr", { "data-result": ended.id }, make("th", { scope: "row" }, jobName(ended)), ...cells, end),
      update({ result, last }) {
        setText(cells[0], result ? sizeText(result.bytes) : "");
        setText(cells[1], result ? mibText(result.average_mib_per_s) : "");
        setText(cells[2], result?.latency ? plain(result.latency.p50_us) : "");
        setText(cells[3], result?.latency ? plain(result.latency.p99_us) : "");
        const wrong = result?.verified === false ? "WRONG BYTES" : result?.verified ? "complete, all bytes correct" : "complete";
        const text = last && ended.error ? ended.error : wrong;
        setText(end, text);
        setClass(end, "bad", text !== "complete" && result?.verified !== true);
      },
    };
  });
}

// --- the whole page ---------------------------------------------------------------------------------------------------

function showSummary(state, history) {
  const { job } = state;
  const latest = job ? history.findLast((entry) => entry.ports.size > 0)?.ports : undefined;
  const sum = [...(latest?.values() ?? [])].reduce((total, { rate: value }) => total + value, 0);
  const last = state.results.find((ended) => ended.report?.results.length > 0);
  const lastRate = last?.report.results.at(-1).average_mib_per_s;
  const figures = [
    ["State", !job ? "Idle" : job.stopped_by ? "Stopping" : job.kind === "matrix" ? "Matrix" : "Run"],
    ["Rate now", `${rate(sum)} MiB/s`],
    ["Pair", job ? `${pairName(job)}, ${job.mode}` : "–"],
    ["Last run", last ? `${mibText(lastRate)} MiB/s` : "–"],
    ["NICs", countText(state.nics.length)],
  ];
  showList(get("summary"), figures, ([name]) => name, ([name]) => {
    const { element, value } = figure(name);
    return { element, update: ([, text]) => setText(value, text) };
  });
}

function show(state) {
  const ended = current?.job && current.job.id !== state.job?.id ? current.job : undefined;
  current = state;
  setText(get("server"), state.server);
  document.title = `${state.server} · p2pmem gauge`;
  setText(get("about"), `p2pmem-perf ${state.version}`);
  fillForms(state);
  const history = charted(state);
  pairChart.show(history, "pairs", ["rate"]);
  portChart.show(history, "ports", ["rate"]);
  showRates(get("pair-list"), pairChart, history, "pairs", state.job);
  showRates(get("port-list"), portChart, history, "ports", state.job);
  showSummary(state, history);
  showJob(state);
  showMatrix(state);
  showResults(state);
  if (ended) announce(`Measurement ${ended.id} has ended`);
}

connect(show);
