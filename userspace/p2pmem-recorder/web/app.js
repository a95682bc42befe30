// SPDX-License-Identifier: MIT OR Apache-2.0
// The page of a storage node: shows the state that the server sends each second, and sends changes to /api.

import {
  announce, Chart, confirmed, connect, countText, durationText, figure, get, isListed, make, newId, newMessage,
  onSubmit, partText, plural, rateText, send, setClass, setHidden, setText, showList, showMessage, sizeText, swatch,
  timeText,
} from "/assets/common.js";

/** The latest state of the node. */
let current;

// --- changes ----------------------------------------------------------------------------------------------------------

/**
 * Asks, deletes, and moves the focus to `heading`, because the button is gone. The reason of a failure is in `message`, which
 * is near the button.
 */
async function remove(what, path, consequence, heading, message) {
  if (!(await confirmed(`Delete ${what}?`, consequence, "Delete"))) return;
  try {
    await send("DELETE", path);
    showMessage(message);
    announce(`${what} was deleted`);
    heading.focus();
  } catch (error) {
    showMessage(message, `Cannot delete ${what}: ${error.message}`);
  }
}

const part = encodeURIComponent;

// --- rates ------------------------------------------------------------------------------------------------------------

const WINDOW = 120;
// Events after a change follow each other faster than a second. Rates over so short times would jump.
const SHORTEST = 900;

const driveName = (drive) => drive.device ?? drive.folder;

/** The counters of the last sample, rates since the sample before, and the history. */
const rates = { last: undefined, sessions: new Map(), ports: new Map(), drives: new Map(), history: [] };

function addTo(map, key, name, value) {
  const entry = map.get(key) ?? {};
  entry[name] = (entry[name] ?? 0) + value;
  map.set(key, entry);
}

/** Computes rates from the differences of counters. */
function sample(state) {
  const last = rates.last;
  if (last && state.elapsed < last.elapsed) {
    // The storage node was started again.
    rates.last = undefined;
    rates.history = [];
    return sample(state);
  }
  const counters = {
    elapsed: state.elapsed,
    sessions: new Map(state.sessions.map((session) => [session.id, session.blocks * session.block_size])),
    drives: new Map(state.drives.map((drive) => [drive.folder, drive])),
  };
  if (!last) {
    rates.last = counters;
    return;
  }
  const time = (state.elapsed - last.elapsed) / 1000;
  if (time * 1000 < SHORTEST) return;
  rates.sessions = new Map();
  rates.ports = new Map();
  rates.drives = new Map();
  for (const session of state.sessions) {
    const rate = (counters.sessions.get(session.id) - (last.sessions.get(session.id) ?? 0)) / time;
    rates.sessions.set(session.id, rate);
    // A port of an ended session stays in the chart as long as the session is in the state.
    addTo(rates.ports, session.nic, session.direction, rate);
  }
  for (const drive of state.drives) {
    const before = last.drives.get(drive.folder) ?? drive;
    addTo(rates.drives, driveName(drive), "write", Math.max(0, drive.written - before.written) / time);
    addTo(rates.drives, driveName(drive), "read", Math.max(0, drive.read - before.read) / time);
  }
  rates.last = counters;
  rates.history.push({ time: state.elapsed / 1000, ports: rates.ports, drives: rates.drives });
  while (rates.history[0].time < state.elapsed / 1000 - WINDOW) rates.history.shift();
  portChart.show(rates.history, "ports", ["record", "play"]);
  driveChart.show(rates.history, "drives", ["write", "read"]);
}

const portChart = new Chart(get("port-chart"), "Rate of each port in MB/s over the last two minutes", WINDOW);
const driveChart = new Chart(get("drive-chart"), "Rate of each drive in MB/s over the last two minutes", WINDOW);

