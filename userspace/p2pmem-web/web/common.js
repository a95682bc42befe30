// SPDX-License-Identifier: MIT OR Apache-2.0
// What the pages of all programs use: elements, numbers, requests, charts, and the connection to the server.

/* global uPlot */

export const get = (id) => document.getElementById(id);

// --- elements ---------------------------------------------------------------------------------------------------------

/** Returns a new element with attributes, listeners (onclick: function), and children (elements and text). */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Sets the text of an element if it differs, so that screen readers and selections are left alone. */
export function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

export function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

export function setClass(element, name, present) {
  element.classList.toggle(name, Boolean(present));
}

const lists = new WeakMap();

/** Whether a list has an item with this key. */
export const isListed = (parent, key) => Boolean(lists.get(parent)?.has(key));

/**
 * Makes the children of `parent` those of `items`. An item keeps its element as long as its key exists, so that the focus and
 * what was typed stay. `create` returns {element, update}.
 */
export function showList(parent, items, key, create) {
  const before = lists.get(parent) ?? new Map();
  const after = new Map(items.map((item) => [String(key(item)), item]));
  for (const [name, entry] of before) {
    if (!after.has(name)) {
      entry.element.remove();
      before.delete(name);
    }
  }
  let last = null;
  for (const [name, item] of after) {
    if (!before.has(name)) before.set(name, create(item));
    const { element, update } = before.get(name);
    update(item);
    const place = last ? last.nextSibling : parent.firstChild;
    if (element !== place) parent.insertBefore(element, place);
    last = element;
  }
  lists.set(parent, before);
}

let nextId = 0;
export const newId = (prefix) => `${prefix}-${nextId++}`;

// --- numbers ----------------------------------------------------------------------------------------------------------

/** Returns a size with a unit, such as "1.5 GiB". */
export function sizeText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  let value = bytes;
  while (value >= 1024 && unit + 1 < units.length) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit > 0 && value < 100 && value % 1 !== 0 ? 1 : 0;
  return `${Number(value.toFixed(digits)).toLocaleString("en")} ${units[unit]}`;
}

/** Returns a part of a size, such as "2.5 of 3.5 TiB". */
export function partText(part, whole) {
  const [[number, unit], text] = [sizeText(part).split(" "), sizeText(whole)];
  return text.endsWith(` ${unit}`) ? `${number} of ${text}` : `${number} ${unit} of ${text}`;
}

/** Returns bytes per second in units of `unit` bytes per second, such as "1,450" or "9.5". */
export function rateText(rate, unit = 1e6) {
  if (rate === undefined) return "–";
  const value = rate / unit;
  const digits = value > 0 && value < 100 ? 1 : 0;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export const countText = (count) => count.toLocaleString("en");
export const plural = (count, one, many) => `${countText(count)} ${count === 1 ? one : many}`;

export function timeText(seconds) {
  return new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ");
}

export function durationText(seconds) {
  const [days, hours, minutes] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  if (days > 0) return `${days} d ${hours} h`;
  if (hours > 0) return `${hours} h ${minutes} min`;
  return minutes > 0 ? `${minutes} min` : `${seconds} s`;
}

// --- changes ----------------------------------------------------------------------------------------------------------

/** Sends a request. Fails with the reason that the server gives. */
export async function send(method, path, body) {
  const options = { method, headers: {} };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(`/api${path}`, options);
  } catch {
    throw new Error("the server does not answer; check the network, and try again");
  }
  if (response.status === 401) location.assign("/login");
  if (!response.ok) {
    const answer = await response.json().catch(() => ({}));
    throw new Error(answer.error ?? `the server answered ${response.status} ${response.statusText}`);
  }
}

export function announce(text) {
  get("announcement").textContent = text;
}

export function showMessage(element, text) {
  element.textContent = text ?? "";
  element.hidden = !text;
}

/** Asks in the dialog of the page. Returns whether the answer was yes. */
export function confirmed(title, text, yes) {
  const dialog = get("confirm");
  get("confirm-no").onclick = () => dialog.close("");
  get("confirm-yes").onclick = () => dialog.close("yes");
  get("confirm-title").textContent = title;
  get("confirm-text").textContent = text;
  get("confirm-yes").textContent = yes;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

export const newMessage = () => make("p", { class: "message", role: "alert", hidden: true });

/** Sends the body of a form, which `read` returns, and shows the reason of a failure in the form. */
export function onSubmit(form, read, done) {
  const message = form.querySelector(".message");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button[type=submit]");
    button.disabled = true;
    try {
      const { path, body } = read(form);
      await send("POST", path, body);
      showMessage(message);
      done(body);
    } catch (error) {
      showMessage(message, error.message);
    } finally {
      button.disabled = false;
    }
  });
}