function showPorts(state) {
  const ports = [...new Set(state.sessions.map((session) => session.nic))].sort();
  showList(get("port-list"), ports, (name) => name, (name) => {
    const cells = [1, 2, 3].map(() => make("td", { class: "number" }));
    return {
      element: make("tr", {}, make("th", { scope: "row" }, swatch(portChart, name), name), ...cells),
      update() {
        const entry = rates.ports.get(name) ?? {};
        // Without two samples, no rate is known.
        const known = rates.history.length > 0;
        setText(cells[0], rateText(known ? entry.record ?? 0 : undefined));
        setText(cells[1], rateText(known ? entry.play ?? 0 : undefined));
        setText(cells[2], current.sessions.filter((session) => session.running && session.nic === name).length);
      },
    };
  });
}

function showDrives(state) {
  showList(get("drive-list"), state.drives, (drive) => drive.folder, (drive) => {
    const cells = [1, 2, 3].map(() => make("td", { class: "number" }));
    const error = make("div", { class: "bad" });
    const space = make("div", { class: "hint" });
    const head = make("th", { scope: "row" }, swatch(driveChart, driveName(drive)), driveName(drive), space, error);
    return {
      element: make("tr", { "data-drive": drive.folder }, head, ...cells),
      update(now) {
        const entry = rates.drives.get(driveName(now)) ?? {};
        const folder = now.device ? `${now.folder}, ` : "";
        setText(cells[0], rateText(entry.write));
        setText(cells[1], rateText(entry.read));
        setText(cells[2], now.in_flight);
        setText(space, `${folder}${partText(now.free, now.size)} free`);
        setText(error, now.error ? `Error: ${now.error.message}` : "");
      },
    };
  });
}

// --- sessions ---------------------------------------------------------------------------------------------------------

const sessionChannel = (session) => `${session.lun}/${session.stream}/${session.channel}`;
const sessionTitle = (session) => `${session.direction === "record" ? "Record" : "Play"} ${sessionChannel(session)}`;

/** Returns the drives of a session's LUN. */
function sessionDrives(session, state) {
  const folders = state.luns.find((lun) => lun.name === session.lun)?.drives ?? [];
  return state.drives.filter((drive) => folders.includes(drive.folder));
}

/** Returns what limits a session, in words. */
function limitText(session, state) {
  const records = session.direction === "record";
  if (session.limit === "drive") {
    const drives = sessionDrives(session, state).map((drive) => `${driveName(drive)} (queue depth ${drive.in_flight})`);
    return `The drives limit the rate: buffers wait for ${drives.join(", ") || "a drive"}, and the source slows down.`;
  }
  if (session.limit === "rate") return "The rate is the one that the accelerator node requested.";
  return records ? "The accelerator node limits the rate: buffers are free." : "The accelerator node limits the rate: blocks are ready for it.";
}

/** Shows which drives failed while the session used them. */
function showWarnings(list, session) {
  setHidden(list, session.warnings.length === 0);
  showList(list, session.warnings, (text) => text, (text) => ({ element: make("li", { class: "bad" }, text), update() {} }));
}

function showSessions(state) {
  const running = state.sessions.filter((session) => session.running);
  setHidden(get("no-session"), running.length > 0);
  showList(get("sessions"), running, (session) => session.id, (first) => {
    const title = newId("session");
    const buffersText = make("span");
    const meter = make("meter", { min: 0, max: first.buffers, high: 0.75 * first.buffers, optimum: 0, "aria-label": `Buffers in use by session ${first.id}` });
    const rate = figure("Rate");
    const blocks = figure("Blocks");
    const acknowledged = figure(first.direction === "record" ? "Durable" : "Read");
    const dropped = figure("Dropped");
    const buffers = figure("Buffers that wait for drives", buffersText, meter);
    buffers.element.classList.add("wide");
    const limit = make("p", { class: "limit" });
    const warnings = make("ul", { class: "warnings", role: "list", hidden: true });
    const message = newMessage();
    const path = make("ol", { class: "path", role: "list", "aria-label": "Path of the payload" });
    const stop = make("button", {
      type: "button",
      class: "danger",
      "aria-describedby": title,
      onclick: async () => {
        stop.disabled = true;
        try {
          await send("POST", `/sessions/${first.id}/stop`);
          announce(`Session ${first.id} is stopping`);
          stop.textContent = "Stopping";
          get("sessions-title").focus();
        } catch (error) {
          showMessage(message, `Cannot stop session ${first.id}: ${error.message}`);
          stop.disabled = false;
        }
      },
    }, "Stop");
    const element = make("article", { class: "card", "aria-labelledby": title, "data-session": first.id },
      make("div", { class: "title" },
        make("h3", { id: title }, `${sessionTitle(first)}, recording ${first.recording}`), stop),
      message,
      make("p", { class: "hint" }, `Session ${first.id} of ${first.peer}, since ${timeText(first.started)} UTC`),
      path,
      make("dl", { class: "figures" }, ...[rate, blocks, acknowledged, dropped, buffers].map((entry) => entry.element)),
      limit, warnings);
    return {
      element,
      update(session) {
        setText(rate.value, `${rateText(rates.sessions.get(session.id))} MB/s`);
        setText(blocks.value, `${countText(session.blocks)} × ${sizeText(session.block_size)}`);
        setText(acknowledged.value, countText(session.acknowledged));
        setText(dropped.value, countText(session.dropped));
        setClass(dropped.value, "good", session.dropped === 0);
        setClass(dropped.value, "bad", session.dropped > 0);
        setText(buffersText, `${session.in_flight} of ${session.buffers}`);
        meter.value = session.in_flight;
        setText(limit, limitText(session, current));
        setClass(limit, "attention", session.limit === "drive");
        showWarnings(warnings, session);
        const drives = sessionDrives(session, current).map(driveName).join(", ") || session.lun;
        const stations = [[session.peer, "peer"], [session.nic, "nic"], [session.memory, "memory"], [drives, "drives"]];
        if (session.direction === "play") stations.reverse();
        showList(path, stations, ([, kind]) => kind, ([, kind]) => {
          const station = make("li", { class: kind });
          return { element: station, update: ([text]) => setText(station, text) };
        });
      },
    };
  });

  const ended = state.sessions.filter((session) => !session.running).reverse();
  setHidden(get("ended"), ended.length === 0);
  setText(get("ended-count"), plural(ended.length, "session ended", "sessions ended"));
  showList(get("ended-list"), ended, (session) => session.id, (session) => {
    const [blocks, dropped, end] = [make("td", { class: "number" }), make("td", { class: "number" }), make("td")];
    return {
      element: make("tr", { "data-ended": session.id },
        make("th", { scope: "row" }, `${session.id}: ${sessionTitle(session)}`), blocks, dropped, end),
      update(now) {
        setText(blocks, countText(now.acknowledged));
        setText(dropped, countText(now.dropped));
        setClass(dropped, "bad", now.dropped > 0);
        setText(end, [now.error ?? "complete", ...now.warnings].join("; "));
        setClass(end, "bad", Boolean(now.error));
      },
    };
  });
}

// --- LUNs -------------------------------------------------------------------------------------------------------------

function showCreation(creation) {
  setHidden(get("creation"), !creation);
  if (!creation) return;
  const progress = get("creation-progress");
  setHidden(progress, Boolean(creation.error));
  progress.max = creation.total;
  progress.value = creation.written;
  const text = creation.error
    ? `LUN ${creation.lun} was not created: ${creation.error}`
    : `LUN ${creation.lun} is being created: ${sizeText(creation.written)} of ${sizeText(creation.total)} written`;
  setText(get("creation-text"), text);
  setClass(get("creation-text"), "bad", Boolean(creation.error));
}