// --- charts -----------------------------------------------------------------------------------------------------------

export const cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const seriesColor = (index) => `--series-${(index % 6) + 1}`;

/**
 * A chart of rates over time, with a line for each device and direction: the line of the first direction is solid, the others
 * are dashed. It shows the last `window` seconds, in units of `unit` bytes per second. The entries of its history are
 * {time, KIND: Map of the name to {DIRECTION: bytes per second}}.
 */
export class Chart {
  constructor(element, label, window = 120, unit = 1e6) {
    this.element = element;
    this.label = label;
    this.window = window;
    this.unit = unit;
    this.directions = [];
    this.names = [];
    this.plot = undefined;
    this.drawn = undefined;
    this.data = undefined;
    element.setAttribute("aria-label", label);
    new ResizeObserver(() => {
      if (this.plot) this.plot.setSize(this.size());
    }).observe(element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  size() {
    return { width: Math.max(this.element.clientWidth, 120), height: 190 };
  }

  /** Returns the number of the device in the chart, which gives its color. */
  index(name) {
    if (!this.names.includes(name)) this.names.push(name);
    return this.names.indexOf(name);
  }

  show(history, kind, directions) {
    this.directions = directions;
    for (const name of history.flatMap((entry) => [...entry[kind].keys()])) this.index(name);
    const now = history[history.length - 1].time;
    const lines = this.names.flatMap((name) =>
      directions.map((direction) => history.map((entry) => {
        const value = entry[kind].get(name)?.[direction];
        return value === undefined ? null : value / this.unit;
      })),
    );
    this.data = [history.map((entry) => entry.time - now), ...lines];
    if (this.drawn !== this.names.length) this.draw();
    else this.plot.setData(this.data);
    const latest = [...history[history.length - 1][kind]].map(([name, entry]) =>
      `${name} ${directions.map((direction) => `${direction} ${rateText(entry[direction] ?? 0, this.unit)}`).join(", ")}`,
    );
    this.element.setAttribute("aria-label", `${this.label}; now: ${latest.join("; ") || "none"}`);
  }

  draw() {
    if (!this.data) return;
    this.plot?.destroy();
    const axis = {
      stroke: cssColor("--quiet"),
      grid: { stroke: cssColor("--line"), width: 1 },
      ticks: { stroke: cssColor("--line"), width: 1 },
    };
    const lines = this.names.flatMap((name, index) => this.directions.map((direction, number) => ({
      label: name, stroke: cssColor(seriesColor(index)), width: 2, dash: number > 0 ? [6, 4] : undefined, points: { show: false },
    })));
    const options = {
      ...this.size(),
      legend: { show: false },
      cursor: { show: false },
      scales: {
        x: { time: false, range: [-this.window, 0] },
        y: { range: (plot, low, high) => [0, Math.max(1, (high ?? 0) * 1.1)] },
      },
      axes: [
        { ...axis, values: (plot, values) => values.map((value) => (value === 0 ? "now" : `−${-value} s`)) },
        { ...axis, size: 56, values: (plot, values) => values.map((value) => value.toLocaleString("en")) },
      ],
      series: [{}, ...lines],
    };
    this.plot = new uPlot(options, this.data, this.element);
    this.drawn = this.names.length;
  }
}

export function swatch(chart, name) {
  const element = make("span", { class: "series", "aria-hidden": "true" });
  element.style.background = `var(${seriesColor(chart.index(name))})`;
  return element;
}

export function figure(name, ...content) {
  const value = make("dd", {}, ...content);
  return { element: make("div", {}, make("dt", {}, name), value), value };
}

// --- the connection ---------------------------------------------------------------------------------------------------

export function showConnection(text, bad) {
  setText(get("connection"), text);
  setClass(get("connection"), "bad", bad);
}

/**
 * Receives the state, and calls `show` with it. The browser connects again by itself, except after an answer that is no stream
 * of events.
 */
export function connect(show) {
  const events = new EventSource("/api/events");
  events.addEventListener("status", (event) => {
    showConnection("Live", false);
    show(JSON.parse(event.data));
  });
  events.addEventListener("error", async () => {
    showConnection("Connection lost, trying again", true);
    if (events.readyState !== EventSource.CLOSED) return;
    const answer = await fetch("/api/status").catch(() => undefined);
    if (answer?.status === 401) location.assign("/login");
    else setTimeout(() => connect(show), 5000);
  });
}