function recordingRow(lun, stream, heading, message) {
  return ({ channel, recording: first }) => {
    const name = `recording ${first.number} of ${lun}/${stream}/${channel}`;
    const path = `/luns/${part(lun)}/streams/${part(stream)}/channels/${channel}/recordings/${first.number}`;
    const [started, blocks] = [make("td"), make("td", { class: "number" })];
    const button = make("button", {
      type: "button",
      class: "danger",
      "aria-label": `Delete ${name}`,
      onclick: () => remove(name, path, "Its blocks are lost. Its segments are free for other recordings.", heading, message),
    }, "Delete");
    return {
      element: make("tr", {},
        make("th", { scope: "row" }, `${channel}/${first.number}`), started, blocks, make("td", {}, button)),
      update({ recording }) {
        const seconds = Math.floor((recording.first_time ?? recording.started) / 1e9);
        setText(started, recording.writing ? "being recorded" : timeText(seconds));
        setText(blocks, countText(recording.blocks));
      },
    };
  };
}

function streamEntry(lun, heading) {
  return (first) => {
    const message = newMessage();
    const path = `/luns/${part(lun)}/streams/${part(first.name)}`;
    const name = `stream ${lun}/${first.name}`;
    const about = make("p", { class: "hint" });
    const rows = make("tbody");
    const count = make("span");
    const table = make("details", {},
      make("summary", {}, count),
      make("div", { class: "table" },
        make("table", {},
          make("caption", { class: "unseen" }, `Recordings of ${name}`),
          make("thead", {}, make("tr", {},
            make("th", { scope: "col" }, "Channel / recording"),
            make("th", { scope: "col" }, "First block, UTC"),
            make("th", { scope: "col", class: "number" }, "Blocks"),
            make("th", { scope: "col" }, make("span", { class: "unseen" }, "Action")))),
          rows)));
    const button = make("button", {
      type: "button",
      class: "danger",
      "aria-label": `Delete ${name}`,
      onclick: () => remove(name, path, "All of its recordings are lost.", heading, message),
    }, "Delete stream");
    return {
      element: make("li", { class: "card", "data-stream": `${lun}/${first.name}` },
        make("div", { class: "title" }, make("h4", {}, `Stream ${first.name}`), button), message, about, table),
      update(stream) {
        const writing = stream.channels.filter((channel) => channel.recordings.some((recording) => recording.writing)).length;
        const channels = `${plural(stream.channels.length, "channel", "channels")}, blocks of ${sizeText(stream.block_size)}`;
        setText(about, writing > 0 ? `${channels}, ${plural(writing, "channel", "channels")} being recorded` : channels);
        const recordings = stream.channels.flatMap((channel) =>
          channel.recordings.map((recording) => ({ channel: channel.number, recording })));
        setText(count, plural(recordings.length, "recording", "recordings"));
        setHidden(table, recordings.length === 0);
        const key = ({ channel, recording }) => `${channel}/${recording.number}`;
        showList(rows, recordings, key, recordingRow(lun, stream.name, heading, message));
      },
    };
  };
}

/** Returns a form for a new stream of a LUN. */
function streamForm(lun, done) {
  const [name, size, channels] = [newId("name"), newId("size"), newId("channels")];
  const form = make("form", {},
    make("p", { class: "message", role: "alert", hidden: true }),
    make("label", { for: name }, "Name"),
    make("input", { id: name, name: "name", required: true, maxlength: 64, pattern: "[A-Za-z0-9_\\-]+", autocomplete: "off" }),
    make("label", { for: size }, "Block size"),
    make("span", { class: "pair" },
      make("input", { id: size, name: "size", type: "number", min: 1, value: 1, required: true }),
      make("select", { name: "unit", "aria-label": "Unit of the block size" },
        make("option", { value: 1024 }, "KiB"),
        make("option", { value: 1048576, selected: true }, "MiB"))),
    make("label", { for: channels }, "Channels"),
    make("input", { id: channels, name: "channels", type: "number", min: 1, max: 1024, value: 1, required: true }),
    make("button", { type: "submit", class: "main" }, "Create stream"));
  const read = () => ({
    path: `/luns/${part(lun)}/streams`,
    body: {
      name: form.elements.name.value,
      block_size: Number(form.elements.size.value) * Number(form.elements.unit.value),
      channels: Number(form.elements.channels.value),
    },
  });
  onSubmit(form, read, (body) => {
    form.reset();
    announce(`Stream ${body.name} was created`);
    done();
  });
  return form;
}

function lunEntry(first) {
  const title = newId("lun");
  const heading = make("h3", { id: title, tabindex: -1 }, `LUN ${first.name}`);
  const message = newMessage();
  const space = make("p", { class: "space" });
  const meter = make("meter", { min: 0, optimum: 0, "aria-label": `Used space of LUN ${first.name}` });
  const drives = make("p", { class: "hint" });
  const streams = make("ul", { class: "cards streams", role: "list" });
  const details = make("details", {}, make("summary", {}, `New stream in ${first.name}`));
  details.append(streamForm(first.name, () => {
    details.open = false;
    details.querySelector("summary").focus();
  }));
  const button = make("button", {
    type: "button",
    class: "danger",
    onclick: () => remove(`LUN ${first.name}`, `/luns/${part(first.name)}`, "All of its streams and recordings are lost.", get("luns-title"), message),
    "aria-label": `Delete LUN ${first.name}`,
  }, "Delete LUN");
  return {
    element: make("article", { class: "card", "aria-labelledby": title, "data-lun": first.name },
      make("div", { class: "title" }, heading, button), message, space, meter, drives, streams, details),
    update(lun) {
      const used = lun.total - lun.free;
      setText(space, `${partText(lun.free, lun.total)} free (${Math.floor((100 * lun.free) / lun.total)} %), segments of ${sizeText(lun.segment_size)}`);
      meter.max = lun.total;
      meter.high = 0.9 * lun.total;
      meter.value = used;
      setText(drives, `On ${lun.drives.join(", ")}`);
      setHidden(streams, lun.streams.length === 0);
      showList(streams, lun.streams, (stream) => stream.name, streamEntry(lun.name, heading));
    },
  };
}

function showLuns(state) {
  setHidden(get("no-lun"), state.luns.length > 0 || Boolean(state.creation));
  showList(get("luns"), state.luns, (lun) => lun.name, lunEntry);
  showCreation(state.creation);
  showList(get("lun-drives"), state.drives, (drive) => drive.folder, (drive) => {
    const text = make("span");
    const box = make("input", { type: "checkbox", name: "drive", value: drive.folder, checked: true });
    return {
      element: make("label", {}, box, text),
      update: (now) => setText(text, `${driveName(now)}${now.device ? ` at ${now.folder}` : ""}, ${sizeText(now.free)} free`),
    };
  });
  showLunSize();
}

const lunForm = get("lun-form");

function readLun() {
  const drives = [...lunForm.querySelectorAll("input[name=drive]:checked")].map((box) => box.value);
  return {
    name: lunForm.elements.name.value,
    drives,
    segment_size: Number(lunForm.elements.segment.value) * Number(lunForm.elements.unit.value),
    segments: Number(lunForm.elements.segments.value),
  };
}

function showLunSize() {
  const { drives, segment_size: size, segments } = readLun();
  setText(get("lun-size"), `${sizeText(drives.length * size * segments)} in all. Creating the LUN writes all of its bytes once.`);
}

lunForm.addEventListener("input", showLunSize);
onSubmit(lunForm, () => ({ path: "/luns", body: readLun() }), (body) => {
  lunForm.reset();
  get("new-lun").open = false;
  announce(`LUN ${body.name} is being created`);
  get("luns-title").focus();
});

// --- the whole page ---------------------------------------------------------------------------------------------------

function showSummary(state) {
  const running = state.sessions.filter((session) => session.running);
  const sum = (items, value) => items.reduce((total, item) => total + (value(item) ?? 0), 0);
  const dropped = sum(state.sessions, (session) => session.dropped);
  const ports = [...rates.ports.values()];
  const figures = [
    ["Record", `${rateText(sum(ports, (port) => port.record))} MB/s`],
    ["Play", `${rateText(sum(ports, (port) => port.play))} MB/s`],
    ["Sessions", countText(running.length)],
    ["Dropped blocks", countText(dropped)],
    ["Free space in LUNs", partText(sum(state.luns, (lun) => lun.free), sum(state.luns, (lun) => lun.total))],
    ["Memory for blocks", state.memory === "device" ? "in devices" : "in the host"],
  ];
  showList(get("summary"), figures, ([name]) => name, ([name]) => {
    const { element, value } = figure(name);
    return {
      element,
      update([, text]) {
        setText(value, text);
        if (name === "Dropped blocks") {
          setClass(value, "bad", text !== "0");
          setClass(value, "good", text === "0");
        }
      },
    };
  });
}

/** Returns what a drive's error is about: session, time, and what became of the session. */
function driveProblem(drive) {
  const { error } = drive;
  const name = `${driveName(drive)}${drive.device ? ` at ${drive.folder}` : ""}`;
  const session = `session ${error.session} (${error.direction} ${error.channel})`;
  return `Drive ${name} failed in ${session} at ${timeText(error.time)} UTC: ${error.message}; ${error.consequence}`;
}

/** Returns a button that removes the error of a drive from the page. */
function acknowledgeButton(number, session, name, message) {
  return make("button", {
    type: "button",
    "aria-label": `Acknowledge the error of ${name}`,
    onclick: async () => {
      try {
        await send("DELETE", `/drives/${number}/errors/${session}`);
        showMessage(message);
        announce(`The error of ${name} is acknowledged`);
        // The button is gone, and perhaps the section with it.
        get("main").focus();
      } catch (error) {
        showMessage(message, `Cannot acknowledge the error of ${name}: ${error.message}`);
      }
    },
  }, "Acknowledge");
}

function showProblems(state) {
  const problems = [
    ...state.problems.map((text) => ({ text: `Store: ${text}` })),
    ...state.drives.map((drive, number) => ({ drive, number })).filter(({ drive }) => drive.error)
      .map(({ drive, number }) => ({ text: driveProblem(drive), drive, number })),
    // An error of a session counts until its channel is used again.
    ...[...new Map(state.sessions.map((session) => [`${session.direction} ${sessionChannel(session)}`, session])).values()]
      .filter((session) => session.error)
      .map((session) => ({ text: `Session ${session.id}, ${sessionTitle(session)}: ${session.error}` })),
  ];
  const list = get("problem-list");
  const fresh = problems.map(({ text }) => text).filter((text) => !isListed(list, text));
  if (fresh.length > 0) announce(`Problem: ${fresh.join("; ")}`);
  // The reason of a refusal is about the problems that were shown then.
  if (fresh.length > 0 || problems.length === 0) showMessage(get("problem-message"));
  setHidden(get("problems"), problems.length === 0);
  showList(list, problems, ({ text }) => text, ({ text, drive, number }) => {
    const element = make("li", {}, make("span", {}, text));
    if (drive) element.append(acknowledgeButton(number, drive.error.session, driveName(drive), get("problem-message")));
    return { element, update() {} };
  });
}

// --- topology ---------------------------------------------------------------------------------------------------------

// The tree changes rarely, and the used memory of providers is no live figure.
const TOPOLOGY_AGE = 60000;
const TOPOLOGY_RETRY = 10000;

/** What the topology shows: its sessions, and when to ask for it again although they are the same. */
const topology = { key: undefined, until: 0, busy: false };

const roleNames = {
  "host-bridge": "", "root-port": "", switch: "", port: "", bridge: "", client: "",
  provider: "memory that p2pmem hands out", memory: "device with memory",
};

/** Returns a function of the tree with all below it, as an item of a list. */
function treeItem(node) {
  const text = [...node.lines, roleNames[node.role], node.warning, node.has_transfer ? "on the path of a session" : ""];
  const element = make("li", {}, text.filter(Boolean).join(", "));
  if (node.chosen_for.length > 0) element.append(", ", make("strong", {}, `chosen for ${node.chosen_for.join(", ")}`));
  if (node.children.length > 0) element.append(make("ul", {}, ...node.children.map(treeItem)));
  return element;
}

/** The box of the drawing. It shows the right end, where the devices are, until a person scrolls. */
const drawing = { box: get("topology-drawing"), atEnd: true, width: 0 };

drawing.box.addEventListener("scroll", () => {
  const { box } = drawing;
  // The event can follow a change of the box, which the observer handles next.
  if (box.clientWidth !== drawing.width) return;
  drawing.atEnd = box.scrollLeft + box.clientWidth >= box.scrollWidth - 2;
});
new ResizeObserver(() => {
  drawing.width = drawing.box.clientWidth;
  if (drawing.atEnd) drawing.box.scrollLeft = drawing.box.scrollWidth;
}).observe(drawing.box);

/** Shows the drawing. It is at the same place of its box as the one before. */
function drawTopology({ svg, tree, sessions }) {
  const { box, atEnd } = drawing;
  const place = box.scrollLeft;
  const parsed = new DOMParser().parseFromString(svg, "image/svg+xml").documentElement;
  parsed.setAttribute("aria-label", "PCI topology; the list below has the same content");
  box.replaceChildren(document.importNode(parsed, true));
  setHidden(box, false);
  box.scrollLeft = atEnd ? box.scrollWidth : place;
  get("topology-list").replaceChildren(...tree.map(treeItem));
  const paths = sessions.map(({ session, about, drawn }) => ({ session, text: drawn ? about : `${about} (not in the drawing)` }));
  setHidden(get("no-path"), paths.length > 0);
  showList(get("topology-paths"), paths, ({ session }) => session, () => {
    const element = make("li");
    return { element, update: ({ text }) => setText(element, text) };
  });
}

/** Asks for the topology if other sessions run than those that it shows. */
async function showTopology(state) {
  const key = state.sessions.filter((session) => session.running).map((session) => session.id).join();
  const again = state.elapsed > topology.until || state.elapsed < topology.until - TOPOLOGY_AGE;
  if (topology.busy || (key === topology.key && !again)) return;
  topology.busy = true;
  try {
    const response = await fetch("/api/topology").catch(() => undefined);
    const answer = await response?.json().catch(() => undefined);
    if (!response?.ok || !answer) throw new Error(answer?.error ?? "the storage node does not answer");
    drawTopology(answer);
    topology.key = answer.sessions.map(({ session }) => session).join();
    topology.until = state.elapsed + TOPOLOGY_AGE;
    showMessage(get("topology-message"));
  } catch (error) {
    topology.key = key;
    topology.until = state.elapsed + TOPOLOGY_RETRY;
    showMessage(get("topology-message"), error.message);
    // An old drawing would show sessions that have ended.
    setHidden(get("topology-drawing"), true);
    get("topology-list").replaceChildren();
    showList(get("topology-paths"), [], () => undefined, () => undefined);
  } finally {
    topology.busy = false;
  }
}

function show(state) {
  current = state;
  sample(state);
  setText(get("name"), state.name);
  document.title = `${state.name} · p2pmem recorder`;
  setText(get("about"), `p2pmem-recorder ${state.version}, running for ${durationText(state.uptime)}`);
  showSummary(state);
  showProblems(state);
  showSessions(state);
  showPorts(state);
  showDrives(state);
  showLuns(state);
  showTopology(state);
}

connect(show);
